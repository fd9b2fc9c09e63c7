/* v1_server STORE ADDRESS RAIL...
 *
 * A server of the frozen protocol: maps a v1 store's files, registers each layer for remote READs on
 * every RAIL (dev[:gid]), listens on ADDRESS (IPv4) at a port of the system's choice, and prints
 * "listening PORT". Each client has a thread, and queue pairs that live as long as its connection.
 * Clients that want TCP (mode 0) are hung up. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "v1.h"

static struct shape shape;
static char *manifest;
static uint32_t manifest_bytes;
static struct rail rails[RAILS_MAX];
static int rail_count;
static struct ibv_mr **regions[RAILS_MAX]; /* one per layer */

static void load_manifest(const char *store) {
    char path[4096];
    struct stat stat;
    snprintf(path, sizeof path, "%s/manifest.json", store);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &stat) || !stat.st_size || stat.st_size > MANIFEST_MAX) die("%s: no manifest", path);
    manifest_bytes = (uint32_t)stat.st_size;
    manifest = calloc(1, manifest_bytes + 1);
    if (!read_all(fd, manifest, manifest_bytes)) die("%s: %s", path, strerror(errno));
    close(fd);
    shape = manifest_shape(manifest);
    if (manifest_number(manifest, "version") != 1) die("%s: not version 1", path);
}

static void register_layer(const char *store, uint32_t layer) {
    char path[4096];
    struct stat stat;
    size_t bytes = shape.stride * shape.experts;
    snprintf(path, sizeof path, "%s/experts_%05u.xpr", store, layer);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &stat) || (size_t)stat.st_size != bytes) die("%s: no layer of this shape", path);
    /* Private: every kernel registers it, by copying the pages. */
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (at == MAP_FAILED) die("%s: %s", path, strerror(errno));
    close(fd);
    for (int i = 0; i < rail_count; i++) {
        regions[i][layer] = ibv_reg_mr(rails[i].pd, at, bytes, IBV_ACCESS_REMOTE_READ);
        if (!regions[i][layer]) die("%s: cannot be registered: %s", path, strerror(errno));
    }
}

struct client {
    struct ibv_qp *qps[RAILS_MAX];
    struct ibv_cq *cqs[RAILS_MAX];
};

static void release(struct client *client) {
    for (int i = 0; i < RAILS_MAX; i++) {
        if (client->qps[i]) ibv_destroy_qp(client->qps[i]);
        if (client->cqs[i]) ibv_destroy_cq(client->cqs[i]);
    }
}

static int send_rail(int fd, int index, const struct endpoint *own) {
    if (!write_all(fd, own, sizeof *own) || !write_all(fd, &shape.layers, sizeof shape.layers)) return 0;
    for (uint32_t layer = 0; layer < shape.layers; layer++) {
        uint64_t base = (uintptr_t)regions[index][layer]->addr;
        uint32_t rkey = regions[index][layer]->rkey;
        if (!write_all(fd, &base, sizeof base) || !write_all(fd, &rkey, sizeof rkey)) return 0;
    }
    return 1;
}

/* Everything with one client; false ends at once, true after the client hung up. */
static int attend(int fd, struct client *client) {
    struct endpoint own[RAILS_MAX], other[RAILS_MAX];
    uint8_t mode, count, again, ready = 0;
    if (!write_all(fd, &manifest_bytes, sizeof manifest_bytes) || !write_all(fd, manifest, manifest_bytes)) return 0;
    if (!read_all(fd, &mode, 1) || mode != 1) return 0;
    if (!read_all(fd, &count, 1) || !count || count > rail_count) return 0;
    if (!write_all(fd, &count, 1)) return 0;
    for (int i = 0; i < count; i++) {
        client->cqs[i] = ibv_create_cq(rails[i].context, 1, NULL, NULL, 0);
        client->qps[i] = client->cqs[i] ? make_qp(&rails[i], client->cqs[i], IBV_ACCESS_REMOTE_READ, &own[i]) : NULL;
        if (!client->qps[i] || !send_rail(fd, i, &own[i])) return 0;
    }
    if (!read_all(fd, &again, 1) || again != count) return 0;
    if (!read_all(fd, other, sizeof *other * count)) return 0;
    for (int i = 0; i < count; i++) {
        int failed = connect_qp(&rails[i], client->qps[i], &own[i], &other[i]);
        if (failed) {
            fprintf(stderr, "rail %d: %s\n", i, strerror(failed));
            return 0;
        }
    }
    if (!write_all(fd, &ready, 1)) return 0;
    printf("client with %d rails\n", count);
    char byte;
    return !read_all(fd, &byte, 1);
}

static void *serve(void *argument) {
    int fd = (int)(intptr_t)argument;
    struct client client = {0};
    attend(fd, &client);
    release(&client);
    close(fd);
    return NULL;
}

int main(int count, char **words) {
    if (count < 4) die("usage: v1_server STORE ADDRESS RAIL...");
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    seed();
    load_manifest(words[1]);
    for (int i = 3; i < count; i++) {
        if (rail_count == RAILS_MAX) die("more than %d rails", RAILS_MAX);
        regions[rail_count] = calloc(shape.layers, sizeof **regions);
        rails[rail_count++] = open_rail(words[i]);
    }
    for (uint32_t layer = 0; layer < shape.layers; layer++) register_layer(words[1], layer);

    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t bytes = sizeof at;
    if (inet_pton(AF_INET, words[2], &at.sin_addr) != 1) die("%s is no IPv4 address", words[2]);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 64) ||
        getsockname(listener, (struct sockaddr *)&at, &bytes))
        die("listening on %s: %s", words[2], strerror(errno));
    printf("listening %u\n", ntohs(at.sin_port));
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        pthread_t thread;
        if (fd < 0) continue;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd))
            close(fd);
        else
            pthread_detach(thread);
    }
}
