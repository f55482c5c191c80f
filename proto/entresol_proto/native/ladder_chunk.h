/* Whole chunks of the ladder codec; see ladder.h. Included by ladder_body.h. */

/* How many values a row may have: the FINALISTS shortest distances whose multiples are mostly distances
 * at which values resemble each other. Four multiples and more decide together, because a token that
 * comes again makes single distances stand out. Returns how many were found; none when `count` is small.
 */
static size_t LADDER(periods_of)(const uint8_t *seen, size_t count, size_t periods[FINALISTS])
{
    enum { FIRST = 4096, LONGEST = PERIOD_MAX / LANES, SEARCHED = 4 * LONGEST };
    uint64_t scores[SEARCHED + 1], means[LONGEST + 1], all = 0, best = UINT64_MAX;
    size_t first = count / 2 / LANES * LANES, searched = 0, found = 0;
    if (first > FIRST)
        first = FIRST;
    for (size_t i = 1; first != 0 && i <= SEARCHED && i * LANES + first <= count; i++) {
        scores[i] = LADDER(distance)(seen, seen + i * LANES, 1, first);
        all += scores[i];
        searched = i;
    }
    if (searched < 8)
        return 0;
    all = all * 256 / searched;
    for (size_t i = 2; i <= searched / 4; i++) {
        uint64_t sum = 0, multiples = 0;
        for (size_t j = i; j <= searched; j += i, multiples++)
            sum += scores[j];
        means[i] = sum * 256 / multiples;
        best = means[i] < best ? means[i] : best;
    }
    for (size_t i = 2; i <= searched / 4 && found < FINALISTS; i++)
        if (all <= best || (means[i] - best) * 8 <= (all - best) * 5)
            periods[found++] = i * LANES;
    return found;
}

/* What a chunk is encoded as. */
struct LADDER(plan) {
    const struct ladder_kind *kind;
    struct ladder_model model;
    size_t section; /* values */
    uint8_t log2;
    int hasty; /* speed is all, and this kind's exponents allow for some */
    int begun; /* a section was made, with this ranking */
    struct LADDER(ranking) ranking;
};

/* Model the rows of a section: places into `places`, what is to be stored of rows into s->flags and
 * s->resets. Returns how many of the latter; `*cost` grows by what prediction missed, in 1/16 of an
 * exponent. */
static size_t LADDER(place_rows)(size_t count, struct ladder_model *model, struct ladder_scratch *s,
                                 uint8_t *places, uint8_t *seen, uint64_t *cost)
{
    size_t resets = 0, row = 0;
    memset(s->flags, 0, (count + model->period - 1) / model->period / 8 + 1);
    for (size_t at = 0; at < count; at += model->period, row++) {
        const size_t length = count - at < model->period ? count - at : model->period;
        uint32_t keep, sum = LADDER(see_row)(s->sym + at, length, model, seen, &keep);
        const uint8_t mean = (uint8_t)(sum / length / 2 * 2);
        uint32_t reset = LADDER(distance)(seen, &mean, 0, length) + RESET_COST;
        int how = -1;
        if (!model->begun) {
            how = mean / 2;
            keep = reset;
        } else {
            const uint8_t zero = 0;
            uint32_t held = LADDER(distance)(model->state, &zero, 0, length);
            int by = (int)(sum / length) - (int)(held / length);
            by = by < -63 ? -63 : by > 63 ? 63 : by;
            memcpy(s->moved, model->state, model->period);
            LADDER(move_state)(s->moved, model->period, (uint8_t)(192 + by));
            uint32_t move = LADDER(distance)(seen, s->moved, 1, length) + RESET_COST;
            if (move < keep && move < reset) {
                how = 192 + by;
                keep = move;
            } else if (reset < keep) {
                how = mean / 2;
                keep = reset;
            }
        }
        if (how >= 0) {
            LADDER(move_state)(model->state, model->period, (uint8_t)how);
            s->flags[row / 8] |= (uint8_t)(1 << row % 8);
            s->resets[resets++] = (uint8_t)how;
            model->begun = 1;
        }
        *cost += keep + RESET_COST / 9;
        LADDER(place_row)(s->sym + at, seen, length, model, places + at);
    }
    return resets;
}

/* Whether the first values of a chunk, which are in s->sym, take fewer bits with one base than with the
 * rows of a model: where channels do not differ, each predicts its own noise. */
static int LADDER(rows_lose)(size_t count, struct ladder_scratch *s, struct ladder_model *model)
{
    uint32_t rows[256] = {0}, flat[256] = {0}, outside = (uint32_t)count;
    uint64_t cost = 0;
    struct LADDER(ranking) ranking;
    LADDER(place_rows)(count, model, s, s->rank[2], s->rank[3], &cost);
    LADDER(count)(s->rank[2], count / LANES, rows);
    LADDER(order)(rows, CONTEXTS, &ranking);
    cost = LADDER(cut)(rows, CONTEXTS, rows[0x80], NULL, &ranking);
    LADDER(count)(s->sym, count / LANES, flat);
    const uint8_t base = LADDER(window_of)(flat);
    for (int i = 0; i < 16; i++)
        outside -= flat[base + i];
    LADDER(order)(flat + base, 1, &ranking);
    return LADDER(cut)(flat + base, 1, outside, NULL, &ranking) <= cost;
}

/* Find the rows of a chunk: the window and the period that predict its first values best. */
static void LADDER(learn)(const uint8_t *plain, size_t count, int kind, uint8_t mode,
                          struct ladder_scratch *s, struct ladder_model *model)
{
    enum { TRIED = 16384 };
    const size_t seen = count < SECTION_MAX ? count : SECTION_MAX;
    const size_t tried = seen < TRIED ? seen : TRIED;
    size_t periods[FINALISTS], best = 0;
    uint64_t least = UINT64_MAX;
    uint32_t away;
    model->window = mode < BELOW ? 0 : (uint8_t)(mode - BELOW > 240 ? 240 : mode - BELOW);
    LADDER(split)(kind, plain, seen, s->sym, s->rank[0], s->extra);
    for (size_t at = 0; at < seen; at += PERIOD_MAX) /* of the sums, none is used */
        LADDER(see_row)(s->sym + at, seen - at < PERIOD_MAX ? seen - at : PERIOD_MAX, model,
                        s->rank[1] + at, &away);
    for (size_t found = LADDER(periods_of)(s->rank[1], seen, periods), i = 0; i < found; i++) {
        uint64_t cost = 0;
        model->period = periods[i];
        model->begun = 0;
        LADDER(place_rows)(tried, model, s, s->rank[2], s->rank[3], &cost);
        if (cost < least)
            least = cost, best = periods[i];
    }
    model->period = best;
    model->begun = 0;
    if (best != 0 && LADDER(rows_lose)(tried, s, model))
        model->period = 0;
    model->begun = 0;
}

/* Look at a little of the chunk. Returns 0 when encoding would not pay; `*mode` becomes the likeliest
 * exponent, for who wants it (not NULL). */
static int LADDER(pays)(const uint8_t *plain, size_t count, int kind, int by_channel, uint8_t *mode)
{
    const struct ladder_kind *k = &LADDER_KINDS[kind];
    const size_t groups = count / LANES, samples = groups < PROBED ? groups : PROBED;
    uint32_t counts[256] = {0}, outside = (uint32_t)(samples * LANES);
    uint8_t sym[PROBED * LANES], rest[LANES], extra[LANES];
    struct LADDER(ranking) ranking;
    for (size_t i = 0; i < samples; i++)
        LADDER(split)(kind, plain + i * groups / samples * LANES * k->width, LANES,
                      sym + i * LANES, rest, extra);
    LADDER(count)(sym, samples, counts);
    uint8_t base = LADDER(window_of)(counts);
    if (mode != NULL)
        *mode = LADDER(mode_of)(counts);
    for (int i = 0; i < 16; i++)
        outside -= counts[base + i];
    LADDER(order)(counts + base, 1, &ranking);
    uint64_t bits = LADDER(cut)(counts + base, 1, outside, NULL, &ranking) +
                    samples * LANES * (8u * k->rest + k->extra);
    return bits * 1000 <= samples * LANES * 8 * k->width * (by_channel ? 1000 : 970);
}

/* How to encode a chunk that pays. */
static void LADDER(decide)(const uint8_t *plain, size_t count, int kind, int by_channel, uint8_t mode,
                           struct ladder_scratch *s, struct LADDER(plan) *plan)
{
    plan->kind = &LADDER_KINDS[kind];
    plan->model = (struct ladder_model){0, 0, s->state, 0};
    if (by_channel)
        LADDER(learn)(plain, count, kind, mode, s, &plan->model);
    plan->log2 = 15;
    plan->hasty = !by_channel && kind == KIND_BF16;
    plan->begun = 0;
    plan->section = (size_t)1 << plan->log2;
    if (plan->model.period != 0)
        plan->section = plan->section / plan->model.period * plan->model.period;
}

/* Ranks of places; literals into `literals`. Returns how many. */
static size_t LADDER(rank_places)(const uint8_t *places, size_t count, const uint8_t *rank_of,
                                  const uint8_t *sym, uint8_t *ranks, uint8_t *literals)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i += LANES) {
        uint32_t mask = 0;
#if defined(LADDER_AVX2)
        __m256i x = _mm256_loadu_si256((const __m256i *)(places + i));
        __m256i literal = _mm256_set1_epi8(LITERAL);
        __m256i low = _mm256_and_si256(x, literal);
        __m256i rank = LADDER(of_context)(rank_of, low, _mm256_slli_epi16(x, 3),
                                          _mm256_slli_epi16(x, 2));
        rank = _mm256_blendv_epi8(rank, literal, x);
        _mm256_storeu_si256((__m256i *)(ranks + i), rank);
        mask = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(rank, literal));
#else
        for (size_t j = 0; j < LANES; j++) {
            uint8_t place = places[i + j];
            ranks[i + j] = place & 0x80 ? LITERAL : rank_of[place & 63];
            mask |= (uint32_t)(ranks[i + j] == LITERAL) << j;
        }
#endif
        for (; mask != 0; mask &= mask - 1)
            literals[found++] = sym[i + (size_t)__builtin_ctz(mask)];
    }
    return found;
}

#if !defined(LADDER_AVX2)
/* The same where one base serves the section: `rank_of` has 16 entries. */
static size_t LADDER(rank_flat)(const uint8_t *sym, size_t count, uint8_t base,
                                const uint8_t *rank_of, uint8_t *ranks, uint8_t *literals)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i += LANES) {
        uint32_t mask = 0;
        for (size_t j = 0; j < LANES; j++) {
            uint8_t at = (uint8_t)(sym[i + j] - base);
            ranks[i + j] = at < 16 ? rank_of[at & 15] : LITERAL;
            mask |= (uint32_t)(ranks[i + j] == LITERAL) << j;
        }
        for (; mask != 0; mask &= mask - 1)
            literals[found++] = sym[i + (size_t)__builtin_ctz(mask)];
    }
    return found;
}
#endif

/* Count one group in SAMPLED of a section; returns the base of its window. */
static uint8_t LADDER(sample)(const uint8_t *plain, size_t count, int kind, uint8_t *sym,
                              uint32_t counts[256], uint32_t *outside)
{
    const size_t step = (size_t)LANES * SAMPLED, groups = (count + step - 1) / step;
    uint8_t rest[LANES], extra[LANES];
    for (size_t i = 0; i < groups; i++)
        LADDER(split)(kind, plain + i * step * LADDER_KINDS[kind].width, LANES, sym + i * LANES, rest,
                      extra);
    LADDER(count)(sym, groups, counts);
    uint8_t base = LADDER(window_of)(counts);
    *outside = (uint32_t)(groups * LANES);
    for (int i = 0; i < 16; i++)
        *outside -= counts[base + i];
    return base;
}

/* Codes of s->rank[0] and s->literals, from `at` on, level after level. Returns the end, or NULL when
 * `room` bytes do not hold them; `left` says how many values reach each level. */
static uint8_t *LADDER(put_levels)(const uint8_t bits[LEVELS], struct ladder_scratch *s, uint8_t *at,
                                   size_t room, size_t left[LEVELS + 1])
{
    size_t size = left[LEVELS];
    for (int level = 0; level < LEVELS; level++) {
        store64(s->rank[level] + left[level], 0);
        size_t given = LADDER(descend)(bits[level], s->rank[level], left[level], s->packed[level],
                                       s->rank[level + 1]);
        if (level + 1 < LEVELS)
            left[level + 1] = given;
        size += packed_bytes(bits[level], left[level]);
    }
    if (size > room)
        return NULL;
    for (int level = 0; level < LEVELS; level++) {
        size_t bytes = packed_bytes(bits[level], left[level]);
        memcpy(at, s->packed[level], bytes);
        at += bytes;
    }
    memcpy(at, s->literals, left[LEVELS]);
    return at + left[LEVELS];
}

/* One section of `count` values. Returns its bytes, or 0 when `room` does not hold them. */
static size_t LADDER(put_section)(const uint8_t *plain, size_t count, int kind,
                                  struct LADDER(plan) *plan, struct ladder_scratch *s, uint8_t *out,
                                  size_t room)
{
    const struct ladder_kind *k = plan->kind;
    struct ladder_model *model = &plan->model;
    const int flat = model->period == 0, contexts = flat ? 1 : CONTEXTS;
    uint8_t *rest = out + 10, *extra = rest + count * k->rest, *at = extra + count * k->extra / 8;
    uint8_t *places = s->rank[1], base = 0;
    uint32_t counts[256] = {0}, outside = 0;
    struct LADDER(ranking) ranking;
    int again = 0; /* the tables are those of the section before */
    size_t resets = 0, rows = 0, left[LEVELS + 1] = {count};
    if ((size_t)(at - out) > room)
        return 0;
    if (flat) {
        base = LADDER(sample)(plain, count, kind, s->sym, counts, &outside);
    } else {
        uint64_t cost = 0;
        LADDER(split)(kind, plain, count, s->sym, rest, s->extra);
        LADDER(put_extra)(k->extra, s->extra, count, extra);
        rows = (count + model->period - 1) / model->period;
        resets = LADDER(place_rows)(count, model, s, places, s->rank[2], &cost);
        LADDER(count)(places, count / LANES, counts);
        outside = counts[0x80];
    }
    LADDER(order)(counts + base, contexts, &ranking);
    uint64_t bits = LADDER(cut)(counts + base, contexts, outside, plan->hasty ? k : NULL, &ranking);
    if (!flat && plan->begun &&
        LADDER(cut)(counts, contexts, outside, NULL, &plan->ranking) <= bits + 64 * CONTEXTS) {
        again = 1;
        ranking = plan->ranking;
    }
    plan->ranking = ranking;
    plan->begun = 1;
    const size_t tables = again ? 0 : 8 * (size_t)contexts;
    if ((size_t)(at - out) + tables + (rows + 7) / 8 + resets > room)
        return 0;
    for (size_t i = 0; i < tables; i++)
        *at++ = (uint8_t)(ranking.place_of[2 * i] | ranking.place_of[2 * i + 1] << 4);
    memcpy(at, s->flags, (rows + 7) / 8);
    at += (rows + 7) / 8;
    memcpy(at, s->resets, resets);
    at += resets;
    room -= (size_t)(at - out);
#if defined(LADDER_AVX2)
    if (flat) {
        const struct LADDER(rests) to = {rest, extra, extra + count / 4};
        at = LADDER(put_flat)(plain, count, kind, base, &ranking, to, s->rank[0], at, room, left);
    }
#else
    if (flat) {
        LADDER(split)(kind, plain, count, s->sym, rest, s->extra);
        LADDER(put_extra)(k->extra, s->extra, count, extra);
        left[LEVELS] = LADDER(rank_flat)(s->sym, count, base, ranking.rank_of, s->rank[0],
                                         s->literals);
        at = LADDER(put_levels)(ranking.bits, s, at, room, left);
    }
#endif
    if (!flat) {
        left[LEVELS] = LADDER(rank_places)(places, count, ranking.rank_of, s->sym, s->rank[0],
                                           s->literals);
        at = LADDER(put_levels)(ranking.bits, s, at, room, left);
    }
    if (at == NULL)
        return 0;
    const int wide = ranking.bits[0] == 3;
    out[0] = (uint8_t)((wide ? 8 : ranking.bits[0] - 1) | (ranking.bits[1] - 1) << 1 | again << 2);
    out[1] = base;
    for (int level = 1; level <= LEVELS; level++)
        put16(out + 2 * level, (unsigned)left[level]);
    return (size_t)(at - out);
}

static size_t LADDER(ladder_encode)(const uint8_t *plain, size_t plain_bytes, int kind,
                                    int by_channel, uint8_t *out, size_t out_bytes)
{
    struct ladder_scratch s;
    struct LADDER(plan) plan;
    uint8_t mode = 0;
    const size_t width = LADDER_KINDS[kind].width;
    const size_t count = plain_bytes / width / LANES * LANES;
    const size_t tail = plain_bytes - count * width;
    if (count == 0 || out_bytes < LADDER_HEAD + tail ||
        !LADDER(pays)(plain, count, kind, by_channel, by_channel ? &mode : NULL))
        return 0;
    LADDER(decide)(plain, count, kind, by_channel, mode, &s, &plan);
    size_t at = LADDER_HEAD;
    for (size_t done = 0; done < count; done += plan.section) {
        size_t now = count - done < plan.section ? count - done : plan.section;
        size_t made = LADDER(put_section)(plain + done * width, now, kind, &plan, &s, out + at,
                                          out_bytes - tail - at);
        if (made == 0)
            return 0;
        at += made;
    }
    out[0] = LADDER_FORMAT;
    out[1] = (uint8_t)kind;
    out[2] = plan.log2;
    out[3] = 0;
    put16(out + 4, (unsigned)plan.model.period);
    out[6] = plan.model.window;
    out[7] = 0;
    memcpy(out + at, plain + count * width, tail);
    return at + tail;
}

/* Decoding ------------------------------------------------------------------------------------- */

/* One section of `count` values at `*at`, which moves behind it. */
static int32_t LADDER(take_section)(const uint8_t **at, const uint8_t *end, size_t count, int kind,
                                    struct ladder_model *model, struct ladder_scratch *s,
                                    uint8_t *into)
{
    const struct ladder_kind *k = &LADDER_KINDS[kind];
    const size_t extra = count * k->extra / 8;
    size_t tables = model->period ? 8 * CONTEXTS : 8;
    const size_t rows = model->period ? (count + model->period - 1) / model->period : 0;
    const uint8_t *from = *at, *rest, *pairs, *levels[LEVELS], *literals, *resets;
    uint8_t *names = s->names;
    if (end - from < 10)
        return LADDER_CUT;
    const uint8_t *head = from;
    if (head[0] & 4)
        tables = 0;
    if ((size_t)(end - from) < 10 + count * k->rest + extra + tables + (rows + 7) / 8)
        return LADDER_CUT;
    const int wide = head[0] >> 3 & 1;
    const int bits[LEVELS] = {wide ? 3 : (head[0] & 1) + 1, (head[0] >> 1 & 1) + 1, 2, 2 - wide};
    size_t left[LEVELS + 1] = {count};
    if (head[0] > 15 || (wide && (head[0] & 1 || model->period)))
        return LADDER_BAD_COUNT;
    for (int level = 1; level <= LEVELS; level++) {
        left[level] = u16_at(head + 2 * level);
        if (left[level] > left[level - 1])
            return LADDER_BAD_COUNT;
    }
    rest = from + 10;
    pairs = from = rest + count * k->rest;
    from += extra;
    for (size_t i = 0; i < 2 * tables; i++)
        names[i] = from[i / 2] >> 4 * (i & 1) & 15;
    from += tables;
    size_t asked = 0;
    for (size_t row = 0; row < rows; row++)
        asked += from[row / 8] >> row % 8 & 1;
    const uint8_t *flags = from;
    resets = from += (rows + 7) / 8;
    if ((size_t)(end - from) < asked)
        return LADDER_CUT;
    from += asked;
    for (int level = 0; level < LEVELS; level++) {
        levels[level] = from;
        if ((size_t)(end - from) < packed_bytes(bits[level], left[level]))
            return LADDER_CUT;
        from += packed_bytes(bits[level], left[level]);
    }
    literals = from;
    if ((size_t)(end - from) < left[LEVELS])
        return LADDER_CUT;
    *at = from + left[LEVELS];
#if defined(LADDER_AVX2)
    if (model->period == 0) {
        const struct LADDER(parts) parts = {rest, pairs, pairs + count / 4};
        memcpy(s->rank[LEVELS], literals, left[LEVELS]);
        return LADDER(take_flat)(count, kind, head[1], names, bits, left, levels, parts, s, into);
    }
#endif
    LADDER(take_extra)(k->extra, pairs, count, s->extra);
    unsigned first = (1u << bits[0]) + (1u << bits[1]) + 1;
    memset(s->rank[LEVELS], LITERAL, left[LEVELS - 1] + 8);
    for (int level = LEVELS - 1; level >= 0; level--) {
        first -= level == LEVELS - 1 ? 0 : (1u << bits[level]) - 1;
        if (LADDER(climb)(bits[level], levels[level], left[level], first, s->rank[level + 1],
                          s->rank[level]) != left[level + 1])
            return LADDER_BAD_COUNT;
    }
#if !defined(LADDER_AVX2)
    if (model->period == 0)
        LADDER(name_flat)(s->rank[0], count, names, head[1], literals, s->sym);
#endif
    if (model->period != 0) {
        for (size_t row = 0, done = 0; row < rows; row++, done += model->period) {
            size_t now = count - done < model->period ? count - done : model->period;
            if (flags[row / 8] >> row % 8 & 1)
                LADDER(move_state)(model->state, model->period, *resets++);
            literals = LADDER(name_row)(s->rank[0] + done, now, names, model, literals,
                                        s->sym + done);
        }
    }
    LADDER(join)(kind, into, count, s->sym, rest, s->extra);
    return LADDER_OK;
}

static int32_t LADDER(ladder_decode)(const uint8_t *stored, size_t stored_bytes, int kind,
                                     uint8_t *into, size_t into_bytes)
{
    struct ladder_scratch s;
    const size_t width = LADDER_KINDS[kind].width;
    const size_t count = into_bytes / width / LANES * LANES;
    const size_t tail = into_bytes - count * width;
    struct ladder_model model = {0, 0, s.state, 0};
    if (count == 0 || stored_bytes < LADDER_HEAD + tail || stored[0] != LADDER_FORMAT ||
        stored[1] != kind || stored[2] < SECTION_LOG2_MIN || stored[2] > SECTION_LOG2_MAX ||
        stored[3] != 0 || stored[7] != 0 || stored[6] > 240)
        return LADDER_BAD_HEAD;
    size_t section = (size_t)1 << stored[2];
    model.period = u16_at(stored + 4);
    model.window = stored[6];
    if (model.period != 0) {
        if (model.period % LANES || model.period > PERIOD_MAX)
            return LADDER_BAD_HEAD;
        section = section / model.period * model.period;
        memset(s.state, 0, sizeof s.state);
    }
    memset(s.names, 0, sizeof s.names);
    const uint8_t *at = stored + LADDER_HEAD, *end = stored + stored_bytes - tail;
    for (size_t done = 0; done < count; done += section) {
        size_t now = count - done < section ? count - done : section;
        int32_t bad = LADDER(take_section)(&at, end, now, kind, &model, &s, into + done * width);
        if (bad != LADDER_OK)
            return bad;
    }
    if (at != end)
        return LADDER_CUT;
    memcpy(into + count * width, end, tail);
    return LADDER_OK;
}
