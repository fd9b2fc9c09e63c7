#!/bin/sh
# Writes ../src/sys/bindings.rs from the installed <infiniband/verbs.h>.
#
# Needed by whoever changes the list below, never by a build: bindgen (0.72.1 made the file that is
# checked in: cargo install bindgen-cli --version 0.72.1 --locked), libclang, and the header
# (Debian: apt install libclang-dev libibverbs-dev; version 44 made the file).
#
# The functions are not bound here: the crate looks them up at run time (../src/sys/functions.rs), so
# only types and constants are taken. What differs between machines (pthread types) comes from the
# libc crate; layouts are checked by ../tests/layout.rs against the header of the machine it runs on.
set -eu
export LC_ALL=C
cd "$(dirname "$0")"

types='verbs_context|ibv_context|ibv_device|ibv_device_attr|ibv_port_attr|ibv_gid|ibv_gid_entry'
types="$types|ibv_pd|ibv_mr|ibv_cq|ibv_comp_channel|ibv_qp|ibv_qp_init_attr|ibv_qp_attr"
types="$types|ibv_send_wr|ibv_sge|ibv_wc|ibv_async_event"
types="$types|ibv_access_flags|ibv_send_flags|ibv_qp_attr_mask|ibv_gid_type"
constants='IBV_(NODE|TRANSPORT|LINK_LAYER|GID_TYPE|PORT)_[A-Z0-9_]*'
constants="$constants|IBV_(EVENT|WC|QPT|QPS|MTU)_[A-Z0-9_]*"
constants="$constants|IBV_QP_[A-Z_]*|IBV_ACCESS_[A-Z_]*|IBV_WR_RDMA_READ|IBV_SEND_SIGNALED"

# Known by pointer alone.
opaque='ibv_srq|ibv_wq|ibv_wq_.*|ibv_mw|ibv_mw_bind|ibv_mw_type|ibv_ah|ibv_dm|ibv_td|ibv_xrcd|ibv_counters'
opaque="$opaque|ibv_flow|ibv_flow_.*|ibv_cq_ex|ibv_cq_init_attr_ex|ibv_qp_ex|ibv_qp_init_attr_ex|ibv_qp_open_attr"
opaque="$opaque|ibv_srq_init_attr_ex|ibv_rwq_ind_table|ibv_rwq_ind_table_init_attr|ibv_values_ex"
opaque="$opaque|ibv_recv_wr|ibv_ops_wr|ibv_modify_cq_attr|ibv_parent_domain_init_attr|ibv_alloc_dm_attr"
opaque="$opaque|ibv_counters_init_attr|ibv_counter_attach_attr|ibv_qp_rate_limit_attr"
opaque="$opaque|ibv_device_attr_ex|ibv_query_device_ex_input|ibv_td_init_attr|ibv_xrcd_init_attr|ib_uverbs_.*"

bindgen wrapper.h \
    --rust-target 1.85 --rust-edition 2024 --use-core --no-layout-tests --no-doc-comments --merge-extern-blocks \
    --default-enum-style consts --no-prepend-enum-name --no-derive-debug \
    --allowlist-type "$types" --allowlist-var "$constants" --ignore-functions \
    --opaque-type "$opaque" \
    --blocklist-type 'pthread_mutex_t|pthread_cond_t|__pthread_.*|__atomic_.*|_compat_ibv_port_attr' \
    --raw-line '// Written by bindings/generate.sh; do not edit.' \
    --raw-line '' \
    --raw-line 'pub use libc::{pthread_cond_t, pthread_mutex_t};' \
    --raw-line '' \
    --raw-line '#[repr(C)]' \
    --raw-line 'pub struct _compat_ibv_port_attr {' \
    --raw-line '    _private: [u8; 0],' \
    --raw-line '}' \
    --output ../src/sys/bindings.rs
