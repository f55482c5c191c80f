/* getaddrinfo of a resolver that hangs, for names that begin with "slow"; "two" has an address where
 * nobody listens before its own. To be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

typedef int (*resolve)(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    resolve next = (resolve)dlsym(RTLD_NEXT, "getaddrinfo");
    if (host != NULL && strncmp(host, "slow", 4) == 0) {
        sleep(20);
        return EAI_AGAIN;
    }
    if (host == NULL || strcmp(host, "two") != 0) return next(host, service, hints, found);
    struct addrinfo *last;
    int failed = next("127.0.0.9", service, hints, found);
    if (failed) return failed;
    for (last = *found; last->ai_next != NULL; last = last->ai_next) continue;
    return next("127.0.0.1", service, hints, &last->ai_next);
}
