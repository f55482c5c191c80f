/* The ladder codec (proto/FORMAT.md, "Ladder"): exponents as ranks, ranks as short codes on four
 * levels, an escape from each level to the next. Part of kernel.c.
 *
 * The Python twin is seal/codecs/ladder.py; both must give the same bytes. Unlike the rest of the
 * kernel, decoding trusts nothing: every length that a chunk states is checked before it is used,
 * and a consumer of a stream can never run past scratch memory, because each stream is padded to
 * the most that could be asked of it.
 *
 * ladder_body.h holds the loops and is compiled once portable and once for AVX2 where the compiler
 * can; the choice is made when the library loads. Both give the same bytes.
 */

#include <stdlib.h>

enum {
    LADDER_FORMAT = 1,
    LADDER_HEAD = 8,          /* bytes before the first section */
    SECTION_LOG2_MIN = 12,
    SECTION_LOG2_MAX = 15,
    SECTION_MAX = 1 << SECTION_LOG2_MAX,
    PERIOD_MAX = 2048,
    LANES = 32,               /* values are coded in groups of so many; the rest is the tail */
    PAD = 64,                 /* bytes that a vector may read or write behind what it works on */
    LEVELS = 4,
    LITERAL = 15,             /* the rank of whatever no code stands for */
    BELOW = 9,                /* window positions below a predicted exponent; 6 above */
    PROBED = 16,              /* groups looked at to see whether a chunk pays */
    SAMPLED = 64,             /* one in so many groups is counted where speed is all */
    SPARED = 8,              /* codes of three bits may cost one in so many of the bits saved */
    CONTEXTS = 4,             /* tables of a section: by how far between two exponents one is predicted */
    FINALISTS = 3,            /* periods that are tried */
    RESET_COST = 96,          /* what a byte about a row must save, in 1/16 of an exponent */
};
enum { KIND_BF16 = 1, KIND_FP16 = 2, KIND_E4M3 = 3, KIND_E5M2 = 4 };
enum { LADDER_OK = 0, LADDER_BAD_HEAD = 1, LADDER_CUT = 2, LADDER_BAD_COUNT = 3 };

/* How an element of a kind is cut: `rest` raw bytes and `extra` raw bits beside the exponent. */
struct ladder_kind {
    uint8_t width, rest, extra;
};
static const struct ladder_kind LADDER_KINDS[5] = {
    {0, 0, 0}, {2, 1, 0}, {2, 1, 3}, {1, 0, 4}, {1, 0, 3},
};

/* For a mask of 8 bits: where in a vector of 8 bytes the set ones are (gather), and which byte of a
 * dense stream each set one takes (spread; 0x80, which shuffles in a zero, for the others). A row may
 * be read together with the next. */
static uint8_t ladder_gather[257][8], ladder_spread[257][8];

__attribute__((constructor)) static void ladder_tables(void)
{
    for (int mask = 0; mask < 256; mask++) {
        int set = 0;
        for (int i = 0; i < 8; i++) {
            ladder_gather[mask][i] = 0x80;
            ladder_spread[mask][i] = 0x80;
        }
        for (int i = 0; i < 8; i++)
            if (mask >> i & 1) {
                ladder_gather[mask][set] = (uint8_t)i;
                ladder_spread[mask][i] = (uint8_t)set++;
            }
    }
}

static inline uint64_t load64(const uint8_t *at)
{
    uint64_t x;
    memcpy(&x, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

static inline void store64(uint8_t *at, uint64_t x)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    memcpy(at, &x, 8);
}

static inline unsigned u16_at(const uint8_t *at)
{
    uint16_t x;
    memcpy(&x, at, 2);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap16(x);
#endif
    return x;
}

static inline void put16(uint8_t *at, unsigned value)
{
    uint16_t x = (uint16_t)value;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap16(x);
#endif
    memcpy(at, &x, 2);
}

/* Eight codes of one or two bits to and from eight bytes; the first value is lowest. */
static inline uint64_t unpack8(int bits, const uint8_t *at)
{
    uint64_t x = at[0];
    if (bits == 1) {
        x = (x | x << 28) & 0x0000000F0000000Full;
        x = (x | x << 14) & 0x0003000300030003ull;
        return (x | x << 7) & 0x0101010101010101ull;
    }
    x |= (uint64_t)at[1] << 8;
    x = (x | x << 24) & 0x000000FF000000FFull;
    x = (x | x << 12) & 0x000F000F000F000Full;
    return (x | x << 6) & 0x0303030303030303ull;
}

static inline void pack8(int bits, uint64_t x, uint8_t *at)
{
    if (bits == 1) {
        x = (x | x >> 7) & 0x0003000300030003ull;
        x = (x | x >> 14) & 0x0000000F0000000Full;
        at[0] = (uint8_t)(x | x >> 28);
        return;
    }
    x = (x | x >> 6) & 0x000F000F000F000Full;
    x = (x | x >> 12) & 0x000000FF000000FFull;
    x |= x >> 24;
    at[0] = (uint8_t)x;
    at[1] = (uint8_t)(x >> 8);
}

/* Which of eight codes, a byte each, are the escape: 1 in the byte of each that is. */
static inline uint64_t escapes8(int bits, uint64_t x)
{
    uint64_t hit = bits == 1 ? x : bits == 2 ? x & x >> 1 : x & x >> 1 & x >> 2;
    return hit & 0x0101010101010101ull;
}

/* The same, a bit each. */
static inline unsigned mask8(int bits, uint64_t x)
{
    return (unsigned)(escapes8(bits, x) * 0x0102040810204080ull >> 56);
}

static inline size_t packed_bytes(int bits, size_t count) { return (count + 7) / 8 * (size_t)bits; }

struct ladder_scratch {
    uint8_t sym[SECTION_MAX + PAD];             /* exponents */
    uint8_t extra[SECTION_MAX + PAD];           /* raw bits that are less than a byte */
    uint8_t rank[LEVELS + 1][SECTION_MAX + PAD]; /* what is left to say on each level */
    uint8_t literals[SECTION_MAX + PAD];
    uint8_t packed[LEVELS][SECTION_MAX / 8 * 3 + PAD];
    uint8_t names[16 * CONTEXTS];               /* places of ranks */
    uint8_t moved[PERIOD_MAX + PAD];
    uint8_t state[PERIOD_MAX + PAD];            /* predicted exponent per channel, in 1/16 */
    uint8_t flags[SECTION_MAX / LANES / 8 + PAD], resets[SECTION_MAX / LANES + PAD];
};

/* Where a channel model stands between sections. */
struct ladder_model {
    size_t period; /* 0: one base per section */
    uint8_t window;
    uint8_t *state;
    int begun;
};

#define LADDER(name) name##_portable
#include "ladder_body.h"
#undef LADDER

#if defined(__x86_64__) && defined(__GNUC__)
#define LADDER_AVX2 1
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,popcnt,bmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,popcnt,bmi")
#endif
#define LADDER(name) name##_avx2
#include "ladder_body.h"
#undef LADDER
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
/* A hypervisor may leave out any of them. */
static int ladder_wide(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") &&
           __builtin_cpu_supports("bmi");
}
#endif

/* True when low bytes repeat, which mantissas do not: padding, or values of fewer bits. Of 64 bytes
 * noise has about 57 different ones, and 8-bit KV more than 30. */
static int ladder_repeats(const uint8_t *plain, size_t plain_bytes, size_t width)
{
    enum { PICKED = 64, DIFFERENT_MIN = 40 };
    const size_t step = (plain_bytes / (PICKED * width) > 1 ? plain_bytes / (PICKED * width) : 1) * width;
    uint8_t seen[256] = {0};
    int different = 0;
    for (size_t i = 0; i < plain_bytes; i += step) {
        different += !seen[plain[i]];
        seen[plain[i]] = 1;
    }
    return different < (width > 1 ? DIFFERENT_MIN : DIFFERENT_MIN / 2);
}

/* Whether one of two chunks may be worth encoding. Costs as little as they can be looked at. `by_channel` also asks for other structure. */
EXPORT int32_t entresol_ladder_pays(const uint8_t *const plain[2], const size_t plain_bytes[2],
                                    int kind, int by_channel)
{
    if (kind < KIND_BF16 || kind > KIND_E5M2)
        return 1; /* not for this function to say */
    for (int i = 0; i < 2; i++) {
        const size_t width = LADDER_KINDS[kind].width, count = plain_bytes[i] / width / LANES * LANES;
        int pays = count != 0;
#if defined(LADDER_AVX2)
        if (pays && ladder_wide())
            pays = pays_avx2(plain[i], count, kind, by_channel, NULL);
        else
#endif
            pays = pays && pays_portable(plain[i], count, kind, by_channel, NULL);
        if (pays || (by_channel && ladder_repeats(plain[i], plain_bytes[i], width)))
            return 1;
    }
    return 0;
}

/* Encode `plain_bytes` of a kind. Returns how many bytes of `out` were written, or 0 when they would
 * be more than `out_bytes`, or are not worth a try. `by_channel` looks for channels and predicts each.
 * `portable` keeps to plain C.
 */
EXPORT size_t entresol_ladder_encode(const uint8_t *plain, size_t plain_bytes, int kind,
                                     int by_channel, uint8_t *out, size_t out_bytes, int portable)
{
    if (kind < KIND_BF16 || kind > KIND_E5M2)
        return 0;
#if defined(LADDER_AVX2)
    if (!portable && ladder_wide())
        return ladder_encode_avx2(plain, plain_bytes, kind, by_channel, out, out_bytes);
#endif
    (void)portable;
    return ladder_encode_portable(plain, plain_bytes, kind, by_channel, out, out_bytes);
}

/* Decode exactly `into_bytes`. Returns LADDER_OK, or why not; then `into` holds anything. */
EXPORT int32_t entresol_ladder_decode(const uint8_t *stored, size_t stored_bytes, int kind,
                                      uint8_t *into, size_t into_bytes, int portable)
{
    if (kind < KIND_BF16 || kind > KIND_E5M2)
        return LADDER_BAD_HEAD;
#if defined(LADDER_AVX2)
    if (!portable && ladder_wide())
        return ladder_decode_avx2(stored, stored_bytes, kind, into, into_bytes);
#endif
    (void)portable;
    return ladder_decode_portable(stored, stored_bytes, kind, into, into_bytes);
}
