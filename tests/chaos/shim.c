// Preloaded into a run: faults of the disk, waiting for ever, death and a jumping clock at the n-th operation on the files of a folder.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long at = -1, last = -1;   // the operations from `at` up to `last` fail
static int code;                  // their errno; -1: kill -9, after half of a write; -2: they never return
static atomic_long count;
static long jump_after = -1;      // operations until the clock jumps
static long jump;                 // by so many seconds

// Names the folder and what is to happen in it; called by the run itself before it begins.
void chaos_arm(const char *where, long first, long final, int what, long clock_after, long seconds) {
    strncpy(folder, where, sizeof folder - 1);
    at = first, last = final, code = what, jump_after = clock_after, jump = seconds;
}

// As a file system whose server is gone, or a lock that is never released: signals change nothing.
void chaos_block(void) {
    for (;;) pause();
}

long chaos_count(void) { return atomic_load(&count); }

static int inside(const char *path) {
    return folder[0] && path && !strncmp(path, folder, strlen(folder));
}

static int named(int fd) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return inside(path);
}

// Whether this operation is to fail; does not return where it is to kill.
static int fails(int mine) {
    if (!mine) return 0;
    long number = atomic_fetch_add(&count, 1);
    if (at < 0 || number < at || number > last) return 0;
    if (code == -1) raise(SIGKILL);
    if (code == -2) chaos_block();
    errno = code;
    return 1;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int half(int mine) {  // a write that is to be torn
    return mine && code == -1 && at >= 0 && atomic_load(&count) == at;
}

#define WRITE(name, offset, ...) \
    ssize_t name(int fd, const void *data, size_t size __VA_ARGS__) { \
        REAL(name); \
        int mine = named(fd); \
        if (half(mine)) real(fd, data, size / 2 offset); \
        return fails(mine) ? -1 : real(fd, data, size offset); \
    }
#define COMMA ,
WRITE(write, )
WRITE(pwrite, COMMA from, , off_t from)
WRITE(pwrite64, COMMA from, , off64_t from)

#define CALL(type, name, mine, given, ...) \
    type name(__VA_ARGS__) { \
        REAL(name); \
        return fails(mine) ? -1 : real given; \
    }
CALL(ssize_t, writev, named(fd), (fd, pieces, many), int fd, const struct iovec *pieces, int many)
CALL(int, fsync, named(fd), (fd), int fd)
CALL(int, fdatasync, named(fd), (fd), int fd)
CALL(int, rename, inside(old), (old, new), const char *old, const char *new)
CALL(int, renameat, inside(old), (a, old, b, new), int a, const char *old, int b, const char *new)
CALL(int, mkdir, inside(path), (path, mode), const char *path, mode_t mode)

#define OPEN(name, at, ...) \
    int name(__VA_ARGS__ const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = va_arg(rest, int); \
        va_end(rest); \
        return fails(flags & O_CREAT && inside(path)) ? -1 : real(at path, flags, mode); \
    }
OPEN(open, )
OPEN(open64, )
OPEN(openat, dir COMMA, int dir, )

int clock_gettime(clockid_t which, struct timespec *now) {
    REAL(clock_gettime);
    int done = real(which, now);
    if (which == CLOCK_REALTIME && jump_after >= 0 && atomic_load(&count) >= jump_after)
        now->tv_sec += jump;
    return done;
}
