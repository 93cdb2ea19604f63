// Emulate a GPU's memory on the host: allocation, copies, pinned memory, and memory shared with other processes (IPC).
#define _GNU_SOURCE
#include "emulator.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// MAPPED: physical memory of a GPU at a reserved address. REGISTERED: pinned memory that the program itself has allocated.
typedef enum { ON_GPU, MAPPED, PINNED, REGISTERED } Kind;

typedef struct {
    char *start;
    size_t size;
    int device;
    Kind kind;
    int file; // -1: not shared
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t num_blocks, capacity, used[MAX_DEVICES];

static void add(Block block) {
    pthread_mutex_lock(&lock);
    if (num_blocks == capacity) blocks = realloc(blocks, sizeof *blocks * (capacity = 2 * capacity + 64));
    blocks[num_blocks++] = block;
    if (block.kind == ON_GPU) used[block.device] += block.size;
    pthread_mutex_unlock(&lock);
}

static bool find(const void *pointer, Block *found) {
    bool is_found = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_blocks && !is_found; i++) {
        is_found = (char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size;
        if (is_found) *found = blocks[i];
    }
    pthread_mutex_unlock(&lock);
    return is_found;
}

static bool forget(const void *start, Block *found) {
    bool is_known = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_blocks && !is_known; i++) {
        if (blocks[i].start != start) continue;
        is_known = true;
        *found = blocks[i];
        blocks[i] = blocks[--num_blocks];
        if (found->kind == ON_GPU) used[found->device] -= found->size;
    }
    pthread_mutex_unlock(&lock);
    return is_known;
}

bool emulated_take(int device, size_t size) {
    pthread_mutex_lock(&lock);
    bool has_room = used[device] + size <= emulated_bytes();
    if (has_room) used[device] += size;
    pthread_mutex_unlock(&lock);
    return has_room;
}

void emulated_give_back(int device, size_t size) {
    pthread_mutex_lock(&lock);
    used[device] -= size;
    pthread_mutex_unlock(&lock);
}

void emulated_mapped(void *start, size_t size, int device) { add((Block){start, size, device, MAPPED, -1}); }

bool emulated_unmapped(void *start) {
    Block block;
    emulated_wait_all();
    return forget(start, &block);
}

static cudaError_t allocate(void **pointer, size_t size, Kind kind) {
    int device = emulated_current(), file = -1;
    size = size ? (size + 4095) / 4096 * 4096 : 4096;
    if (kind == ON_GPU && used[device] + size > emulated_bytes()) return emulated_fail(cudaErrorMemoryAllocation);
    if (kind == ON_GPU) {
        file = memfd_create("emulated-gpu", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, size)) return emulated_fail(cudaErrorMemoryAllocation);
    }
    int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, file, 0);
    if (*pointer == MAP_FAILED) return emulated_fail(cudaErrorMemoryAllocation);
    add((Block){*pointer, size, device, kind, file});
    return cudaSuccess;
}

static cudaError_t release(void *pointer) {
    if (!pointer) return cudaSuccess;
    emulated_wait_all();
    Block block;
    if (!forget(pointer, &block)) return emulated_fail(cudaErrorInvalidValue);
    if (block.kind != REGISTERED) munmap(block.start, block.size);
    if (block.file >= 0) close(block.file);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, ON_GPU); }
cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
cudaError_t cudaFree(void *pointer) { return release(pointer); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return release(pointer); }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return allocate(pointer, size, PINNED); }
cudaError_t cudaMallocHost(void **pointer, size_t size) { return allocate(pointer, size, PINNED); }
cudaError_t cudaFreeHost(void *pointer) { return release(pointer); }
cudaError_t cudaHostUnregister(void *pointer) { return release(pointer); }

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    add((Block){pointer, size, emulated_current(), REGISTERED, -1});
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **on_device, void *on_host, unsigned flags) {
    *on_device = on_host;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = emulated_bytes();
    *available = *total - used[emulated_current()];
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    Block block;
    if (!find(pointer, &block)) {
        *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
        return cudaSuccess;
    }
    bool is_on_gpu = block.kind == ON_GPU || block.kind == MAPPED;
    *attributes = (struct cudaPointerAttributes){
        .type = is_on_gpu ? cudaMemoryTypeDevice : cudaMemoryTypeHost,
        .device = block.device,
        .devicePointer = (void *)pointer,
        .hostPointer = is_on_gpu ? NULL : (void *)pointer,
    };
    return cudaSuccess;
}

typedef struct {
    void *to;
    const void *from; // NULL: fill
    size_t size;
    int value;
} Copy;

static void copy(void *argument) {
    Copy *c = argument;
    c->from ? memmove(c->to, c->from, c->size) : memset(c->to, c->value, c->size);
}

static cudaError_t copy_late(Copy what, cudaStream_t stream) {
    Copy *kept = malloc(sizeof *kept);
    *kept = what;
    emulated_push(stream, copy, kept);
    return cudaSuccess;
}

// Pageable memory is copied before the call returns, as on a real GPU.
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    Block block;
    copy_late((Copy){to, from, size, 0}, stream);
    if (!size || (find(to, &block) && find(from, &block))) return cudaSuccess;
    emulated_host_waits();
    emulated_wait_stream(stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    copy_late((Copy){to, from, size, 0}, 0);
    emulated_host_waits();
    emulated_wait_stream(0);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
    return copy_late((Copy){to, from, size, 0}, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        copy_late((Copy){(char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, 0}, stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind) {
    cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, 0);
    emulated_host_waits();
    emulated_wait_stream(0);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    return copy_late((Copy){to, NULL, size, value}, stream);
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
    cudaMemsetAsync(to, value, size, 0);
    emulated_wait_stream(0);
    return cudaSuccess;
}

// What a handle of 64 bytes holds: where the owner's file is.
typedef struct {
    unsigned magic;
    int process, file, physical_device;
    size_t size;
} Handle;
enum { MAGIC = 0xe6a11d1e };

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    Block block;
    if (!find(pointer, &block) || block.kind != ON_GPU || block.start != pointer) {
        emulated_log("cudaIpcGetMemHandle: not the start of an allocation on a GPU");
        return emulated_fail(cudaErrorInvalidValue);
    }
    memset(handle, 0, sizeof *handle);
    *(Handle *)handle = (Handle){MAGIC, getpid(), block.file, emulated_physical(block.device), block.size};
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    Handle *owner = (Handle *)&handle;
    if (owner->magic != MAGIC) return emulated_fail(cudaErrorInvalidValue);
    if (owner->process == getpid()) return emulated_fail(cudaErrorDeviceUninitialized); // CUDA refuses a process's own
    if (owner->physical_device != emulated_physical(emulated_current()))
        emulated_log("cudaIpcOpenMemHandle: GPU %d opens memory of GPU %d", emulated_physical(emulated_current()),
                     owner->physical_device);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", owner->process, owner->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return emulated_fail(cudaErrorInvalidValue);
    *pointer = mmap(NULL, owner->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (*pointer == MAP_FAILED) return emulated_fail(cudaErrorMapBufferObjectFailed);
    int device = emulated_current(); // CUDA: the owner's, if this process sees it
    for (int i = 0; i < emulated_num_visible(); i++)
        if (emulated_physical(i) == owner->physical_device) device = i;
    add((Block){*pointer, owner->size, device, ON_GPU, file});
    used[device] -= owner->size; // it is the owner's
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    Block block;
    if (find(pointer, &block)) used[block.device] += block.size;
    return release(pointer);
}
