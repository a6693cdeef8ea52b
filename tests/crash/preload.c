// Preloaded library that makes system calls on files below a folder fail at random.
//
// FAULT_FOLDER   the folder
// FAULT_KIND     eio, enospc, edquot, eintr or short
// FAULT_CLOCK_S  seconds by which the clock is set
// FAULT_EVERY    mean number of calls between two faults
// FAULT_SEED     start of the random numbers
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_ulong counter;

static unsigned long setting(const char *name) {
    const char *text = getenv(name);
    return text ? strtoul(text, NULL, 10) : 0;
}

static int is_due(void) {
    unsigned long every = setting("FAULT_EVERY");
    if (every == 0) return 0;
    unsigned long x = atomic_fetch_add(&counter, 1) + 1000003 * (setting("FAULT_SEED") + 1);
    x ^= x >> 33, x *= 0xff51afd7ed558ccdUL, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53UL, x ^= x >> 33;
    return x % every == 0;
}

static int is_below(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    return folder && strncmp(path, folder, strlen(folder)) == 0;
}

static int concerns(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static const char *kind(void) { return getenv("FAULT_KIND") ? getenv("FAULT_KIND") : ""; }

static int fails(void) {
    if (strcmp(kind(), "short") == 0 || !is_due()) return 0;
    errno = strcmp(kind(), "enospc") == 0 ? ENOSPC : strcmp(kind(), "edquot") == 0 ? EDQUOT : strcmp(kind(), "eintr") == 0 ? EINTR : EIO;
    return 1;
}

// A short write stays a multiple of a block, as direct I/O requires.
static size_t allowed(size_t length) {
    if (strcmp(kind(), "short") != 0 || length <= 4096 || !is_due()) return length;
    size_t half = length / 2 / 4096 * 4096;
    return half > 0 ? half : 4096;
}

#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

typedef ssize_t (*pwrite_type)(int, const void *, size_t, off_t);
typedef ssize_t (*pwritev_type)(int, const struct iovec *, int, off_t);
typedef ssize_t (*pwritev2_type)(int, const struct iovec *, int, off_t, int);
typedef int (*descriptor_type)(int);
typedef int (*rename_type)(const char *, const char *);

ssize_t write(int descriptor, const void *bytes, size_t length) {
    typedef ssize_t (*type)(int, const void *, size_t);
    REAL("write", type);
    if (!concerns(descriptor)) return real(descriptor, bytes, length);
    return fails() ? -1 : real(descriptor, bytes, allowed(length));
}

#define PWRITE(name)                                                                   \
    ssize_t name(int descriptor, const void *bytes, size_t length, off_t offset) {     \
        REAL(#name, pwrite_type);                                                      \
        if (!concerns(descriptor)) return real(descriptor, bytes, length, offset);     \
        return fails() ? -1 : real(descriptor, bytes, allowed(length), offset);        \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

static int parts(int count) { return strcmp(kind(), "short") == 0 && count > 1 && is_due() ? count - 1 : count; }

#define PWRITEV(name)                                                                  \
    ssize_t name(int descriptor, const struct iovec *list, int count, off_t offset) {  \
        REAL(#name, pwritev_type);                                                     \
        if (!concerns(descriptor)) return real(descriptor, list, count, offset);       \
        return fails() ? -1 : real(descriptor, list, parts(count), offset);            \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(name)                                                                            \
    ssize_t name(int descriptor, const struct iovec *list, int count, off_t offset, int flags) {  \
        REAL(#name, pwritev2_type);                                                               \
        if (!concerns(descriptor)) return real(descriptor, list, count, offset, flags);           \
        return fails() ? -1 : real(descriptor, list, parts(count), offset, flags);                \
    }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

// Kernels never interrupt a sync or a rename.
static int fails_whole(void) { return strcmp(kind(), "eintr") != 0 && fails(); }

#define SYNC(name)                                              \
    int name(int descriptor) {                                  \
        REAL(#name, descriptor_type);                           \
        if (concerns(descriptor) && fails_whole()) return -1;   \
        return real(descriptor);                                \
    }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *source, const char *target) {
    REAL("rename", rename_type);
    if (is_below(target) && fails_whole()) return -1;
    return real(source, target);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    typedef int (*type)(clockid_t, struct timespec *);
    REAL("clock_gettime", type);
    const char *shift = getenv("FAULT_CLOCK_S");
    int status = real(clock, time);
    if (status == 0 && clock == CLOCK_REALTIME && shift) time->tv_sec += strtol(shift, NULL, 10);
    return status;
}
