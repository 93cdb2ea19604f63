// Emulate the CUDA driver's functions that torch, vLLM and Triton call beside the runtime's.
//
// cuda.h renames functions to their versions by macros; these are the symbols themselves, so that it is not included.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

int cudaGetDeviceCount(int *), cudaGetDevice(int *), cudaSetDevice(int), cudaDeviceGetAttribute(int *, int, int);
int cudaMemGetInfo(size_t *, size_t *), cudaMalloc(void **, size_t), cudaFree(void *);
int cudaPointerGetAttributes(void *, const void *), emulated_physical(int);

enum { SUCCESS = 0, NOT_FOUND = 500, NOT_SUPPORTED = 801, CUDA_13 = 13000 };
enum { POINTER_MEMORY_TYPE = 2, POINTER_DEVICE_ORDINAL = 9 }; // CU_POINTER_ATTRIBUTE_...
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };

static void *context_of(int device) { return (void *)(size_t)(device + 1); }

int cuInit(unsigned flags) { return SUCCESS; }
int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count), SUCCESS; }
int cuDeviceGetAttribute(int *value, int name, int device) { return cudaDeviceGetAttribute(value, name, device); }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuMemAlloc_v2(void **pointer, size_t size) { return cudaMalloc(pointer, size); }
int cuMemFree_v2(void *pointer) { return cudaFree(pointer); }
int cuMemGetInfo_v2(size_t *available, size_t *total) { return cudaMemGetInfo(available, total); }

int cuDriverGetVersion(int *version) {
    *version = CUDA_13;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "NVIDIA H100 80GB HBM3");
    return SUCCESS;
}

int cuDeviceGetUuid_v2(char uuid[16], int device) {
    memset(uuid, 0, 16);
    uuid[3] = (char)emulated_physical(device);
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *total, int device) {
    size_t available;
    return cudaMemGetInfo(&available, total);
}

int cuCtxGetCurrent(void **context) {
    int device;
    cudaGetDevice(&device);
    *context = context_of(device);
    return SUCCESS;
}

int cuCtxSetCurrent(void *context) {
    if (context) cudaSetDevice((int)(size_t)context - 1);
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = context_of(device);
    return SUCCESS;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    if (flags) *flags = 0;
    if (is_active) *is_active = 1;
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = "error of the emulated GPU's driver";
    return SUCCESS;
}

int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }

int cuPointerGetAttribute(void *value, int name, size_t pointer) {
    int attributes[16] = {0}; // cudaPointerAttributes: type, device, ...
    cudaPointerGetAttributes(attributes, (void *)pointer);
    switch (name) {
    case POINTER_DEVICE_ORDINAL: *(int *)value = attributes[1]; break;
    case POINTER_MEMORY_TYPE: *(int *)value = attributes[0] == 2 ? MEMORY_DEVICE : MEMORY_HOST; break;
    default: *(size_t *)value = pointer;
    }
    return SUCCESS;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = !*function;
    return *function ? SUCCESS : NOT_FOUND;
}
