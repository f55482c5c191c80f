/* BLAKE2b of many short inputs under one key (RFC 7693), for the names of thousands of blocks.
 *
 * One compression for the key, one for each input. Plain C; nothing here depends on what is hashed
 * but its length.
 */

#ifndef ENTRESOL_BLAKE2B_H
#define ENTRESOL_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLAKE2B_BLOCK_BYTES = 128, BLAKE2B_PERSON_BYTES = 16 };

static const uint64_t blake2b_iv[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};

static const uint8_t blake2b_sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t blake2b_load(const uint8_t *at)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | at[i];
    return value;
}

static inline uint64_t blake2b_right(uint64_t value, int bits)
{
    return value >> bits | value << (64 - bits);
}

static inline void blake2b_mix(uint64_t *a, uint64_t *b, uint64_t *c, uint64_t *d, uint64_t x,
                               uint64_t y)
{
    *a += *b + x;
    *d = blake2b_right(*d ^ *a, 32);
    *c += *d;
    *b = blake2b_right(*b ^ *c, 24);
    *a += *b + y;
    *d = blake2b_right(*d ^ *a, 16);
    *c += *d;
    *b = blake2b_right(*b ^ *c, 63);
}

static inline __attribute__((always_inline)) void blake2b_round(uint64_t v[16],
                                                                const uint64_t m[16], int number)
{
    const uint8_t *s = blake2b_sigma[number];
    blake2b_mix(v + 0, v + 4, v + 8, v + 12, m[s[0]], m[s[1]]);
    blake2b_mix(v + 1, v + 5, v + 9, v + 13, m[s[2]], m[s[3]]);
    blake2b_mix(v + 2, v + 6, v + 10, v + 14, m[s[4]], m[s[5]]);
    blake2b_mix(v + 3, v + 7, v + 11, v + 15, m[s[6]], m[s[7]]);
    blake2b_mix(v + 0, v + 5, v + 10, v + 15, m[s[8]], m[s[9]]);
    blake2b_mix(v + 1, v + 6, v + 11, v + 12, m[s[10]], m[s[11]]);
    blake2b_mix(v + 2, v + 7, v + 8, v + 13, m[s[12]], m[s[13]]);
    blake2b_mix(v + 3, v + 4, v + 9, v + 14, m[s[14]], m[s[15]]);
}

/* `counted` bytes went in so far, those of this block included. */
static void blake2b_compress(uint64_t h[8], const uint8_t block[BLAKE2B_BLOCK_BYTES],
                             uint64_t counted, int last)
{
    uint64_t m[16], v[16];
    for (int i = 0; i < 16; i++)
        m[i] = blake2b_load(block + 8 * i);
    for (int i = 0; i < 8; i++) {
        v[i] = h[i];
        v[i + 8] = blake2b_iv[i];
    }
    v[12] ^= counted;
    if (last)
        v[14] = ~v[14];
    /* Written out, so that the compiler knows which words go where. */
    blake2b_round(v, m, 0), blake2b_round(v, m, 1), blake2b_round(v, m, 2);
    blake2b_round(v, m, 3), blake2b_round(v, m, 4), blake2b_round(v, m, 5);
    blake2b_round(v, m, 6), blake2b_round(v, m, 7), blake2b_round(v, m, 8);
    blake2b_round(v, m, 9), blake2b_round(v, m, 0), blake2b_round(v, m, 1);
    for (int i = 0; i < 8; i++)
        h[i] ^= v[i] ^ v[i + 8];
}

#include "blake2b_four.h"

static inline void blake2b_store(uint8_t *out, const uint64_t h[8], size_t digest_bytes)
{
    for (size_t i = 0; i < digest_bytes; i++)
        out[i] = (uint8_t)(h[i / 8] >> 8 * (i % 8));
}

/* The state after the key, which has 1 to 64 bytes. */
static void blake2b_begin(uint64_t h[8], const uint8_t *key, size_t key_bytes,
                          const uint8_t person[BLAKE2B_PERSON_BYTES], size_t digest_bytes)
{
    memcpy(h, blake2b_iv, 8 * sizeof h[0]);
    h[0] ^= 0x01010000u ^ (uint64_t)key_bytes << 8 ^ digest_bytes;
    h[6] ^= blake2b_load(person);
    h[7] ^= blake2b_load(person + 8);
    uint8_t block[BLAKE2B_BLOCK_BYTES] = {0};
    memcpy(block, key, key_bytes);
    blake2b_compress(h, block, BLAKE2B_BLOCK_BYTES, 0);
}

/* `count` inputs of `length` bytes each, at most a block, end to end; digests end to end in `out`.
 * The key has 1 to 64 bytes.
 */
static void blake2b_many(const uint8_t *key, size_t key_bytes,
                         const uint8_t person[BLAKE2B_PERSON_BYTES], size_t digest_bytes,
                         size_t count, const uint8_t *inputs, size_t length, uint8_t *out)
{
    uint64_t keyed[8];
    blake2b_begin(keyed, key, key_bytes, person, digest_bytes);
    uint8_t block[BLAKE2B_BLOCK_BYTES] = {0};
    const uint64_t counted = BLAKE2B_BLOCK_BYTES + length;
    size_t n = 0;
#ifdef BLAKE2B_FOUR
    uint8_t blocks[4 * BLAKE2B_BLOCK_BYTES] = {0};
    for (const int has_four = blake2b_has_four(); has_four && n + 4 <= count; n += 4) {
        uint64_t found[4][8];
        for (size_t lane = 0; lane < 4; lane++)
            memcpy(blocks + lane * BLAKE2B_BLOCK_BYTES, inputs + (n + lane) * length, length);
        blake2b_compress_four(keyed, blocks, counted, found);
        for (size_t lane = 0; lane < 4; lane++)
            blake2b_store(out + (n + lane) * digest_bytes, found[lane], digest_bytes);
    }
#endif
    for (; n < count; n++) {
        uint64_t h[8];
        memcpy(h, keyed, sizeof h);
        memcpy(block, inputs + n * length, length);
        blake2b_compress(h, block, counted, 1);
        blake2b_store(out + n * digest_bytes, h, digest_bytes);
    }
}

#endif
