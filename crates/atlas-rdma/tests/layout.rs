//! The bindings against the header of the machine that runs the tests: sizes, offsets, constants and prototypes.

// The crate's own file, because what it has is not part of the crate's interface.
#[allow(
    dead_code,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    missing_docs,
    unreachable_pub,
    clippy::all
)]
#[path = "../src/sys/bindings.rs"]
mod bindings;

use bindings::*;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

macro_rules! facts {
    (
        size { $($size:ident [ $($($field:ident).+),* ])* }
        least { $($least:ident [ $($($lfield:ident).+),* ])* }
        constants { $($constant:ident)* }
    ) => {{
        let mut facts: BTreeMap<&str, i64> = BTreeMap::new();
        $(
            facts.insert(concat!("size ", stringify!($size)), size_of::<$size>() as i64);
            $(facts.insert(
                concat!(stringify!($size), ".", facts!(@dotted $($field).+)),
                offset_of!($size, $($field).+) as i64,
            );)*
        )*
        $(
            facts.insert(concat!("least ", stringify!($least)), size_of::<$least>() as i64);
            $(facts.insert(
                concat!(stringify!($least), ".", facts!(@dotted $($lfield).+)),
                offset_of!($least, $($lfield).+) as i64,
            );)*
        )*
        $(facts.insert(stringify!($constant), i64::from($constant));)*
        facts
    }};
    (@dotted $first:ident $(. $rest:ident)*) => { concat!(stringify!($first) $(, ".", stringify!($rest))*) };
}

fn of_bindings() -> BTreeMap<&'static str, i64> {
    let mut facts = facts! {
        size {
            ibv_gid [ raw ]
            ibv_device [ node_type, transport_type, name, dev_name ]
            ibv_device_attr [ fw_ver, node_guid, max_mr_size, max_qp, max_qp_wr, max_sge, max_sge_rd, max_cqe, max_mr, max_qp_rd_atom, max_qp_init_rd_atom, phys_port_cnt ]
            ibv_context [ ops, async_fd, abi_compat ]
            ibv_context_ops [ poll_cq, req_notify_cq, post_send ]
            ibv_mr [ addr, length, lkey, rkey ]
            ibv_pd [ context ]
            ibv_comp_channel [ context, fd ]
            ibv_cq [ context, channel, cqe ]
            ibv_qp [ context, pd, send_cq, qp_num, state, qp_type ]
            ibv_qp_cap [ max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data ]
            ibv_qp_init_attr [ send_cq, recv_cq, srq, cap, qp_type, sq_sig_all ]
            ibv_qp_attr [ qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, ah_attr, pkey_index, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry ]
            ibv_ah_attr [ grh, dlid, sl, is_global, port_num ]
            ibv_global_route [ dgid, sgid_index, hop_limit, traffic_class ]
            ibv_sge [ addr, length, lkey ]
            ibv_send_wr [ wr_id, next, sg_list, num_sge, opcode, send_flags, wr.rdma.remote_addr, wr.rdma.rkey ]
            ibv_wc [ wr_id, status, vendor_err, byte_len, qp_num ]
            ibv_async_event [ element.qp, element.port_num, event_type ]
        }
        least {
            ibv_port_attr [ state, active_mtu, gid_tbl_len, max_msg_sz, lid, active_width, active_speed, link_layer ]
            ibv_gid_entry [ gid, gid_index, port_num, gid_type, ndev_ifindex ]
        }
        constants {
            IBV_NODE_CA IBV_NODE_RNIC IBV_TRANSPORT_IB IBV_TRANSPORT_IWARP IBV_TRANSPORT_USNIC
            IBV_TRANSPORT_USNIC_UDP IBV_TRANSPORT_UNSPECIFIED IBV_LINK_LAYER_INFINIBAND IBV_LINK_LAYER_ETHERNET
            IBV_GID_TYPE_IB IBV_GID_TYPE_ROCE_V1 IBV_GID_TYPE_ROCE_V2 IBV_PORT_DOWN IBV_PORT_INIT IBV_PORT_ARMED
            IBV_PORT_ACTIVE IBV_PORT_ACTIVE_DEFER IBV_MTU_256 IBV_MTU_512 IBV_MTU_1024 IBV_MTU_2048 IBV_MTU_4096
            IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR IBV_EVENT_QP_ACCESS_ERR IBV_EVENT_DEVICE_FATAL
            IBV_EVENT_PORT_ACTIVE IBV_EVENT_PORT_ERR IBV_EVENT_GID_CHANGE IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR
            IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_PROT_ERR IBV_WC_LOC_ACCESS_ERR IBV_WC_WR_FLUSH_ERR
            IBV_WC_REM_INV_REQ_ERR IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR IBV_WC_RETRY_EXC_ERR
            IBV_WC_RNR_RETRY_EXC_ERR IBV_WC_GENERAL_ERR IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_READ
            IBV_ACCESS_RELAXED_ORDERING IBV_QPT_RC IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS
            IBV_QPS_ERR IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV IBV_QP_PATH_MTU
            IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC
            IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_DEST_QPN IBV_WR_RDMA_READ
            IBV_SEND_SIGNALED
        }
    };
    // This struct grows at its start, so places count from its last field.
    let context = offset_of!(verbs_context, context);
    for (name, value) in [
        (
            "verbs_context.query_port before context",
            context - offset_of!(verbs_context, query_port),
        ),
        (
            "verbs_context.sz before context",
            context - offset_of!(verbs_context, sz),
        ),
        (
            "verbs_context.context before its end",
            size_of::<verbs_context>() - context,
        ),
    ] {
        facts.insert(name, value as i64);
    }
    facts
}

/// What the C program says of the installed header.
fn of_header() -> BTreeMap<String, i64> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/layout.c");
    let out = tempfile::tempdir().unwrap();
    let program = out.path().join("layout");
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(&cc)
        .args(["-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(&source)
        .output()
        .unwrap_or_else(|error| {
            panic!("{cc} cannot be run: {error}; run 'apt install gcc libc6-dev'")
        });
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(
        !errors.contains("infiniband/verbs.h: No such file"),
        "the header <infiniband/verbs.h> is missing; run 'apt install libibverbs-dev' (Fedora: 'dnf install \
         rdma-core-devel')"
    );
    assert!(compiled.status.success(), "{errors}");
    let output = Command::new(&program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

#[test]
fn the_bindings_are_laid_out_as_the_installed_header_says() {
    let header = of_header();
    let bindings = of_bindings();
    let names: Vec<&str> = header.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        bindings.keys().copied().collect::<Vec<_>>(),
        "both ask for the same"
    );
    let wrong: Vec<String> = bindings
        .iter()
        .filter(|&(&name, &ours)| {
            let theirs = header[name];
            // A longer one is told how much of it the crate knows.
            if name.starts_with("least ") {
                ours > theirs
            } else {
                ours != theirs
            }
        })
        .map(|(name, ours)| format!("{name}: {ours} here, {} in the header", header[*name]))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
