/* Reads of one file, begun in the order they were asked for, by threads that come and take them.
 *
 * What is asked for waits here, and not where a thread needs the interpreter's lock to find it: a
 * drive goes on while that lock is held elsewhere. At most `at_once` reads are in service, whatever
 * the number of threads, so that those who look at what they read keep no read waiting.
 *
 * Invariants: a piece is given to one thread, once, unless it was dropped before; its memory is
 * touched from `entresol_reads_add` until that thread's `entresol_reads_next` returned, no longer.
 */

#include <pthread.h>
#include <stdlib.h>

struct piece {
    struct piece *next;
    uint64_t number; /* the caller's name for it */
    uint64_t offset_bytes;
    int count;
    struct iovec parts[];
};

struct reads {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct piece *first;
    struct piece **last; /* where the next one is hung up */
    int fd, at_once, in_service, waiting, closed;
};

/* What one thread brought. */
struct taken {
    uint64_t number;
    int64_t got_bytes; /* as of preadv(2), fewer than were asked for or none; -errno */
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
    r->fd = fd, r->at_once = at_once, r->last = &r->first;
    return r;
}

/* Ask for bytes from `offset_bytes` on, into `count` places, at most IOV_MAX. 0 or -ENOMEM. */
EXPORT int32_t entresol_reads_add(struct reads *r, uint64_t number, uint64_t offset_bytes,
                                  size_t count, uint8_t *const *into, const size_t *length_bytes)
{
    struct piece *p = malloc(sizeof *p + count * sizeof p->parts[0]);
    if (p == NULL)
        return -ENOMEM;
    p->next = NULL, p->number = number, p->offset_bytes = offset_bytes, p->count = (int)count;
    for (size_t i = 0; i < count; i++)
        p->parts[i] = (struct iovec){.iov_base = into[i], .iov_len = length_bytes[i]};
    pthread_mutex_lock(&r->lock);
    *r->last = p;
    r->last = &p->next;
    if (r->waiting > 0)
        pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
    return 0;
}

/* Read one piece; waits until there is one. 0 once the queue is closed, and empty: else 1. */
EXPORT int32_t entresol_reads_next(struct reads *r, struct taken *taken)
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
    if (p == NULL)
        return 0;
    ssize_t got;
    do
        got = preadv(r->fd, p->parts, p->count, (off_t)p->offset_bytes);
    while (got < 0 && errno == EINTR);
    taken->got_bytes = got < 0 ? -(int64_t)errno : (int64_t)got;
    taken->number = p->number;
    free(p);
    pthread_mutex_lock(&r->lock);
    r->in_service--;
    if (r->closed)
        pthread_cond_broadcast(&r->changed); /* of those who find nothing, each has to hear it */
    else if (r->first != NULL && r->waiting > 0)
        pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
    return 1;
}

/* Not to be read after all: 1 if no thread has begun it, and none will. */
EXPORT int32_t entresol_reads_drop(struct reads *r, uint64_t number)
{
    struct piece *found = NULL;
    pthread_mutex_lock(&r->lock);
    for (struct piece **at = &r->first; *at != NULL; at = &(*at)->next) {
        if ((*at)->number != number)
            continue;
        found = *at;
        *at = found->next;
        if (found->next == NULL)
            r->last = at;
        break;
    }
    pthread_mutex_unlock(&r->lock);
    free(found);
    return found != NULL;
}

/* Whoever waits is told that there will be nothing, once all that was asked for is taken. */
EXPORT void entresol_reads_close(struct reads *r)
{
    pthread_mutex_lock(&r->lock);
    r->closed = 1;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* Nobody is in any of these calls, nor will be. */
EXPORT void entresol_reads_free(struct reads *r)
{
    while (r->first != NULL) {
        struct piece *p = r->first;
        r->first = p->next;
        free(p);
    }
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->lock);
    free(r);
}
