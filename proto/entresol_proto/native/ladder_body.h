/* The loops of the ladder codec; see ladder.h, which includes this once per instruction set. */

/* Cutting elements, and putting them together -------------------------------------------------- */

static void LADDER(split)(int kind, const uint8_t *restrict plain, size_t count,
                          uint8_t *restrict sym, uint8_t *restrict rest, uint8_t *restrict extra)
{
    size_t i = 0;
#if defined(LADDER_AVX2)
    const __m256i low = _mm256_set1_epi16(0xFF), mantissa = _mm256_set1_epi16(0x7F);
    for (; kind == KIND_BF16 && i < count; i += 32) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(plain + 2 * i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(plain + 2 * i + 32));
        __m256i x = _mm256_packus_epi16(_mm256_and_si256(_mm256_srli_epi16(a, 7), low),
                                        _mm256_and_si256(_mm256_srli_epi16(b, 7), low));
        _mm256_storeu_si256((__m256i *)(sym + i), _mm256_permute4x64_epi64(x, 0xD8));
        __m256i signs = _mm256_packs_epi16(_mm256_srai_epi16(a, 15), _mm256_srai_epi16(b, 15));
        x = _mm256_packus_epi16(_mm256_and_si256(a, mantissa), _mm256_and_si256(b, mantissa));
        x = _mm256_or_si256(x, _mm256_and_si256(signs, _mm256_set1_epi8((char)0x80)));
        _mm256_storeu_si256((__m256i *)(rest + i), _mm256_permute4x64_epi64(x, 0xD8));
    }
#endif
    for (; kind == KIND_BF16 && i < count; i++) {
        unsigned x = u16_at(plain + 2 * i);
        sym[i] = (uint8_t)(x >> 7);
        rest[i] = (uint8_t)((x >> 8 & 0x80) | (x & 0x7F));
    }
    for (; kind == KIND_FP16 && i < count; i++) {
        unsigned x = u16_at(plain + 2 * i);
        sym[i] = (uint8_t)(x >> 10 & 31);
        rest[i] = (uint8_t)x;
        extra[i] = (uint8_t)((x >> 8 & 3) | (x >> 13 & 4));
    }
    for (; kind == KIND_E4M3 && i < count; i++) {
        uint8_t x = plain[i];
        sym[i] = x >> 3 & 15;
        extra[i] = (uint8_t)((x & 7) | (x >> 4 & 8));
    }
    for (; kind == KIND_E5M2 && i < count; i++) {
        uint8_t x = plain[i];
        sym[i] = x >> 2 & 31;
        extra[i] = (uint8_t)((x & 3) | (x >> 5 & 4));
    }
}

static void LADDER(join)(int kind, uint8_t *restrict into, size_t count, const uint8_t *restrict sym,
                         const uint8_t *restrict rest, const uint8_t *restrict extra)
{
    size_t i = 0;
#if defined(LADDER_AVX2)
    const __m256i top = _mm256_set1_epi8((char)0x80), under = _mm256_set1_epi8(0x7F);
    for (; kind == KIND_BF16 && i < count; i += 32) {
        __m256i x = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(sym + i)), 0xD8);
        __m256i y = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(rest + i)), 0xD8);
        __m256i low = _mm256_or_si256(_mm256_and_si256(y, under),
                                      _mm256_and_si256(_mm256_slli_epi16(x, 7), top));
        __m256i high = _mm256_or_si256(_mm256_and_si256(y, top),
                                       _mm256_and_si256(_mm256_srli_epi16(x, 1), under));
        _mm256_storeu_si256((__m256i *)(into + 2 * i), _mm256_unpacklo_epi8(low, high));
        _mm256_storeu_si256((__m256i *)(into + 2 * i + 32), _mm256_unpackhi_epi8(low, high));
    }
#endif
    for (; kind == KIND_BF16 && i < count; i++)
        put16(into + 2 * i, (unsigned)sym[i] << 7 | (rest[i] & 0x7Fu) | (rest[i] & 0x80u) << 8);
    for (; kind == KIND_FP16 && i < count; i++)
        put16(into + 2 * i, rest[i] | ((sym[i] & 31u) << 2 | (extra[i] & 3) | (extra[i] & 4u) << 5) << 8);
    for (; kind == KIND_E4M3 && i < count; i++)
        into[i] = (uint8_t)((sym[i] & 15) << 3 | (extra[i] & 7) | (extra[i] & 8) << 4);
    for (; kind == KIND_E5M2 && i < count; i++)
        into[i] = (uint8_t)((sym[i] & 31) << 2 | (extra[i] & 3) | (extra[i] & 4) << 5);
}

/* Codes and levels ----------------------------------------------------------------------------- */

#if defined(LADDER_AVX2)
static inline __m128i LADDER(half)(const uint8_t *low, const uint8_t *high)
{
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)low),
                              _mm_loadl_epi64((const __m128i *)high));
}

/* 32 codes of two bits as bytes. */
static inline __m256i LADDER(unpack32)(const uint8_t *at)
{
    const __m256i where = _mm256_setr_epi8(
        0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    const __m256i low = _mm256_setr_epi8(0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0,
                                         0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0);
    __m256i x = _mm256_set1_epi64x((long long)load64(at));
    x = _mm256_shuffle_epi8(x, where);
    x = _mm256_blend_epi16(x, _mm256_srli_epi16(x, 4), 0xAA); /* values 2, 3 of 4: high nibble */
    x = _mm256_and_si256(x, _mm256_set1_epi16(0x0C03));
    return _mm256_shuffle_epi8(low, x);
}

/* 32 bytes of at most 3 as codes of two bits. */
static inline uint64_t LADDER(pack32)(__m256i x)
{
    x = _mm256_maddubs_epi16(x, _mm256_set1_epi16(0x0401));
    x = _mm256_madd_epi16(x, _mm256_set1_epi32(0x00100001));
    x = _mm256_shuffle_epi8(x, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1,
                                                -1, -1, -1, -1));
    __m128i y = _mm_or_si128(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return (uint64_t)_mm_cvtsi128_si64(y);
}

/* From the table of its context for each value: the top bits of `low` and `high` are the context. */
static inline __m256i LADDER(of_context)(const uint8_t *tables, __m256i at, __m256i low, __m256i high)
{
    __m256i x[CONTEXTS];
    for (int i = 0; i < CONTEXTS; i++)
        x[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(
                                       (const __m128i *)(tables + 16 * i))), at);
    return _mm256_blendv_epi8(_mm256_blendv_epi8(x[0], x[1], low),
                              _mm256_blendv_epi8(x[2], x[3], low), high);
}

static inline size_t LADDER(ones)(uint32_t x) { return (size_t)__builtin_popcount(x); }

/* The row of a table for a mask of 8 bits; the upper half is of the next. */
static inline __m128i LADDER(row)(const uint8_t (*table)[8], uint32_t mask)
{
    return _mm_loadu_si128((const __m128i *)table[mask]);
}
#endif

static inline uint64_t LADDER(spread8)(uint64_t dense, unsigned mask)
{
#if defined(LADDER_AVX2)
    __m128i table = _mm_loadl_epi64((const __m128i *)ladder_spread[mask]);
    return (uint64_t)_mm_cvtsi128_si64(
        _mm_shuffle_epi8(_mm_cvtsi64_si128((long long)dense), table));
#elif defined(__aarch64__)
    return vget_lane_u64(vreinterpret_u64_u8(vtbl1_u8(vreinterpret_u8_u64(vcreate_u64(dense)),
                                                      vld1_u8(ladder_spread[mask]))), 0);
#else
    uint64_t out = 0;
    for (; mask != 0; mask &= mask - 1, dense >>= 8)
        out |= (dense & 0xFF) << 8 * __builtin_ctz(mask);
    return out;
#endif
}

static inline uint64_t LADDER(gather8)(uint64_t x, unsigned mask)
{
#if defined(LADDER_AVX2)
    __m128i table = _mm_loadl_epi64((const __m128i *)ladder_gather[mask]);
    return (uint64_t)_mm_cvtsi128_si64(_mm_shuffle_epi8(_mm_cvtsi64_si128((long long)x), table));
#elif defined(__aarch64__)
    return vget_lane_u64(vreinterpret_u64_u8(vtbl1_u8(vreinterpret_u8_u64(vcreate_u64(x)),
                                                      vld1_u8(ladder_gather[mask]))), 0);
#else
    uint64_t out = 0;
    for (int at = 0; mask != 0; mask &= mask - 1, at += 8)
        out |= (x >> 8 * __builtin_ctz(mask) & 0xFF) << at;
    return out;
#endif
}

/* Codes of three bits are stored as their two low bits, all of them, and then the high ones.
 *
 * Ranks of one level: codes plus `first`, and where a code is the escape, the next of `below`.
 * Returns how many of `below` were taken: at most `count` rounded up to 8. */
static size_t LADDER(climb)(int bits, const uint8_t *packed, size_t count, unsigned first,
                            const uint8_t *below, uint8_t *ranks)
{
    size_t taken = 0, i = 0;
#if defined(LADDER_AVX2)
    const __m256i add = _mm256_set1_epi8((char)first);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    const __m256i where = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    for (; i + 32 <= count; i += 32, packed += 4 * bits) {
        __m256i x, escaped;
        if (bits == 2) {
            x = LADDER(unpack32)(packed);
            escaped = _mm256_cmpeq_epi8(x, _mm256_set1_epi8(3));
            x = _mm256_add_epi8(x, add);
        } else {
            uint32_t word;
            memcpy(&word, packed, 4);
            x = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word), where);
            escaped = _mm256_cmpeq_epi8(_mm256_and_si256(x, bit), bit);
            x = add;
        }
        uint32_t mask = (uint32_t)_mm256_movemask_epi8(escaped);
        const uint8_t *from = below + taken;
        __m128i a = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)from),
                                     _mm_loadl_epi64((const __m128i *)ladder_spread[mask & 255]));
        __m128i b = _mm_shuffle_epi8(
            _mm_loadl_epi64((const __m128i *)(from + LADDER(ones)(mask & 0xFF))),
            _mm_loadl_epi64((const __m128i *)ladder_spread[mask >> 8 & 255]));
        __m128i c = _mm_shuffle_epi8(
            _mm_loadl_epi64((const __m128i *)(from + LADDER(ones)(mask & 0xFFFF))),
            _mm_loadl_epi64((const __m128i *)ladder_spread[mask >> 16 & 255]));
        __m128i d = _mm_shuffle_epi8(
            _mm_loadl_epi64((const __m128i *)(from + LADDER(ones)(mask & 0xFFFFFF))),
            _mm_loadl_epi64((const __m128i *)ladder_spread[mask >> 24]));
        __m256i more = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_unpacklo_epi64(a, b)), _mm_unpacklo_epi64(c, d), 1);
        x = _mm256_blendv_epi8(x, more, escaped);
        _mm256_storeu_si256((__m256i *)(ranks + i), x);
        taken += LADDER(ones)(mask);
    }
#endif
    const uint8_t *high = packed + (count + 7) / 8 * 2; /* of codes of three bits */
    for (; i < count; i += 8, packed += bits < 3 ? bits : 2) {
        uint64_t x = unpack8(bits < 3 ? bits : 2, packed);
        if (bits == 3)
            x |= unpack8(1, high++) << 2;
        unsigned mask = mask8(bits, x);
        uint64_t hit = escapes8(bits, x) * 0xFF;
        uint64_t more = LADDER(spread8)(load64(below + taken), mask);
        x = ((x + first * 0x0101010101010101ull) & ~hit) | (more & hit);
        store64(ranks + i, x);
        taken += (size_t)__builtin_popcount(mask);
    }
    return taken;
}

/* The inverse: codes of `count` values, and in `below` what is left of the escaped. Values behind
 * `count` up to a multiple of 8 must be 0. Returns how many escaped. */
static size_t LADDER(descend)(int bits, const uint8_t *values, size_t count, uint8_t *packed,
                              uint8_t *below)
{
    const uint8_t escape = (uint8_t)((1 << bits) - 1);
    size_t given = 0, i = 0;
#if defined(LADDER_AVX2)
    const __m256i top = _mm256_set1_epi8((char)escape);
    for (; i + 32 <= count; i += 32, packed += 4 * bits) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(values + i));
        __m256i code = _mm256_min_epu8(x, top);
        uint32_t mask = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, top));
        if (bits == 2)
            store64(packed, LADDER(pack32)(code));
        else
            memcpy(packed, &mask, 4);
        x = _mm256_sub_epi8(x, top);
        __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
        uint8_t *to = below + given;
        _mm_storel_epi64((__m128i *)to,
                         _mm_shuffle_epi8(low, _mm_loadl_epi64(
                             (const __m128i *)ladder_gather[mask & 255])));
        _mm_storel_epi64((__m128i *)(to + LADDER(ones)(mask & 0xFF)),
                         _mm_shuffle_epi8(_mm_srli_si128(low, 8), _mm_loadl_epi64(
                             (const __m128i *)ladder_gather[mask >> 8 & 255])));
        _mm_storel_epi64((__m128i *)(to + LADDER(ones)(mask & 0xFFFF)),
                         _mm_shuffle_epi8(high, _mm_loadl_epi64(
                             (const __m128i *)ladder_gather[mask >> 16 & 255])));
        _mm_storel_epi64((__m128i *)(to + LADDER(ones)(mask & 0xFFFFFF)),
                         _mm_shuffle_epi8(_mm_srli_si128(high, 8), _mm_loadl_epi64(
                             (const __m128i *)ladder_gather[mask >> 24])));
        given += LADDER(ones)(mask);
    }
#endif
    uint8_t *high = packed + (count + 7) / 8 * 2; /* of codes of three bits */
    for (; i < count; i += 8, packed += bits < 3 ? bits : 2) {
        uint8_t code[8], left[8];
        for (int j = 0; j < 8; j++) {
            uint8_t x = values[i + (size_t)j];
            code[j] = x < escape ? x : escape;
            left[j] = (uint8_t)(x - escape);
        }
        uint64_t codes = load64(code);
        unsigned mask = mask8(bits, codes);
        if (bits == 3)
            pack8(1, codes >> 2 & 0x0101010101010101ull, high++);
        pack8(bits < 3 ? bits : 2, codes & 0x0303030303030303ull, packed);
        store64(below + given, LADDER(gather8)(load64(left), mask));
        given += (size_t)__builtin_popcount(mask);
    }
    return given;
}

/* Raw bits beside the exponent: two of each value, then the others. */
static size_t LADDER(put_extra)(int bits, const uint8_t *extra, size_t count, uint8_t *out)
{
    uint8_t *at = out;
    for (int done = 0; done < bits; done += 2) {
        int now = bits - done < 2 ? 1 : 2;
        const uint64_t keep = now == 2 ? 0x0303030303030303ull : 0x0101010101010101ull;
        for (size_t i = 0; i < count; i += 8, at += now)
            pack8(now, load64(extra + i) >> done & keep, at);
    }
    return (size_t)(at - out);
}

static void LADDER(take_extra)(int bits, const uint8_t *stored, size_t count, uint8_t *extra)
{
    for (int done = 0; done < bits; done += 2) {
        int now = bits - done < 2 ? 1 : 2;
        for (size_t i = 0; i < count; i += 8, stored += now)
            store64(extra + i, (done ? load64(extra + i) : 0) | unpack8(now, stored) << done);
    }
}

/* Ranks of exponents --------------------------------------------------------------------------- */

#if !defined(LADDER_AVX2)
/* Exponents of ranks where one base serves the section. `table` has 16 entries of 0 to 15. */
static void LADDER(name_flat)(const uint8_t *ranks, size_t count, const uint8_t *table,
                              uint8_t base, const uint8_t *literals, uint8_t *sym)
{
    for (size_t i = 0; i < count; i += LANES) {
        uint32_t mask = 0;
        for (size_t j = 0; j < LANES; j++) {
            sym[i + j] = (uint8_t)(table[ranks[i + j]] + base);
            mask |= (uint32_t)(ranks[i + j] == LITERAL) << j;
        }
        for (; mask != 0; mask &= mask - 1)
            sym[i + (size_t)__builtin_ctz(mask)] = *literals++;
    }
}
#endif

/* Exponents of ranks where each channel of a row predicts its own; `state` is brought up to date. */
static const uint8_t *LADDER(name_row)(const uint8_t *ranks, size_t count, const uint8_t *tables,
                                       const struct ladder_model *model, const uint8_t *literals,
                                       uint8_t *sym)
{
    const uint8_t window = model->window, base = (uint8_t)(window - BELOW);
    uint8_t *state = model->state;
    for (size_t i = 0; i < count; i += LANES) {
        uint32_t mask = 0;
#if defined(LADDER_AVX2)
        __m256i rank = _mm256_loadu_si256((const __m256i *)(ranks + i));
        __m256i was = _mm256_loadu_si256((const __m256i *)(state + i));
        __m256i x = LADDER(of_context)(tables, rank, _mm256_slli_epi16(was, 5),
                                       _mm256_slli_epi16(was, 4));
        __m256i whole = _mm256_and_si256(_mm256_srli_epi16(was, 4), _mm256_set1_epi8(15));
        x = _mm256_add_epi8(_mm256_add_epi8(x, whole), _mm256_set1_epi8((char)base));
        _mm256_storeu_si256((__m256i *)(sym + i), x);
        mask = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(rank, _mm256_set1_epi8(LITERAL)));
        if (mask != 0) {
            for (; mask != 0; mask &= mask - 1)
                sym[i + (size_t)__builtin_ctz(mask)] = *literals++;
            x = _mm256_loadu_si256((const __m256i *)(sym + i));
        }
        x = _mm256_min_epu8(_mm256_subs_epu8(x, _mm256_set1_epi8((char)window)),
                            _mm256_set1_epi8(15));
        x = _mm256_or_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi8(8));
        x = _mm256_avg_epu8(was, _mm256_avg_epu8(was, _mm256_avg_epu8(was, x)));
        _mm256_storeu_si256((__m256i *)(state + i), x);
#else
        for (size_t j = i; j < i + LANES; j++) {
            uint8_t was = state[j];
            sym[j] = (uint8_t)(tables[(was & 12) * 4 + ranks[j]] + (was >> 4) + base);
            mask |= (uint32_t)(ranks[j] == LITERAL) << (j - i);
        }
        for (; mask != 0; mask &= mask - 1)
            sym[i + (size_t)__builtin_ctz(mask)] = *literals++;
        for (size_t j = i; j < i + LANES; j++) {
            unsigned was = state[j], x = sym[j] < window ? 0 : sym[j] - window;
            x = (x < 15 ? x : 15) << 4 | 8;
            for (int k = 0; k < 3; k++)
                x = (was + x + 1) >> 1;
            state[j] = (uint8_t)x;
        }
#endif
    }
    return literals;
}

/* Window positions of a row's exponents and their contexts, as `context * 16 + position`, 0x80 where
 * the window does not reach; `state` is brought up to date. */
static void LADDER(place_row)(const uint8_t *sym, const uint8_t *seen, size_t count,
                              const struct ladder_model *model, uint8_t *places)
{
    const uint8_t base = (uint8_t)(model->window - BELOW);
    uint8_t *state = model->state;
    for (size_t i = 0; i < count; i++) {
        unsigned was = state[i], x = seen[i];
        uint8_t at = (uint8_t)(sym[i] - base - (was >> 4));
        places[i] = (uint8_t)(at < 16 ? at | (was & 12) << 2 : 0x80);
        x = (was + x + 1) >> 1;
        x = (was + x + 1) >> 1;
        state[i] = (uint8_t)((was + x + 1) >> 1);
    }
}

/* What the model sees of a row, 16 times the exponent within the window and 8: and the sums that
 * decide about a reset. Returns the sum of all; `*away` becomes their distance from the state. */
static uint32_t LADDER(see_row)(const uint8_t *sym, size_t count, const struct ladder_model *model,
                                uint8_t *seen, uint32_t *away)
{
    const unsigned window = model->window;
    const uint8_t *state = model->state;
    uint32_t sum = 0, far = 0;
#if defined(LADDER_AVX2)
    __m256i sums = _mm256_setzero_si256(), fars = sums;
    for (size_t i = 0; i < count; i += LANES) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(sym + i));
        x = _mm256_min_epu8(_mm256_subs_epu8(x, _mm256_set1_epi8((char)window)),
                            _mm256_set1_epi8(15));
        x = _mm256_or_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi8(8));
        _mm256_storeu_si256((__m256i *)(seen + i), x);
        __m256i was = _mm256_loadu_si256((const __m256i *)(state + i));
        sums = _mm256_add_epi64(sums, _mm256_sad_epu8(x, _mm256_setzero_si256()));
        fars = _mm256_add_epi64(fars, _mm256_sad_epu8(x, was));
    }
    uint64_t a[4], b[4];
    _mm256_storeu_si256((__m256i *)a, sums);
    _mm256_storeu_si256((__m256i *)b, fars);
    sum = (uint32_t)(a[0] + a[1] + a[2] + a[3]);
    far = (uint32_t)(b[0] + b[1] + b[2] + b[3]);
#else
    for (size_t i = 0; i < count; i++) {
        unsigned x = sym[i] < window ? 0 : sym[i] - window;
        x = (x < 15 ? x : 15) << 4 | 8;
        seen[i] = (uint8_t)x;
        sum += x;
        far += x < state[i] ? state[i] - x : x - state[i];
    }
#endif
    *away = far;
    return sum;
}

static uint32_t LADDER(distance)(const uint8_t *a, const uint8_t *b, size_t step, size_t count)
{
    uint32_t far = 0; /* step 0: from one value */
#if defined(LADDER_AVX2)
    __m256i fars = _mm256_setzero_si256(), one = _mm256_set1_epi8((char)*b);
    for (size_t i = 0; i < count; i += LANES) {
        __m256i y = step ? _mm256_loadu_si256((const __m256i *)(b + i)) : one;
        fars = _mm256_add_epi64(
            fars, _mm256_sad_epu8(_mm256_loadu_si256((const __m256i *)(a + i)), y));
    }
    uint64_t sums[4];
    _mm256_storeu_si256((__m256i *)sums, fars);
    far = (uint32_t)(sums[0] + sums[1] + sums[2] + sums[3]);
#else
    for (size_t i = 0; i < count; i++) {
        uint8_t x = a[i], y = b[step * i];
        far += (uint32_t)(x < y ? y - x : x - y);
    }
#endif
    return far;
}

/* Apply what is stored of a row to its channels: below 128 all become twice that, from there on each
 * moves by as much as it is above 192, and stays within a byte. */
static void LADDER(move_state)(uint8_t *state, size_t period, uint8_t how)
{
    if (how < 128) {
        memset(state, how * 2, period);
        return;
    }
    const int by = how - 192;
    for (size_t i = 0; i < period; i++) {
        int x = state[i] + by;
        state[i] = (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x);
    }
}

#include "ladder_rank.h"
#if defined(LADDER_AVX2)
#include "ladder_flat.h"
#endif
#include "ladder_chunk.h"
