//! What a device, a port and a GID table say of themselves, as plain values without a library.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What lies below the transport of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    /// InfiniBand: addressed by LID, a GID is optional.
    InfiniBand,
    /// Ethernet (RoCE): addressed by GID alone.
    Ethernet,
}

/// State of a port as the device reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortState {
    /// No link.
    Down,
    /// A link, not configured yet (InfiniBand without a subnet manager).
    Initializing,
    /// Configured, not active yet.
    Armed,
    /// Works.
    Active,
    /// Was active and lost its link a moment ago.
    ActiveDefer,
    /// Anything else, as the device's number.
    Unknown(u32),
}

/// A path MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// All of them, smallest first.
    pub const ALL: [Self; 5] = [
        Self::B256,
        Self::B512,
        Self::B1024,
        Self::B2048,
        Self::B4096,
    ];

    /// Payload bytes of one packet.
    pub fn bytes(self) -> u32 {
        256 << (self.code() - 1)
    }

    /// The number that verbs use, 1 to 5.
    pub fn code(self) -> u32 {
        match self {
            Self::B256 => 1,
            Self::B512 => 2,
            Self::B1024 => 3,
            Self::B2048 => 4,
            Self::B4096 => 5,
        }
    }

    /// The MTU that a verbs number stands for.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// The MTU of so many bytes.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
}

/// Limits of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Firmware version, as text.
    pub firmware: String,
    /// GUID of the node.
    pub node_guid: u64,
    /// Largest region, bytes.
    pub max_mr_bytes: u64,
    /// Regions.
    pub max_mr: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Requests of one send queue.
    pub max_qp_wr: u32,
    /// Local ranges of a request.
    pub max_sge: u32,
    /// Local ranges of a READ; 0 where the device does not say (then as `max_sge`).
    pub max_sge_rd: u32,
    /// Entries of one completion queue.
    pub max_cqe: u32,
    /// READs that a queue pair answers at once.
    pub max_qp_rd_atom: u32,
    /// READs that a queue pair has under way at once.
    pub max_qp_init_rd_atom: u32,
    /// Number of physical ports.
    pub ports: u8,
}

/// A port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortAttributes {
    /// Its state.
    pub state: PortState,
    /// What lies below.
    pub link_layer: LinkLayer,
    /// Local identifier on InfiniBand, 0 on Ethernet.
    pub lid: u16,
    /// MTU in force.
    pub active_mtu: Mtu,
    /// Largest message, bytes.
    pub max_message_bytes: u32,
    /// Length of the GID table, empty entries included.
    pub gid_table_len: u32,
    /// Link speed in megabits a second, all lanes; 0 where it is not known.
    pub link_mbit_per_s: u64,
}

/// A global identifier: 16 bytes in network order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IP address that a RoCE GID carries: IPv4 where it is IPv4-mapped.
    pub fn ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        match v6.to_ipv4_mapped() {
            Some(v4) => IpAddr::V4(v4),
            None => IpAddr::V6(v6),
        }
    }

    /// The GID of an IP address.
    pub fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }

    /// Whether all bytes are zero: an empty slot of the table.
    pub fn is_empty(self) -> bool {
        self.0 == [0; 16]
    }

    /// Whether it reaches beyond its own link.
    pub fn is_routable(self) -> bool {
        match self.ip() {
            IpAddr::V4(v4) => v4 != Ipv4Addr::UNSPECIFIED && !v4.is_link_local(),
            IpAddr::V6(v6) => !self.is_empty() && (v6.segments()[0] & 0xffc0) != 0xfe80,
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// How packets with a GID are framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidType {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: Ethernet frames, not routable.
    RoceV1,
    /// RoCE v2: UDP.
    RoceV2,
}

impl fmt::Display for GidType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

/// One entry of a port's GID table that is not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// Index in the table.
    pub index: u32,
    /// The GID.
    pub gid: Gid,
    /// Its type.
    pub kind: GidType,
    /// Name of its network interface where that is visible in this network namespace; `None` on
    /// InfiniBand and for an interface of another namespace.
    pub netdev: Option<String>,
    /// Prefix length of the address on that interface, where it was found.
    pub prefix_len: Option<u8>,
}
