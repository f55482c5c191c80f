/* Makes system calls of a real daemon fail: preloaded, told what to do through a shared file.
 *
 * The file named by ENTRESOL_FAULTS is mapped when the process starts and inherited by its
 * children, so that faults are switched on and off while the daemon runs (see faults_lab.py, which
 * writes the same layout). A rule names calls, kinds of descriptors, what happens, and how often:
 * at a rate, or at exactly the k-th call since it was written. Draws come from the seed and a
 * counter of calls. Everything not named by a rule passes through.
 *
 * io_uring is not seen here; the daemon's device uses threads and preadv/pwritev.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CALL_READ, CALL_WRITE, CALL_SYNC, CALL_OPEN, CALL_RENAME, CALLS };
enum { KIND_UNKNOWN, KIND_DATA, KIND_STATE, KIND_SOCKET, KIND_OTHER, KINDS };
enum { DO_ERROR, DO_SHORT, DO_TORN };
enum { MAGIC = 0x464c5431, RULES_MAX = 8, FDS_MAX = 65536, IOV_PARTS_MAX = 1024 };

struct rule {
    uint32_t calls, kinds;  /* bit masks */
    int32_t action, error;
    uint32_t per_million, pad;
    uint64_t kth, seen;
};

struct control {
    uint32_t magic, on, rules, pad;
    uint64_t seed, draws;
    struct rule rule[RULES_MAX];
    uint64_t passed[CALLS][KINDS], injected[CALLS][KINDS];
};

static struct control *control;
static const char *data_part, *state_part;
static unsigned char kind_of[FDS_MAX];

static ssize_t (*next_read)(int, void *, size_t);
static ssize_t (*next_write)(int, const void *, size_t);
static ssize_t (*next_readv)(int, const struct iovec *, int);
static ssize_t (*next_writev)(int, const struct iovec *, int);
static ssize_t (*next_pread)(int, void *, size_t, off_t);
static ssize_t (*next_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*next_preadv2)(int, const struct iovec *, int, off_t, int);
static ssize_t (*next_pwritev2)(int, const struct iovec *, int, off_t, int);
static ssize_t (*next_recv)(int, void *, size_t, int);
static ssize_t (*next_send)(int, const void *, size_t, int);
static ssize_t (*next_recvmsg)(int, struct msghdr *, int);
static ssize_t (*next_sendmsg)(int, const struct msghdr *, int);
static int (*next_fsync)(int);
static int (*next_fdatasync)(int);
static int (*next_openat)(int, const char *, int, ...);
static int (*next_rename)(const char *, const char *);
static int (*next_close)(int);

__attribute__((constructor)) static void begin(void) {
#define FIND(name) *(void **)&next_##name = dlsym(RTLD_NEXT, #name)
    FIND(read); FIND(write); FIND(readv); FIND(writev); FIND(pread); FIND(pwrite);
    FIND(preadv2); FIND(pwritev2); FIND(recv); FIND(send); FIND(recvmsg); FIND(sendmsg);
    FIND(fsync); FIND(fdatasync); FIND(openat); FIND(rename); FIND(close);
    const char *path = getenv("ENTRESOL_FAULTS");
    data_part = getenv("ENTRESOL_FAULTS_DATA");
    state_part = getenv("ENTRESOL_FAULTS_STATE");
    if (path == NULL || data_part == NULL || state_part == NULL) return;
    int fd = next_openat(AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    next_close(fd);
    if (found != MAP_FAILED && ((struct control *)found)->magic == MAGIC) control = found;
}

static int kind_of_path(const char *path) {
    if (data_part != NULL && strstr(path, data_part) != NULL) return KIND_DATA;
    if (state_part != NULL && strstr(path, state_part) != NULL) return KIND_STATE;
    return KIND_OTHER;
}

static int kind(int fd) {
    if (fd < 0 || fd >= FDS_MAX) return KIND_OTHER;
    if (kind_of[fd] != KIND_UNKNOWN) return kind_of[fd];
    struct stat info;
    int found = KIND_OTHER;
    if (fstat(fd, &info) == 0) {
        if (S_ISSOCK(info.st_mode)) {
            found = KIND_SOCKET;
        } else if (S_ISREG(info.st_mode) || S_ISDIR(info.st_mode)) {
            char name[64], path[PATH_MAX];
            snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
            ssize_t length = readlink(name, path, sizeof path - 1);
            if (length > 0) {
                path[length] = 0;
                found = kind_of_path(path);
            }
        }
    }
    kind_of[fd] = (unsigned char)found;
    return found;
}

static uint64_t draw(void) {
    uint64_t z = control->seed + 0x9e3779b97f4a7c15ULL *
                 (1 + __atomic_fetch_add(&control->draws, 1, __ATOMIC_RELAXED));
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

/* The rule that strikes this call, or NULL. */
static struct rule *strikes(int call, int which) {
    if (control == NULL || !__atomic_load_n(&control->on, __ATOMIC_ACQUIRE)) return NULL;
    for (uint32_t i = 0; i < control->rules && i < RULES_MAX; i++) {
        struct rule *rule = &control->rule[i];
        if (!(rule->calls >> call & 1) || !(rule->kinds >> which & 1)) continue;
        uint64_t seen = 1 + __atomic_fetch_add(&rule->seen, 1, __ATOMIC_RELAXED);
        int hit = rule->kth ? seen == rule->kth : draw() % 1000000 < rule->per_million;
        if (hit) {
            __atomic_fetch_add(&control->injected[call][which], 1, __ATOMIC_RELAXED);
            return rule;
        }
    }
    __atomic_fetch_add(&control->passed[call][which], 1, __ATOMIC_RELAXED);
    return NULL;
}

static int fails(int call, int which) {
    struct rule *rule = strikes(call, which);
    if (rule == NULL) return 0;
    errno = rule->action == DO_SHORT ? EINTR : rule->error;
    return 1;
}

/* How much of a transfer happens: whole sectors of files, any part of a stream. */
static size_t part_of(size_t length, int which) {
    size_t unit = which == KIND_DATA ? 512 : 1;
    if (length <= unit) return length;
    return (1 + draw() % (length / unit - (length % unit == 0))) * unit;
}

static size_t iov_bytes(const struct iovec *iov, size_t count) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++) total += iov[i].iov_len;
    return total;
}

/* The first `length` bytes of a vector; returns the number of parts. */
static int cut(struct iovec *to, const struct iovec *from, int count, size_t length) {
    int used = 0;
    while (used < count && used < IOV_PARTS_MAX && length > 0) {
        to[used] = from[used];
        if (to[used].iov_len > length) to[used].iov_len = length;
        length -= to[used].iov_len;
        used++;
    }
    return used;
}

/* Runs `whole`, or what a rule makes of it: `PART` with a shorter length, an error, or both. */
#define TRANSFER(call, fd, length, whole, PART)                     \
    int which = kind(fd);                                           \
    struct rule *rule = strikes(call, which);                       \
    if (rule == NULL) return whole;                                 \
    if (rule->action == DO_ERROR) { errno = rule->error; return -1; } \
    size_t some = part_of(length, which);                           \
    ssize_t done = PART;                                            \
    if (rule->action == DO_TORN && done >= 0) { errno = rule->error; return -1; } \
    return done

ssize_t read(int fd, void *to, size_t length) {
    TRANSFER(CALL_READ, fd, length, next_read(fd, to, length), next_read(fd, to, some));
}
ssize_t write(int fd, const void *from, size_t length) {
    TRANSFER(CALL_WRITE, fd, length, next_write(fd, from, length), next_write(fd, from, some));
}
ssize_t recv(int fd, void *to, size_t length, int flags) {
    TRANSFER(CALL_READ, fd, length, next_recv(fd, to, length, flags),
             next_recv(fd, to, some, flags));
}
ssize_t send(int fd, const void *from, size_t length, int flags) {
    TRANSFER(CALL_WRITE, fd, length, next_send(fd, from, length, flags),
             next_send(fd, from, some, flags));
}
ssize_t pread(int fd, void *to, size_t length, off_t at) {
    TRANSFER(CALL_READ, fd, length, next_pread(fd, to, length, at), next_pread(fd, to, some, at));
}
ssize_t pwrite(int fd, const void *from, size_t length, off_t at) {
    TRANSFER(CALL_WRITE, fd, length, next_pwrite(fd, from, length, at),
             next_pwrite(fd, from, some, at));
}
ssize_t readv(int fd, const struct iovec *iov, int count) {
    struct iovec parts[IOV_PARTS_MAX];
    TRANSFER(CALL_READ, fd, iov_bytes(iov, count), next_readv(fd, iov, count),
             next_readv(fd, parts, cut(parts, iov, count, some)));
}
ssize_t writev(int fd, const struct iovec *iov, int count) {
    struct iovec parts[IOV_PARTS_MAX];
    TRANSFER(CALL_WRITE, fd, iov_bytes(iov, count), next_writev(fd, iov, count),
             next_writev(fd, parts, cut(parts, iov, count, some)));
}
ssize_t preadv2(int fd, const struct iovec *iov, int count, off_t at, int flags) {
    struct iovec parts[IOV_PARTS_MAX];
    TRANSFER(CALL_READ, fd, iov_bytes(iov, count), next_preadv2(fd, iov, count, at, flags),
             next_preadv2(fd, parts, cut(parts, iov, count, some), at, flags));
}
ssize_t pwritev2(int fd, const struct iovec *iov, int count, off_t at, int flags) {
    struct iovec parts[IOV_PARTS_MAX];
    TRANSFER(CALL_WRITE, fd, iov_bytes(iov, count), next_pwritev2(fd, iov, count, at, flags),
             next_pwritev2(fd, parts, cut(parts, iov, count, some), at, flags));
}
ssize_t preadv(int fd, const struct iovec *iov, int count, off_t at) {
    return preadv2(fd, iov, count, at, 0);
}
ssize_t pwritev(int fd, const struct iovec *iov, int count, off_t at) {
    return pwritev2(fd, iov, count, at, 0);
}
/* With descriptors in it a message goes whole or not at all. */
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    return fails(CALL_READ, kind(fd)) ? -1 : next_recvmsg(fd, message, flags);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return fails(CALL_WRITE, kind(fd)) ? -1 : next_sendmsg(fd, message, flags);
}
int fsync(int fd) { return fails(CALL_SYNC, kind(fd)) ? -1 : next_fsync(fd); }
int fdatasync(int fd) { return fails(CALL_SYNC, kind(fd)) ? -1 : next_fdatasync(fd); }
int rename(const char *from, const char *to) {
    return fails(CALL_RENAME, kind_of_path(to)) ? -1 : next_rename(from, to);
}
int close(int fd) {
    if (fd >= 0 && fd < FDS_MAX) kind_of[fd] = KIND_UNKNOWN;
    return next_close(fd);
}
int openat(int folder, const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    if (fails(CALL_OPEN, kind_of_path(path))) return -1;
    int fd = next_openat(folder, path, flags, mode);
    if (fd >= 0 && fd < FDS_MAX) kind_of[fd] = KIND_UNKNOWN;
    return fd;
}
int open(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    return openat(AT_FDCWD, path, flags, mode);
}

/* The names with 64 in them are the same calls where off_t is 64 bits wide. */
_Static_assert(sizeof(off_t) == 8, "build with 64-bit offsets");
#define ALIAS(name, of) __attribute__((alias(#of)))
ssize_t pread64(int, void *, size_t, off_t) ALIAS(pread64, pread);
ssize_t pwrite64(int, const void *, size_t, off_t) ALIAS(pwrite64, pwrite);
ssize_t preadv64(int, const struct iovec *, int, off_t) ALIAS(preadv64, preadv);
ssize_t pwritev64(int, const struct iovec *, int, off_t) ALIAS(pwritev64, pwritev);
ssize_t preadv64v2(int, const struct iovec *, int, off_t, int) ALIAS(preadv64v2, preadv2);
ssize_t pwritev64v2(int, const struct iovec *, int, off_t, int) ALIAS(pwritev64v2, pwritev2);
int open64(const char *, int, ...) ALIAS(open64, open);
int openat64(int, const char *, int, ...) ALIAS(openat64, openat);
