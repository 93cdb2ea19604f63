// Declare what the emulator's libraries share: settings, messages, and the work that streams wait for.
//
// A GPU's memory is host memory. Copies and NCCL's operations are late: they are done when something waits for their
// stream, not when they are asked for, so that a missing wait gives wrong bytes. Kernels are computed when they are
// launched, after what their stream waits for.
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

enum { MAX_DEVICES = 64 };

// Settings, from COATI_EMULATED_GPU_COUNT and COATI_EMULATED_GPU_BYTES.
int emulated_count(void);      // GPUs of the machine, before CUDA_VISIBLE_DEVICES
size_t emulated_bytes(void);   // memory of each
int emulated_physical(int device); // index on the machine of a device that this process sees
int emulated_num_visible(void);

// Append a line to COATI_EMULATED_GPU_LOG, or write it to stderr.
void emulated_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Count an operation in which the host waits for the GPU.
void emulated_host_waits(void);

// Physical memory that is apart from addresses (virtual_memory.c).
bool emulated_take(int device, size_t size); // false: the GPU has no room
void emulated_give_back(int device, size_t size);
void emulated_mapped(void *start, size_t size, int device);
bool emulated_unmapped(void *start); // after what streams have to do; false: nothing is mapped there

cudaError_t emulated_fail(cudaError_t error); // keep it for cudaGetLastError
int emulated_current(void);                   // the thread's device

// A piece of work in a stream. What is late has a function that its first waiter calls; NCCL's ends on another thread.
typedef struct Work Work;
Work *emulated_push(cudaStream_t stream, void (*run)(void *), void *argument); // takes a malloc'ed argument
Work *emulated_push_external(cudaStream_t stream);
void emulated_wait_before(Work *work); // for what its stream did earlier
void emulated_finish(Work *work);
void emulated_wait_stream(cudaStream_t stream);
void emulated_wait_all(void);
