/* What is written together, and made durable, in one call: a thread needs the interpreter's lock
 * before and behind it, and not in between.
 *
 * Invariants: memory is read until the call returns, no longer; runs are written in the order they
 * were given, each in full or the call fails; nothing is flushed unless all of them were written.
 */

#include <limits.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* How a run is given: this, and behind it its parts. */
struct write_run {
    uint64_t offset_bytes;
    uint64_t count;
};

struct write_part {
    uint64_t address, length_bytes;
};

struct written {
    uint64_t write_ns, flush_ns;
    int32_t failed;   /* an errno, or 0 */
    int32_t flushing; /* whether that was the flush */
    int32_t stop;     /* set from another thread: no further run is begun */
    int32_t reserved;
};

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* One run, in full: 0 or an errno. `parts` are changed. */
static int write_run(int fd, uint64_t offset_bytes, struct iovec *parts, size_t count,
                     uint32_t block_bytes)
{
    while (count > 0) {
        const ssize_t done =
            pwritev(fd, parts, count > IOV_MAX ? IOV_MAX : (int)count, (off_t)offset_bytes);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return errno;
        size_t moved = (size_t)done;
        offset_bytes += moved;
        while (count > 0 && moved >= parts->iov_len)
            moved -= parts->iov_len, parts++, count--;
        if (count == 0)
            break;
        if (done == 0 || offset_bytes % block_bytes != 0)
            return EIO; /* a device that takes nothing, or a part of a block */
        parts->iov_base = (uint8_t *)parts->iov_base + moved;
        parts->iov_len -= moved;
    }
    return 0;
}

/* Write so many runs of whole blocks: `wanted` holds a `struct write_run` for each, with its parts
 * behind it. Then, if `flush`, fdatasync(2). How it ended, and what both took, is in `written`.
 */
EXPORT void entresol_write(int fd, uint32_t runs, const uint8_t *wanted, uint32_t block_bytes,
                           int32_t flush, struct written *written)
{
    const uint64_t began_ns = clock_ns();
    for (uint32_t i = 0; i < runs && written->failed == 0; i++) {
        struct write_run run;
        memcpy(&run, wanted, sizeof run);
        wanted += sizeof run;
        if (__atomic_load_n(&written->stop, __ATOMIC_RELAXED)) {
            written->failed = ECANCELED;
            break;
        }
        struct iovec *parts = malloc((run.count + 1) * sizeof *parts);
        if (parts == NULL) {
            written->failed = ENOMEM;
            break;
        }
        for (uint64_t k = 0; k < run.count; k++) {
            struct write_part part;
            memcpy(&part, wanted, sizeof part);
            wanted += sizeof part;
            parts[k].iov_base = (void *)(uintptr_t)part.address;
            parts[k].iov_len = part.length_bytes;
        }
        written->failed = write_run(fd, run.offset_bytes, parts, run.count, block_bytes);
        free(parts);
    }
    const uint64_t written_ns = clock_ns();
    written->write_ns = written_ns - began_ns;
    if (written->failed != 0 || !flush)
        return;
    int failed;
    do
        failed = fdatasync(fd);
    while (failed < 0 && errno == EINTR);
    if (failed < 0)
        written->failed = errno, written->flushing = 1;
    written->flush_ns = clock_ns() - written_ns;
}
