/* Whether what was read from flash is the record that was asked for: what flash/checking.py says.
 *
 * Layout: daemon/DATA_FILE.md. A head is as it would be written but for what only the flash knows
 * (its LSN, the payload's hash and its own check), which is zero in it. "No" here means "look": a
 * record that is not good is judged by the twin, and so is one whose payload is too short for the
 * hash of xxh3.h, or any where there is none.
 */

#ifndef ENTRESOL_RECORD_H
#define ENTRESOL_RECORD_H

#include "blake2b.h"
#include "xxh3.h"

enum {
    RECORD_HEAD_BYTES = 96,
    RECORD_LSN_AT = 16,
    RECORD_SEALED_BYTES_AT = 28,
    RECORD_HASH_AT = 72,
    RECORD_CHECK_AT = 88,
    RECORD_CHECK_BYTES = 8,
};

/* What checks are keyed with: BLAKE2b's state after the key. */
struct record_keys {
    uint64_t keyed[8];
    int with_payloads;
};

static void record_keys(struct record_keys *keys, const uint8_t *key, size_t key_bytes,
                        int with_payloads)
{
    static const uint8_t person[BLAKE2B_PERSON_BYTES] = "entresol-recd";
    blake2b_begin(keys->keyed, key, key_bytes, person, RECORD_CHECK_BYTES);
    keys->with_payloads = with_payloads;
}

static int is_record(const uint8_t *found, size_t length_bytes, const uint8_t *head,
                     const struct record_keys *keys)
{
    if (length_bytes < RECORD_HEAD_BYTES)
        return 0;
    if (memcmp(found, head, RECORD_LSN_AT) != 0 ||
        memcmp(found + RECORD_LSN_AT + 8, head + RECORD_LSN_AT + 8,
               RECORD_HASH_AT - RECORD_LSN_AT - 8) != 0)
        return 0;
    uint8_t block[BLAKE2B_BLOCK_BYTES] = {0}, check[RECORD_CHECK_BYTES];
    uint64_t h[8];
    memcpy(h, keys->keyed, sizeof h);
    memcpy(block, found, RECORD_CHECK_AT);
    blake2b_compress(h, block, BLAKE2B_BLOCK_BYTES + RECORD_CHECK_AT, 1);
    blake2b_store(check, h, sizeof check);
    if (memcmp(found + RECORD_CHECK_AT, check, sizeof check) != 0)
        return 0;
    if (!keys->with_payloads)
        return 1;
#if defined(XXH3_HERE)
    const uint64_t sealed_bytes = u32_at(head + RECORD_SEALED_BYTES_AT);
    return sealed_bytes >= XXH3_BYTES_MIN && sealed_bytes <= length_bytes - RECORD_HEAD_BYTES &&
           xxh3_64(found + RECORD_HEAD_BYTES, sealed_bytes) ==
               blake2b_load(found + RECORD_HASH_AT);
#else
    return 0;
#endif
}

#endif
