//! Two soft-RoCE devices of one guest with a cable between them, so that what they send each other can be held up.
//!
//! The rig's own devices are on links of their own, and what one of them sends to itself touches no interface.

use super::programs::{run_shell, shell};

/// The client's device, on an interface of the same name without its `rxe_`.
pub(crate) const NEAR: &str = "rxe_near";
/// The peer's.
pub(crate) const FAR: &str = "rxe_far";

/// See the module. It goes when it is dropped.
pub(crate) struct Cable(());

impl Cable {
    /// Lays it.
    pub(crate) fn new() -> Self {
        let cable = Self(());
        shell(
            "set -e
            ip link add near type veth peer name far
            for end in near far all; do
                # Both addresses are this machine's own.
                echo 1 >/proc/sys/net/ipv4/conf/$end/accept_local
                echo 0 >/proc/sys/net/ipv4/conf/$end/rp_filter
            done
            ip link set near mtu 9000 up
            ip link set far mtu 9000 up
            ip addr add 10.88.0.1/24 dev near
            ip addr add 10.88.0.2/24 dev far
            rdma link add rxe_near type rxe netdev near
            rdma link add rxe_far type rxe netdev far",
        );
        cable
    }

    /// Holds up every packet for so long, each way.
    pub(crate) fn slow_down(&self, each_way_ms: u32) {
        for end in ["near", "far"] {
            shell(&format!(
                "tc qdisc add dev {end} root netem delay {each_way_ms}ms limit 100000"
            ));
        }
    }

    /// Packets arrive as fast as they can again.
    pub(crate) fn speed_up(&self) {
        for end in ["near", "far"] {
            shell(&format!("tc qdisc del dev {end} root"));
        }
    }

    /// Sets the MTU of the peer's end.
    pub(crate) fn set_far_mtu(&self, bytes: u32) {
        shell(&format!("ip link set far mtu {bytes}"));
    }

    /// Packets that the client's device received.
    pub(crate) fn packets(&self) -> u64 {
        let path = format!("/sys/class/infiniband/{NEAR}/ports/1/hw_counters/rcvd_pkts");
        let text = std::fs::read_to_string(path).expect("a counter");
        text.trim().parse().expect("a number")
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        let gone =
            run_shell("rdma link delete rxe_near; rdma link delete rxe_far; ip link del near");
        if gone.code != Some(0) {
            eprintln!("{gone:?}");
        }
    }
}
