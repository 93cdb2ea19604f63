// Emulate NCCL between processes of one machine. A thread per communicator does its operations in order.
#define _GNU_SOURCE
#include "nccl_emulated.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread char last_message[MAX_TEXT];
static __thread int group_depth;
static __thread Operation *grouped, **grouped_end = NULL;

static void land(void *operations) {
    for (Operation *o = *(Operation **)operations, *next; o; o = next) {
        next = o->next;
        if (o->landing) memcpy(o->out, o->landing, o->landing_size);
        free(o->landing);
        free(o);
    }
}

void *nccl_work(void *argument) {
    struct ncclComm *c = argument;
    cudaSetDevice(c->device);
    pthread_mutex_lock(&c->lock);
    for (;;) {
        c->is_busy = false;
        pthread_cond_broadcast(&c->changed);
        while (!c->first && !c->is_closing) pthread_cond_wait(&c->changed, &c->lock);
        Batch *batch = c->first;
        if (!batch) break;
        c->first = batch->next;
        c->is_busy = true;
        pthread_mutex_unlock(&c->lock);
        emulated_wait_before(batch->work);
        for (int sends = 1; sends >= 0; sends--) // first, so that ranks which send to each other do not wait
            for (Operation *o = batch->operations; o && !c->is_aborted; o = o->next)
                if ((o->kind == SEND) == sends) exchange(c, o);
        emulated_finish(batch->work);
        free(batch);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

ncclResult_t nccl_refuse(const char *message) {
    snprintf(last_message, sizeof last_message, "%s", message);
    emulated_log("NCCL: %s", message);
    return ncclInvalidUsage;
}

// Results are written when the stream is waited for.
static ncclResult_t submit(Operation *operations) {
    struct ncclComm *c = operations->communicator;
    for (Operation *o = operations; o; o = o->next)
        if (o->stream != operations->stream) return nccl_refuse("a group on several streams, which is not emulated");
    Batch *batch = calloc(1, sizeof *batch);
    Operation **kept = malloc(sizeof *kept);
    *kept = batch->operations = operations;
    pthread_mutex_lock(&c->lock);
    batch->work = emulated_push_external(operations->stream);
    emulated_push(operations->stream, land, kept);
    Batch **end = &c->first;
    while (*end) end = &(*end)->next;
    *end = batch;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return ncclSuccess;
}

static bool is_on(const void *pointer, int device) {
    struct cudaPointerAttributes attributes;
    cudaPointerGetAttributes(&attributes, pointer);
    bool is_device = attributes.type == cudaMemoryTypeDevice;
    return attributes.type == cudaMemoryTypeHost || (is_device && attributes.device == device);
}

static ncclResult_t enqueue(Kind kind, const void *in, void *out, size_t count, ncclDataType_t type, int reduction,
                            int peer, ncclComm_t c, cudaStream_t stream) {
    if (!c || c->is_aborted) return nccl_refuse("the communicator was aborted");
    if (c->error) return c->error;
    if (peer < 0 || peer >= c->size) return nccl_refuse("a rank that the communicator does not have");
    if (count && ((in && !is_on(in, c->device)) || (out && !is_on(out, c->device))))
        return nccl_refuse("memory that is not on the communicator's GPU");
    Operation *o = malloc(sizeof *o);
    *o = (Operation){kind, in, out, count, type, reduction, peer, stream, c};
    if (!group_depth) return submit(o);
    if (!grouped) grouped_end = &grouped;
    *grouped_end = o;
    grouped_end = &o->next;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (--group_depth) return ncclSuccess;
    Operation *left = grouped;
    ncclResult_t result = ncclSuccess;
    grouped = NULL;
    while (left) { // a batch for each communicator
        struct ncclComm *c = left->communicator;
        Operation *own = NULL, **own_end = &own, *others = NULL, **others_end = &others;
        for (Operation *o = left, *next; o; o = next) {
            next = o->next;
            o->next = NULL;
            Operation ***end = o->communicator == c ? &own_end : &others_end;
            **end = o;
            *end = &o->next;
        }
        if (submit(own)) result = ncclInvalidUsage;
        left = others;
    }
    return result;
}

ncclResult_t ncclCommFinalize(ncclComm_t c) {
    pthread_mutex_lock(&c->lock);
    while ((c->first || c->is_busy) && !c->is_aborted) pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return ncclSuccess;
}

// Communicators are kept to the process's end: torch asks for the errors of closed ones.
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (!c) return ncclSuccess;
    ncclCommFinalize(c);
    nccl_leave(c);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (!c) return ncclSuccess;
    c->is_aborted = true;
    nccl_leave(c);
    return ncclSuccess;
}

#define GIVE(TARGET, VALUE) return *(TARGET) = (VALUE), ncclSuccess
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) { GIVE(error, c->error); }
ncclResult_t ncclCommCount(const ncclComm_t c, int *size) { GIVE(size, c->size); }
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *device) { GIVE(device, c->device); }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) { GIVE(rank, c->rank); }
ncclResult_t ncclGetVersion(int *version) { GIVE(version, NCCL_VERSION_CODE); }
ncclResult_t ncclCommRegister(const ncclComm_t c, void *buffer, size_t size, void **handle) { GIVE(handle, buffer); }
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *handle) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void **pointer, size_t size) {
    return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void *pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess; }

const char *ncclGetErrorString(ncclResult_t error) {
    static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                  "invalid argument", "invalid usage", "remote process exited", "in progress"};
    return error >= 0 && error < 8 ? texts[error] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t c) { return c && c->message[0] ? c->message : last_message; }

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *reduction, void *scale, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t c) {
    c->scales[c->num_scales % MAX_SCALES] = read_number(scale, 0, type);
    GIVE(reduction, (ncclRedOp_t)(ncclNumOps + c->num_scales++ % MAX_SCALES));
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t reduction, ncclComm_t c) { return ncclSuccess; }

#define IN const void *in, size_t n, ncclDataType_t type
#define IN_OUT const void *in, void *out, size_t n, ncclDataType_t type
#define ON ncclComm_t c, cudaStream_t s
ncclResult_t ncclAllReduce(IN_OUT, ncclRedOp_t op, ON) { return enqueue(ALL_REDUCE, in, out, n, type, op, 0, c, s); }
ncclResult_t ncclBroadcast(IN_OUT, int root, ON) { return enqueue(BROADCAST, in, out, n, type, 0, root, c, s); }
ncclResult_t ncclReduce(IN_OUT, ncclRedOp_t op, int root, ON) {
    return enqueue(REDUCE, in, out, n, type, op, root, c, s);
}
ncclResult_t ncclAllGather(IN_OUT, ON) { return enqueue(ALL_GATHER, in, out, n, type, 0, 0, c, s); }
ncclResult_t ncclReduceScatter(IN_OUT, ncclRedOp_t op, ON) {
    return enqueue(REDUCE_SCATTER, in, out, n, type, op, 0, c, s);
}
ncclResult_t ncclAlltoAll(IN_OUT, ON) { return enqueue(ALL_TO_ALL, in, out, n, type, 0, 0, c, s); }
ncclResult_t ncclGather(IN_OUT, int root, ON) { return enqueue(GATHER, in, out, n, type, 0, root, c, s); }
ncclResult_t ncclScatter(IN_OUT, int root, ON) { return enqueue(SCATTER, in, out, n, type, 0, root, c, s); }
ncclResult_t ncclSend(IN, int peer, ON) { return enqueue(SEND, in, NULL, n, type, 0, peer, c, s); }
ncclResult_t ncclRecv(void *out, size_t n, ncclDataType_t type, int peer, ON) {
    return enqueue(RECEIVE, NULL, out, n, type, 0, peer, c, s);
}
ncclResult_t ncclBcast(void *buffer, size_t n, ncclDataType_t type, int root, ON) {
    return enqueue(BROADCAST, buffer, buffer, n, type, 0, root, c, s);
}
