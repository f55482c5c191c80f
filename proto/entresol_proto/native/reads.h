/* Reads of one file, begun in the order they were asked for, by threads that come and take them.
 *
 * What is asked for waits here, and not where a thread needs the interpreter's lock to find it: a
 * drive goes on while that lock is held elsewhere. What was read is looked at here as well, where it
 * was said what it should be (record.h), and who asked for it is woken by his descriptor: only what
 * is not as it should be, or was not said, goes back to who sent the thread. At most `at_once` reads
 * are in service, whatever the number of threads, so that those that look at what they read keep no
 * read waiting.
 *
 * Invariants: a piece is given to one thread, once, unless it was dropped before; its memory is
 * touched from `entresol_reads_add` until its batch has ended, no longer. A batch ends once, when
 * each piece of it was found good, settled or dropped.
 */

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "record.h"

/* When a piece is good, that was read in full. */
enum look {
    LOOK_ELSEWHERE, /* whoever sent the thread says so */
    LOOK_NO_FURTHER, /* at once */
    LOOK_FOR_RECORDS, /* when each part is the record that it was said to be */
};

/* What was asked for together. */
struct batch {
    struct batch *next; /* of those that have ended */
    uint64_t number;    /* the caller's name for it */
    int64_t owed;       /* pieces */
    int wake_fd;
    struct record_keys keys;
};

struct piece {
    struct piece *next;
    struct batch *batch;
    uint64_t offset_bytes;
    uint32_t number, count; /* of its batch; of its parts */
    enum look look;
    struct iovec *parts;
    uint8_t *heads; /* RECORD_HEAD_BYTES for each part */
};

/* How it is asked for: a piece, and behind it its parts. */
struct wanted {
    uint64_t offset_bytes;
    uint32_t count;
    uint32_t look; /* an `enum look` */
};

struct wanted_part {
    uint64_t address, length_bytes;
    uint8_t head[RECORD_HEAD_BYTES]; /* as it must be, where it is known before */
};

struct reads {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct piece *first;
    struct piece **last; /* where the next one is hung up */
    struct batch *ended;
    struct batch **ended_last;
    int fd, at_once, in_service, waiting, closed;
};

/* What one thread brought, that is not known to be good. */
struct taken {
    struct batch *batch;
    uint64_t batch_number;
    int64_t got_bytes; /* as of preadv(2), fewer than were asked for or none; -errno */
    uint64_t number;   /* of the piece */
};

/* NULL without memory. The descriptor stays the caller's, and is open until `entresol_reads_free`. */
EXPORT struct reads *entresol_reads_open(int fd, int at_once)
{
    struct reads *r = calloc(1, sizeof *r);
    if (r == NULL)
        return NULL;
    if (pthread_mutex_init(&r->lock, NULL) != 0) {
        free(r);
        return NULL;
    }
    if (pthread_cond_init(&r->changed, NULL) != 0) {
        pthread_mutex_destroy(&r->lock);
        free(r);
        return NULL;
    }
    r->fd = fd, r->at_once = at_once, r->last = &r->first, r->ended_last = &r->ended;
    return r;
}

static void free_pieces(struct piece *p)
{
    while (p != NULL) {
        struct piece *next = p->next;
        free(p);
        p = next;
    }
}

/* A piece with its parts behind it, in one piece of memory. */
static struct piece *make_piece(struct batch *batch, uint32_t number, const struct wanted *wanted,
                                const uint8_t *parts)
{
    const size_t count = wanted->count;
    struct piece *p = malloc(sizeof *p + count * (sizeof p->parts[0] + RECORD_HEAD_BYTES));
    if (p == NULL)
        return NULL;
    *p = (struct piece){.batch = batch, .number = number, .offset_bytes = wanted->offset_bytes,
                        .count = wanted->count, .look = (enum look)wanted->look};
    p->parts = (struct iovec *)(p + 1);
    p->heads = (uint8_t *)(p->parts + count);
    for (size_t i = 0; i < count; i++) {
        struct wanted_part part;
        memcpy(&part, parts + i * sizeof part, sizeof part);
        p->parts[i].iov_base = (void *)(uintptr_t)part.address;
        p->parts[i].iov_len = part.length_bytes;
        memcpy(p->heads + i * RECORD_HEAD_BYTES, part.head, RECORD_HEAD_BYTES);
    }
    return p;
}

/* Ask for so many pieces, at least one: `wanted` holds a `struct wanted` for each, with its parts
 * behind it, at most IOV_MAX. When all have ended the batch is told by `entresol_reads_ended`, and
 * then eight bytes are written to `wake_fd`, an eventfd that is open until `entresol_reads_free`:
 * that may be after the batch was forgotten. `check_key` has `check_key_bytes`, 1 to 64, where there are records to
 * look for; and `payloads` says whether to hash them. 0; or -ENOMEM or, once the queue is closed,
 * -ESHUTDOWN, and then nothing was asked for.
 */
EXPORT int32_t entresol_reads_add(struct reads *r, uint64_t batch_number, int wake_fd,
                                  const uint8_t *check_key, size_t check_key_bytes,
                                  int32_t payloads, uint32_t pieces, const uint8_t *wanted)
{
    struct batch *batch = calloc(1, sizeof *batch);
    if (batch == NULL)
        return -ENOMEM;
    batch->number = batch_number, batch->owed = pieces, batch->wake_fd = wake_fd;
    if (check_key_bytes > 0)
        record_keys(&batch->keys, check_key, check_key_bytes, payloads != 0);
    struct piece *first = NULL, **last = &first;
    for (uint32_t number = 0; number < pieces; number++) {
        struct wanted head;
        memcpy(&head, wanted, sizeof head);
        struct piece *p = make_piece(batch, number, &head, wanted + sizeof head);
        if (p == NULL) {
            free_pieces(first);
            free(batch);
            return -ENOMEM;
        }
        *last = p;
        last = &p->next;
        wanted += sizeof head + head.count * sizeof(struct wanted_part);
    }
    pthread_mutex_lock(&r->lock);
    if (r->closed) {
        pthread_mutex_unlock(&r->lock);
        free_pieces(first);
        free(batch);
        return -ESHUTDOWN;
    }
    *r->last = first;
    r->last = last;
    for (int wake = r->waiting; wake > 0 && pieces > 0; wake--, pieces--)
        pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
    return 0;
}

/* With the lock held: so many pieces of it are done with. Whether it has ended, and whoever asked
 * for it is to be woken, without the lock. */
static int owe_less(struct reads *r, struct batch *batch, int64_t pieces)
{
    batch->owed -= pieces;
    if (batch->owed > 0)
        return 0;
    *r->ended_last = batch;
    r->ended_last = &batch->next;
    return 1;
}

static void wake(int fd)
{
    const uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Whether all of a piece is there, and what it should be. */
static int is_good(const struct piece *p, int64_t got_bytes)
{
    uint64_t length = 0;
    for (uint32_t i = 0; i < p->count; i++)
        length += p->parts[i].iov_len;
    if (p->look == LOOK_ELSEWHERE || got_bytes < 0 || (uint64_t)got_bytes != length)
        return 0;
    for (uint32_t i = 0; p->look == LOOK_FOR_RECORDS && i < p->count; i++)
        if (!is_record(p->parts[i].iov_base, p->parts[i].iov_len,
                       p->heads + (size_t)i * RECORD_HEAD_BYTES, &p->batch->keys))
            return 0;
    return 1;
}

/* Wait for a piece, and take it into service; NULL once the queue is closed, and empty. */
static struct piece *take_piece(struct reads *r)
{
    pthread_mutex_lock(&r->lock);
    while (r->first == NULL ? !r->closed : r->in_service >= r->at_once) {
        r->waiting++;
        pthread_cond_wait(&r->changed, &r->lock);
        r->waiting--;
    }
    struct piece *p = r->first;
    if (p != NULL) {
        r->first = p->next;
        if (r->first == NULL)
            r->last = &r->first;
        r->in_service++;
    }
    pthread_mutex_unlock(&r->lock);
    return p;
}

static void leave_service(struct reads *r)
{
    pthread_mutex_lock(&r->lock);
    r->in_service--;
    if (r->closed)
        pthread_cond_broadcast(&r->changed); /* of those who find nothing, each has to hear it */
    else if (r->first != NULL && r->waiting > 0)
        pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* One piece that was looked at elsewhere is done with. */
EXPORT void entresol_reads_settle(struct reads *r, struct batch *batch)
{
    const int fd = batch->wake_fd; /* it may be gone as soon as it has ended */
    pthread_mutex_lock(&r->lock);
    const int ended = owe_less(r, batch, 1);
    pthread_mutex_unlock(&r->lock);
    if (ended)
        wake(fd);
}

/* Read pieces, and wait for them, until there is one that is not known to be good: 1, and it is to
 * be settled. 0 once the queue is closed, and empty. */
EXPORT int32_t entresol_reads_next(struct reads *r, struct taken *taken)
{
    struct piece *p;
    while ((p = take_piece(r)) != NULL) {
        ssize_t got;
        do
            got = preadv(r->fd, p->parts, (int)p->count, (off_t)p->offset_bytes);
        while (got < 0 && errno == EINTR);
        const int64_t got_bytes = got < 0 ? -(int64_t)errno : (int64_t)got;
        leave_service(r);
        const int good = is_good(p, got_bytes);
        *taken = (struct taken){.batch = p->batch, .batch_number = p->batch->number,
                                .got_bytes = got_bytes, .number = p->number};
        free(p);
        if (!good)
            return 1;
        entresol_reads_settle(r, taken->batch);
    }
    return 0;
}

/* What no thread has begun of a batch is not to be read after all, and none will. */
EXPORT void entresol_reads_drop(struct reads *r, uint64_t batch_number)
{
    struct piece *dropped = NULL;
    struct batch *batch = NULL;
    int64_t count = 0;
    int ended = 0, fd = -1;
    pthread_mutex_lock(&r->lock);
    for (struct piece **at = &r->first; *at != NULL;) {
        struct piece *p = *at;
        if (p->batch->number != batch_number) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        if (p->next == NULL)
            r->last = at;
        batch = p->batch, fd = batch->wake_fd;
        p->next = dropped, dropped = p, count++;
    }
    if (batch != NULL)
        ended = owe_less(r, batch, count);
    pthread_mutex_unlock(&r->lock);
    free_pieces(dropped);
    if (ended)
        wake(fd);
}

/* The first batch that has ended: 1, and its number, until it is forgotten. 0: none. */
EXPORT int32_t entresol_reads_ended(struct reads *r, uint64_t *batch_number)
{
    pthread_mutex_lock(&r->lock);
    struct batch *batch = r->ended;
    if (batch != NULL)
        *batch_number = batch->number;
    pthread_mutex_unlock(&r->lock);
    return batch != NULL;
}

/* That batch is not to be told again; there is one. */
EXPORT void entresol_reads_forget(struct reads *r)
{
    pthread_mutex_lock(&r->lock);
    struct batch *batch = r->ended;
    r->ended = batch->next;
    if (r->ended == NULL)
        r->ended_last = &r->ended;
    pthread_mutex_unlock(&r->lock);
    free(batch);
}

/* Whoever waits is told that there will be nothing, once all that was asked for is taken. */
EXPORT void entresol_reads_close(struct reads *r)
{
    pthread_mutex_lock(&r->lock);
    r->closed = 1;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* Nobody is in any of these calls, nor will be; all batches have ended. */
EXPORT void entresol_reads_free(struct reads *r)
{
    uint64_t number;
    free_pieces(r->first);
    while (entresol_reads_ended(r, &number))
        entresol_reads_forget(r);
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->lock);
    free(r);
}
