/* Sections without a period in one pass, for AVX2; see ladder.h. Included by ladder_body.h.
 *
 * What the loops of ladder_chunk.h do one after the other over a section (cut elements, rank
 * exponents, code level 1, gather what escapes) is done here for 32 values at a time, in registers.
 * Levels hold exponents instead of ranks: each has a table of its own from place to code, so what
 * escapes from the last level is the list of literals as it stands, and in decoding a table of names
 * gives exponents at once. The bytes are the same.
 */

#define FLAT static inline __attribute__((always_inline))

/* Streams of a section that hold what is not the exponent, to write and to read: raw bytes, the two
 * lowest raw bits, the other raw bits. Each moves on by 32 values. */
struct LADDER(rests) {
    uint8_t *rest, *pairs, *others;
};
struct LADDER(parts) {
    const uint8_t *rest, *pairs, *others;
};

/* Exponents by spread code; `high` of codes whose third bit is set. */
struct LADDER(names) {
    __m256i low, high;
};

/* A level: its codes are of ranks `first` and following. */
struct LADDER(level) {
    int bits;
    uint8_t base;
    __m256i table; /* by place: the escape less the code */
};

/* 16 bytes from each of two places, as the halves of one vector. */
FLAT __m256i LADDER(halves)(const uint8_t *low, const uint8_t *high)
{
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)low)),
        _mm_loadu_si128((const __m128i *)high), 1);
}

/* 32 bits as 32 bytes of 0 or 255. */
FLAT __m256i LADDER(spread_bits)(const uint8_t *at)
{
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    const __m256i where = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    uint32_t word;
    memcpy(&word, at, 4);
    __m256i x = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word), where);
    return _mm256_cmpeq_epi8(_mm256_and_si256(x, bit), bit);
}

/* 32 codes of two bits, each at 0 or at bit 2 of its byte: what `by_code` makes a table for. */
FLAT __m256i LADDER(spread_pairs)(const uint8_t *at)
{
    const __m256i where = _mm256_setr_epi8(
        0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    __m256i x = _mm256_shuffle_epi8(_mm256_set1_epi64x((long long)load64(at)), where);
    x = _mm256_blend_epi16(x, _mm256_srli_epi16(x, 4), 0xAA);
    return _mm256_and_si256(x, _mm256_set1_epi16(0x0C03));
}

FLAT __m256i LADDER(by_code)(uint8_t zero, uint8_t one, uint8_t two, uint8_t three)
{
    return _mm256_broadcastsi128_si256(
        _mm_setr_epi8((char)zero, (char)one, (char)two, (char)three, (char)one, 0, 0, 0, (char)two, 0,
                      0, 0, (char)three, 0, 0, 0)); /* not an array, which Clang would fill anew */
}

/* Encoding ------------------------------------------------------------------------------------- */

/* Exponents of 32 elements; what else they hold goes to its streams. */
FLAT __m256i LADDER(cut32)(const int kind, const uint8_t *plain, struct LADDER(rests) *to)
{
    const __m256i three = _mm256_set1_epi8(3);
    if (kind == KIND_BF16 || kind == KIND_FP16) {
        const __m256i apart = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                                               0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        __m256i a = _mm256_shuffle_epi8(LADDER(halves)(plain, plain + 32), apart);
        __m256i b = _mm256_shuffle_epi8(LADDER(halves)(plain + 16, plain + 48), apart);
        __m256i low = _mm256_unpacklo_epi64(a, b), high = _mm256_unpackhi_epi64(a, b);
        __m256i rest = low;
        if (kind == KIND_BF16) {
            const __m256i under = _mm256_set1_epi8(0x7F);
            rest = _mm256_or_si256(_mm256_and_si256(low, under), _mm256_andnot_si256(under, high));
        }
        _mm256_storeu_si256((__m256i *)to->rest, rest);
        to->rest += 32;
        if (kind == KIND_BF16) /* a low byte that is negative has the lowest bit of the exponent */
            return _mm256_sub_epi8(_mm256_add_epi8(high, high),
                                   _mm256_cmpgt_epi8(_mm256_setzero_si256(), low));
        uint32_t signs = (uint32_t)_mm256_movemask_epi8(high);
        store64(to->pairs, LADDER(pack32)(_mm256_and_si256(high, three)));
        memcpy(to->others, &signs, 4);
        to->pairs += 8, to->others += 4;
        return _mm256_and_si256(_mm256_srli_epi16(high, 2), _mm256_set1_epi8(31));
    }
    __m256i x = _mm256_loadu_si256((const __m256i *)plain);
    store64(to->pairs, LADDER(pack32)(_mm256_and_si256(x, three)));
    to->pairs += 8;
    if (kind == KIND_E5M2) {
        uint32_t signs = (uint32_t)_mm256_movemask_epi8(x);
        memcpy(to->others, &signs, 4);
        to->others += 4;
        return _mm256_and_si256(_mm256_srli_epi16(x, 2), _mm256_set1_epi8(31));
    }
    __m256i more = _mm256_or_si256(
        _mm256_and_si256(_mm256_srli_epi16(x, 2), _mm256_set1_epi8(1)),
        _mm256_and_si256(_mm256_srli_epi16(x, 6), _mm256_set1_epi8(2)));
    store64(to->others, LADDER(pack32)(more));
    to->others += 8;
    return _mm256_and_si256(_mm256_srli_epi16(x, 3), _mm256_set1_epi8(15));
}

/* Which of 32 exponents escape, a bit each; their codes, of which `escape - code` is in `*codes`. */
FLAT uint32_t LADDER(find32)(const struct LADDER(level) *level, __m256i sym, __m256i *codes)
{
    __m256i place = _mm256_sub_epi8(sym, _mm256_set1_epi8((char)level->base));
    /* beyond the window bit 7 is set, and the shuffle gives 0 */
    place = _mm256_adds_epu8(place, _mm256_set1_epi8(0x70));
    *codes = _mm256_shuffle_epi8(level->table, place);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(*codes, _mm256_setzero_si256()));
}

/* Codes of 32 exponents, 4 * bits bytes; those that escape to `below`, of which up to 32 bytes are
 * overwritten. Returns where the next ones go. */
FLAT uint8_t *LADDER(code32)(const int bits, const struct LADDER(level) *level, __m256i sym,
                             uint8_t *packed, uint8_t *below)
{
    __m256i x;
    const uint32_t mask = LADDER(find32)(level, sym, &x);
    if (bits == 2)
        store64(packed, ~LADDER(pack32)(x));
    else
        memcpy(packed, &mask, 4);
    const uint32_t a = mask & 0xFF, b = mask >> 8 & 0xFF, c = mask >> 16 & 0xFF, d = mask >> 24;
    __m128i low = _mm256_castsi256_si128(sym), high = _mm256_extracti128_si256(sym, 1);
    _mm_storel_epi64((__m128i *)below, _mm_shuffle_epi8(low, LADDER(row)(ladder_gather, a)));
    below += LADDER(ones)(a);
    _mm_storel_epi64((__m128i *)below, _mm_shuffle_epi8(_mm_srli_si128(low, 8),
                                                        LADDER(row)(ladder_gather, b)));
    below += LADDER(ones)(b);
    _mm_storel_epi64((__m128i *)below, _mm_shuffle_epi8(high, LADDER(row)(ladder_gather, c)));
    below += LADDER(ones)(c);
    _mm_storel_epi64((__m128i *)below, _mm_shuffle_epi8(_mm_srli_si128(high, 8),
                                                        LADDER(row)(ladder_gather, d)));
    return below + LADDER(ones)(d);
}

/* The same with three bits: two of each into `packed`, the third into `high`, exponents to `of`.
 * Returns which escape. */
FLAT uint64_t LADDER(code32_wide)(const struct LADDER(level) *level, __m256i sym, uint8_t *packed,
                                  uint8_t *high, uint8_t *of)
{
    __m256i x;
    const uint32_t mask = LADDER(find32)(level, sym, &x);
    const uint32_t thirds = ~(uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(x, 5));
    store64(packed, ~LADDER(pack32)(_mm256_and_si256(x, _mm256_set1_epi8(3))));
    memcpy(high, &thirds, 4);
    _mm256_storeu_si256((__m256i *)of, sym);
    return mask;
}

/* Copy what a mask says of 64 bytes, of which few are set: the first FEW are written whether they are
 * there or not (then it is the byte behind), which costs less than to ask. */
FLAT uint8_t *LADDER(pick64)(const uint8_t of[2 * LANES + 1], uint64_t mask, uint8_t *below)
{
    enum { FEW = 6 };
    uint8_t *next = below + __builtin_popcountll(mask);
    for (int i = 0; i < FEW; i++, mask = _blsr_u64(mask)) {
        below[i] = of[_tzcnt_u64(mask)];
        __asm__("" : "+m"(below[i])); /* or GCC collects the bytes into words, at more cost */
    }
    for (below += FEW; mask != 0; mask = _blsr_u64(mask))
        *below++ = of[_tzcnt_u64(mask)];
    return next;
}

/* Level 1 of a section. Returns how many exponents escaped into `below`. A function for each kind and
 * width, so that a loop has the registers to itself. */
#define CODE(kind, bits)                                                                             \
    static __attribute__((noinline)) size_t LADDER(code_##kind##_##bits)(                            \
        const uint8_t *plain, size_t count, const struct LADDER(level) *how,                         \
        const struct LADDER(rests) *streams, uint8_t *packed, uint8_t *below)                        \
    {                                                                                                \
        const struct LADDER(level) level = *how;                                                     \
        struct LADDER(rests) to = *streams;                                                          \
        const uint8_t *end = plain + count * LADDER_KINDS[kind].width;                               \
        uint8_t *next = below;                                                                       \
        for (; plain != end; plain += LANES * LADDER_KINDS[kind].width, packed += 4 * bits)          \
            next = LADDER(code32)(bits, &level, LADDER(cut32)(kind, plain, &to), packed, next);      \
        return (size_t)(next - below);                                                               \
    }
CODE(KIND_BF16, 1) CODE(KIND_BF16, 2) CODE(KIND_FP16, 1) CODE(KIND_FP16, 2)
CODE(KIND_E4M3, 1) CODE(KIND_E4M3, 2) CODE(KIND_E5M2, 1) CODE(KIND_E5M2, 2)
#undef CODE

#define CODE_WIDE(kind)                                                                              \
    static __attribute__((noinline)) size_t LADDER(code_##kind##_3)(                                 \
        const uint8_t *plain, size_t count, const struct LADDER(level) *how,                         \
        const struct LADDER(rests) *streams, uint8_t *packed, uint8_t *below)                        \
    {                                                                                                \
        const struct LADDER(level) level = *how;                                                     \
        struct LADDER(rests) to = *streams;                                                          \
        const size_t bytes = LANES * LADDER_KINDS[kind].width;                                       \
        uint8_t of[2 * LANES + 1] = {0}, *next = below, *high = packed + count / 4;                  \
        for (; count >= 2 * LANES; count -= 2 * LANES, plain += 2 * bytes, packed += 16, high += 8) { \
            uint64_t mask = LADDER(code32_wide)(&level, LADDER(cut32)(kind, plain, &to), packed,     \
                                                high, of);                                           \
            mask |= LADDER(code32_wide)(&level, LADDER(cut32)(kind, plain + bytes, &to), packed + 8, \
                                        high + 4, of + LANES) << 32;                                 \
            next = LADDER(pick64)(of, mask, next);                                                   \
        }                                                                                            \
        if (count != 0)                                                                              \
            next = LADDER(pick64)(of, LADDER(code32_wide)(                                           \
                &level, LADDER(cut32)(kind, plain, &to), packed, high, of), next);                   \
        return (size_t)(next - below);                                                               \
    }
CODE_WIDE(KIND_BF16) CODE_WIDE(KIND_FP16) CODE_WIDE(KIND_E4M3) CODE_WIDE(KIND_E5M2)
#undef CODE_WIDE

/* One of the levels below: of `count` exponents, those that escape stay, at the front. */
static __attribute__((noinline)) size_t LADDER(code_level)(struct LADDER(level) level, uint8_t usual, uint8_t *values,
                                 size_t count, uint8_t *packed)
{
    uint8_t *next = values;
    size_t i = 0;
    memset(values + count, usual, LANES); /* its code is 0 */
    if (level.bits == 2)
        for (; i + LANES <= count; i += LANES, packed += 8)
            next = LADDER(code32)(2, &level, _mm256_loadu_si256((const __m256i *)(values + i)),
                                  packed, next);
    else
        for (; i + LANES <= count; i += LANES, packed += 4)
            next = LADDER(code32)(1, &level, _mm256_loadu_si256((const __m256i *)(values + i)),
                                  packed, next);
    if (i < count) {
        uint8_t last[8];
        __m256i sym = _mm256_loadu_si256((const __m256i *)(values + i));
        next = level.bits == 2 ? LADDER(code32)(2, &level, sym, last, next)
                               : LADDER(code32)(1, &level, sym, last, next);
        memcpy(packed, last, packed_bytes(level.bits, count - i));
    }
    return (size_t)(next - values);
}

/* Codes of levels from `at` on; `left` becomes how many values reach each. Returns the end, or NULL
 * when `room` bytes do not hold them. `values` has room for `count` values and PAD. */
static uint8_t *LADDER(put_flat)(const uint8_t *plain, size_t count, int kind, uint8_t base,
                                 const struct LADDER(ranking) *ranking, struct LADDER(rests) to,
                                 uint8_t *values, uint8_t *at, size_t room, size_t left[LEVELS + 1])
{
    int first = 0;
    for (int level = 0; level < LEVELS; level++) {
        const int bits = ranking->bits[level], escape = (1 << bits) - 1;
        const size_t bytes = packed_bytes(bits, left[level]);
        uint8_t table[16] = {0};
        for (int code = 0; code < escape; code++)
            table[ranking->place_of[first + code]] = (uint8_t)(escape - code);
        const struct LADDER(level) how = {
            bits, base, _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table))};
        if (bytes > room)
            return NULL;
        if (level != 0)
            left[level + 1] = LADDER(code_level)(
                how, (uint8_t)(base + ranking->place_of[first]), values, left[level], at);
#define OF(k, b) kind == k && bits == b ? LADDER(code_##k##_##b)(plain, count, &how, &to, at, values)
        else
            left[1] = OF(KIND_BF16, 2) : OF(KIND_BF16, 1) : OF(KIND_FP16, 2) : OF(KIND_FP16, 1)
                : OF(KIND_E4M3, 2) : OF(KIND_E4M3, 1) : OF(KIND_E5M2, 2) : OF(KIND_E5M2, 1)
                : OF(KIND_BF16, 3) : OF(KIND_FP16, 3) : OF(KIND_E4M3, 3) : OF(KIND_E5M2, 3) : 0;
#undef OF
        first += escape;
        at += bytes;
        room -= bytes;
    }
    if (left[LEVELS] > room)
        return NULL;
    memcpy(at, values, left[LEVELS]);
    return at + left[LEVELS];
}

/* Decoding ------------------------------------------------------------------------------------- */

/* Put the next of `*below` where a bit of `mask` is set, and `x` is 0. */
FLAT __m256i LADDER(fill32)(__m256i x, uint32_t mask, const uint8_t **below)
{
    const uint32_t a = mask & 0xFF, b = mask >> 8 & 0xFF, c = mask >> 16 & 0xFF, d = mask >> 24;
    const uint8_t *from = *below;
    __m128i p = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)from), LADDER(row)(ladder_spread, a));
    from += LADDER(ones)(a);
    __m128i q = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)from), LADDER(row)(ladder_spread, b));
    from += LADDER(ones)(b);
    __m128i r = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)from), LADDER(row)(ladder_spread, c));
    from += LADDER(ones)(c);
    __m128i s = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)from), LADDER(row)(ladder_spread, d));
    *below = from + LADDER(ones)(d);
    __m256i more = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi64(p, q)),
                                           _mm_unpacklo_epi64(r, s), 1);
    return _mm256_or_si256(x, more);
}

/* Exponents of 32 codes; those that escaped are the next of `*below`. */
FLAT __m256i LADDER(name32)(const int bits, __m256i names, const uint8_t *packed,
                            const uint8_t **below)
{
    __m256i x;
    uint32_t mask;
    if (bits == 2) {
        const __m256i escapes = LADDER(by_code)(0, 0, 0, 0xFF);
        __m256i codes = LADDER(spread_pairs)(packed);
        x = _mm256_shuffle_epi8(names, codes);
        mask = (uint32_t)_mm256_movemask_epi8(_mm256_shuffle_epi8(escapes, codes));
    } else {
        memcpy(&mask, packed, 4);
        x = _mm256_andnot_si256(LADDER(spread_bits)(packed), names);
    }
    return LADDER(fill32)(x, mask, below);
}

/* 32 elements of their exponents and what else there is of them. */
FLAT void LADDER(join32)(const int kind, __m256i sym, struct LADDER(parts) *from, uint8_t *into)
{
    const __m256i top = _mm256_set1_epi8((char)0x80);
    __m256i low, high;
    if (kind == KIND_BF16) {
        const __m256i under = _mm256_set1_epi8(0x7F);
        __m256i rest = _mm256_loadu_si256((const __m256i *)from->rest);
        from->rest += 32;
        low = _mm256_or_si256(_mm256_and_si256(rest, under),
                              _mm256_and_si256(_mm256_slli_epi16(sym, 7), top));
        high = _mm256_or_si256(_mm256_and_si256(rest, top),
                               _mm256_and_si256(_mm256_srli_epi16(sym, 1), under));
    } else {
        high = _mm256_shuffle_epi8(LADDER(by_code)(0, 1, 2, 3), LADDER(spread_pairs)(from->pairs));
        from->pairs += 8;
        if (kind == KIND_E4M3) {
            high = _mm256_or_si256(high, _mm256_shuffle_epi8(
                LADDER(by_code)(0, 4, 0x80, 0x84), LADDER(spread_pairs)(from->others)));
            high = _mm256_or_si256(
                high, _mm256_and_si256(_mm256_slli_epi16(sym, 3), _mm256_set1_epi8(0x78)));
            from->others += 8;
        } else {
            high = _mm256_or_si256(
                high, _mm256_and_si256(_mm256_slli_epi16(sym, 2), _mm256_set1_epi8(0x7C)));
            high = _mm256_or_si256(high,
                                   _mm256_and_si256(LADDER(spread_bits)(from->others), top));
            from->others += 4;
        }
        if (kind != KIND_FP16) {
            _mm256_storeu_si256((__m256i *)into, high);
            return;
        }
        low = _mm256_loadu_si256((const __m256i *)from->rest);
        from->rest += 32;
    }
    __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    _mm_storeu_si128((__m128i *)into, _mm256_castsi256_si128(a));
    _mm_storeu_si128((__m128i *)(into + 16), _mm256_castsi256_si128(b));
    _mm_storeu_si128((__m128i *)(into + 32), _mm256_extracti128_si256(a, 1));
    _mm_storeu_si128((__m128i *)(into + 48), _mm256_extracti128_si256(b, 1));
}

/* Exponents of 32 codes of three bits; those that escaped are the next of `*below`. */
FLAT __m256i LADDER(name32_wide)(__m256i low, __m256i high, const uint8_t *packed,
                                 const uint8_t *thirds, const uint8_t **below)
{
    const __m256i escapes = LADDER(by_code)(0, 0, 0, 0xFF);
    __m256i codes = LADDER(spread_pairs)(packed), third = LADDER(spread_bits)(thirds);
    __m256i x = _mm256_blendv_epi8(_mm256_shuffle_epi8(low, codes),
                                   _mm256_shuffle_epi8(high, codes), third);
    uint32_t mask = (uint32_t)_mm256_movemask_epi8(
        _mm256_and_si256(_mm256_shuffle_epi8(escapes, codes), third));
    return LADDER(fill32)(x, mask, below);
}

/* Level 1, and the elements. Returns how many exponents of `below` were taken. */
#define JOIN(kind, bits)                                                                             \
    static __attribute__((noinline)) size_t LADDER(join_##kind##_##bits)(                            \
        const struct LADDER(names) *names, const uint8_t *packed, size_t count,                      \
        const uint8_t *below, const struct LADDER(parts) *parts, uint8_t *into)                      \
    {                                                                                                \
        struct LADDER(parts) from = *parts;                                                          \
        const struct LADDER(names) of = *names;                                                      \
        const uint8_t *next = below, *high = packed + count / 4;                                     \
        const uint8_t *end = into + count * LADDER_KINDS[kind].width;                                \
        for (; into != end; into += LANES * LADDER_KINDS[kind].width) {                              \
            __m256i sym;                                                                             \
            if (bits == 3) {                                                                         \
                sym = LADDER(name32_wide)(of.low, of.high, packed, high, &next);                     \
                packed += 8, high += 4;                                                              \
            } else {                                                                                 \
                sym = LADDER(name32)(bits, of.low, packed, &next);                                   \
                packed += 4 * bits;                                                                  \
            }                                                                                        \
            LADDER(join32)(kind, sym, &from, into);                                                  \
        }                                                                                            \
        return (size_t)(next - below);                                                               \
    }
JOIN(KIND_BF16, 1) JOIN(KIND_BF16, 2) JOIN(KIND_FP16, 1) JOIN(KIND_FP16, 2)
JOIN(KIND_E4M3, 1) JOIN(KIND_E4M3, 2) JOIN(KIND_E5M2, 1) JOIN(KIND_E5M2, 2)
JOIN(KIND_BF16, 3) JOIN(KIND_FP16, 3) JOIN(KIND_E4M3, 3) JOIN(KIND_E5M2, 3)
#undef JOIN

/* One of the levels below level 1: exponents of its `count` codes into `values`. */
static __attribute__((noinline)) size_t LADDER(name_level)(int bits, __m256i names, const uint8_t *packed, size_t count,
                                 const uint8_t *below, uint8_t *values)
{
    const uint8_t *next = below;
    size_t i = 0;
    if (bits == 2)
        for (; i + LANES <= count; i += LANES, packed += 8)
            _mm256_storeu_si256((__m256i *)(values + i), LADDER(name32)(2, names, packed, &next));
    else
        for (; i + LANES <= count; i += LANES, packed += 4)
            _mm256_storeu_si256((__m256i *)(values + i), LADDER(name32)(1, names, packed, &next));
    if (i < count) {
        uint8_t last[8] = {0};
        memcpy(last, packed, packed_bytes(bits, count - i));
        __m256i x = bits == 2 ? LADDER(name32)(2, names, last, &next)
                              : LADDER(name32)(1, names, last, &next);
        _mm256_storeu_si256((__m256i *)(values + i), x);
    }
    return (size_t)(next - below);
}

/* Decode a section whose lengths were checked: codes at `levels`, `left` values on each, whose names
 * are places from `base`; `s->rank[LEVELS]` begins with the literals. */
static int32_t LADDER(take_flat)(size_t count, int kind, uint8_t base, const uint8_t *names,
                                 const int bits[LEVELS], const size_t left[LEVELS + 1],
                                 const uint8_t *const levels[LEVELS], struct LADDER(parts) from,
                                 struct ladder_scratch *s, uint8_t *into)
{
    int first = (1 << bits[0]) + (1 << bits[1]) + (1 << bits[2]) + (1 << bits[3]) - 4;
    for (int level = LEVELS - 1; level >= 0; level--) {
        const uint8_t *below = s->rank[level + 1];
        first -= (1 << bits[level]) - 1;
        uint8_t name[8] = {0};
        for (int code = 0; code < (1 << bits[level]) - 1; code++)
            name[code] = (uint8_t)(names[first + code] + base);
        struct LADDER(names) table = {_mm256_set1_epi8((char)name[0]), _mm256_setzero_si256()};
        if (bits[level] != 1) {
            table.low = LADDER(by_code)(name[0], name[1], name[2], name[3]);
            table.high = LADDER(by_code)(name[4], name[5], name[6], 0);
        }
        size_t taken = 0;
        if (level != 0)
            taken = LADDER(name_level)(bits[level], table.low, levels[level], left[level], below,
                                       s->rank[level]);
#define OF(k, b) \
    kind == k && bits[0] == b ? LADDER(join_##k##_##b)(&table, levels[0], count, below, &from, into)
        else
            taken = OF(KIND_BF16, 2) : OF(KIND_BF16, 1) : OF(KIND_FP16, 2) : OF(KIND_FP16, 1)
                : OF(KIND_E4M3, 2) : OF(KIND_E4M3, 1) : OF(KIND_E5M2, 2) : OF(KIND_E5M2, 1)
                : OF(KIND_BF16, 3) : OF(KIND_FP16, 3) : OF(KIND_E4M3, 3) : OF(KIND_E5M2, 3) : 0;
#undef OF
        if (taken != left[level + 1])
            return LADDER_BAD_COUNT;
    }
    return LADDER_OK;
}

#undef FLAT
