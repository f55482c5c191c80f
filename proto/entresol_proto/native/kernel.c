/* The native kernel: inner loops that a profile has shown to pay, and nothing else.
 *
 * Plain C11, no dependency but libc, no Python headers: it is loaded with ctypes, whose calls
 * release the interpreter lock. Every function has a Python twin that gives the same bytes; see
 * __init__.py. Callers vouch for lengths and lifetimes of all memory.
 */

#define _GNU_SOURCE /* preadv(2) */
#define _FILE_OFFSET_BITS 64

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "blake2b.h"

#define EXPORT __attribute__((visibility("default")))

/* Raised with every change of a signature below; the loader refuses any other. */
EXPORT int32_t entresol_kernel_version(void) { return 10; }

/* Copy that does not read the destination into the caches, nor leave it there. */
static void stream_copy(uint8_t *into, const uint8_t *from, size_t length_bytes)
{
#if defined(__SSE2__)
    size_t head = (size_t)(-(uintptr_t)into & 15);
    if (head > length_bytes)
        head = length_bytes;
    memcpy(into, from, head);
    into += head, from += head, length_bytes -= head;
    while (length_bytes >= 64) {
        _mm_prefetch((const char *)from + 1024, _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)into, a);
        _mm_stream_si128((__m128i *)(into + 16), b);
        _mm_stream_si128((__m128i *)(into + 32), c);
        _mm_stream_si128((__m128i *)(into + 48), d);
        into += 64, from += 64, length_bytes -= 64;
    }
#endif
    memcpy(into, from, length_bytes);
}

/* Copy `count` pieces that do not overlap. The bytes are visible to other threads on return. */
EXPORT void entresol_stream_copy(size_t count, uint8_t *const *into, const uint8_t *const *from,
                                 const size_t *length_bytes)
{
    for (size_t i = 0; i < count; i++)
        stream_copy(into[i], from[i], length_bytes[i]);
#if defined(__SSE2__)
    _mm_sfence(); /* streamed stores are weakly ordered */
#endif
}

/* Receiving the payload of a tcp data stream (proto/FABRICS.md): what fabric/framing.py does for any
 * message, for a run of DATA messages that answer one span.
 */

enum { HEADER_BYTES = 64, MESSAGE_DATA = 4 };
enum { DONE = 0, OTHER = 1, STOPPED = 2, ENDED = 3 }; /* below 0: -errno */

struct receiving {
    uint8_t *into;         /* where the span goes, `length_bytes` long */
    uint64_t length_bytes;
    uint64_t received_bytes;
    uint64_t piece_bytes;  /* of the DATA message under way, still to come */
    uint64_t header_bytes; /* of the next header, here already */
    uint32_t request;
    uint32_t index;
    volatile int32_t stop; /* set by others, who then make wake_fd readable */
    uint32_t reserved;
    uint8_t header[HEADER_BYTES];
};

static uint32_t u32_at(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Whether the header announces the next bytes of the span; then takes it. */
static int take_header(struct receiving *r)
{
    const uint8_t *h = r->header;
    uint32_t index = (uint32_t)h[2] | (uint32_t)h[3] << 8;
    uint32_t request = u32_at(h + 4), offset = u32_at(h + 8), length = u32_at(h + 12);
    if (h[0] != MESSAGE_DATA || index != r->index || request != r->request ||
        offset != r->received_bytes || length == 0 ||
        length > r->length_bytes - r->received_bytes)
        return 0;
    r->piece_bytes = length;
    r->header_bytes = 0;
    return 1;
}

/* Receive until the span is complete (DONE), another message begins (OTHER: it is in `header`),
 * `stop` is set (STOPPED), the peer ended the stream (ENDED) or an error (-errno). `r` always says
 * how far it is, so that someone else can go on. The socket does not block.
 */
EXPORT int32_t entresol_receive(int fd, int wake_fd, struct receiving *r)
{
    while (!r->stop) {
        struct iovec parts[2];
        int count = 0;
        if (r->piece_bytes == 0) {
            if (r->received_bytes == r->length_bytes)
                return DONE;
            if (r->header_bytes == HEADER_BYTES) {
                if (!take_header(r))
                    return OTHER;
                continue;
            }
        } else {
            parts[count].iov_base = r->into + r->received_bytes;
            parts[count++].iov_len = r->piece_bytes;
        }
        parts[count].iov_base = r->header + r->header_bytes;
        parts[count++].iov_len = HEADER_BYTES - r->header_bytes;
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
        if (got == 0)
            return ENDED;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            struct pollfd wait[2] = {{.fd = fd, .events = POLLIN}, {.fd = wake_fd, .events = POLLIN}};
            if (poll(wait, 2, -1) < 0 && errno != EINTR)
                return -errno;
            continue;
        }
        if (got < 0) {
            if (errno == EINTR)
                continue;
            return -errno;
        }
        uint64_t piece = (uint64_t)got < r->piece_bytes ? (uint64_t)got : r->piece_bytes;
        r->piece_bytes -= piece;
        r->received_bytes += piece;
        r->header_bytes += (uint64_t)got - piece;
    }
    return STOPPED;
}

/* Keyed BLAKE2b of many inputs of one length: see blake2b.h. What hashlib gives for each. */
EXPORT void entresol_blake2b_many(const uint8_t *key, size_t key_bytes, const uint8_t *person,
                                  size_t digest_bytes, size_t count, const uint8_t *inputs,
                                  size_t length_bytes, uint8_t *out)
{
    blake2b_many(key, key_bytes, person, digest_bytes, count, inputs, length_bytes, out);
}

#include "ladder.h"
#include "reads.h"
#include "writes.h"
#include "pools.h"
