//! Why a queue pair did not go to its next state: the kernel says EINVAL, people need to know which attribute.

use crate::attributes::{DeviceAttributes, GidEntry, LinkLayer, PortAttributes, PortState};
use crate::path::{Path, Step};
use crate::timers::{ack_timeout, ack_timeout_code};

/// What is known when a step fails.
pub(crate) struct Known<'a> {
    pub(crate) device: &'a DeviceAttributes,
    /// `None` where the port could not be asked.
    pub(crate) port: Option<&'a PortAttributes>,
    /// `None` where the table could not be read.
    pub(crate) gids: Option<&'a [GidEntry]>,
}

/// The attributes that exceed a limit, as sentences; what else it can be where none does.
pub(crate) fn why(
    step: Step,
    errno: i32,
    port: u8,
    path: Option<&Path>,
    known: &Known<'_>,
) -> String {
    let mut reasons = Vec::new();
    check_port(port, known, &mut reasons);
    if let Some(path) = path {
        match step {
            Step::ReadyToReceive => check_route(path, known, &mut reasons),
            Step::ReadyToSend => check_sending(path, known, &mut reasons),
            Step::Init | Step::Error => {}
        }
    }
    if reasons.is_empty() {
        reasons.push(unknown(step, errno).to_owned());
    }
    reasons.join("; ")
}

fn check_port(port: u8, known: &Known<'_>, reasons: &mut Vec<String>) {
    if port == 0 || port > known.device.ports {
        reasons.push(format!(
            "port {port} does not exist, the device has {}",
            known.device.ports
        ));
    }
    if let Some(attributes) = known.port {
        if attributes.state != PortState::Active {
            reasons.push(format!("the port is not active ({:?})", attributes.state));
        }
    }
}

fn check_route(path: &Path, known: &Known<'_>, reasons: &mut Vec<String>) {
    if let Some(port) = known.port {
        if path.mtu > port.active_mtu {
            reasons.push(format!(
                "MTU {} exceeds the port's active MTU {}",
                path.mtu.bytes(),
                port.active_mtu.bytes()
            ));
        }
        if path.link_layer != port.link_layer {
            reasons.push(format!(
                "the path is for {:?}, the port is {:?}",
                path.link_layer, port.link_layer
            ));
        }
        if port.link_layer == LinkLayer::Ethernet && !path.has_grh() {
            reasons.push("the path has no global route (GRH), which Ethernet needs".to_owned());
        }
        if port.link_layer == LinkLayer::InfiniBand && !path.has_grh() && path.remote.lid == 0 {
            reasons.push(
                "the remote LID is 0: is a subnet manager running, and did the other end send its LID?".to_owned(),
            );
        }
        if path.has_grh() && path.gid_index >= port.gid_table_len {
            reasons.push(format!(
                "GID index {} is not in the port's table of {} entries",
                path.gid_index, port.gid_table_len
            ));
        }
    }
    if path.has_grh() {
        check_gids(path, known, reasons);
    }
    if u32::from(path.reads_in) > known.device.max_qp_rd_atom {
        reasons.push(format!(
            "{} READs answered at once (max_dest_rd_atomic) exceed the device's {}",
            path.reads_in, known.device.max_qp_rd_atom
        ));
    }
    if path.service_level > 15 {
        reasons.push(format!("service level {} exceeds 15", path.service_level));
    }
}

fn check_gids(path: &Path, known: &Known<'_>, reasons: &mut Vec<String>) {
    if path.remote.gid.is_empty() {
        reasons.push("the remote GID is empty".to_owned());
    }
    let Some(gids) = known.gids else { return };
    match gids.iter().find(|entry| entry.index == path.gid_index) {
        None => reasons.push(format!(
            "GID index {} is empty; the table may have changed since it was read",
            path.gid_index
        )),
        Some(entry) if path.link_layer == LinkLayer::Ethernet && entry.netdev.is_none() => {
            reasons.push(format!(
                "GID index {} ({}) belongs to an interface outside this network namespace",
                path.gid_index, entry.gid
            ));
        }
        Some(entry) if entry.gid.ip().is_ipv4() != path.remote.gid.ip().is_ipv4() => {
            reasons.push(format!(
                "the local GID {} and the remote GID {} are of different address families",
                entry.gid.ip(),
                path.remote.gid.ip()
            ));
        }
        Some(_) => {}
    }
}

fn check_sending(path: &Path, known: &Known<'_>, reasons: &mut Vec<String>) {
    if u32::from(path.reads_out) > known.device.max_qp_init_rd_atom {
        reasons.push(format!(
            "{} READs under way (max_rd_atomic) exceed the device's {}",
            path.reads_out, known.device.max_qp_init_rd_atom
        ));
    }
    if path.retry_count > 7 {
        reasons.push(format!("retry count {} exceeds 7", path.retry_count));
    }
    if path.rnr_retry > 7 {
        reasons.push(format!("RNR retry count {} exceeds 7", path.rnr_retry));
    }
}

fn unknown(step: Step, errno: i32) -> &'static str {
    match (step, errno) {
        (
            Step::ReadyToReceive,
            libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ENOENT | libc::ENODEV,
        ) => {
            "the remote GID was not resolved to a link address: can the two addresses of this rail ping each other?"
        }
        (Step::ReadyToReceive, _) => {
            "no attribute exceeds a known limit; it may be that the remote GID cannot be reached from the local one \
             (can the two addresses of this rail ping each other?)"
        }
        (Step::Init, _) => {
            "no attribute exceeds a known limit; is the pkey index in the port's table?"
        }
        (Step::ReadyToSend | Step::Error, _) => {
            "no attribute exceeds a known limit; is the queue pair in the state before?"
        }
    }
}

/// Every attribute of INIT.
pub(crate) fn init_sent(port: u8, pkey_index: u16, remote_read: bool) -> String {
    let access = if remote_read { "REMOTE_READ" } else { "none" };
    format!("port {port}, pkey index {pkey_index}, access {access}")
}

/// Every attribute of RTR.
pub(crate) fn rtr_sent(path: &Path) -> String {
    let route = if path.has_grh() {
        format!(
            "local GID index {}, remote GID {}, hop limit {}, traffic class {}",
            path.gid_index, path.remote.gid, path.hop_limit, path.traffic_class
        )
    } else {
        "no global route".to_owned()
    };
    format!(
        "port {}, MTU {}, remote QP {}, remote PSN {}, remote LID {}, {route}, service level {}, READs answered {}, \
         minimal RNR timer {:?}",
        path.port,
        path.mtu.bytes(),
        path.remote.qpn,
        path.remote.psn,
        path.remote.lid,
        path.service_level,
        path.reads_in,
        path.min_rnr_timer
    )
}

/// Every attribute of RTS.
pub(crate) fn rts_sent(path: &Path) -> String {
    format!(
        "PSN {}, time-out {:?}, retries {}, RNR retries {}, READs under way {}",
        path.local_psn,
        ack_timeout(ack_timeout_code(path.timeout)),
        path.retry_count,
        path.rnr_retry,
        path.reads_out
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attributes::{Gid, GidType, Mtu};
    use crate::path::RemoteEndpoint;

    fn device() -> DeviceAttributes {
        DeviceAttributes {
            firmware: String::new(),
            node_guid: 1,
            max_mr_bytes: 1 << 40,
            max_mr: 100,
            max_qp: 100,
            max_qp_wr: 100,
            max_sge: 8,
            max_sge_rd: 8,
            max_cqe: 1000,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 8,
            ports: 1,
        }
    }

    fn port(link_layer: LinkLayer) -> PortAttributes {
        PortAttributes {
            state: PortState::Active,
            link_layer,
            lid: 0,
            active_mtu: Mtu::B1024,
            max_message_bytes: 1 << 30,
            gid_table_len: 4,
            link_mbit_per_s: 0,
        }
    }

    fn path(link_layer: LinkLayer) -> Path {
        let remote = RemoteEndpoint {
            qpn: 17,
            psn: 5,
            gid: Gid::of("10.0.0.2".parse().unwrap()),
            lid: 0,
        };
        let mut path = Path::new(1, link_layer, Mtu::B1024, remote);
        path.gid_index = 1;
        path.reads_out = 8;
        path
    }

    fn gid(netdev: Option<&str>) -> GidEntry {
        GidEntry {
            index: 1,
            gid: Gid::of("10.0.0.1".parse().unwrap()),
            kind: GidType::RoceV2,
            netdev: netdev.map(str::to_owned),
            prefix_len: Some(24),
        }
    }

    fn explain(step: Step, path: &Path, port: &PortAttributes, gids: &[GidEntry]) -> String {
        let known = Known {
            device: &device(),
            port: Some(port),
            gids: Some(gids),
        };
        why(step, libc::EINVAL, path.port, Some(path), &known)
    }

    #[test]
    fn each_attribute_above_its_limit_is_named_with_the_limit() {
        let rtr = Step::ReadyToReceive;
        let ethernet = port(LinkLayer::Ethernet);
        type Change = fn(&mut Path);
        let cases: [(Change, &str); 6] = [
            (
                |p| p.mtu = Mtu::B4096,
                "MTU 4096 exceeds the port's active MTU 1024",
            ),
            (|p| p.reads_in = 32, "exceed the device's 16"),
            (
                |p| p.gid_index = 9,
                "GID index 9 is not in the port's table of 4 entries",
            ),
            (|p| p.gid_index = 2, "GID index 2 is empty"),
            (|p| p.port = 3, "port 3 does not exist, the device has 1"),
            (
                |p| p.remote.gid = Gid::of("fd00::2".parse().unwrap()),
                "different address families",
            ),
        ];
        for (change, expected) in cases {
            let mut path = path(LinkLayer::Ethernet);
            change(&mut path);
            let text = explain(rtr, &path, &ethernet, &[gid(Some("eth0"))]);
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn nothing_is_blamed_when_nothing_exceeds_a_limit() {
        let path = path(LinkLayer::Ethernet);
        let text = explain(
            Step::ReadyToReceive,
            &path,
            &port(LinkLayer::Ethernet),
            &[gid(Some("eth0"))],
        );
        assert!(
            text.contains("no attribute exceeds a known limit"),
            "{text}"
        );
        assert!(text.contains("ping"), "{text}");
    }

    #[test]
    fn a_gid_of_another_namespace_and_a_port_that_is_down_are_named() {
        let path = path(LinkLayer::Ethernet);
        let mut down = port(LinkLayer::Ethernet);
        down.state = PortState::Down;
        let text = explain(Step::ReadyToReceive, &path, &down, &[gid(None)]);
        assert!(text.contains("outside this network namespace"), "{text}");
        assert!(text.contains("not active (Down)"), "{text}");
    }

    #[test]
    fn lid_0_on_infiniband_and_too_many_reads_are_named() {
        let path = path(LinkLayer::InfiniBand);
        let infiniband = port(LinkLayer::InfiniBand);
        let text = explain(Step::ReadyToReceive, &path, &infiniband, &[]);
        assert!(text.contains("the remote LID is 0"), "{text}");
        let mut path = path;
        path.reads_out = 16;
        let text = explain(Step::ReadyToSend, &path, &infiniband, &[]);
        assert!(
            text.contains("16 READs under way (max_rd_atomic) exceed the device's 8"),
            "{text}"
        );
    }
}
