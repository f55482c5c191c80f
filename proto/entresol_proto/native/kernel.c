/* The native kernel: inner loops that a profile has shown to pay, and nothing else.
 *
 * Plain C11, no dependency but libc, no Python headers: it is loaded with ctypes, whose calls
 * release the interpreter lock. Every function has a Python twin that gives the same bytes; see
 * __init__.py. Callers vouch for lengths and lifetimes of all memory.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

/* Raised with every change of a signature below; the loader refuses any other. */
EXPORT int32_t entresol_kernel_version(void) { return 1; }

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
