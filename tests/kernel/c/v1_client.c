/* v1_client HOST PORT LAYERS [--again] RAIL...
 *
 * A client of the frozen protocol: READs every record of a v1 peer over all RAILs (dev[:gid]), record
 * `expert` on rail `expert % rails`, and compares each byte with the layer files in the folder LAYERS.
 *
 * Prints "read N records, B bytes" and hangs up. With --again it READs all of them over and over until
 * the server hangs up, and prints "hung up after N records". Exit 1: anything else; the reason is on
 * standard error. */
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>

#include "v1.h"

struct layer {
    uint64_t base;
    uint32_t rkey;
};

struct lane {
    struct rail rail;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    struct endpoint own, other;
    struct layer *layers;
};

static int control;
static struct shape shape;
static struct lane lanes[RAILS_MAX];
static int rails;
static char *landing; /* one record per READ in flight and rail */
static char *wanted;  /* the store's files, one after the other */

static void must_read(void *to, size_t bytes) {
    if (!read_all(control, to, bytes)) die("the server hung up in the handshake");
}

static void must_write(const void *from, size_t bytes) {
    if (!write_all(control, from, bytes)) die("the server does not take the handshake: %s", strerror(errno));
}

static void dial(const char *host, const char *port) {
    struct addrinfo *found, hints = {.ai_socktype = SOCK_STREAM};
    int failed = getaddrinfo(host, port, &hints, &found);
    if (failed) die("%s: %s", host, gai_strerror(failed));
    control = socket(found->ai_family, found->ai_socktype, 0);
    if (control < 0 || connect(control, found->ai_addr, found->ai_addrlen))
        die("%s port %s: %s", host, port, strerror(errno));
    freeaddrinfo(found);
    struct timeval limit = {.tv_sec = 20};
    setsockopt(control, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

static void read_manifest(void) {
    uint32_t bytes;
    must_read(&bytes, sizeof bytes);
    if (!bytes || bytes > MANIFEST_MAX) die("a manifest of %u bytes", bytes);
    char *json = calloc(1, bytes + 1);
    must_read(json, bytes);
    shape = manifest_shape(json);
    free(json);
}

static void load_files(const char *folder) {
    size_t bytes = shape.stride * shape.experts;
    wanted = malloc(bytes * shape.layers);
    for (uint32_t layer = 0; layer < shape.layers; layer++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/experts_%05u.xpr", folder, layer);
        FILE *file = fopen(path, "rb");
        if (!file || fread(wanted + bytes * layer, 1, bytes, file) != bytes) die("%s: no layer of this shape", path);
        fclose(file);
    }
}

static void exchange(void) {
    uint8_t start[2] = {1, (uint8_t)rails}, count;
    must_write(start, sizeof start);
    must_read(&count, 1);
    if (count != rails) die("%d rails were asked for, %d came", rails, count);
    for (int i = 0; i < rails; i++) {
        uint32_t layers;
        must_read(&lanes[i].other, sizeof lanes[i].other);
        must_read(&layers, sizeof layers);
        if (layers != shape.layers) die("rail %d has %u layers, the manifest %u", i, layers, shape.layers);
        lanes[i].layers = calloc(layers, sizeof *lanes[i].layers);
        for (uint32_t l = 0; l < layers; l++) {
            must_read(&lanes[i].layers[l].base, 8);
            must_read(&lanes[i].layers[l].rkey, 4);
        }
    }
    uint8_t mine = (uint8_t)rails, ready = 1;
    must_write(&mine, 1);
    for (int i = 0; i < rails; i++) {
        struct lane *lane = &lanes[i];
        size_t bytes = READS_MAX * shape.stride;
        lane->cq = ibv_create_cq(lane->rail.context, READS_MAX, NULL, NULL, 0);
        lane->mr = ibv_reg_mr(lane->rail.pd, landing + bytes * (size_t)i, bytes, IBV_ACCESS_LOCAL_WRITE);
        if (!lane->cq || !lane->mr) die("rail %d: %s", i, strerror(errno));
        lane->qp = make_qp(&lane->rail, lane->cq, 0, &lane->own);
        if (!lane->qp) die("rail %d: no queue pair: %s", i, strerror(errno));
        must_write(&lane->own, sizeof lane->own);
    }
    must_read(&ready, 1);
    if (ready) die("the server answers %d instead of 0", ready);
    for (int i = 0; i < rails; i++) {
        int failed = connect_qp(&lanes[i].rail, lanes[i].qp, &lanes[i].own, &lanes[i].other);
        if (failed) die("rail %d cannot be connected: %s", i, strerror(failed));
    }
}

/* Whether the server has hung up; a byte from it would be no v1. */
static int hung_up(int wait_ms) {
    struct pollfd control_end = {.fd = control, .events = POLLIN};
    if (poll(&control_end, 1, wait_ms) <= 0) return 0;
    char byte;
    if (recv(control, &byte, 1, MSG_DONTWAIT) > 0) die("the server said something after the handshake");
    return 1;
}

static uint64_t seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec;
}

static void post(struct lane *lane, uint32_t slot, uint32_t layer, uint32_t expert) {
    char *to = (char *)lane->mr->addr + slot * shape.stride;
    memset(to, 0xa5, shape.stride);
    struct ibv_sge local = {(uintptr_t)to, (uint32_t)shape.stride, lane->mr->lkey};
    struct ibv_send_wr *bad, request = {
        .wr_id = (uint64_t)slot << 48 | (uint64_t)layer << 32 | expert,
        .sg_list = &local,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_READ,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {lane->layers[layer].base + expert * shape.stride, lane->layers[layer].rkey},
    };
    int failed = ibv_post_send(lane->qp, &request, &bad);
    if (failed) die("a READ cannot be posted: %s", strerror(failed));
}

/* One READ's end. 0 where the server withdrew and hung up, which is only right while reading again and again. */
static int take(struct lane *lane, int again) {
    struct ibv_wc done;
    uint64_t limit = seconds() + 30;
    for (;;) {
        int count = ibv_poll_cq(lane->cq, 1, &done);
        if (count < 0) die("the completion queue is broken");
        if (count) break;
        if (seconds() > limit) die("a READ does not end");
        if (hung_up(0)) {
            if (again) return 0;
            die("the server hung up");
        }
        sched_yield();
    }
    uint32_t slot = (uint32_t)(done.wr_id >> 48), layer = (uint32_t)(done.wr_id >> 32) & 0xffff, expert = (uint32_t)done.wr_id;
    if (done.status != IBV_WC_SUCCESS) {
        if (again && hung_up(10000)) return 0;
        die("layer %u expert %u: %s", layer, expert, ibv_wc_status_str(done.status));
    }
    const char *right = wanted + ((size_t)layer * shape.experts + expert) * shape.stride;
    if (memcmp((char *)lane->mr->addr + slot * shape.stride, right, shape.stride))
        die("layer %u expert %u: wrong bytes", layer, expert);
    return 1;
}

/* READs of all records, up to READS_MAX on each rail at once; gives the number of those that came. */
static uint64_t read_every_record(int again, int *ended) {
    uint64_t records = 0;
    for (int i = 0; i < rails; i++) {
        struct lane *lane = &lanes[i];
        uint32_t posted = 0, taken = 0, count = 0;
        for (uint32_t expert = (uint32_t)i; expert < shape.experts; expert += (uint32_t)rails) count += shape.layers;
        while (taken < count) {
            /* Completions come in the order of the posts, so a slot is free again after READS_MAX of them. */
            for (; posted < count && posted - taken < READS_MAX; posted++) {
                uint32_t layer = posted % shape.layers;
                uint32_t expert = posted / shape.layers * (uint32_t)rails + (uint32_t)i;
                post(lane, posted % READS_MAX, layer, expert);
            }
            if (!take(lane, again)) {
                *ended = 1;
                return records;
            }
            taken++;
            records++;
        }
    }
    return records;
}

int main(int count, char **words) {
    if (count < 5) die("usage: v1_client HOST PORT LAYERS [--again] RAIL...");
    int again = !strcmp(words[4], "--again");
    setvbuf(stdout, NULL, _IOLBF, 0);
    seed();
    for (int i = 4 + again; i < count; i++) {
        if (rails == RAILS_MAX) die("more than %d rails", RAILS_MAX);
        lanes[rails++].rail = open_rail(words[i]);
    }
    dial(words[1], words[2]);
    read_manifest();
    load_files(words[3]);
    landing = aligned_alloc(4096, (READS_MAX * shape.stride * (size_t)rails + 4095) / 4096 * 4096);
    exchange();
    int ended = 0;
    uint64_t records = read_every_record(again, &ended);
    printf("read %llu records, %llu bytes\n", (unsigned long long)records, (unsigned long long)(records * shape.stride));
    while (again && !ended) records += read_every_record(again, &ended);
    if (again) printf("hung up after %llu records\n", (unsigned long long)records);
    return 0;
}
