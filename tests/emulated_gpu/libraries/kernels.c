// Refuse kernels by name: torch's operations are computed by dispatch.cpp, and nothing computes what is launched here.
#define _GNU_SOURCE
#include "emulator.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *function;
    const char *name;
} Kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel *kernels;
static size_t num_kernels, capacity;
static __thread char unsupported[400] = "operation not supported by the emulated GPU";

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }

void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit,
                            void *a, void *b, void *c, void *d, int *e) {
    pthread_mutex_lock(&lock);
    if (num_kernels == capacity) kernels = realloc(kernels, sizeof *kernels * (capacity = 2 * capacity + 4096));
    kernels[num_kernels++] = (Kernel){function, name};
    pthread_mutex_unlock(&lock);
}

void __cudaRegisterVar(void **handle, char *variable, char *a, const char *name, int b, size_t size, int c, int d) {}
void __cudaRegisterManagedVar(void **handle, void **v, char *a, const char *name, int b, size_t size, int c, int d) {}
void __cudaRegisterHostVar(void **handle, const char *name, char *variable, size_t size) {}

static cudaError_t refuse(const void *function) {
    const char *name = "without a name";
    for (size_t i = 0; i < num_kernels; i++)
        if (kernels[i].function == function) name = kernels[i].name;
    snprintf(unsupported, sizeof unsupported, "operation not supported: nothing computes the kernel %.300s", name);
    emulated_log("nothing computes the kernel %s", name);
    return emulated_fail(cudaErrorNotSupported);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return refuse(function);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return refuse((const void *)kernel);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return refuse(function);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return refuse(function);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) { return 0; }

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = *block = (dim3){1, 1, 1};
    *shared = 0;
    *(void **)stream = NULL;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90};
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute name, int value) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block_size,
                                                                   size_t shared, unsigned flags) {
    *count = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block_size,
                                                          size_t shared) {
    *count = 2;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                               enum cudaMemcpyKind kind) {
    return cudaSuccess; // only kernels read it
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char zeros[1 << 16];
    *pointer = zeros;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotSupported: return unsupported;
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotReady: return "device not ready";
    default: return "error of the emulated GPU";
    }
}

const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

static int unsupported_driver_call(void) { return 801; }

// The driver's functions are those of libcuda.so.1, which is loaded first.
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void *)unsupported_driver_call;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, result);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)(size_t)(device + 1);
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr name, void *value) {
    *(unsigned long long *)value = 0;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr name, void *value) { return cudaSuccess; }

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t size) { return cudaSuccess; }
