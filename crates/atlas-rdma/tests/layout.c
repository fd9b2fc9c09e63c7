/* Prints what the installed <infiniband/verbs.h> says of everything that the crate uses; layout.rs compares it
   with the bindings. It is compiled, and needs no library to run. */
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdio.h>

#undef ibv_query_port
#undef ibv_reg_mr

/* The functions that ../src/sys/functions.rs looks up by name, as it calls them. */
#define PROTOTYPE(result, name, ...) \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&name), result (*)(__VA_ARGS__)), #name " has another prototype")

PROTOTYPE(struct ibv_device **, ibv_get_device_list, int *);
PROTOTYPE(void, ibv_free_device_list, struct ibv_device **);
PROTOTYPE(__be64, ibv_get_device_guid, struct ibv_device *);
PROTOTYPE(struct ibv_context *, ibv_open_device, struct ibv_device *);
PROTOTYPE(int, ibv_close_device, struct ibv_context *);
PROTOTYPE(int, ibv_query_device, struct ibv_context *, struct ibv_device_attr *);
PROTOTYPE(int, ibv_query_port, struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *);
PROTOTYPE(int, ibv_get_async_event, struct ibv_context *, struct ibv_async_event *);
PROTOTYPE(void, ibv_ack_async_event, struct ibv_async_event *);
PROTOTYPE(struct ibv_pd *, ibv_alloc_pd, struct ibv_context *);
PROTOTYPE(int, ibv_dealloc_pd, struct ibv_pd *);
PROTOTYPE(struct ibv_mr *, ibv_reg_mr, struct ibv_pd *, void *, size_t, int);
PROTOTYPE(struct ibv_mr *, ibv_reg_mr_iova2, struct ibv_pd *, void *, size_t, uint64_t, unsigned int);
PROTOTYPE(int, ibv_dereg_mr, struct ibv_mr *);
PROTOTYPE(struct ibv_comp_channel *, ibv_create_comp_channel, struct ibv_context *);
PROTOTYPE(int, ibv_destroy_comp_channel, struct ibv_comp_channel *);
PROTOTYPE(struct ibv_cq *, ibv_create_cq, struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
PROTOTYPE(int, ibv_destroy_cq, struct ibv_cq *);
PROTOTYPE(int, ibv_get_cq_event, struct ibv_comp_channel *, struct ibv_cq **, void **);
PROTOTYPE(void, ibv_ack_cq_events, struct ibv_cq *, unsigned int);
PROTOTYPE(struct ibv_qp *, ibv_create_qp, struct ibv_pd *, struct ibv_qp_init_attr *);
PROTOTYPE(int, ibv_modify_qp, struct ibv_qp *, struct ibv_qp_attr *, int);
PROTOTYPE(int, ibv_query_qp, struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
PROTOTYPE(int, ibv_destroy_qp, struct ibv_qp *);
PROTOTYPE(ssize_t, _ibv_query_gid_table, struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, size_t);

#define FACT(name, value) printf("%s %lld\n", name, (long long)(value))
#define SIZE(kind, type) FACT("size " #type, sizeof(kind type))
/* A struct that is passed with its size, so that a newer header may have a longer one. */
#define LEAST(kind, type) FACT("least " #type, sizeof(kind type))
#define OFFSET(kind, type, field) FACT(#type "." #field, offsetof(kind type, field))
#define CONSTANT(name) FACT(#name, name)

int main(void)
{
	/* This struct grows at its start, so places count from its last field. */
	FACT("verbs_context.query_port before context",
	     offsetof(struct verbs_context, context) - offsetof(struct verbs_context, query_port));
	FACT("verbs_context.sz before context",
	     offsetof(struct verbs_context, context) - offsetof(struct verbs_context, sz));
	FACT("verbs_context.context before its end",
	     sizeof(struct verbs_context) - offsetof(struct verbs_context, context));
	SIZE(union, ibv_gid);
	OFFSET(union, ibv_gid, raw);
	SIZE(struct, ibv_device);
	OFFSET(struct, ibv_device, node_type);
	OFFSET(struct, ibv_device, transport_type);
	OFFSET(struct, ibv_device, name);
	OFFSET(struct, ibv_device, dev_name);
	SIZE(struct, ibv_device_attr);
	OFFSET(struct, ibv_device_attr, fw_ver);
	OFFSET(struct, ibv_device_attr, node_guid);
	OFFSET(struct, ibv_device_attr, max_mr_size);
	OFFSET(struct, ibv_device_attr, max_qp);
	OFFSET(struct, ibv_device_attr, max_qp_wr);
	OFFSET(struct, ibv_device_attr, max_sge);
	OFFSET(struct, ibv_device_attr, max_sge_rd);
	OFFSET(struct, ibv_device_attr, max_cqe);
	OFFSET(struct, ibv_device_attr, max_mr);
	OFFSET(struct, ibv_device_attr, max_qp_rd_atom);
	OFFSET(struct, ibv_device_attr, max_qp_init_rd_atom);
	OFFSET(struct, ibv_device_attr, phys_port_cnt);
	SIZE(struct, ibv_context);
	OFFSET(struct, ibv_context, ops);
	OFFSET(struct, ibv_context, async_fd);
	OFFSET(struct, ibv_context, abi_compat);
	SIZE(struct, ibv_context_ops);
	OFFSET(struct, ibv_context_ops, poll_cq);
	OFFSET(struct, ibv_context_ops, req_notify_cq);
	OFFSET(struct, ibv_context_ops, post_send);
	SIZE(struct, ibv_mr);
	OFFSET(struct, ibv_mr, addr);
	OFFSET(struct, ibv_mr, length);
	OFFSET(struct, ibv_mr, lkey);
	OFFSET(struct, ibv_mr, rkey);
	SIZE(struct, ibv_pd);
	OFFSET(struct, ibv_pd, context);
	SIZE(struct, ibv_comp_channel);
	OFFSET(struct, ibv_comp_channel, context);
	OFFSET(struct, ibv_comp_channel, fd);
	SIZE(struct, ibv_cq);
	OFFSET(struct, ibv_cq, context);
	OFFSET(struct, ibv_cq, channel);
	OFFSET(struct, ibv_cq, cqe);
	SIZE(struct, ibv_qp);
	OFFSET(struct, ibv_qp, context);
	OFFSET(struct, ibv_qp, pd);
	OFFSET(struct, ibv_qp, send_cq);
	OFFSET(struct, ibv_qp, qp_num);
	OFFSET(struct, ibv_qp, state);
	OFFSET(struct, ibv_qp, qp_type);
	SIZE(struct, ibv_qp_cap);
	OFFSET(struct, ibv_qp_cap, max_send_wr);
	OFFSET(struct, ibv_qp_cap, max_recv_wr);
	OFFSET(struct, ibv_qp_cap, max_send_sge);
	OFFSET(struct, ibv_qp_cap, max_recv_sge);
	OFFSET(struct, ibv_qp_cap, max_inline_data);
	SIZE(struct, ibv_qp_init_attr);
	OFFSET(struct, ibv_qp_init_attr, send_cq);
	OFFSET(struct, ibv_qp_init_attr, recv_cq);
	OFFSET(struct, ibv_qp_init_attr, srq);
	OFFSET(struct, ibv_qp_init_attr, cap);
	OFFSET(struct, ibv_qp_init_attr, qp_type);
	OFFSET(struct, ibv_qp_init_attr, sq_sig_all);
	SIZE(struct, ibv_qp_attr);
	OFFSET(struct, ibv_qp_attr, qp_state);
	OFFSET(struct, ibv_qp_attr, path_mtu);
	OFFSET(struct, ibv_qp_attr, rq_psn);
	OFFSET(struct, ibv_qp_attr, sq_psn);
	OFFSET(struct, ibv_qp_attr, dest_qp_num);
	OFFSET(struct, ibv_qp_attr, qp_access_flags);
	OFFSET(struct, ibv_qp_attr, ah_attr);
	OFFSET(struct, ibv_qp_attr, pkey_index);
	OFFSET(struct, ibv_qp_attr, max_rd_atomic);
	OFFSET(struct, ibv_qp_attr, max_dest_rd_atomic);
	OFFSET(struct, ibv_qp_attr, min_rnr_timer);
	OFFSET(struct, ibv_qp_attr, port_num);
	OFFSET(struct, ibv_qp_attr, timeout);
	OFFSET(struct, ibv_qp_attr, retry_cnt);
	OFFSET(struct, ibv_qp_attr, rnr_retry);
	SIZE(struct, ibv_ah_attr);
	OFFSET(struct, ibv_ah_attr, grh);
	OFFSET(struct, ibv_ah_attr, dlid);
	OFFSET(struct, ibv_ah_attr, sl);
	OFFSET(struct, ibv_ah_attr, is_global);
	OFFSET(struct, ibv_ah_attr, port_num);
	SIZE(struct, ibv_global_route);
	OFFSET(struct, ibv_global_route, dgid);
	OFFSET(struct, ibv_global_route, sgid_index);
	OFFSET(struct, ibv_global_route, hop_limit);
	OFFSET(struct, ibv_global_route, traffic_class);
	SIZE(struct, ibv_sge);
	OFFSET(struct, ibv_sge, addr);
	OFFSET(struct, ibv_sge, length);
	OFFSET(struct, ibv_sge, lkey);
	SIZE(struct, ibv_send_wr);
	OFFSET(struct, ibv_send_wr, wr_id);
	OFFSET(struct, ibv_send_wr, next);
	OFFSET(struct, ibv_send_wr, sg_list);
	OFFSET(struct, ibv_send_wr, num_sge);
	OFFSET(struct, ibv_send_wr, opcode);
	OFFSET(struct, ibv_send_wr, send_flags);
	OFFSET(struct, ibv_send_wr, wr.rdma.remote_addr);
	OFFSET(struct, ibv_send_wr, wr.rdma.rkey);
	SIZE(struct, ibv_wc);
	OFFSET(struct, ibv_wc, wr_id);
	OFFSET(struct, ibv_wc, status);
	OFFSET(struct, ibv_wc, vendor_err);
	OFFSET(struct, ibv_wc, byte_len);
	OFFSET(struct, ibv_wc, qp_num);
	SIZE(struct, ibv_async_event);
	OFFSET(struct, ibv_async_event, element.qp);
	OFFSET(struct, ibv_async_event, element.port_num);
	OFFSET(struct, ibv_async_event, event_type);
	LEAST(struct, ibv_port_attr);
	OFFSET(struct, ibv_port_attr, state);
	OFFSET(struct, ibv_port_attr, active_mtu);
	OFFSET(struct, ibv_port_attr, gid_tbl_len);
	OFFSET(struct, ibv_port_attr, max_msg_sz);
	OFFSET(struct, ibv_port_attr, lid);
	OFFSET(struct, ibv_port_attr, active_width);
	OFFSET(struct, ibv_port_attr, active_speed);
	OFFSET(struct, ibv_port_attr, link_layer);
	LEAST(struct, ibv_gid_entry);
	OFFSET(struct, ibv_gid_entry, gid);
	OFFSET(struct, ibv_gid_entry, gid_index);
	OFFSET(struct, ibv_gid_entry, port_num);
	OFFSET(struct, ibv_gid_entry, gid_type);
	OFFSET(struct, ibv_gid_entry, ndev_ifindex);
	CONSTANT(IBV_NODE_CA);
	CONSTANT(IBV_NODE_RNIC);
	CONSTANT(IBV_TRANSPORT_IB);
	CONSTANT(IBV_TRANSPORT_IWARP);
	CONSTANT(IBV_TRANSPORT_USNIC);
	CONSTANT(IBV_TRANSPORT_USNIC_UDP);
	CONSTANT(IBV_TRANSPORT_UNSPECIFIED);
	CONSTANT(IBV_LINK_LAYER_INFINIBAND);
	CONSTANT(IBV_LINK_LAYER_ETHERNET);
	CONSTANT(IBV_GID_TYPE_IB);
	CONSTANT(IBV_GID_TYPE_ROCE_V1);
	CONSTANT(IBV_GID_TYPE_ROCE_V2);
	CONSTANT(IBV_PORT_DOWN);
	CONSTANT(IBV_PORT_INIT);
	CONSTANT(IBV_PORT_ARMED);
	CONSTANT(IBV_PORT_ACTIVE);
	CONSTANT(IBV_PORT_ACTIVE_DEFER);
	CONSTANT(IBV_MTU_256);
	CONSTANT(IBV_MTU_512);
	CONSTANT(IBV_MTU_1024);
	CONSTANT(IBV_MTU_2048);
	CONSTANT(IBV_MTU_4096);
	CONSTANT(IBV_EVENT_QP_FATAL);
	CONSTANT(IBV_EVENT_QP_REQ_ERR);
	CONSTANT(IBV_EVENT_QP_ACCESS_ERR);
	CONSTANT(IBV_EVENT_DEVICE_FATAL);
	CONSTANT(IBV_EVENT_PORT_ACTIVE);
	CONSTANT(IBV_EVENT_PORT_ERR);
	CONSTANT(IBV_EVENT_GID_CHANGE);
	CONSTANT(IBV_WC_SUCCESS);
	CONSTANT(IBV_WC_LOC_LEN_ERR);
	CONSTANT(IBV_WC_LOC_QP_OP_ERR);
	CONSTANT(IBV_WC_LOC_PROT_ERR);
	CONSTANT(IBV_WC_LOC_ACCESS_ERR);
	CONSTANT(IBV_WC_WR_FLUSH_ERR);
	CONSTANT(IBV_WC_REM_INV_REQ_ERR);
	CONSTANT(IBV_WC_REM_ACCESS_ERR);
	CONSTANT(IBV_WC_REM_OP_ERR);
	CONSTANT(IBV_WC_RETRY_EXC_ERR);
	CONSTANT(IBV_WC_RNR_RETRY_EXC_ERR);
	CONSTANT(IBV_WC_GENERAL_ERR);
	CONSTANT(IBV_ACCESS_LOCAL_WRITE);
	CONSTANT(IBV_ACCESS_REMOTE_READ);
	CONSTANT(IBV_ACCESS_RELAXED_ORDERING);
	CONSTANT(IBV_QPT_RC);
	CONSTANT(IBV_QPS_RESET);
	CONSTANT(IBV_QPS_INIT);
	CONSTANT(IBV_QPS_RTR);
	CONSTANT(IBV_QPS_RTS);
	CONSTANT(IBV_QPS_ERR);
	CONSTANT(IBV_QP_STATE);
	CONSTANT(IBV_QP_ACCESS_FLAGS);
	CONSTANT(IBV_QP_PKEY_INDEX);
	CONSTANT(IBV_QP_PORT);
	CONSTANT(IBV_QP_AV);
	CONSTANT(IBV_QP_PATH_MTU);
	CONSTANT(IBV_QP_TIMEOUT);
	CONSTANT(IBV_QP_RETRY_CNT);
	CONSTANT(IBV_QP_RNR_RETRY);
	CONSTANT(IBV_QP_RQ_PSN);
	CONSTANT(IBV_QP_MAX_QP_RD_ATOMIC);
	CONSTANT(IBV_QP_MIN_RNR_TIMER);
	CONSTANT(IBV_QP_SQ_PSN);
	CONSTANT(IBV_QP_MAX_DEST_RD_ATOMIC);
	CONSTANT(IBV_QP_DEST_QPN);
	CONSTANT(IBV_WR_RDMA_READ);
	CONSTANT(IBV_SEND_SIGNALED);
	return 0;
}
