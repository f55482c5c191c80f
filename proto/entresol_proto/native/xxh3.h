/* XXH3-64 without a seed, of inputs longer than 240 bytes: the hash of a record's payload.
 *
 * Source: the XXH3 algorithm description, xxHash (doc/xxhash_spec.md, version 0.8), whose constants
 * these are. What `xxhash.xxh3_64_intdigest` gives. Eight lanes, for SSE2 where there is that; for
 * processors of 64 bits.
 */

#ifndef ENTRESOL_XXH3_H
#define ENTRESOL_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__SIZEOF_INT128__)
#define XXH3_HERE 1

enum {
    XXH3_BYTES_MIN = 241, /* shorter inputs are hashed otherwise, and not here */
    XXH3_STRIPE_BYTES = 64,
    XXH3_BLOCK_STRIPES = 16,
    XXH3_BLOCK_BYTES = XXH3_BLOCK_STRIPES * XXH3_STRIPE_BYTES,
    XXH3_SECRET_BYTES = 192,
};

static const uint8_t xxh3_secret[XXH3_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t xxh3_start[8] = {
    0x00000000c2b2ae3du, 0x9e3779b185ebca87u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u,
    0x85ebca77c2b2ae63u, 0x0000000085ebca77u, 0x27d4eb2f165667c5u, 0x000000009e3779b1u,
};

static inline __attribute__((always_inline)) uint64_t xxh3_word(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static inline __attribute__((always_inline)) void xxh3_add(uint64_t acc[8], const uint8_t *stripe,
                                                           const uint8_t *secret)
{
#if defined(__SSE2__)
    __m128i *lanes = (__m128i *)acc;
    for (int i = 0; i < 4; i++) {
        const __m128i data = _mm_loadu_si128((const __m128i *)stripe + i);
        const __m128i mixed = _mm_xor_si128(data, _mm_loadu_si128((const __m128i *)secret + i));
        const __m128i product = _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32));
        const __m128i other = _mm_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
        lanes[i] = _mm_add_epi64(lanes[i], _mm_add_epi64(other, product));
    }
#else
    uint64_t data[8], mixed[8];
    for (int i = 0; i < 8; i++)
        data[i] = xxh3_word(stripe + 8 * i);
    for (int i = 0; i < 8; i++)
        mixed[i] = data[i] ^ xxh3_word(secret + 8 * i);
    for (int i = 0; i < 8; i++)
        acc[i] += data[i ^ 1] + (mixed[i] & 0xffffffffu) * (mixed[i] >> 32);
#endif
}

static inline __attribute__((always_inline)) uint64_t xxh3_fold(uint64_t a, uint64_t b)
{
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Of at least XXH3_BYTES_MIN bytes. */
static uint64_t xxh3_64(const uint8_t *in, size_t length)
{
    uint64_t acc[8] __attribute__((aligned(32)));
    memcpy(acc, xxh3_start, sizeof acc);
    const size_t blocks = (length - 1) / XXH3_BLOCK_BYTES; /* but the last one, if it is full */
    for (size_t block = 0; block < blocks; block++) {
        for (int n = 0; n < XXH3_BLOCK_STRIPES; n++) {
            const uint8_t *stripe = in + block * XXH3_BLOCK_BYTES + n * XXH3_STRIPE_BYTES;
            __builtin_prefetch(stripe + 1024);
            xxh3_add(acc, stripe, xxh3_secret + 8 * n);
        }
        const uint8_t *secret = xxh3_secret + XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES;
        for (int i = 0; i < 8; i++)
            acc[i] = (acc[i] ^ acc[i] >> 47 ^ xxh3_word(secret + 8 * i)) * 0x9e3779b1u;
    }
    const uint8_t *rest = in + blocks * XXH3_BLOCK_BYTES;
    const size_t stripes = (length - 1 - blocks * XXH3_BLOCK_BYTES) / XXH3_STRIPE_BYTES;
    for (size_t n = 0; n < stripes; n++)
        xxh3_add(acc, rest + n * XXH3_STRIPE_BYTES, xxh3_secret + 8 * n);
    xxh3_add(acc, in + length - XXH3_STRIPE_BYTES,
             xxh3_secret + XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES - 7);
    uint64_t found = (uint64_t)length * 0x9e3779b185ebca87u;
    for (int i = 0; i < 4; i++)
        found += xxh3_fold(acc[2 * i] ^ xxh3_word(xxh3_secret + 11 + 16 * i),
                           acc[2 * i + 1] ^ xxh3_word(xxh3_secret + 19 + 16 * i));
    found = (found ^ found >> 37) * 0x165667919e3779f9u;
    return found ^ found >> 32;
}

#endif

#endif
