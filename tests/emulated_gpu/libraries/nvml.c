// Emulate NVML, from which vLLM and Ray learn of a machine's GPUs. It knows no CUDA_VISIBLE_DEVICES.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef size_t Device; // index + 1
typedef unsigned long long Bytes;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2 };

static unsigned count(void) {
    const char *text = getenv("COATI_EMULATED_GPU_COUNT");
    return text ? (unsigned)atoi(text) : 8;
}

static Bytes total_bytes(void) {
    const char *text = getenv("COATI_EMULATED_GPU_BYTES");
    return text ? strtoull(text, NULL, 10) : 8ull << 30;
}

#define SET(TARGET, VALUE) return *(TARGET) = (VALUE), SUCCESS

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return "error of the emulated NVML"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.95.05"), SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { SET(version, 13000); }
int nvmlSystemGetCudaDriverVersion(int *version) { SET(version, 13000); }
int nvmlDeviceGetCount_v2(unsigned *number) { SET(number, count()); }
int nvmlDeviceGetCount(unsigned *number) { SET(number, count()); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (index >= count()) return INVALID_ARGUMENT;
    SET(device, index + 1);
}

int nvmlDeviceGetHandleByIndex(unsigned index, Device *device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    return nvmlDeviceGetHandleByIndex_v2((unsigned)strtol(uuid + strlen("GPU-"), NULL, 16), device);
}

int nvmlDeviceGetIndex(Device device, unsigned *index) { SET(index, device - 1); }
int nvmlDeviceGetMinorNumber(Device device, unsigned *number) { SET(number, device - 1); }

int nvmlDeviceGetName(Device device, char *text, unsigned size) {
    return snprintf(text, size, "NVIDIA H100 80GB HBM3"), SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    return snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", (unsigned)device - 1), SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    *major = 9;
    SET(minor, 0);
}

int nvmlDeviceGetMemoryInfo(Device device, Bytes info[3]) { // total, free, used
    info[0] = info[1] = total_bytes();
    SET(&info[2], 0);
}

int nvmlDeviceGetMemoryInfo_v2(Device device, Bytes info[5]) { // version, total, reserved, free, used
    info[1] = info[3] = total_bytes();
    info[2] = info[4] = 0;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Device device, char info[68]) { // the short text, numbers, the long text
    memset(info, 0, 68);
    snprintf(info, 16, "0000:%02x:00.0", 15 + (unsigned)device);
    snprintf(info + 36, 32, "00000000:%02X:00.0", 15 + (unsigned)device);
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(Device device, Device peer, int capability, int *status) { SET(status, 0); }
int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *is_active) { SET(is_active, 1); }
int nvmlDeviceGetPowerManagementLimit(Device device, unsigned *milliwatts) { SET(milliwatts, 700000); }

int nvmlDeviceGetMigMode(Device device, unsigned *now, unsigned *later) {
    *now = 0;
    SET(later, 0);
}

int nvmlDeviceGetUtilizationRates(Device device, unsigned rates[2]) {
    rates[0] = 0;
    SET(&rates[1], 0);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *number, void *processes) { SET(number, 0); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *number, void *processes) { SET(number, 0); }
