/* What a v1 client and a v1 server have in common: the manifest, bytes on a socket, and queue pairs
 * with the constants that the protocol freezes. Little-endian machines only. */
#ifndef V1_H
#define V1_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RAILS_MAX = 8, LAYERS_MAX = 4096, MANIFEST_MAX = 16 << 20, READS_MAX = 16 };
#define V1_PORT 1

_Noreturn static inline void die(const char *format, ...) {
    va_list words;
    va_start(words, format);
    fputs("error: ", stderr);
    vfprintf(stderr, format, words);
    fputc('\n', stderr);
    va_end(words);
    exit(1);
}

/* What one side tells the other about its queue pair: 24 bytes on the wire. */
struct endpoint {
    uint32_t qpn, psn;
    uint8_t gid[16];
};
_Static_assert(sizeof(struct endpoint) == 24, "as on the wire");

/* The numbers of a manifest that addresses are made of. */
struct shape {
    uint32_t layers, experts;
    uint64_t stride;
};

struct rail {
    struct ibv_context *context;
    struct ibv_pd *pd;
    int gid_index;
    union ibv_gid gid;
    struct ibv_port_attr port;
};

/* 1 when all came, 0 when the other side hung up before the first byte. */
static inline int read_all(int fd, void *to, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t got = read(fd, (char *)to + at, bytes - at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        at += (size_t)got;
    }
    return 1;
}

static inline int write_all(int fd, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t put = write(fd, (const char *)from + at, bytes - at);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return 0;
        at += (size_t)put;
    }
    return 1;
}

/* A whole number of the manifest, which is flat but for one list: a key occurs once. */
static inline uint64_t manifest_number(const char *json, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    const char *at = strstr(json, quoted);
    if (!at) die("the manifest has no %s", key);
    at += strlen(quoted);
    at += strspn(at, " \t\r\n");
    if (*at++ != ':') die("the manifest's %s has no value", key);
    at += strspn(at, " \t\r\n");
    char *end;
    errno = 0;
    unsigned long long value = strtoull(at, &end, 10);
    if (errno || end == at) die("the manifest's %s is no number", key);
    return value;
}

static inline struct shape manifest_shape(const char *json) {
    uint64_t layers = manifest_number(json, "num_moe_layers");
    uint64_t experts = manifest_number(json, "num_experts");
    uint64_t stride = manifest_number(json, "record_stride");
    if (!layers || layers > LAYERS_MAX || !experts || experts > 65536 || !stride || stride > 1u << 30)
        die("the manifest's sizes are beyond reason");
    return (struct shape){(uint32_t)layers, (uint32_t)experts, stride};
}

/* "dev" or "dev:gid"; without an index it is 3, as v1 tools have it. */
static inline struct rail open_rail(const char *spec) {
    char name[64];
    struct rail rail = {.gid_index = 3};
    size_t length = strcspn(spec, ":");
    if (length >= sizeof name) die("no device has a name as long as %s", spec);
    memcpy(name, spec, length);
    name[length] = 0;
    if (spec[length]) rail.gid_index = atoi(spec + length + 1);
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    for (int i = 0; list && i < count; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name)) rail.context = ibv_open_device(list[i]);
    if (list) ibv_free_device_list(list);
    if (!rail.context) die("device %s cannot be opened", name);
    if (ibv_query_port(rail.context, V1_PORT, &rail.port)) die("%s: no port %d", name, V1_PORT);
    if (ibv_query_gid(rail.context, V1_PORT, rail.gid_index, &rail.gid)) die("%s: no GID %d", name, rail.gid_index);
    rail.pd = ibv_alloc_pd(rail.context);
    if (!rail.pd) die("%s: no protection domain", name);
    return rail;
}

/* A queue pair in INIT and what the other side has to know of it; NULL where the device has none left. */
static inline struct ibv_qp *make_qp(const struct rail *rail, struct ibv_cq *cq, int access, struct endpoint *own) {
    struct ibv_qp_init_attr wanted = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = READS_MAX, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *qp = ibv_create_qp(rail->pd, &wanted);
    if (!qp) return NULL;
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT, .pkey_index = 0, .port_num = V1_PORT, .qp_access_flags = (unsigned)access};
    if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
        ibv_destroy_qp(qp);
        return NULL;
    }
    own->qpn = qp->qp_num;
    own->psn = (uint32_t)random() & 0xffffff;
    memcpy(own->gid, rail->gid.raw, 16);
    return qp;
}

/* To RTS; 0 is done. */
static inline int connect_qp(const struct rail *rail, struct ibv_qp *qp, const struct endpoint *own,
                             const struct endpoint *other) {
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = rail->port.active_mtu,
        .dest_qp_num = other->qpn,
        .rq_psn = other->psn,
        .max_dest_rd_atomic = READS_MAX,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .port_num = V1_PORT,
                    .grh = {.hop_limit = 64, .sgid_index = (uint8_t)rail->gid_index}},
    };
    memcpy(rtr.ah_attr.grh.dgid.raw, other->gid, 16);
    int failed = ibv_modify_qp(qp, &rtr,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (failed) return failed;
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .sq_psn = own->psn,
        .max_rd_atomic = READS_MAX,
    };
    return ibv_modify_qp(qp, &rts,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC);
}

static inline void seed(void) {
    unsigned value = (unsigned)getpid();
    FILE *file = fopen("/dev/urandom", "rb");
    if (file) {
        if (fread(&value, sizeof value, 1, file) != 1) value = (unsigned)getpid();
        fclose(file);
    }
    srandom(value);
}

#endif
