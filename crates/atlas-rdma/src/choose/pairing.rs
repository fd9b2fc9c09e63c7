//! Which rail of this end talks to which rail of the other.

use super::rails::RailChoice;
use crate::attributes::{Gid, LinkLayer};
use std::net::IpAddr;

/// Prefix length of an IPv4 address whose own is not known: the usual one of a storage network.
const IPV4_PREFIX_DEFAULT: u8 = 24;

/// Prefix length of an IPv6 address whose own is not known.
const IPV6_PREFIX_DEFAULT: u8 = 64;

/// A rail as the other end sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// What lies below.
    pub link_layer: LinkLayer,
    /// Its GID.
    pub gid: Gid,
    /// Prefix length of the GID's address, where it is known. Unused on InfiniBand.
    pub prefix_len: Option<u8>,
    /// Its LID; 0 on Ethernet.
    pub lid: u16,
    /// First eight bytes of the GID on InfiniBand; 0 on Ethernet.
    pub subnet_prefix: u64,
}

impl Endpoint {
    /// A RoCE port.
    pub fn ethernet(gid: Gid, prefix_len: Option<u8>) -> Self {
        Self {
            link_layer: LinkLayer::Ethernet,
            gid,
            prefix_len,
            lid: 0,
            subnet_prefix: 0,
        }
    }

    /// An InfiniBand port.
    pub fn infiniband(gid: Gid, lid: u16) -> Self {
        Self {
            link_layer: LinkLayer::InfiniBand,
            gid,
            prefix_len: None,
            lid,
            subnet_prefix: u64::from_be_bytes(
                gid.0[..8].try_into().expect("eight of sixteen bytes"),
            ),
        }
    }

    /// Whether both are in one subnet, as far as their addresses tell: on Ethernet each must see the other inside its
    /// own prefix, and link-local addresses say nothing; on InfiniBand the subnet prefixes must be equal.
    pub fn same_subnet(&self, other: &Self) -> bool {
        match (self.link_layer, other.link_layer) {
            (LinkLayer::InfiniBand, LinkLayer::InfiniBand) => {
                self.subnet_prefix == other.subnet_prefix
            }
            (LinkLayer::Ethernet, LinkLayer::Ethernet) => {
                let known = |own: &Self, far: &Self| own.prefix_len.or(far.prefix_len);
                self.gid.is_routable()
                    && other.gid.is_routable()
                    && within(self.gid, other.gid, known(self, other))
                    && within(self.gid, other.gid, known(other, self))
            }
            _ => false,
        }
    }

    /// Whether the two could talk at all: one link layer, and on Ethernet one family of addresses, because a packet
    /// carries one kind of header.
    fn could_reach(&self, other: &Self) -> bool {
        let family = |end: &Self| matches!(end.gid.ip(), IpAddr::V4(_));
        self.link_layer == other.link_layer
            && (self.link_layer == LinkLayer::InfiniBand || family(self) == family(other))
    }
}

/// How the rails of both ends belong together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pairing {
    /// Index of a local rail and of the remote rail in its subnet, by local index.
    pub paired: Vec<(usize, usize)>,
    /// Every other local rail and the remote rails to probe, the most promising first; empty where no link layer fits.
    pub candidates: Vec<(usize, Vec<usize>)>,
}

/// Pairs the rails of both ends by subnet; what is left must be probed.
///
/// As many rails are paired as subnets allow, each remote rail at most once, and within one subnet in the order of
/// both lists. The candidates of the others are all remote rails of their link layer (and family of addresses): unused
/// ones first, then those in the same subnet, then in the order of the list.
pub fn pair(local: &[Endpoint], remote: &[Endpoint]) -> Pairing {
    let mut remote_of: Vec<Option<usize>> = vec![None; local.len()];
    let mut local_of: Vec<Option<usize>> = vec![None; remote.len()];
    for i in 0..local.len() {
        let mut seen = vec![false; remote.len()];
        assign(i, local, remote, &mut remote_of, &mut local_of, &mut seen);
    }
    let mut pairing = Pairing::default();
    for (i, end) in local.iter().enumerate() {
        if let Some(j) = remote_of[i] {
            pairing.paired.push((i, j));
            continue;
        }
        let mut order: Vec<usize> = (0..remote.len())
            .filter(|j| end.could_reach(&remote[*j]))
            .collect();
        order.sort_by_key(|j| (local_of[*j].is_some(), !end.same_subnet(&remote[*j]), *j));
        // Rails that nobody is paired with are tried from different ends, so that not all of this end's come to the
        // first one where every one can be reached.
        let free = order.iter().filter(|j| local_of[**j].is_none()).count();
        if free > 0 {
            order[..free].rotate_left(pairing.candidates.len() % free);
        }
        pairing.candidates.push((i, order));
    }
    pairing
}

/// Finds a remote rail in the subnet of local rail `i`: a free one, or one whose local rail can move to another.
fn assign(
    i: usize,
    local: &[Endpoint],
    remote: &[Endpoint],
    remote_of: &mut [Option<usize>],
    local_of: &mut [Option<usize>],
    seen: &mut [bool],
) -> bool {
    let matching: Vec<usize> = (0..remote.len())
        .filter(|j| local[i].same_subnet(&remote[*j]))
        .collect();
    let free = matching.iter().copied().find(|j| local_of[*j].is_none());
    let taken = free.or_else(|| {
        matching.into_iter().find(|j| {
            if std::mem::replace(&mut seen[*j], true) {
                return false;
            }
            let holder = local_of[*j].expect("no matching remote rail is free");
            assign(holder, local, remote, remote_of, local_of, seen)
        })
    });
    if let Some(j) = taken {
        local_of[j] = Some(i);
        remote_of[i] = Some(j);
    }
    taken.is_some()
}

/// Pairs of chosen Ethernet rails that are in one subnet.
///
/// There ARP may answer for either port, so that both rails run through one of them although each passes a probe.
/// Worth a warning, and a look at the port counters.
pub fn shares_subnet(choices: &[RailChoice]) -> Vec<(usize, usize)> {
    let ends: Vec<Endpoint> = choices.iter().map(RailChoice::endpoint).collect();
    let mut pairs = Vec::new();
    for (i, one) in ends.iter().enumerate() {
        for (j, other) in ends.iter().enumerate().skip(i + 1) {
            if one.link_layer == LinkLayer::Ethernet && one.same_subnet(other) {
                pairs.push((i, j));
            }
        }
    }
    pairs
}

/// Whether two addresses agree in their first bits.
fn within(a: Gid, b: Gid, prefix_len: Option<u8>) -> bool {
    match (a.ip(), b.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let len = u32::from(prefix_len.unwrap_or(IPV4_PREFIX_DEFAULT)).min(32);
            let differs = a.to_bits() ^ b.to_bits();
            differs.leading_zeros() >= len
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let len = u32::from(prefix_len.unwrap_or(IPV6_PREFIX_DEFAULT)).min(128);
            let differs = a.to_bits() ^ b.to_bits();
            differs.leading_zeros() >= len
        }
        _ => false,
    }
}
