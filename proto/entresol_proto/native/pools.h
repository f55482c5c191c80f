/* The ends of CPython's pools (Objects/obmalloc.c, 3.10 to 3.13), behind the last whole object.
 *
 * Called with the interpreter's lock held: a pool is what its head says until it is given up.
 */

enum { POOL_BYTES = 16384, POOL_HEAD_BYTES = 48, POOL_STEP_BYTES = 16, POOL_OBJECT_BYTES_MAX = 512 };

/* Zeros into the ends of `count` neighbouring pools of one arena. */
EXPORT void entresol_clear_pool_ends(uint8_t *first, size_t count)
{
    for (uint8_t *pool = first; count > 0; pool += POOL_BYTES, count--) {
        uint32_t index, last;
        memcpy(&index, pool + 36, sizeof index); /* szidx */
        memcpy(&last, pool + 44, sizeof last);   /* maxnextoffset */
        if (index >= POOL_OBJECT_BYTES_MAX / POOL_STEP_BYTES)
            continue;
        uint32_t size = (index + 1) * POOL_STEP_BYTES;
        if (last != POOL_BYTES - size)
            continue; /* never used */
        uint32_t end = POOL_HEAD_BYTES + (POOL_BYTES - POOL_HEAD_BYTES) / size * size;
        memset(pool + end, 0, POOL_BYTES - end);
    }
}
