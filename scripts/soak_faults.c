/* Delay fsync and move the wall clock of a process and of all that it starts, as a file says that each of them maps.

   cc -shared -fPIC -O2 -o soak_faults.so soak_faults.c -ldl
   COATI_SOAK_FAULTS=FILE LD_PRELOAD=.../soak_faults.so COMMAND

   FILE: two int64, nanoseconds: the delay of each fsync, and what is added to CLOCK_REALTIME.

   A wait until a time of the wall clock ends when the moved clock shows that time, as one in the kernel does when the
   clock is set. So it is made in slices. Where nothing but a slice has ended, a wait on a condition or a futex wakes for
   no reason, as it may, so that no signal is lost between two slices; but if the clock was set since it began it goes on,
   as the caller would compute another deadline with the new time. Other waits go on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
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

static int real_clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, at);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = real_clock_gettime(clock, at);
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

static int64_t nanoseconds(const struct timespec *at) { return at->tv_sec * INT64_C(1000000000) + at->tv_nsec; }

struct slice {
    struct timespec end; /* by the kernel's clock */
    int64_t offset;      /* of the moved clock, as it begins */
    int is_last;         /* it ends when the wait does */
};

static struct slice next_slice(const struct timespec *until) {
    const int64_t longest = 100 * INT64_C(1000000);
    struct slice found = {.offset = faults ? faults[1] : 0};
    int64_t left;
    real_clock_gettime(CLOCK_REALTIME, &found.end);
    left = nanoseconds(until) - found.offset - nanoseconds(&found.end);
    found.is_last = left <= longest;
    add(&found.end, left < 0 ? 0 : found.is_last ? left : longest);
    return found;
}

static int clock_was_set(int64_t since) { return faults && faults[1] != since; }

typedef int (*wait_on_condition)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static int wait_in_slices(wait_on_condition wait, pthread_cond_t *condition, pthread_mutex_t *mutex,
                          const struct timespec *until) {
    const int64_t begun = faults ? faults[1] : 0;
    for (;;) {
        struct slice now = next_slice(until);
        int failed = wait(condition, mutex, &now.end);
        if (failed != ETIMEDOUT || (now.is_last && !clock_was_set(now.offset))) return failed;
        if (!clock_was_set(begun)) return 0;
    }
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static wait_on_condition real;
    if (!real) real = (wait_on_condition)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = (wait_on_condition)dlsym(RTLD_NEXT, "pthread_cond_timedwait"); /* on x86-64 that of old conditions */
    if (condition->__data.__wrefs & 2) return real(condition, mutex, until); /* its clock is CLOCK_MONOTONIC */
    return wait_in_slices(real, condition, mutex, until);
}

static int real_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                          const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real)
        real = (int (*)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *))dlsym(
            RTLD_NEXT, "pthread_cond_clockwait");
    return real(condition, mutex, clock, until);
}

static int wait_by_wall_clock(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    return real_clockwait(condition, mutex, CLOCK_REALTIME, until);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until) {
    if (clock != CLOCK_REALTIME) return real_clockwait(condition, mutex, clock, until);
    return wait_in_slices(wait_by_wall_clock, condition, mutex, until);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    for (;;) {
        struct slice now = next_slice(until);
        int failed = real(semaphore, &now.end);
        if (!failed || errno != ETIMEDOUT || (now.is_last && !clock_was_set(now.offset))) return failed;
    }
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_mutex_t *, const struct timespec *);
    if (!real) real = (int (*)(pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    for (;;) {
        struct slice now = next_slice(until);
        int failed = real(mutex, &now.end);
        if (failed != ETIMEDOUT || (now.is_last && !clock_was_set(now.offset))) return failed;
    }
}

/* Abseil, which Ray and gRPC use, calls futex itself. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int each = 0; each < 6; each++) a[each] = va_arg(rest, long);
    va_end(rest);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number != SYS_futex || !(a[1] & FUTEX_CLOCK_REALTIME) || (a[1] & FUTEX_CMD_MASK) != FUTEX_WAIT_BITSET || !a[3])
        return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    const int64_t begun = faults ? faults[1] : 0;
    for (;;) {
        struct slice now = next_slice((const struct timespec *)a[3]);
        long result = real(number, a[0], a[1], a[2], (long)&now.end, a[4], a[5]);
        if (result != -1 || errno != ETIMEDOUT || (now.is_last && !clock_was_set(now.offset))) return result;
        if (clock_was_set(begun)) continue;
        errno = EINTR; /* as a signal wakes it */
        return result;
    }
}
