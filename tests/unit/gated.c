/* The native kernel with a gate in front of every read, so that a test decides when one goes on.
 *
 * A read that has begun is written down, then waits for one byte from the gate.
 */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/uio.h>
#include <unistd.h>

static ssize_t gated_preadv(int fd, const struct iovec *parts, int count, off_t at);

#define preadv gated_preadv
#include "kernel.c"
#undef preadv

enum { BEGUN_MAX = 256 };
static int gate_fd = -1;
static atomic_int begun_count;
static uint64_t begun_at[BEGUN_MAX];

EXPORT void gate(int fd) { gate_fd = fd, begun_count = 0; }
EXPORT int begun(void) { return begun_count; }
EXPORT uint64_t begun_offset(int number) { return begun_at[number]; }

static ssize_t gated_preadv(int fd, const struct iovec *parts, int count, off_t at)
{
    int number = atomic_fetch_add(&begun_count, 1);
    if (number < BEGUN_MAX)
        begun_at[number] = (uint64_t)at;
    char byte;
    while (gate_fd >= 0 && read(gate_fd, &byte, 1) < 0 && errno == EINTR)
        ;
    return preadv(fd, parts, count, at);
}
