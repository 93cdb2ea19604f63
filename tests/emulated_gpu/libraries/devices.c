// Emulate CUDA's device management: GPUs named H100, chosen by CUDA_VISIBLE_DEVICES.
#define _GNU_SOURCE
#include "emulator.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static __thread int current_device;
static __thread cudaError_t last_error = cudaSuccess;
static long num_host_waits;
static int visible[MAX_DEVICES], num_visible = -1;
static pid_t visible_of; // a forked process may choose its own

static long long setting(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text ? atoll(text) : otherwise;
}

int emulated_count(void) { return (int)setting("COATI_EMULATED_GPU_COUNT", 8); }
size_t emulated_bytes(void) { return (size_t)setting("COATI_EMULATED_GPU_BYTES", 8ll << 30); }
int emulated_current(void) { return current_device; }
void emulated_host_waits(void) { __atomic_add_fetch(&num_host_waits, 1, __ATOMIC_RELAXED); }
long emulated_num_host_waits(void) { return __atomic_load_n(&num_host_waits, __ATOMIC_RELAXED); }

void emulated_log(const char *format, ...) {
    const char *path = getenv("COATI_EMULATED_GPU_LOG");
    FILE *file = path ? fopen(path, "a") : stderr;
    if (!file) return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(file, "[emulated GPU, process %d] ", getpid());
    vfprintf(file, format, arguments);
    fputc('\n', file);
    va_end(arguments);
    if (path) fclose(file);
}

// Indexes and GPU-<hexadecimal index> identifiers, up to the first that does not exist, as CUDA reads them.
static void read_visible(void) {
    if (num_visible >= 0 && visible_of == getpid()) return;
    visible_of = getpid();
    num_visible = 0;
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    int count = emulated_count();
    if (!chosen) {
        while (num_visible < count && num_visible < MAX_DEVICES) visible[num_visible] = num_visible, num_visible++;
        return;
    }
    char *text = strdup(chosen), *rest = text, *word;
    while ((word = strsep(&rest, ",")) && num_visible < MAX_DEVICES) {
        char *end;
        long index = strncmp(word, "GPU-", 4) ? strtol(word, &end, 10) : strtol(word + 4, &end, 16);
        if (end == word || index < 0 || index >= count) break;
        visible[num_visible++] = (int)index;
    }
    free(text);
}

int emulated_num_visible(void) {
    read_visible();
    return num_visible;
}

int emulated_physical(int device) {
    read_visible();
    return visible[device];
}

cudaError_t emulated_fail(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

static bool exists(int device) { return device >= 0 && device < emulated_num_visible(); }

cudaError_t cudaGetDeviceCount(int *count) {
    *count = emulated_num_visible();
    return *count ? cudaSuccess : emulated_fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (!exists(device)) return emulated_fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

static const struct {
    enum cudaDeviceAttr name;
    int value;
} ATTRIBUTES[] = { // of an H100; others are 0
    {cudaDevAttrMultiProcessorCount, 132},
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrCooperativeLaunch, 1},
};

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
    if (!exists(device)) return emulated_fail(cudaErrorInvalidDevice);
    *value = 0;
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++)
        if (ATTRIBUTES[i].name == name) *value = ATTRIBUTES[i].value;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (!exists(device)) return emulated_fail(cudaErrorInvalidDevice);
    *p = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3", .totalGlobalMem = emulated_bytes(), .major = 9, .multiProcessorCount = 132,
        .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536, .sharedMemPerBlock = 49152, .sharedMemPerMultiprocessor = 233472,
        .sharedMemPerBlockOptin = 232448, .totalConstMem = 65536, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .l2CacheSize = 50 << 20, .memoryBusWidth = 5120,
        .unifiedAddressing = 1, .managedMemory = 1, .concurrentKernels = 1, .asyncEngineCount = 3,
        .canMapHostMemory = 1, .ECCEnabled = 1, .cooperativeLaunch = 1, .maxBlocksPerMultiProcessor = 32,
        .streamPrioritiesSupported = 1, .memoryPoolsSupported = 1, .pciBusID = 16 + emulated_physical(device),
    };
    p->uuid.bytes[3] = (char)emulated_physical(device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    if (!exists(device)) return emulated_fail(cudaErrorInvalidDevice);
    snprintf(text, size, "0000:%02x:00.0", 16 + emulated_physical(device));
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned flags) { return cudaSuccess; }

cudaError_t cudaGetDeviceFlags(unsigned *flags) {
    *flags = 0;
    return cudaSuccess;
}
