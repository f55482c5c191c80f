/* The native kernel against damaged input, in memory that ends where the input does: built with
 * AddressSanitizer and UBSan, which end the program at the first byte too far.
 *
 * Arguments: how many rounds, after how many seconds to stop all the same, and which check to leave
 * out of a kernel that was prepared for it (0: none). Prints what came of the rounds; ends with 1
 * where the ways of the kernel differ, or a damaged thing passes.
 */

static int left_out;
#include "kernel.c"

#include <stdio.h>

static uint64_t state = 0x9e3779b97f4a7c15u;
static unsigned long decoded, refused, encoded, landed, records;

static uint32_t draw(uint32_t below)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)((state >> 32) * below >> 32);
}

static uint32_t one_of(const uint32_t *these, size_t count) { return these[draw((uint32_t)count)]; }
#define ONE_OF(...) \
    one_of((const uint32_t[]){__VA_ARGS__}, sizeof((uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

static void must(int holds, const char *what)
{
    if (!holds) {
        printf("differs: %s\n", what);
        exit(1);
    }
}

/* Memory of just that length; what is behind it may not be touched. */
static uint8_t *exact(const uint8_t *from, size_t length_bytes)
{
    uint8_t *made = malloc(length_bytes);
    must(made != NULL || length_bytes == 0, "memory");
    if (from != NULL && length_bytes != 0)
        memcpy(made, from, length_bytes);
    return made;
}

static uint8_t *noise(size_t length_bytes)
{
    uint8_t *made = exact(NULL, length_bytes);
    for (size_t i = 0; i < length_bytes; i++)
        made[i] = (uint8_t)draw(256);
    return made;
}

/* Ladder --------------------------------------------------------------------------------------- */

/* Elements whose exponents lie close together, by column as well, but for a few. */
static uint8_t *values(int kind, size_t length_bytes)
{
    uint8_t *made = noise(length_bytes);
    const uint32_t base = 4 + draw(200), spread = ONE_OF(1, 3, 9, 20), row = ONE_OF(64, 96, 2048);
    const uint32_t outside = ONE_OF(0, 1, 10, 50), width = LADDER_KINDS[kind].width;
    for (size_t i = 0; (i + 1) * width <= length_bytes; i++) {
        uint32_t x = base + draw(spread) + (uint32_t)(i % row) * 7 % (spread + 1);
        x = draw(100) < outside ? draw(256) : x;
        if (kind == KIND_BF16)
            put16(made + 2 * i, (x << 7 & 0x7F80) | (u16_at(made + 2 * i) & 0x807F));
        else if (kind == KIND_FP16)
            put16(made + 2 * i, (x << 10 & 0x7C00) | (u16_at(made + 2 * i) & 0x83FF));
        else if (kind == KIND_E4M3)
            made[i] = (uint8_t)((x << 3 & 0x78) | (made[i] & 0x87));
        else
            made[i] = (uint8_t)((x << 2 & 0x7C) | (made[i] & 0x83));
    }
    return made;
}

/* A chunk that ends amid what it says of its rows, or has rows that are too long. */
static size_t spoil_rows(uint8_t *stored, size_t length_bytes, int kind, size_t plain_bytes)
{
    enum { TOO_LONG = SECTION_MAX - LANES };
    const struct ladder_kind *k = &LADDER_KINDS[kind];
    const size_t period = draw(2) ? LANES : TOO_LONG, all = plain_bytes / k->width / LANES * LANES;
    const size_t section = SECTION_MAX / period * period, count = all < section ? all : section;
    const size_t rows = (count + period - 1) / period, flags = (rows + 7) / 8;
    const size_t tables_at = LADDER_HEAD + 10 + count * k->rest + count * k->extra / 8;
    const size_t at = tables_at + 8 * CONTEXTS + flags;
    if (at + rows > length_bytes)
        return length_bytes;
    stored[2] = SECTION_LOG2_MAX;
    put16(stored + 4, (unsigned)period);
    stored[LADDER_HEAD] &= 3;
    memset(stored + LADDER_HEAD + 2, 0, 8); /* nothing escapes */
    memset(stored + at - flags, 0xFF, flags);
    memset(stored + at, 0, length_bytes - at);
    return period == LANES ? at + draw((uint32_t)rows + 1) : length_bytes;
}

/* Something a head may say and should not, or bytes changed, taken away or put in. `stored` has
 * room for 64 more. */
static size_t damage(uint8_t *stored, size_t length_bytes)
{
    const size_t at = draw((uint32_t)length_bytes), many = 1 + draw(63);
    const size_t rest = length_bytes - at, some = many < rest ? many : rest;
    switch (draw(8)) {
    case 0:
        stored[at] ^= (uint8_t)(1 << draw(8));
        break;
    case 1: /* the head, or what the first section says first */
        stored[draw(length_bytes < 60 ? (uint32_t)length_bytes : 60)] = (uint8_t)draw(256);
        break;
    case 2:
        return at;
    case 3:
        memmove(stored + at, stored + at + some, rest - some);
        return length_bytes - some;
    case 4:
        memmove(stored + at + many, stored + at, rest);
        return length_bytes + many;
    case 5: /* a count */
        if (length_bytes >= 18)
            put16(stored + 10 + 2 * draw(4),
                  ONE_OF(0, 1, 31, 32, 33, 255, 4096, 32767, 32768, 65535));
        break;
    case 6: /* the length of a section, and of a row */
        if (length_bytes >= 18) {
            stored[2] = (uint8_t)(11 + draw(6));
            put16(stored + 4, ONE_OF(0, 32, 33, 64, 96, 2048, 2080, 32736, 65535));
        }
        break;
    default: /* nothing escapes, or everything */
        memset(stored + at, draw(2) ? 0xFF : 0, some);
    }
    return length_bytes;
}

static void decode(const uint8_t *chunk, size_t chunk_bytes, int kind, size_t plain_bytes,
                   const uint8_t *plain)
{
    uint8_t *stored = exact(chunk, chunk_bytes);
    uint8_t *wide = exact(NULL, plain_bytes), *portable = exact(NULL, plain_bytes);
    const int bad = entresol_ladder_decode(stored, chunk_bytes, kind, wide, plain_bytes, 0);
    const int also = entresol_ladder_decode(stored, chunk_bytes, kind, portable, plain_bytes, 1);
    must((bad != 0) == (also != 0), "what is refused");
    must(bad || plain_bytes == 0 || memcmp(wide, portable, plain_bytes) == 0, "what is decoded");
    must(plain == NULL || (!bad && memcmp(wide, plain, plain_bytes) == 0), "what was encoded");
    decoded += !bad, refused += bad != 0;
    free(stored), free(wide), free(portable);
}

static void ladder(void)
{
    const int kind = 1 + (int)draw(4), by_channel = (int)draw(2);
    const size_t width = LADDER_KINDS[kind].width;
    const size_t plain_bytes =
        width * ONE_OF(32, 33, 64, 96, 2048, 4100, 4096, 8224, 32767, 32800, 40000) + draw(2);
    const size_t room = 2 * plain_bytes + 256;
    uint8_t *plain = values(kind, plain_bytes), *out = exact(NULL, room), *again;
    const uint8_t *both[2] = {plain, plain};
    const size_t sizes[2] = {plain_bytes, plain_bytes};
    (void)entresol_ladder_pays(both, sizes, kind, by_channel);
    const size_t made = entresol_ladder_encode(plain, plain_bytes, kind, by_channel, out, room, 0);
    for (int n = 0; n < 6 && made != 0; n++) { /* just room enough, and not quite */
        const size_t less = n < 2 ? 0 : n < 4 ? 1 : 1 + draw((uint32_t)made);
        again = exact(NULL, made - less);
        must(entresol_ladder_encode(plain, plain_bytes, kind, by_channel, again, made - less,
                                    n & 1) == (less ? 0 : made), "room that is needed");
        must(less || memcmp(again, out, made) == 0, "what is encoded");
        free(again);
    }
    if (made != 0) {
        encoded++;
        decode(out, made, kind, plain_bytes, plain);
        for (int i = 0; i < 12; i++) {
            uint8_t *damaged = exact(NULL, made + 4 * 64);
            size_t length_bytes = made;
            memcpy(damaged, out, made);
            if (i == 0)
                length_bytes = spoil_rows(damaged, made, kind, plain_bytes);
            for (uint32_t n = i ? 1 + draw(3) : 0; n > 0 && length_bytes > 0; n--)
                length_bytes = damage(damaged, length_bytes);
            decode(damaged, length_bytes, draw(16) ? kind : (int)draw(6),
                   draw(8) ? plain_bytes : draw(70), NULL);
            free(damaged);
        }
    }
    free(plain), free(out);
}

/* Hashes, records, copies ---------------------------------------------------------------------- */

static void record(void)
{
    const uint32_t sealed_bytes = ONE_OF(241, 304, 1024, 1025, 1264, 2048, 5000);
    const size_t length_bytes = RECORD_HEAD_BYTES + sealed_bytes;
    uint8_t *key = noise(1 + draw(64)), *head = noise(RECORD_HEAD_BYTES), *found, *cut;
    struct record_keys keys;
    record_keys(&keys, key, 1, 1);
    for (int i = 0; i < 4; i++)
        head[RECORD_SEALED_BYTES_AT + i] = (uint8_t)(sealed_bytes >> 8 * i);
    found = noise(length_bytes);
    memcpy(found, head, RECORD_HEAD_BYTES);
    const uint64_t hash = xxh3_64(found + RECORD_HEAD_BYTES, sealed_bytes);
    for (int i = 0; i < 8; i++)
        found[RECORD_HASH_AT + i] = (uint8_t)(hash >> 8 * i);
    blake2b_many(key, 1, (const uint8_t *)"entresol-recd\0\0", RECORD_CHECK_BYTES, 1, found,
                 RECORD_CHECK_AT, found + RECORD_CHECK_AT);
    must(is_record(found, length_bytes, head, &keys), "a record");
    for (int i = 0; i < 4; i++) { /* shorter than its head says */
        const size_t left = draw(2) ? draw((uint32_t)length_bytes) : length_bytes - 1;
        cut = exact(found, left);
        must(!is_record(cut, left, head, &keys), "a record that is cut");
        free(cut);
    }
    found[RECORD_HEAD_BYTES + draw(sealed_bytes)] ^= (uint8_t)(1 << draw(8));
    must(!is_record(found, length_bytes, head, &keys), "a damaged record");
    records++;
    free(key), free(head), free(found);
}

static void hashes(void)
{
    const size_t count = draw(10), length = ONE_OF(1, 8, 31, 32, 33, 64, 127, 128);
    const size_t digest = 1 + draw(64), key_bytes = 1 + draw(64);
    uint8_t *key = noise(key_bytes), *person = noise(16), *inputs = noise(count * length);
    uint8_t *together = exact(NULL, count * digest), *single = exact(NULL, digest);
    entresol_blake2b_many(key, key_bytes, person, digest, count, inputs, length, together);
    for (size_t i = 0; i < count; i++) {
        entresol_blake2b_many(key, key_bytes, person, digest, 1, inputs + i * length, length,
                              single);
        must(memcmp(single, together + i * digest, digest) == 0, "a hash of many");
    }
    free(key), free(person), free(inputs), free(together), free(single);
}

static void copies(void)
{
    const size_t length_bytes = ONE_OF(0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 128, 4097);
    const size_t shift = draw(17);
    uint8_t *from = noise(length_bytes), *memory = exact(NULL, shift + length_bytes);
    uint8_t *into = memory + shift;
    const uint8_t *source = from;
    entresol_stream_copy(1, &into, &source, &length_bytes);
    must(length_bytes == 0 || memcmp(into, from, length_bytes) == 0, "a copy");
    free(from), free(memory);
}

/* A peer that sends what it likes -------------------------------------------------------------- */

static void span(void)
{
    const uint32_t length = 1 + draw(200);
    struct receiving r = {.into = exact(NULL, length), .length_bytes = length, .request = 7};
    uint8_t header[HEADER_BYTES] = {0};
    uint32_t offset = 0;
    int pair[2], ended;
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "a socket");
    for (int i = 0; i < 8; i++) { /* the right next bytes, as a rule */
        const uint32_t left = offset < length ? length - offset : 1;
        const uint32_t now =
            draw(16) ? 1 + draw(left) : ONE_OF(0, left + 1, length + 1, 0x80000000u, 0xFFFFFFFFu);
        const uint32_t at = draw(16) ? offset : ONE_OF(0, 1, 0xFFFFFFFFu);
        const uint32_t fields[3] = {draw(16) ? 7 : draw(9), at, now};
        header[0] = draw(20) ? MESSAGE_DATA : (uint8_t)draw(256);
        for (int n = 0; n < 12; n++)
            header[4 + n] = (uint8_t)(fields[n / 4] >> 8 * (n % 4));
        must(write(pair[1], header, sizeof header) == sizeof header, "a header");
        uint8_t *payload = noise(now < 256 ? now : 256);
        must(write(pair[1], payload, now < 256 ? now : 256) >= 0, "a payload");
        free(payload);
        offset += now;
    }
    close(pair[1]);
    do {
        ended = entresol_receive(pair[0], -1, &r);
        must(r.received_bytes <= length && r.header_bytes <= HEADER_BYTES, "what was received");
        landed += ended == DONE;
        r.header_bytes = ended == OTHER ? 0 : r.header_bytes;
    } while (ended == OTHER);
    close(pair[0]);
    free(r.into);
}

int main(int argc, char **argv)
{
    const long rounds = argc > 1 ? atol(argv[1]) : 0;
    const uint64_t until_ns = clock_ns() + 1000000000u * (uint64_t)(argc > 2 ? atol(argv[2]) : 0);
    long done = 0;
    left_out = argc > 3 ? atoi(argv[3]) : 0;
    for (; done < rounds && clock_ns() < until_ns; done++)
        ladder(), record(), hashes(), copies(), span();
    printf("rounds=%ld encoded=%lu decoded=%lu refused=%lu records=%lu landed=%lu\n", done, encoded,
           decoded, refused, records, landed);
    return 0;
}
