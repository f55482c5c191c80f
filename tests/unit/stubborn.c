/* The native kernel over a device that writes a little at a time, refuses, or takes its time. */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <sys/uio.h>
#include <unistd.h>

static ssize_t stubborn_pwritev(int fd, const struct iovec *parts, int count, off_t at);
static int stubborn_fdatasync(int fd);

#define pwritev stubborn_pwritev
#define fdatasync stubborn_fdatasync
#include "kernel.c"
#undef pwritev
#undef fdatasync

static size_t most_bytes;
static int refused_write, refusal, sync_refusal, gate_fd = -1;
static atomic_int writes, syncs;

/* At most so many bytes a write (0: all); the write of that number (from 1) refused with that
 * errno, as are flushes with the other one; each write waits for a byte from `gate` (-1: none). */
EXPORT void plan(size_t bytes, int number, int write_errno, int sync_errno, int gate)
{
    most_bytes = bytes, refused_write = number, refusal = write_errno;
    sync_refusal = sync_errno, gate_fd = gate, writes = syncs = 0;
}

EXPORT int begun_writes(void) { return writes; }
EXPORT int begun_syncs(void) { return syncs; }

static ssize_t stubborn_pwritev(int fd, const struct iovec *parts, int count, off_t at)
{
    char byte;
    if (++writes == refused_write) {
        errno = refusal;
        return -1;
    }
    while (gate_fd >= 0 && read(gate_fd, &byte, 1) < 0 && errno == EINTR)
        ;
    if (most_bytes == 0)
        return pwritev(fd, parts, count, at);
    const size_t length = parts[0].iov_len < most_bytes ? parts[0].iov_len : most_bytes;
    return pwrite(fd, parts[0].iov_base, length, at);
}

static int stubborn_fdatasync(int fd)
{
    syncs++;
    if (sync_refusal) {
        errno = sync_refusal;
        if (sync_refusal == EINTR)
            sync_refusal = 0; /* once */
        return -1;
    }
    return fdatasync(fd);
}
