// Exchange an operation's data between ranks, each message with a header by which the ranks' calls are compared.
#define _GNU_SOURCE
#include "nccl_emulated.h"
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *NAMES[] = {"AllReduce", "Broadcast", "Reduce",  "AllGather", "ReduceScatter",
                              "AlltoAll",  "Gather",    "Scatter", "Send",      "Recv"};

typedef struct { // of a message
    int kind, type, reduction, root;
    size_t count;
} Header;

void fail(struct ncclComm *c, ncclResult_t error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c->message, sizeof c->message, format, arguments);
    va_end(arguments);
    emulated_log("NCCL, rank %d of %d: %s", c->rank, c->size, c->message);
    c->error = error;
}

static int write_all(int file, const void *data, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t written = write(file, (const char *)data + done, size - done);
        if (written <= 0) return -1;
        done += written;
    }
    return 0;
}

// Put a message into the boxes of some ranks: one file, with a name for each.
int post(struct ncclComm *c, const char *key, const void *header, size_t header_size, const void *data, size_t size,
         int first_rank, int end_rank) {
    char draft[MAX_PATH + 80], name[MAX_PATH + 80];
    snprintf(draft, sizeof draft, "%s/draft-%d-%s", c->directory, c->rank, key);
    int file = open(draft, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    if (file < 0) return -1;
    int failed = write_all(file, header, header_size) || write_all(file, data, size);
    close(file);
    for (int rank = first_rank; rank < end_rank && !failed; rank++) {
        snprintf(name, sizeof name, "%s/%s-from-%d-to-%d", c->directory, key, c->rank, rank);
        failed = link(draft, name);
    }
    unlink(draft);
    if (failed) fail(c, ncclSystemError, "cannot write %s", draft);
    return failed;
}

// Take a message out of the own box, when it is there. Returns -1 if the communicator is aborted before.
int collect(struct ncclComm *c, const char *key, void *header, size_t header_size, void *data, size_t size,
            size_t *found_size) {
    char name[MAX_PATH + 80];
    snprintf(name, sizeof name, "%s/%s-to-%d", c->directory, key, c->rank);
    int file;
    for (long waited_us = 0; (file = open(name, O_RDONLY)) < 0;) {
        if (c->is_aborted) return -1;
        long pause_us = waited_us < 1000 ? 20 : waited_us < 50000 ? 200 : 1000;
        nanosleep(&(struct timespec){.tv_nsec = pause_us * 1000}, NULL);
        waited_us += pause_us;
    }
    struct stat status;
    fstat(file, &status);
    *found_size = status.st_size - header_size;
    unlink(name);
    ssize_t num_read = read(file, header, header_size);
    for (size_t done = 0; num_read > 0 && done < size; done += num_read > 0 ? num_read : 0)
        num_read = read(file, (char *)data + done, size - done);
    close(file);
    return 0;
}

static void send_part(struct ncclComm *c, Operation *o, const char *key, const void *data, size_t size, int first,
                      int end) {
    Header header = {o->kind, o->type, o->reduction, o->kind >= SEND ? 0 : o->peer, o->count};
    if (o->kind == SEND) header.kind = RECEIVE;
    post(c, key, &header, sizeof header, data, size, first, end);
}

// What another rank has sent for the same operation. Returns -1 if its call was another one.
static int receive_part(struct ncclComm *c, Operation *o, const char *key, int source, void *data, size_t size) {
    char from[80];
    Header theirs, own = {o->kind, o->type, o->reduction, o->kind >= SEND ? 0 : o->peer, o->count};
    size_t found;
    snprintf(from, sizeof from, "%s-from-%d", key, source);
    if (collect(c, from, &theirs, sizeof theirs, data, size, &found)) return -1;
    if (!memcmp(&own, &theirs, sizeof own) && found == size) return 0;
    fail(c, ncclInvalidArgument,
         "%s of %zu elements of type %d, root %d; rank %d calls %s of %zu elements of type %d, root %d", NAMES[o->kind],
         o->count, o->type, own.root, source, NAMES[theirs.kind], theirs.count, theirs.type, theirs.root);
    return -1;
}

static int receive_from_all(struct ncclComm *c, Operation *o, const char *key, char *data, size_t size) {
    for (int rank = 0; rank < c->size; rank++)
        if (receive_part(c, o, key, rank, data + rank * size, size)) return -1;
    return 0;
}

static void land(Operation *o, const void *data, size_t size) {
    o->landing = malloc(size + 1);
    o->landing_size = size;
    memcpy(o->landing, data, size);
}

static double scale_of(struct ncclComm *c, int reduction) {
    if (reduction == ncclAvg) return 1.0 / c->size;
    return reduction >= ncclNumOps ? c->scales[(reduction - ncclNumOps) % MAX_SCALES] : 1.0;
}

static void reduce(struct ncclComm *c, Operation *o, const char *key, char *parts) {
    size_t size = o->count * size_of_type(o->type), whole = o->kind == REDUCE_SCATTER ? size * c->size : size;
    bool is_reduce = o->kind == REDUCE;
    send_part(c, o, key, o->in, whole, is_reduce ? o->peer : 0, is_reduce ? o->peer + 1 : c->size);
    if ((is_reduce && c->rank != o->peer) || receive_from_all(c, o, key, parts, whole)) return;
    char *result = malloc(size + 1), *first = parts + (o->kind == REDUCE_SCATTER ? c->rank * size : 0);
    reduce_numbers(result, first, whole, c->size, o->count, o->type, o->reduction, scale_of(c, o->reduction));
    land(o, result, size);
    free(result);
}

void exchange(struct ncclComm *c, Operation *o) {
    size_t size = o->count * size_of_type(o->type);
    bool is_root = c->rank == o->peer;
    char key[40], *parts = malloc(size * c->size * (o->kind == REDUCE_SCATTER ? c->size : 1) + 1);
    if (o->kind < SEND) snprintf(key, sizeof key, "collective-%ld", c->num_collectives++);
    switch (o->kind) {
    case SEND:
        snprintf(key, sizeof key, "message-%ld", c->num_sent[o->peer]++);
        send_part(c, o, key, o->in, size, o->peer, o->peer + 1);
        break;
    case RECEIVE:
        snprintf(key, sizeof key, "message-%ld", c->num_received[o->peer]++);
        if (!receive_part(c, o, key, o->peer, parts, size)) land(o, parts, size);
        break;
    case BROADCAST:
        if (is_root) send_part(c, o, key, o->in, size, 0, c->size);
        if (!receive_part(c, o, key, o->peer, parts, size)) land(o, parts, size);
        break;
    case ALL_GATHER:
        send_part(c, o, key, o->in, size, 0, c->size);
        if (!receive_from_all(c, o, key, parts, size)) land(o, parts, size * c->size);
        break;
    case GATHER:
        send_part(c, o, key, o->in, size, o->peer, o->peer + 1);
        if (is_root && !receive_from_all(c, o, key, parts, size)) land(o, parts, size * c->size);
        break;
    case SCATTER:
        for (int rank = 0; is_root && rank < c->size; rank++)
            send_part(c, o, key, (char *)o->in + rank * size, size, rank, rank + 1);
        if (!receive_part(c, o, key, o->peer, parts, size)) land(o, parts, size);
        break;
    case ALL_TO_ALL:
        for (int rank = 0; rank < c->size; rank++)
            send_part(c, o, key, (char *)o->in + rank * size, size, rank, rank + 1);
        if (!receive_from_all(c, o, key, parts, size)) land(o, parts, size * c->size);
        break;
    default: reduce(c, o, key, parts);
    }
    free(parts);
}
