/* Makes writes to the first bytes of one file fail, for LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char failing[64];
static int passing, refused, number;

/* Pass `skip` writes before byte 8192 of the file `name`, then fail `count` writes with `error`. */
void arm(const char *name, int skip, int count, int error) {
    snprintf(failing, sizeof failing, "/%s", name);
    passing = skip, refused = count, number = error;
}

/* Return how many writes are still to fail. */
int left(void) { return refused; }

static ssize_t write_or_fail(const char *symbol, int fd, const void *data, size_t size, off_t offset) {
    ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, symbol);
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = refused > 0 && offset < 8192 ? readlink(link, path, sizeof path) : 0;
    size_t suffix = strlen(failing);
    if (refused > 0 && length >= (ssize_t)suffix &&
        !memcmp(path + length - suffix, failing, suffix) && passing-- <= 0) {
        refused--;
        errno = number;
        return -1;
    }
    return real(fd, data, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return write_or_fail("pwrite", fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    return write_or_fail("pwrite64", fd, data, size, offset);
}
