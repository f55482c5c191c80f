/* Whole chunks of the ladder codec; see ladder.h. Included by ladder_body.h. */

/* How the exponents of a section rank. */
struct LADDER(ranking) {
    uint8_t place_of[16 * CONTEXTS]; /* by context * 16 + rank */
    uint8_t rank_of[16 * CONTEXTS];  /* by context * 16 + place; LITERAL where no code is */
    uint8_t bits[LEVELS];
    int codes; /* ranks from here on are literals */
};

/* Order places by how often they were seen; the lower comes first among equals. */
static void LADDER(order)(const uint32_t *counts, int contexts, struct LADDER(ranking) *ranking)
{
    for (int c = 0; c < contexts; c++, counts += 16) {
        uint8_t *order = ranking->place_of + 16 * c;
        for (int i = 0; i < 16; i++) {
            int at = i;
            for (; at > 0 && counts[order[at - 1]] < counts[i]; at--)
                order[at] = order[at - 1];
            order[at] = (uint8_t)i;
        }
    }
}

/* Cut the levels so that places in this order take fewest bits; returns how many, without tables.
 * `outside` values are in no window. */
static uint64_t LADDER(cut)(const uint32_t *counts, int contexts, uint32_t outside,
                            struct LADDER(ranking) *ranking)
{
    uint32_t of_rank[16] = {0};
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 16 * contexts; i++)
        of_rank[i & 15] += counts[(i & ~15) + ranking->place_of[i]];
    for (int way = 0; way < 4; way++) {
        uint8_t bits[LEVELS] = {(uint8_t)(2 - (way & 1)), (uint8_t)(2 - (way >> 1)), 2, 2};
        uint64_t cost = 0, length = 0, literals = outside;
        int rank = 0;
        for (int level = 0; level < LEVELS; level++) {
            length += bits[level];
            for (int i = 0; i < (1 << bits[level]) - 1; i++)
                cost += length * of_rank[rank++];
        }
        for (int i = rank; i < 16; i++)
            literals += of_rank[i];
        cost += literals * (length + 8);
        if (cost < best) {
            best = cost;
            ranking->codes = rank;
            memcpy(ranking->bits, bits, sizeof bits);
        }
    }
    for (int i = 0; i < 16 * CONTEXTS; i++) {
        int from = contexts == 1 ? i & 15 : i;
        ranking->rank_of[(i & ~15) + ranking->place_of[from]] =
            (uint8_t)((i & 15) < ranking->codes ? i & 15 : LITERAL);
    }
    return best;
}

/* The lowest base of a window of 16 exponents that holds most of a histogram. */
static uint8_t LADDER(window_of)(const uint32_t *counts)
{
    uint32_t sum = 0, most;
    int best = 0;
    for (int i = 0; i < 16; i++)
        sum += counts[i];
    most = sum;
    for (int i = 16; i < 256; i++) {
        sum += counts[i] - counts[i - 16];
        if (sum > most)
            most = sum, best = i - 15;
    }
    return (uint8_t)best;
}

static uint8_t LADDER(mode_of)(const uint32_t *counts)
{
    int best = 0;
    for (int i = 1; i < 256; i++)
        if (counts[i] > counts[best])
            best = i;
    return (uint8_t)best;
}

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
}

/* Look at a little of the chunk. Returns 0 when encoding would not pay; `*mode` becomes the likeliest
 * exponent. */
static int LADDER(pays)(const uint8_t *plain, size_t count, int kind, int by_channel, uint8_t *mode)
{
    const struct ladder_kind *k = &LADDER_KINDS[kind];
    const size_t groups = count / LANES, samples = groups < PROBED ? groups : PROBED;
    uint32_t counts[256] = {0}, outside = (uint32_t)(samples * LANES);
    uint8_t sym[LANES], rest[LANES], extra[LANES];
    struct LADDER(ranking) ranking;
    for (size_t i = 0; i < samples; i++) {
        size_t at = i * groups / samples * LANES;
        LADDER(split)(kind, plain + at * k->width, LANES, sym, rest, extra);
        for (size_t j = 0; j < LANES; j++)
            counts[sym[j]]++;
    }
    uint8_t base = LADDER(window_of)(counts);
    *mode = LADDER(mode_of)(counts);
    for (int i = 0; i < 16; i++)
        outside -= counts[base + i];
    LADDER(order)(counts + base, 1, &ranking);
    uint64_t bits = LADDER(cut)(counts + base, 1, outside, &ranking) +
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
    plan->log2 = plan->model.period ? 15 : 14;
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

/* The same where one base serves the section: `rank_of` has 16 entries. */
static size_t LADDER(rank_flat)(const uint8_t *sym, size_t count, uint8_t base,
                                const uint8_t *rank_of, uint8_t *ranks, uint8_t *literals)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i += LANES) {
        uint32_t mask = 0;
#if defined(LADDER_AVX2)
        const __m256i last = _mm256_set1_epi8(LITERAL);
        __m256i at = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(sym + i)),
                                     _mm256_set1_epi8((char)base));
        __m256i inside = _mm256_cmpeq_epi8(_mm256_min_epu8(at, last), at);
        __m256i rank = _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)rank_of)), at);
        rank = _mm256_blendv_epi8(last, rank, inside);
        _mm256_storeu_si256((__m256i *)(ranks + i), rank);
        mask = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(rank, last));
#else
        for (size_t j = 0; j < LANES; j++) {
            uint8_t at = (uint8_t)(sym[i + j] - base);
            ranks[i + j] = at < 16 ? rank_of[at & 15] : LITERAL;
            mask |= (uint32_t)(ranks[i + j] == LITERAL) << j;
        }
#endif
        for (; mask != 0; mask &= mask - 1)
            literals[found++] = sym[i + (size_t)__builtin_ctz(mask)];
    }
    return found;
}

/* How often each place occurs; four counters each, so that one need not wait for the other. */
static void LADDER(count_places)(const uint8_t *places, size_t count, uint32_t counts[256])
{
    uint32_t apart[4][256] = {{0}};
    for (size_t i = 0; i < count; i += 4)
        for (size_t j = 0; j < 4; j++)
            apart[j][places[i + j]]++;
    for (size_t i = 0; i < 256; i++)
        counts[i] = apart[0][i] + apart[1][i] + apart[2][i] + apart[3][i];
}

/* One section of `count` values. Returns its bytes, or 0 when `room` does not hold them. */
static size_t LADDER(put_section)(const uint8_t *plain, size_t count, int kind,
                                  struct LADDER(plan) *plan, struct ladder_scratch *s, uint8_t *out,
                                  size_t room)
{
    const struct ladder_kind *k = plan->kind;
    struct ladder_model *model = &plan->model;
    const int contexts = model->period ? CONTEXTS : 1;
    const size_t raw = 10 + count * k->rest + count * k->extra / 8 + 8u * (unsigned)contexts;
    uint8_t *places = s->rank[1], *at = out + 10, base = 0;
    uint32_t counts[256] = {0}, outside = 0;
    struct LADDER(ranking) ranking;
    int again = 0; /* the tables are those of the section before */
    size_t resets = 0, rows = 0, left[LEVELS + 1] = {count}, size = raw;
    if (raw > room)
        return 0;
    LADDER(split)(kind, plain, count, s->sym, at, s->extra);
    at += count * k->rest;
    at += LADDER(put_extra)(k->extra, s->extra, count, at);
    if (model->period) {
        rows = (count + model->period - 1) / model->period;
        uint64_t cost = 0;
        resets = LADDER(place_rows)(count, model, s, places, s->rank[2], &cost);
        LADDER(count_places)(places, count, counts);
        outside = counts[0x80];
    } else {
        uint32_t seen = 0;
        for (size_t i = 0; i < count; i += LANES * SAMPLED, seen += LANES)
            for (size_t j = i; j < i + LANES; j++)
                counts[s->sym[j]]++;
        base = LADDER(window_of)(counts);
        outside = seen;
        for (int i = 0; i < 16; i++)
            outside -= counts[base + i];
    }
    LADDER(order)(counts + base, contexts, &ranking);
    uint64_t bits = LADDER(cut)(counts + base, contexts, outside, &ranking);
    if (model->period != 0 && plan->begun &&
        LADDER(cut)(counts, contexts, outside, &plan->ranking) <= bits + 64 * CONTEXTS) {
        again = 1;
        size -= 8u * (unsigned)contexts;
        ranking = plan->ranking;
    }
    plan->ranking = ranking;
    plan->begun = 1;
    left[LEVELS] = model->period ? LADDER(rank_places)(places, count, ranking.rank_of, s->sym,
                                                       s->rank[0], s->literals)
                                 : LADDER(rank_flat)(s->sym, count, base, ranking.rank_of,
                                                     s->rank[0], s->literals);
    for (int level = 0; level < LEVELS; level++) {
        store64(s->rank[level] + left[level], 0);
        size_t given = LADDER(descend)(ranking.bits[level], s->rank[level], left[level],
                                       s->packed[level], s->rank[level + 1]);
        if (level + 1 < LEVELS)
            left[level + 1] = given;
        size += packed_bytes(ranking.bits[level], left[level]);
    }
    size += (rows + 7) / 8 + resets + left[LEVELS];
    if (size > room)
        return 0;
    out[0] = (uint8_t)((ranking.bits[0] - 1) | (ranking.bits[1] - 1) << 1 | again << 2);
    out[1] = base;
    for (int level = 1; level <= LEVELS; level++)
        put16(out + 2 * level, (unsigned)left[level]);
    for (int i = 0; i < (again ? 0 : 8 * contexts); i++)
        *at++ = (uint8_t)(ranking.place_of[2 * i] | ranking.place_of[2 * i + 1] << 4);
    memcpy(at, s->flags, (rows + 7) / 8);
    at += (rows + 7) / 8;
    memcpy(at, s->resets, resets);
    at += resets;
    for (int level = 0; level < LEVELS; level++) {
        size_t bytes = packed_bytes(ranking.bits[level], left[level]);
        memcpy(at, s->packed[level], bytes);
        at += bytes;
    }
    memcpy(at, s->literals, left[LEVELS]);
    return size;
}

static size_t LADDER(ladder_encode)(const uint8_t *plain, size_t plain_bytes, int kind,
                                    int by_channel, uint8_t *out, size_t out_bytes)
{
    struct ladder_scratch s;
    struct LADDER(plan) plan;
    uint8_t mode;
    const size_t width = LADDER_KINDS[kind].width;
    const size_t count = plain_bytes / width / LANES * LANES;
    const size_t tail = plain_bytes - count * width;
    if (count == 0 || out_bytes < LADDER_HEAD + tail ||
        !LADDER(pays)(plain, count, kind, by_channel, &mode))
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
    const uint8_t *from = *at, *rest, *levels[LEVELS], *literals, *resets;
    uint8_t *names = s->names;
    if (end - from < 10)
        return LADDER_CUT;
    const uint8_t *head = from;
    if (head[0] & 4)
        tables = 0;
    if ((size_t)(end - from) < 10 + count * k->rest + extra + tables + (rows + 7) / 8)
        return LADDER_CUT;
    const int bits[LEVELS] = {(head[0] & 1) + 1, (head[0] >> 1 & 1) + 1, 2, 2};
    size_t left[LEVELS + 1] = {count};
    if (head[0] > 7)
        return LADDER_BAD_COUNT;
    for (int level = 1; level <= LEVELS; level++) {
        left[level] = u16_at(head + 2 * level);
        if (left[level] > left[level - 1])
            return LADDER_BAD_COUNT;
    }
    rest = from + 10;
    from = rest + count * k->rest;
    LADDER(take_extra)(k->extra, from, count, s->extra);
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
    unsigned first = (1u << bits[0]) + (1u << bits[1]) + 1;
    memset(s->rank[LEVELS], LITERAL, left[LEVELS - 1] + 8);
    for (int level = LEVELS - 1; level >= 0; level--) {
        first -= level == LEVELS - 1 ? 0 : (1u << bits[level]) - 1;
        if (LADDER(climb)(bits[level], levels[level], left[level], first, s->rank[level + 1],
                          s->rank[level]) != left[level + 1])
            return LADDER_BAD_COUNT;
    }
    if (model->period == 0) {
        LADDER(name_flat)(s->rank[0], count, names, head[1], literals, s->sym);
    } else {
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
