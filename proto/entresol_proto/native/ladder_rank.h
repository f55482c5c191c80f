/* Which exponents are likely, and what that makes of codes; see ladder.h. Included by ladder_body.h. */

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
        uint32_t keys[16], ranks[16] = {0}; /* all different, the greatest first */
        for (int i = 0; i < 16; i++)
            keys[i] = counts[i] << 4 | (uint32_t)(15 - i);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++)
                ranks[j] += keys[j] < keys[i];
        for (int i = 0; i < 16; i++)
            ranking->place_of[16 * c + (int)ranks[i]] = (uint8_t)i;
    }
}

/* Bits of all values when levels are cut so; `before` counts the values of all ranks before one. */
static uint64_t LADDER(bits_of)(const uint32_t before[17], uint32_t outside,
                                const uint8_t bits[LEVELS], int *codes)
{
    uint64_t cost = 0, length = 0;
    int rank = 0;
    for (int level = 0; level < LEVELS; level++) {
        const int end = rank + (1 << bits[level]) - 1;
        length += bits[level];
        cost += length * (before[end] - before[rank]);
        rank = end;
    }
    *codes = rank;
    return cost + (outside + (uint64_t)(before[16] - before[rank])) * (length + 8);
}

/* Cut the levels so that places in this order take fewest bits; returns how many, without tables.
 * `outside` values are in no window. For elements of the kind `spare` (not NULL), codes of three bits
 * are taken where they cost little of what is saved: there is less to escape, which takes time. */
static uint64_t LADDER(cut)(const uint32_t *counts, int contexts, uint32_t outside,
                            const struct ladder_kind *spare, struct LADDER(ranking) *ranking)
{
    uint32_t of_rank[16] = {0}, before[17] = {0}; /* of a rank; of all ranks before one */
    uint64_t best = UINT64_MAX, cost;
    int codes;
    for (int i = 0; i < 16 * contexts; i++)
        of_rank[i & 15] += counts[(i & ~15) + ranking->place_of[i]];
    for (int i = 0; i < 16; i++)
        before[i + 1] = before[i] + of_rank[i];
    for (int way = 0; way < 4; way++) {
        const uint8_t bits[LEVELS] = {(uint8_t)(2 - (way & 1)), (uint8_t)(2 - (way >> 1)), 2, 2};
        cost = LADDER(bits_of)(before, outside, bits, &codes);
        if (cost < best) {
            best = cost;
            ranking->codes = codes;
            memcpy(ranking->bits, bits, sizeof bits);
        }
    }
    if (spare != NULL) {
        const uint8_t bits[LEVELS] = {3, 2, 2, 1};
        const uint64_t values = outside + (uint64_t)before[16];
        const uint64_t plain = values * 8 * spare->width;
        const uint64_t stored = best + values * (8u * spare->rest + spare->extra);
        cost = LADDER(bits_of)(before, outside, bits, &codes);
        if (stored < plain && (cost < best || (cost - best) * SPARED <= plain - stored)) {
            best = cost;
            ranking->codes = codes;
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

static int LADDER(none8)(const uint32_t *counts)
{
    uint32_t any = 0;
    for (int i = 0; i < 8; i++)
        any |= counts[i];
    return any == 0;
}

/* The lowest base of a window of 16 exponents that holds most of a histogram. */
static uint8_t LADDER(window_of)(const uint32_t *counts)
{
    int lowest = 0, end = 256, best;
    uint32_t sum = 0, most;
    while (lowest < 248 && LADDER(none8)(counts + lowest))
        lowest += 8;
    while (end > 8 && LADDER(none8)(counts + end - 8))
        end -= 8;
    best = lowest < 16 ? 0 : lowest - 16;
    for (int i = 0; i < 16; i++)
        sum += counts[best + i];
    most = sum;
    for (int base = best + 1; base < end && base <= 240; base++) {
        sum += counts[base + 15] - counts[base - 1];
        if (sum > most)
            most = sum, best = base;
    }
    return (uint8_t)best;
}

/* Add the exponents of `groups` groups of LANES to a histogram; every other one into counters of its
 * own, so that one need not wait for the other. */
static void LADDER(count)(const uint8_t *sym, size_t groups, uint32_t counts[256])
{
    uint32_t odd[256] = {0};
    for (size_t i = 0; i < groups * LANES; i += 2) {
        counts[sym[i]]++;
        odd[sym[i + 1]]++;
    }
    for (size_t i = 0; i < 256; i++)
        counts[i] += odd[i];
}

static uint8_t LADDER(mode_of)(const uint32_t *counts)
{
    int best = 0;
    for (int i = 1; i < 256; i++)
        if (counts[i] > counts[best])
            best = i;
    return (uint8_t)best;
}
