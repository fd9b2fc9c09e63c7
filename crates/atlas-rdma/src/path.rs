//! Where a queue pair goes: the two ends of a connection and how packets travel between them.

use crate::attributes::{Gid, LinkLayer, Mtu};
use std::fmt;
use std::time::Duration;

/// This end of a connection, for the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalEndpoint {
    /// Number of the queue pair.
    pub qpn: u32,
    /// Its first packet sequence number, 24 bits.
    pub psn: u32,
}

/// The other end of a connection, as it said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteEndpoint {
    /// Number of its queue pair.
    pub qpn: u32,
    /// Its first packet sequence number; only 24 bits are used.
    pub psn: u32,
    /// Its GID; used with a global route alone.
    pub gid: Gid,
    /// Its LID; used on InfiniBand alone.
    pub lid: u16,
}

/// How a queue pair is connected.
///
/// Start from [`Path::new`], which has the defaults, and change fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// The local port.
    pub port: u8,
    /// What lies below it: Ethernet is addressed by GID, InfiniBand by LID.
    pub link_layer: LinkLayer,
    /// Index in the port's table of partition keys.
    pub pkey_index: u16,
    /// Index of the local GID.
    pub gid_index: u32,
    /// Whether packets carry a global route (GRH). On Ethernet they always do; on InfiniBand where this says so.
    pub global: bool,
    /// The other end.
    pub remote: RemoteEndpoint,
    /// This end's first packet sequence number. Queues that choose their own put it in.
    pub local_psn: u32,
    /// Payload of one packet; both ends must agree.
    pub mtu: Mtu,
    /// READs that the other end may have under way at this one (`max_dest_rd_atomic`).
    pub reads_in: u8,
    /// READs under way at the other end (`max_rd_atomic`): at most what that end answers.
    pub reads_out: u8,
    /// Service level, 0 to 15; the priority on Ethernet.
    pub service_level: u8,
    /// Traffic class of the global route.
    pub traffic_class: u8,
    /// Hop limit of the global route.
    pub hop_limit: u8,
    /// How long the other end is asked to wait where nothing was posted to receive into. READs never meet it.
    pub min_rnr_timer: Duration,
    /// How long an acknowledgement may take before packets are sent again; rounded up to 4.096 µs times a power of 2.
    pub timeout: Duration,
    /// How often they are sent again before the request fails. At most 7, which soft-RoCE takes for ever.
    pub retry_count: u8,
    /// How often a "not ready" is answered by another try; 7 is for ever.
    pub rnr_retry: u8,
}

impl Path {
    /// READs both ways: what every card since ConnectX-3 takes. Depth 1 caps a card, 16 does not.
    pub const DEFAULT_READS: u8 = 16;
    /// Code 14: three orders above a round trip, and seven tries stay below half a second.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_micros(67_108);
    /// One less than soft-RoCE's "for ever".
    pub const DEFAULT_RETRY_COUNT: u8 = 6;
    /// As the fabric's usual default.
    pub const DEFAULT_HOP_LIMIT: u8 = 64;

    /// A path from `port` to `remote` with the defaults: no partition, GID index 0, service level and traffic class 0.
    pub fn new(port: u8, link_layer: LinkLayer, mtu: Mtu, remote: RemoteEndpoint) -> Self {
        Self {
            port,
            link_layer,
            pkey_index: 0,
            gid_index: 0,
            global: link_layer == LinkLayer::Ethernet,
            remote,
            local_psn: 0,
            mtu,
            reads_in: Self::DEFAULT_READS,
            reads_out: Self::DEFAULT_READS,
            service_level: 0,
            traffic_class: 0,
            hop_limit: Self::DEFAULT_HOP_LIMIT,
            min_rnr_timer: Duration::from_micros(640),
            timeout: Self::DEFAULT_TIMEOUT,
            retry_count: Self::DEFAULT_RETRY_COUNT,
            rnr_retry: 7,
        }
    }

    /// Whether packets carry a global route.
    pub fn has_grh(&self) -> bool {
        self.global || self.link_layer == LinkLayer::Ethernet
    }
}

/// A step of a queue pair to its next state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// To INIT.
    Init,
    /// To ready-to-receive.
    ReadyToReceive,
    /// To ready-to-send.
    ReadyToSend,
    /// To the error state.
    Error,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Init => "INIT",
            Self::ReadyToReceive => "RTR",
            Self::ReadyToSend => "RTS",
            Self::Error => "ERR",
        })
    }
}

/// Bits of a packet sequence number.
pub(crate) const PSN_MASK: u32 = 0x00ff_ffff;

/// A packet sequence number to start from, 24 random bits.
///
/// A connection that starts where an old one of the same numbers left off could take a late packet of that one for its
/// own; a random start makes that improbable.
pub fn random_psn() -> u32 {
    let mut bytes = [0_u8; 4];
    // SAFETY: the buffer is valid for writes of its four bytes.
    let got =
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    if usize::try_from(got) != Ok(bytes.len()) {
        // Before the kernel's pool is filled, at boot: the standard library's seed has other sources as well.
        use std::hash::{BuildHasher, RandomState};
        let hash = RandomState::new().hash_one(std::process::id());
        bytes.copy_from_slice(&hash.to_le_bytes()[..4]);
    }
    u32::from_le_bytes(bytes) & PSN_MASK
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn psns_are_24_bits_and_differ() {
        let psns: HashSet<u32> = (0..64).map(|_| random_psn()).collect();
        assert!(psns.len() > 32, "{psns:?}");
        assert!(psns.iter().all(|&psn| psn <= PSN_MASK));
    }

    #[test]
    fn ethernet_always_has_a_global_route_and_infiniband_where_asked() {
        let remote = RemoteEndpoint {
            qpn: 1,
            psn: 2,
            gid: Gid([0; 16]),
            lid: 3,
        };
        let mut path = Path::new(1, LinkLayer::Ethernet, Mtu::B1024, remote);
        path.global = false;
        assert!(path.has_grh());
        let mut path = Path::new(1, LinkLayer::InfiniBand, Mtu::B1024, remote);
        assert!(!path.has_grh());
        path.global = true;
        assert!(path.has_grh());
    }
}
