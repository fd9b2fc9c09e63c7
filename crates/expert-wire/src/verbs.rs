//! The messages that set up one-sided READs, of protocol v2; those of v1 are in [`crate::v1_verbs`].
//!
//! ```text
//! Rails ─► RailsReply          which rails the peer has: the client pairs its own with them
//! OpenRail ─► RailOpened       queue pairs of both sides, and where the store's bytes lie
//! ```
//!
//! The queue pairs of a rail live as long as the connection that opened it. PSNs are random.

use std::net::{IpAddr, Ipv6Addr};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{WireError, limits};

/// `link_layer` of InfiniBand.
pub const LINK_INFINIBAND: u8 = 1;
/// `link_layer` of Ethernet.
pub const LINK_ETHERNET: u8 = 2;
/// `gid_type` of InfiniBand.
pub const GID_INFINIBAND: u8 = 0;
/// `gid_type` of RoCE v1.
pub const GID_ROCE_V1: u8 = 1;
/// `gid_type` of RoCE v2.
pub const GID_ROCE_V2: u8 = 2;
/// `prefix_len` where it is not known.
pub const PREFIX_UNKNOWN: u8 = 255;
/// Largest queue-pair number and PSN: 24 bits.
pub const U24_MAX: u32 = (1 << 24) - 1;

/// A rail of the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailInfo {
    /// Device name, for people.
    pub name: String,
    /// [`LINK_INFINIBAND`] or [`LINK_ETHERNET`].
    pub link_layer: u8,
    /// Type of `gid`.
    pub gid_type: u8,
    /// Path MTU as verbs number it, 1 (256 bytes) to 5 (4096).
    pub mtu_code: u8,
    /// Prefix length of `ip`'s subnet, `None` where it is not known.
    pub prefix_len: Option<u8>,
    /// LID, 0 on Ethernet.
    pub lid: u16,
    /// READs that one of its queue pairs answers at once.
    pub reads_max: u8,
    /// Queue pairs that one client may open on it.
    pub qps_max: u8,
    /// Link speed, megabits a second; 0 where it is not known.
    pub link_mbit_per_s: u32,
    /// GID.
    pub gid: [u8; 16],
    /// Address of the rail's network interface, where it has one: TCP can take the same path.
    pub ip: Option<IpAddr>,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawRailInfo {
    link_layer: u8,
    gid_type: u8,
    mtu_code: u8,
    prefix_len: u8,
    lid: U16,
    reads_max: u8,
    qps_max: u8,
    link_mbit_per_s: U32,
    reserved: U32,
    gid: [u8; 16],
    ip: [u8; 16],
    name: [u8; 16],
}

/// One queue pair of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpEndpoint {
    /// Number, 24 bits.
    pub qpn: u32,
    /// First packet sequence number that it sends, 24 bits.
    pub psn: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawQp {
    qpn: U32,
    psn: U32,
}

/// A client opens a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenRail {
    /// Index in the peer's [`RailInfo`] list.
    pub rail: u8,
    /// The client's path MTU.
    pub mtu_code: u8,
    /// READs that one of its queue pairs has under way at once.
    pub reads_max: u8,
    /// The client's link layer.
    pub link_layer: u8,
    /// Type of `gid`.
    pub gid_type: u8,
    /// The client's LID.
    pub lid: u16,
    /// Epoch of the Welcome that it works with.
    pub epoch: u32,
    /// Service level, 0 to 15; both directions use it.
    pub service_level: u8,
    /// Traffic class; both directions use it.
    pub traffic_class: u8,
    /// The client's GID.
    pub gid: [u8; 16],
    /// The client's queue pairs; the peer makes as many.
    pub qps: Vec<QpEndpoint>,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawOpenRail {
    rail: u8,
    qp_count: u8,
    mtu_code: u8,
    reads_max: u8,
    link_layer: u8,
    gid_type: u8,
    lid: U16,
    epoch: U32,
    service_level: u8,
    traffic_class: u8,
    reserved: U16,
    gid: [u8; 16],
}

/// A region of registered memory that holds bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// File, as the catalogue's segments number them.
    pub file: u32,
    /// Key for READs.
    pub rkey: u32,
    /// First byte in the file.
    pub file_offset: u64,
    /// How many.
    pub bytes: u64,
    /// Remote address of the first.
    pub addr: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawRegion {
    file: U32,
    rkey: U32,
    file_offset: U64,
    bytes: U64,
    addr: U64,
}

/// The peer's answer: its queue pairs are ready to answer READs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailOpened {
    /// Epoch that the regions belong to.
    pub epoch: u32,
    /// MTU to use: the smaller of both.
    pub mtu_code: u8,
    /// READs under way at once: the smaller of both.
    pub reads_max: u8,
    /// The peer's link layer.
    pub link_layer: u8,
    /// The peer's LID.
    pub lid: u16,
    /// The peer's GID.
    pub gid: [u8; 16],
    /// Its queue pairs, in the order of the client's.
    pub qps: Vec<QpEndpoint>,
    /// Ascending by file and offset, disjoint. A file that changed under the peer is missing.
    pub regions: Vec<Region>,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawRailOpened {
    epoch: U32,
    qp_count: u8,
    mtu_code: u8,
    reads_max: u8,
    link_layer: u8,
    lid: U16,
    reserved: U16,
    region_count: U32,
    gid: [u8; 16],
}

const _: () = assert!(size_of::<RawRailInfo>() == 64);
const _: () = assert!(size_of::<RawQp>() == 8);
const _: () = assert!(size_of::<RawOpenRail>() == 32);
const _: () = assert!(size_of::<RawRegion>() == 32);
const _: () = assert!(size_of::<RawRailOpened>() == 32);

fn prefix<T: FromBytes + Unaligned + KnownLayout + Immutable + Copy>(
    what: &'static str,
    bytes: &[u8],
) -> Result<(T, usize), WireError> {
    T::read_from_prefix(bytes)
        .map(|(value, _)| (value, size_of::<T>()))
        .map_err(|_| WireError::Short {
            what,
            got: bytes.len(),
            need: size_of::<T>(),
        })
}

/// The items that follow a head: exactly `count`, up to the end.
fn items<T: FromBytes + Unaligned + KnownLayout + Immutable + Copy>(
    what: &'static str,
    bytes: &[u8],
    count: usize,
) -> Result<Vec<T>, WireError> {
    let need = count * size_of::<T>();
    if bytes.len() < need {
        return Err(WireError::Short {
            what,
            got: bytes.len(),
            need,
        });
    }
    if bytes.len() > need {
        return Err(WireError::TooLarge {
            what,
            got: bytes.len() as u64,
            limit: need as u64,
        });
    }
    Ok(bytes
        .chunks_exact(size_of::<T>())
        .map(|item| T::read_from_bytes(item).expect("cut to its size"))
        .collect())
}

fn within(what: &'static str, got: u64, from: u64, to: u64) -> Result<(), WireError> {
    if got > to {
        return Err(WireError::TooLarge {
            what,
            got,
            limit: to,
        });
    }
    if got < from {
        return Err(WireError::Unexpected { what, got });
    }
    Ok(())
}

fn check_path(link_layer: u8, gid_type: u8, mtu_code: u8, reads_max: u8) -> Result<(), WireError> {
    within("link layer", link_layer.into(), 1, 2)?;
    within("GID type", gid_type.into(), 0, 2)?;
    within("MTU code", mtu_code.into(), 1, 5)?;
    within("READ depth", reads_max.into(), 1, 255)
}

fn check_qps(raw: &[RawQp]) -> Result<Vec<QpEndpoint>, WireError> {
    raw.iter()
        .map(|qp| {
            within("queue pair number", qp.qpn.get().into(), 1, U24_MAX.into())?;
            within("PSN", qp.psn.get().into(), 0, U24_MAX.into())?;
            Ok(QpEndpoint {
                qpn: qp.qpn.get(),
                psn: qp.psn.get(),
            })
        })
        .collect()
}

fn push_qps(out: &mut Vec<u8>, qps: &[QpEndpoint]) {
    for qp in qps {
        let raw = RawQp {
            qpn: U32::new(qp.qpn),
            psn: U32::new(qp.psn),
        };
        out.extend_from_slice(raw.as_bytes());
    }
}

/// Encodes the peer's rails: `u8 count`, 7 zero bytes, the rails.
pub fn encode_rails(rails: &[RailInfo]) -> Vec<u8> {
    let mut out = vec![0; 8];
    out[0] = u8::try_from(rails.len()).expect("few rails");
    for rail in rails {
        let mut name = [0; 16];
        let mut end = rail.name.len().min(16);
        while !rail.name.is_char_boundary(end) {
            end -= 1;
        }
        name[..end].copy_from_slice(&rail.name.as_bytes()[..end]);
        let raw = RawRailInfo {
            link_layer: rail.link_layer,
            gid_type: rail.gid_type,
            mtu_code: rail.mtu_code,
            prefix_len: rail.prefix_len.unwrap_or(PREFIX_UNKNOWN),
            lid: U16::new(rail.lid),
            reads_max: rail.reads_max,
            qps_max: rail.qps_max,
            link_mbit_per_s: U32::new(rail.link_mbit_per_s),
            reserved: U32::ZERO,
            gid: rail.gid,
            ip: match rail.ip {
                Some(IpAddr::V4(v4)) => v4.to_ipv6_mapped().octets(),
                Some(IpAddr::V6(v6)) => v6.octets(),
                None => [0; 16],
            },
            name,
        };
        out.extend_from_slice(raw.as_bytes());
    }
    out
}

/// Reads the peer's rails. *Errors*: wrong size, more than [`limits::RAILS_MAX`], values without a
/// meaning.
pub fn decode_rails(bytes: &[u8]) -> Result<Vec<RailInfo>, WireError> {
    let (head, at) = prefix::<[u8; 8]>("rail list", bytes)?;
    within("rail count", head[0].into(), 0, limits::RAILS_MAX.into())?;
    items::<RawRailInfo>("rail list", &bytes[at..], head[0].into())?
        .iter()
        .map(|raw| {
            check_path(raw.link_layer, raw.gid_type, raw.mtu_code, raw.reads_max)?;
            within("queue pairs per rail", raw.qps_max.into(), 1, 255)?;
            let prefix_len = match raw.prefix_len {
                PREFIX_UNKNOWN => None,
                bits => {
                    within("prefix length", bits.into(), 0, 128)?;
                    Some(bits)
                }
            };
            let ip = Ipv6Addr::from(raw.ip);
            let end = raw.name.iter().position(|&b| b == 0).unwrap_or(16);
            Ok(RailInfo {
                name: String::from_utf8_lossy(&raw.name[..end])
                    .chars()
                    .map(|c| if c.is_control() { '?' } else { c })
                    .collect(),
                link_layer: raw.link_layer,
                gid_type: raw.gid_type,
                mtu_code: raw.mtu_code,
                prefix_len,
                lid: raw.lid.get(),
                reads_max: raw.reads_max,
                qps_max: raw.qps_max,
                link_mbit_per_s: raw.link_mbit_per_s.get(),
                gid: raw.gid,
                ip: (!ip.is_unspecified()).then(|| ip.to_canonical()),
            })
        })
        .collect()
}

impl OpenRail {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        let raw = RawOpenRail {
            rail: self.rail,
            qp_count: u8::try_from(self.qps.len()).expect("few queue pairs"),
            mtu_code: self.mtu_code,
            reads_max: self.reads_max,
            link_layer: self.link_layer,
            gid_type: self.gid_type,
            lid: U16::new(self.lid),
            epoch: U32::new(self.epoch),
            service_level: self.service_level,
            traffic_class: self.traffic_class,
            reserved: U16::ZERO,
            gid: self.gid,
        };
        let mut out = raw.as_bytes().to_vec();
        push_qps(&mut out, &self.qps);
        out
    }

    /// Reads it. *Errors*: wrong size, 0 or more than [`limits::QPS_PER_RAIL_MAX`] queue pairs,
    /// values without a meaning.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (raw, at) = prefix::<RawOpenRail>("rail opening", bytes)?;
        check_path(raw.link_layer, raw.gid_type, raw.mtu_code, raw.reads_max)?;
        let qps = u64::from(raw.qp_count);
        within("queue pair count", qps, 1, limits::QPS_PER_RAIL_MAX.into())?;
        within("service level", raw.service_level.into(), 0, 15)?;
        Ok(Self {
            rail: raw.rail,
            mtu_code: raw.mtu_code,
            reads_max: raw.reads_max,
            link_layer: raw.link_layer,
            gid_type: raw.gid_type,
            lid: raw.lid.get(),
            epoch: raw.epoch.get(),
            service_level: raw.service_level,
            traffic_class: raw.traffic_class,
            gid: raw.gid,
            qps: check_qps(&items("rail opening", &bytes[at..], raw.qp_count.into())?)?,
        })
    }
}

impl RailOpened {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        let raw = RawRailOpened {
            epoch: U32::new(self.epoch),
            qp_count: u8::try_from(self.qps.len()).expect("few queue pairs"),
            mtu_code: self.mtu_code,
            reads_max: self.reads_max,
            link_layer: self.link_layer,
            lid: U16::new(self.lid),
            reserved: U16::ZERO,
            region_count: U32::new(u32::try_from(self.regions.len()).expect("bounded")),
            gid: self.gid,
        };
        let mut out = raw.as_bytes().to_vec();
        push_qps(&mut out, &self.qps);
        for region in &self.regions {
            let raw = RawRegion {
                file: U32::new(region.file),
                rkey: U32::new(region.rkey),
                file_offset: U64::new(region.file_offset),
                bytes: U64::new(region.bytes),
                addr: U64::new(region.addr),
            };
            out.extend_from_slice(raw.as_bytes());
        }
        out
    }

    /// Reads it. *Errors*: wrong size, more than [`limits::REGIONS_MAX`] regions, regions that are
    /// empty, overlap, do not ascend or wrap around, values without a meaning.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (raw, at) = prefix::<RawRailOpened>("opened rail", bytes)?;
        check_path(raw.link_layer, GID_INFINIBAND, raw.mtu_code, raw.reads_max)?;
        let qps = u64::from(raw.qp_count);
        within("queue pair count", qps, 1, limits::QPS_PER_RAIL_MAX.into())?;
        let region_count = raw.region_count.get();
        let max = u64::from(limits::REGIONS_MAX);
        within("region count", region_count.into(), 0, max)?;
        let qps_end = at + usize::from(raw.qp_count) * size_of::<RawQp>();
        let qps = bytes.get(at..qps_end).ok_or(WireError::Short {
            what: "opened rail",
            got: bytes.len(),
            need: qps_end,
        })?;
        let qps = check_qps(&items("opened rail", qps, raw.qp_count.into())?)?;
        let regions: Vec<Region> =
            items::<RawRegion>("opened rail", &bytes[qps_end..], region_count as usize)?
                .iter()
                .map(|raw| Region {
                    file: raw.file.get(),
                    rkey: raw.rkey.get(),
                    file_offset: raw.file_offset.get(),
                    bytes: raw.bytes.get(),
                    addr: raw.addr.get(),
                })
                .collect();
        for region in &regions {
            within("region bytes", region.bytes, 1, u64::MAX)?;
            for (what, start) in [
                ("region's file range", region.file_offset),
                ("region's address", region.addr),
            ] {
                if start.checked_add(region.bytes).is_none() {
                    return Err(WireError::Unexpected { what, got: start });
                }
            }
        }
        let ascend = |a: &Region, b: &Region| {
            a.file < b.file || (a.file == b.file && a.file_offset + a.bytes <= b.file_offset)
        };
        if let Some(pair) = regions.windows(2).find(|p| !ascend(&p[0], &p[1])) {
            return Err(WireError::Unexpected {
                what: "region out of order",
                got: pair[1].file_offset,
            });
        }
        Ok(Self {
            epoch: raw.epoch.get(),
            mtu_code: raw.mtu_code,
            reads_max: raw.reads_max,
            link_layer: raw.link_layer,
            lid: raw.lid.get(),
            gid: raw.gid,
            qps,
            regions,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rail() -> RailInfo {
        RailInfo {
            name: "rocep1s0f1".into(),
            link_layer: LINK_ETHERNET,
            gid_type: GID_ROCE_V2,
            mtu_code: 5,
            prefix_len: Some(24),
            lid: 0,
            reads_max: 16,
            qps_max: 8,
            link_mbit_per_s: 200_000,
            gid: [7; 16],
            ip: Some("10.77.0.1".parse().unwrap()),
        }
    }

    fn open() -> OpenRail {
        OpenRail {
            rail: 1,
            mtu_code: 3,
            reads_max: 1,
            link_layer: LINK_ETHERNET,
            gid_type: GID_ROCE_V2,
            lid: 0,
            epoch: 4,
            service_level: 3,
            traffic_class: 106,
            gid: [9; 16],
            qps: vec![
                QpEndpoint {
                    qpn: 17,
                    psn: U24_MAX
                };
                2
            ],
        }
    }

    fn opened() -> RailOpened {
        RailOpened {
            epoch: 4,
            mtu_code: 3,
            reads_max: 1,
            link_layer: LINK_ETHERNET,
            lid: 0,
            gid: [7; 16],
            qps: vec![QpEndpoint { qpn: 1, psn: 0 }],
            regions: vec![
                Region {
                    file: 0,
                    rkey: 1,
                    file_offset: 0,
                    bytes: 10,
                    addr: 4096,
                },
                Region {
                    file: 0,
                    rkey: 2,
                    file_offset: 10,
                    bytes: 5,
                    addr: 64,
                },
                Region {
                    file: 3,
                    rkey: 3,
                    file_offset: 0,
                    bytes: 1,
                    addr: 0,
                },
            ],
        }
    }

    #[test]
    fn rails_come_back_as_they_were_sent() {
        let infiniband = RailInfo {
            name: "a-name-that-is-longer".into(),
            link_layer: LINK_INFINIBAND,
            gid_type: GID_INFINIBAND,
            prefix_len: None,
            lid: 12,
            ip: None,
            ..rail()
        };
        let got = decode_rails(&encode_rails(&[rail(), infiniband.clone()])).unwrap();
        assert_eq!(got[0], rail());
        assert_eq!(got[1].name, "a-name-that-is-l");
        assert_eq!(
            RailInfo {
                name: infiniband.name.clone(),
                ..got[1].clone()
            },
            infiniband
        );
        assert_eq!(decode_rails(&encode_rails(&[])), Ok(vec![]));
    }

    #[test]
    fn opening_and_answer_come_back_as_they_were_sent() {
        assert_eq!(OpenRail::decode(&open().encode()), Ok(open()));
        assert_eq!(RailOpened::decode(&opened().encode()), Ok(opened()));
    }

    #[test]
    fn regions_that_overlap_wrap_or_are_empty_are_refused() {
        for break_it in [
            |o: &mut RailOpened| o.regions[1].file_offset = 9,
            |o: &mut RailOpened| o.regions[2].bytes = 0,
            |o: &mut RailOpened| o.regions[2].file_offset = u64::MAX,
            |o: &mut RailOpened| o.regions[2].addr = u64::MAX,
            |o: &mut RailOpened| o.regions.swap(0, 1),
            |o: &mut RailOpened| o.qps[0].qpn = U24_MAX + 1,
            |o: &mut RailOpened| o.qps.clear(),
            |o: &mut RailOpened| o.reads_max = 0,
            |o: &mut RailOpened| o.mtu_code = 6,
        ] {
            let mut bad = opened();
            break_it(&mut bad);
            assert!(RailOpened::decode(&bad.encode()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn count_of_four_billion_regions_reserves_nothing() {
        let mut bytes = opened().encode();
        bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(
            RailOpened::decode(&bytes),
            Err(WireError::TooLarge { .. })
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_rails(&bytes);
            if let Ok(open) = OpenRail::decode(&bytes) {
                prop_assert_eq!(OpenRail::decode(&open.encode()), Ok(open));
            }
            if let Ok(opened) = RailOpened::decode(&bytes) {
                prop_assert_eq!(RailOpened::decode(&opened.encode()), Ok(opened));
            }
        }

        #[test]
        fn every_cut_of_a_message_is_refused(cut in 0usize..200) {
            let bytes = opened().encode();
            if cut < bytes.len() {
                prop_assert!(RailOpened::decode(&bytes[..cut]).is_err());
            }
            let bytes = open().encode();
            if cut < bytes.len() {
                prop_assert!(OpenRail::decode(&bytes[..cut]).is_err());
            }
        }
    }
}
