// Create, split and leave communicators. Two ranks on one GPU are refused unless their NCCL_HOSTID differ.
#define _GNU_SOURCE
#include "nccl_emulated.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    unsigned long long random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random) return ncclSystemError;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/dev/shm/emulated-nccl-%016llx%016llx", random[0], random[1]);
    return ncclSuccess;
}

typedef struct { // what ranks tell each other first
    char host[64], gpu[32];
    int size;
} Introduction;

static ncclResult_t create(ncclComm_t *created, int size, const char *directory, int rank) {
    if (size > MAX_RANKS) return nccl_refuse("more ranks than the emulator has room for");
    struct ncclComm *c = calloc(1, sizeof *c);
    c->size = size, c->rank = rank, c->device = emulated_current();
    snprintf(c->directory, sizeof c->directory, "%s", directory);
    mkdir(directory, 0700);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    Introduction own = {.size = size}, other;
    const char *host = getenv("NCCL_HOSTID");
    snprintf(own.host, sizeof own.host, "%s", host ? host : "this");
    cudaDeviceGetPCIBusId(own.gpu, sizeof own.gpu, c->device);
    post(c, "introduction", &own, sizeof own, NULL, 0, 0, size);
    for (int peer = 0; peer < size; peer++) {
        char key[64];
        size_t found;
        snprintf(key, sizeof key, "introduction-from-%d", peer);
        if (collect(c, key, &other, sizeof other, NULL, 0, &found)) return ncclInternalError;
        bool is_same_gpu = peer != rank && !strcmp(own.host, other.host) && !strcmp(own.gpu, other.gpu);
        if (!is_same_gpu && other.size == size) continue;
        char text[MAX_TEXT];
        if (is_same_gpu)
            snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", rank,
                     peer, own.gpu);
        else
            snprintf(text, sizeof text, "rank %d joins %d ranks, rank %d joins %d", rank, size, peer, other.size);
        free(c);
        return nccl_refuse(text);
    }
    pthread_create(&c->worker, NULL, nccl_work, c);
    *created = c;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *c, int size, ncclUniqueId id, int rank) {
    return create(c, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return create(c, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int size, int rank, int num_ids, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
    return create(c, size, ids[0].internal, rank);
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int order, ncclComm_t *created, ncclConfig_t *config) {
    struct {
        int color, order;
    } own = {color, order}, other;
    char key[64];
    long number = c->num_splits++;
    snprintf(key, sizeof key, "split-%ld", number);
    post(c, key, &own, sizeof own, NULL, 0, 0, c->size);
    int size = 0, rank = 0;
    for (int peer = 0; peer < c->size; peer++) {
        size_t found;
        snprintf(key, sizeof key, "split-%ld-from-%d", number, peer);
        if (collect(c, key, &other, sizeof other, NULL, 0, &found)) return ncclInternalError;
        if (other.color != color) continue;
        size++;
        rank += other.order < order || (other.order == order && peer < c->rank);
    }
    *created = NULL;
    if (color < 0) return ncclSuccess;
    char directory[MAX_PATH];
    snprintf(directory, sizeof directory, "%.200s-%ld-%d", c->directory, number, color);
    return create(created, size, directory, rank);
}

// The last rank to leave removes the directory; what a killed one leaves stays until the machine's end.
void nccl_leave(struct ncclComm *c) {
    pthread_mutex_lock(&c->lock);
    c->is_closing = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->worker, NULL);
    char path[MAX_PATH + 300];
    int num_left = 0;
    snprintf(path, sizeof path, "%s/left-%d", c->directory, c->rank);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    for (int rank = 0; rank < c->size; rank++) {
        snprintf(path, sizeof path, "%s/left-%d", c->directory, rank);
        num_left += !access(path, F_OK);
    }
    DIR *files = num_left == c->size ? opendir(c->directory) : NULL;
    if (!files) return;
    for (struct dirent *file; (file = readdir(files));) {
        snprintf(path, sizeof path, "%s/%s", c->directory, file->d_name);
        unlink(path);
    }
    closedir(files);
    rmdir(c->directory);
}
