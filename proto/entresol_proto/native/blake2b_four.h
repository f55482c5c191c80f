/* The last compression of four inputs at a time, one in each lane of a vector.
 *
 * A part of blake2b.h, whose rounds these are: both give the same bytes.
 */

#ifndef ENTRESOL_BLAKE2B_FOUR_H
#define ENTRESOL_BLAKE2B_FOUR_H

#if defined(__GNUC__) && (defined(__x86_64__) || defined(__aarch64__))
#define BLAKE2B_FOUR 1

typedef uint64_t blake2b_lanes __attribute__((vector_size(32)));

#if defined(__x86_64__)
#include <immintrin.h>
#define BLAKE2B_FOUR_TARGET __attribute__((target("avx2")))
static int blake2b_has_four(void) { return __builtin_cpu_supports("avx2"); }

/* To the right by whole bytes: one instruction, where two shifts take three. */
BLAKE2B_FOUR_TARGET static inline blake2b_lanes four_right_bytes(blake2b_lanes value, int bytes)
{
    const __m256i in_order = _mm256_set1_epi64x(0x0706050403020100);
    const __m256i from = _mm256_add_epi8(in_order, _mm256_set1_epi8((char)bytes));
    const __m256i in_word = _mm256_and_si256(from, _mm256_set1_epi8(7));
    const __m256i word = _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0);
    return (blake2b_lanes)_mm256_shuffle_epi8((__m256i)value, _mm256_or_si256(in_word, word));
}
#define FOUR_RIGHT_BYTES(value, bits) four_right_bytes((value), (bits) / 8)
#else
#define BLAKE2B_FOUR_TARGET
static int blake2b_has_four(void) { return 1; }
#define FOUR_RIGHT_BYTES FOUR_RIGHT
#endif

#define FOUR_RIGHT(value, bits) ((value) >> (bits) | (value) << (64 - (bits)))
#define FOUR_MIX(a, b, c, d, x, y) \
    do { \
        v[a] += v[b] + m[x], v[d] = FOUR_RIGHT_BYTES(v[d] ^ v[a], 32); \
        v[c] += v[d], v[b] = FOUR_RIGHT_BYTES(v[b] ^ v[c], 24); \
        v[a] += v[b] + m[y], v[d] = FOUR_RIGHT_BYTES(v[d] ^ v[a], 16); \
        v[c] += v[d], v[b] = FOUR_RIGHT(v[b] ^ v[c], 63); \
    } while (0)

/* `blocks` are four of BLAKE2B_BLOCK_BYTES; `h` is the state after the key, the same for all. */
BLAKE2B_FOUR_TARGET
static void blake2b_compress_four(const uint64_t h[8], const uint8_t *blocks, uint64_t counted,
                                  uint64_t out[4][8])
{
    blake2b_lanes m[16], v[16];
    for (int i = 0; i < 16; i++) {
        const uint8_t *at = blocks + 8 * i;
        m[i] = (blake2b_lanes){blake2b_load(at), blake2b_load(at + BLAKE2B_BLOCK_BYTES),
                               blake2b_load(at + 2 * BLAKE2B_BLOCK_BYTES),
                               blake2b_load(at + 3 * BLAKE2B_BLOCK_BYTES)};
    }
    for (int i = 0; i < 8; i++) {
        v[i] = (blake2b_lanes){h[i], h[i], h[i], h[i]};
        v[i + 8] = (blake2b_lanes){blake2b_iv[i], blake2b_iv[i], blake2b_iv[i], blake2b_iv[i]};
    }
    v[12] ^= (blake2b_lanes){counted, counted, counted, counted};
    v[14] = ~v[14];
#pragma GCC unroll 12
    for (int number = 0; number < 12; number++) {
        const uint8_t *s = blake2b_sigma[number % 10];
        FOUR_MIX(0, 4, 8, 12, s[0], s[1]);
        FOUR_MIX(1, 5, 9, 13, s[2], s[3]);
        FOUR_MIX(2, 6, 10, 14, s[4], s[5]);
        FOUR_MIX(3, 7, 11, 15, s[6], s[7]);
        FOUR_MIX(0, 5, 10, 15, s[8], s[9]);
        FOUR_MIX(1, 6, 11, 12, s[10], s[11]);
        FOUR_MIX(2, 7, 8, 13, s[12], s[13]);
        FOUR_MIX(3, 4, 9, 14, s[14], s[15]);
    }
    for (int i = 0; i < 8; i++) {
        const blake2b_lanes mixed = v[i] ^ v[i + 8];
        for (int lane = 0; lane < 4; lane++)
            out[lane][i] = h[i] ^ mixed[lane];
    }
}

#undef FOUR_MIX
#undef FOUR_RIGHT_BYTES
#undef FOUR_RIGHT
#endif

#endif
