// Emulate the driver's virtual memory: reserved addresses, and physical memory of a GPU that is mapped to them.
//
// vLLM's allocator sleeps by it: an engine's tensors keep their addresses while the GPU's memory is another's. To touch
// an address that nothing is mapped to ends the process, as it makes a context unusable on a GPU.
#define _GNU_SOURCE
#include "emulator.h"
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20 };
enum { LEFT_BEHIND = 0xe5 }; // a byte of memory that another had before: no value may be expected there

typedef struct {
    int file, device;
    size_t size;
    int num_holders; // the handle, and each mapping
} Memory;

typedef struct Mapping {
    char *start;
    Memory *memory;
    struct Mapping *next;
} Mapping;

static Mapping *mappings; // of all threads: vLLM holds Python's lock around these calls

static void let_go(Memory *memory) {
    if (--memory->num_holders) return;
    emulated_give_back(memory->device, memory->size);
    close(memory->file);
    free(memory);
}

static bool is_whole(size_t size) { return size && size % GRANULARITY == 0; }

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags flag) {
    *size = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    if (!is_whole(size)) return CUDA_ERROR_INVALID_VALUE;
    char *start = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *aligned = (char *)(((size_t)start + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
    if (aligned > start) munmap(start, aligned - start);
    munmap(aligned + size, GRANULARITY - (aligned - start));
    *address = (CUdeviceptr)aligned;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    for (Mapping *each = mappings; each; each = each->next)
        if (each->start == (char *)address) return CUDA_ERROR_INVALID_VALUE; // it is to be unmapped before
    return munmap((void *)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *of,
                     unsigned long long flags) {
    if (!is_whole(size) || of->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (!emulated_take(of->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    int file = memfd_create("emulated-gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    Memory *made = malloc(sizeof *made);
    *made = (Memory){file, of->location.id, size, 1};
    *handle = (CUmemGenericAllocationHandle)(size_t)made;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    let_go((Memory *)(size_t)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    Memory *memory = (Memory *)(size_t)handle;
    if (offset || size != memory->size) return CUDA_ERROR_INVALID_VALUE; // what vLLM and torch ask for
    char *start = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0);
    if (start == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    memory->num_holders++;
    Mapping *made = malloc(sizeof *made);
    *made = (Mapping){start, memory, mappings};
    mappings = made;
    emulated_mapped(start, size, memory->device);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *descriptions, size_t count) {
    if (!count || descriptions->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_NOT_SUPPORTED;
    if (mprotect((void *)address, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
    memset((void *)address, LEFT_BEHIND, GRANULARITY);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    for (Mapping **each = &mappings; *each; each = &(*each)->next) {
        Mapping *found = *each;
        if (found->start != (char *)address || found->memory->size != size) continue;
        if (!emulated_unmapped(found->start)) return CUDA_ERROR_INVALID_VALUE;
        mmap(found->start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        *each = found->next;
        let_go(found->memory);
        free(found);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}
