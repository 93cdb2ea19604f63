// Emulate streams and events. Work is late: its first waiter does it, after what the stream did before.
#define _GNU_SOURCE
#include "emulator.h"
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

// Kept to the process's end: streams and events of any thread may refer to it.
struct Work {
    enum { QUEUED, RUNNING, DONE } state;
    Work *before[2];
    void (*run)(void *); // NULL: another thread finishes it
    void *argument;
};

typedef struct Stream {
    Work *last;
    struct Stream *next; // of all streams
} Stream;

typedef struct {
    Work *work;
    double recorded_ms;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream default_streams[MAX_DEVICES], *streams;

static Stream *stream_of(cudaStream_t stream) {
    return (size_t)stream <= 2 ? &default_streams[emulated_current()] : (Stream *)stream; // 1, 2: legacy, per thread
}

static Work *last_of(cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    Work *last = stream_of(stream)->last;
    pthread_mutex_unlock(&lock);
    return last;
}

static Work *push(cudaStream_t stream, Work work) {
    Work *pushed = malloc(sizeof *pushed);
    pthread_mutex_lock(&lock);
    Stream *target = stream_of(stream);
    work.before[0] = target->last;
    *pushed = work;
    target->last = pushed;
    pthread_mutex_unlock(&lock);
    return pushed;
}

Work *emulated_push(cudaStream_t stream, void (*run)(void *), void *argument) {
    return push(stream, (Work){.run = run, .argument = argument});
}

Work *emulated_push_external(cudaStream_t stream) { return push(stream, (Work){0}); }

static void nothing(void *argument) {}

void emulated_finish(Work *work) {
    pthread_mutex_lock(&lock);
    work->state = DONE;
    work->before[0] = work->before[1] = NULL;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void wait_for(Work *work) {
    if (!work) return;
    pthread_mutex_lock(&lock);
    while (work->state != DONE) {
        if (!work->run || work->state == RUNNING) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        work->state = RUNNING;
        pthread_mutex_unlock(&lock);
        emulated_wait_before(work);
        work->run(work->argument);
        free(work->argument);
        emulated_finish(work);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
}

void emulated_wait_before(Work *work) {
    wait_for(work->before[0]);
    wait_for(work->before[1]);
}

// Whether it is done, or can be done now without waiting for another process.
static bool is_done(Work *work) {
    if (!work) return true;
    pthread_mutex_lock(&lock);
    bool done = work->state == DONE, is_late = work->run && work->state == QUEUED;
    Work *before[2] = {work->before[0], work->before[1]};
    pthread_mutex_unlock(&lock);
    if (done) return true;
    if (!is_late || !is_done(before[0]) || !is_done(before[1])) return false;
    wait_for(work);
    return true;
}

void emulated_wait_stream(cudaStream_t stream) { wait_for(last_of(stream)); }

void emulated_wait_all(void) {
    for (int device = 0; device < MAX_DEVICES; device++) wait_for(default_streams[device].last);
    for (Stream *stream = streams; stream; stream = stream->next) wait_for(stream->last);
}

cudaError_t cudaDeviceSynchronize(void) {
    emulated_host_waits();
    emulated_wait_all();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    Stream *created = calloc(1, sizeof *created);
    pthread_mutex_lock(&lock);
    created->next = streams;
    streams = created;
    pthread_mutex_unlock(&lock);
    *stream = (cudaStream_t)created;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; } // its work goes on

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return is_done(last_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    emulated_host_waits();
    emulated_wait_stream(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    Work *awaited = ((Event *)event)->work;
    if (awaited) push(stream, (Work){.before = {NULL, awaited}, .run = nothing});
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    emulated_wait_stream(stream);
    function(argument);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned flags) {
    emulated_wait_stream(stream);
    function(stream, cudaSuccess, argument);
    return cudaSuccess;
}

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    Event *created = calloc(1, sizeof *created);
    created->recorded_ms = now_ms();
    *event = (cudaEvent_t)created;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    *(Event *)event = (Event){.work = last_of(stream), .recorded_ms = now_ms()};
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return is_done(((Event *)event)->work) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    emulated_host_waits();
    wait_for(((Event *)event)->work);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = (float)(((Event *)end)->recorded_ms - ((Event *)start)->recorded_ms);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (graph) *graph = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
