/* A libnccl without GPUs: hands out an id with every value of a byte, and joins only those who bring it. */
#include <string.h>
typedef struct { char bytes[128]; } ncclUniqueId;
static char group;
static char byte_of(int place) { return (char)(place * 2 + (place % 2)); }
int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclGetUniqueId(ncclUniqueId *id) { for (int i = 0; i < 128; i++) id->bytes[i] = byte_of(i); return 0; }
int ncclCommInitRankConfig(void **comm, int size, ncclUniqueId id, int rank, void *config) {
    for (int i = 0; i < 128; i++) if (id.bytes[i] != byte_of(i)) return 5; /* ncclInvalidUsage */
    *comm = &group;
    return rank < size ? 0 : 4; /* ncclInvalidArgument */
}
int ncclCommAbort(void *comm) { return 0; }
int ncclCommDestroy(void *comm) { return 0; }
int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }
const char *ncclGetErrorString(int status) { return status == 5 ? "invalid usage" : "invalid argument"; }
#define UNUSED(name) int name(void) { return 3; }
UNUSED(ncclAllGather) UNUSED(ncclAllReduce) UNUSED(ncclBcast) UNUSED(ncclBroadcast) UNUSED(ncclCommCount)
UNUSED(ncclCommCuDevice) UNUSED(ncclCommInitAll) UNUSED(ncclCommSplit) UNUSED(ncclCommUserRank)
UNUSED(ncclGroupEnd) UNUSED(ncclGroupStart) UNUSED(ncclRecv) UNUSED(ncclReduce) UNUSED(ncclReduceScatter)
UNUSED(ncclSend) UNUSED(ncclCommSuspend) UNUSED(ncclCommResume)
