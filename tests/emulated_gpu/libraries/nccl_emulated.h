// Declare a communicator and its operations. Ranks exchange messages through files of a directory in /dev/shm.
#pragma once
#include "emulator.h"
#include <nccl.h>
#include <pthread.h>

enum { MAX_RANKS = 64, MAX_SCALES = 64, MAX_TEXT = 400, MAX_PATH = 256 };

typedef enum { // in the order of NAMES
    ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECEIVE
} Kind;

typedef struct Operation {
    Kind kind;
    const void *in;
    void *out;
    size_t count; // elements, as the caller of NCCL gives them
    ncclDataType_t type;
    int reduction; // ncclRedOp_t
    int peer;      // or the root
    cudaStream_t stream;
    struct ncclComm *communicator;
    char *landing; // what arrives, until the stream is waited for
    size_t landing_size;
    struct Operation *next;
} Operation;

typedef struct Batch { // a group's operations are done together
    Operation *operations;
    Work *work;
    struct Batch *next;
} Batch;

struct ncclComm {
    int rank, size, device;
    char directory[MAX_PATH];
    volatile bool is_aborted;
    bool is_closing, is_busy;
    volatile ncclResult_t error;
    char message[MAX_TEXT];
    long num_collectives, num_sent[MAX_RANKS], num_received[MAX_RANKS], num_splits;
    double scales[MAX_SCALES]; // of ncclRedOpCreatePreMulSum
    int num_scales;
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Batch *first; // not yet begun
};

// nccl.c
void *nccl_work(void *communicator);
ncclResult_t nccl_refuse(const char *message);

// nccl_members.c
void nccl_leave(struct ncclComm *);

// nccl_numbers.c
size_t size_of_type(ncclDataType_t type);
double read_number(const void *numbers, size_t index, ncclDataType_t type);
void reduce_numbers(void *out, const char *parts, size_t stride, int num_parts, size_t count, ncclDataType_t type,
                    int reduction, double scale);

// nccl_exchange.c
int post(struct ncclComm *, const char *key, const void *header, size_t header_size, const void *data, size_t size,
         int first_rank, int end_rank);
int collect(struct ncclComm *, const char *key, void *header, size_t header_size, void *data, size_t size,
            size_t *found_size);
void exchange(struct ncclComm *, Operation *);
void fail(struct ncclComm *, ncclResult_t, const char *format, ...) __attribute__((format(printf, 3, 4)));
