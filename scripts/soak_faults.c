/* Delay fsync and move the wall clock of a process and of all that it starts, as a file says that each of them maps.

   cc -shared -fPIC -O2 -o soak_faults.so soak_faults.c -ldl
   COATI_SOAK_FAULTS=FILE LD_PRELOAD=.../soak_faults.so COMMAND

   FILE: two int64, nanoseconds: the delay of each fsync, and what is added to CLOCK_REALTIME. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *faults;

__attribute__((constructor)) static void map_faults(void) {
    const char *path = getenv("COATI_SOAK_FAULTS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) faults = found;
    close(file);
}

static void add(struct timespec *at, int64_t nanoseconds) {
    int64_t total = at->tv_sec * INT64_C(1000000000) + at->tv_nsec + nanoseconds;
    at->tv_sec = total / INT64_C(1000000000);
    at->tv_nsec = total % INT64_C(1000000000);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, at);
    if (!failed && faults && clock == CLOCK_REALTIME) add(at, faults[1]);
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    if (faults && faults[0]) {
        struct timespec delay = {faults[0] / INT64_C(1000000000), faults[0] % INT64_C(1000000000)};
        nanosleep(&delay, NULL);
    }
    return real(file);
}
