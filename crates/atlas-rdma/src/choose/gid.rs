//! The entry of a port's GID table that a rail uses.

use super::rails::PortView;
use crate::attributes::{GidEntry, GidType, LinkLayer};
use std::fmt;
use std::net::IpAddr;

/// The entry that a rail uses, and what people want to know about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidChoice {
    /// The entry.
    pub entry: GidEntry,
    /// Whether packets need a global routing header: always on Ethernet, never needed on InfiniBand, where the LID
    /// addresses the port.
    pub needs_grh: bool,
    /// Why this one.
    pub why: String,
    /// The others, in the order of the table.
    pub skipped: Vec<SkippedGid>,
}

/// An entry that was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkippedGid {
    /// The entry.
    pub entry: GidEntry,
    /// Why not.
    pub reason: &'static str,
}

impl fmt::Display for SkippedGid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", Shown(&self.entry), self.reason)
    }
}

/// A port without a usable GID. The text has the table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GidRefusal {
    /// The index that was asked for is empty, or beyond the table.
    #[error(
        "{device} port {port} has no GID at index {index} (the table has room for {table_len}); {table}; leave the \
         index out, because entries move when addresses change"
    )]
    NoSuchIndex {
        /// Device.
        device: String,
        /// Port.
        port: u8,
        /// Index asked for.
        index: u32,
        /// Length of the table, empty entries included.
        table_len: u32,
        /// What the table has.
        table: GidTable,
    },
    /// The index that was asked for belongs to another network namespace.
    #[error(
        "GID index {index} of {device} port {port} belongs to a network interface that this network namespace does not \
         see; {table}; use another index, or run in the interface's namespace (containers: host network)"
    )]
    ForeignIndex {
        /// Device.
        device: String,
        /// Port.
        port: u8,
        /// Index asked for.
        index: u32,
        /// What the table has.
        table: GidTable,
    },
    /// No entry fits.
    #[error(
        "{device} port {port} has no usable GID; {table}; give its network interface an address in this network \
         namespace, or name an index (dev:port:gid)"
    )]
    NothingFits {
        /// Device.
        device: String,
        /// Port.
        port: u8,
        /// What the table has, and why each entry was skipped.
        table: GidTable,
    },
    /// An InfiniBand port that no subnet manager has configured.
    #[error(
        "{device} port {port} is InfiniBand and has no LID; start a subnet manager (opensm) or connect the port to a \
         fabric that has one"
    )]
    NoLid {
        /// Device.
        device: String,
        /// Port.
        port: u8,
    },
}

/// A GID table in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidTable(Vec<(GidEntry, Option<&'static str>)>);

impl fmt::Display for GidTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("its table is empty");
        }
        f.write_str("its table has ")?;
        for (i, (entry, reason)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{}", Shown(entry))?;
            if let Some(reason) = reason {
                write!(f, " – skipped: {reason}")?;
            }
        }
        Ok(())
    }
}

/// One entry in words: `[3] ::ffff:10.0.0.1 RoCE v2 on eth0`.
struct Shown<'a>(&'a GidEntry);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entry = self.0;
        write!(f, "[{}] {} {}", entry.index, entry.gid, entry.kind)?;
        match &entry.netdev {
            Some(netdev) => write!(f, " on {netdev}"),
            None => Ok(()),
        }
    }
}

const FOREIGN: &str = "its network interface is not visible in this network namespace";
const EMPTY: &str = "empty";
const WRONG_KIND: &str = "an InfiniBand entry on an Ethernet port";
const OLDER: &str = "RoCE v1, and there is RoCE v2";
const LINK_LOCAL: &str = "link-local, and there is a routable one";
const SECOND_FAMILY: &str = "IPv6, and there is an IPv4 one as good";
const HIGHER: &str = "as good, at a higher index";
const NOT_ASKED: &str = "another index was asked for";
const BY_LID: &str = "InfiniBand is addressed by LID, index 0 names the port";

/// The GID of a port: the explicit index, or the best by type and reach.
///
/// On Ethernet RoCE v2 goes before v1, routable before link-local, IPv4 before a global IPv6 of the same rank, a low
/// index before a high one. Entries of interfaces that this network namespace does not see are skipped. On InfiniBand
/// it is index 0, and the LID does the addressing.
///
/// # Errors
///
/// An explicit index that is empty or of another namespace, a table where nothing fits, an InfiniBand port without
/// LID.
pub fn choose_gid(view: &PortView, explicit: Option<u32>) -> Result<GidChoice, GidRefusal> {
    let infiniband = view.attributes.link_layer == LinkLayer::InfiniBand;
    if infiniband && view.attributes.lid == 0 {
        return Err(GidRefusal::NoLid {
            device: view.device.clone(),
            port: view.port,
        });
    }
    if let Some(index) = explicit {
        return explicit_gid(view, index);
    }
    let mut usable: Vec<&GidEntry> = if infiniband {
        view.gids.iter().filter(|e| e.index == 0).collect()
    } else {
        view.gids.iter().filter(|e| unusable(e).is_none()).collect()
    };
    usable.sort_by_key(|entry| rank(entry));
    let Some(&best) = usable.first() else {
        let reason = |e: &GidEntry| Some(if infiniband { BY_LID } else { unusable(e)? });
        return Err(GidRefusal::NothingFits {
            device: view.device.clone(),
            port: view.port,
            table: table(view, reason),
        });
    };
    let why = if infiniband {
        format!("LID {:#x}, {}", view.attributes.lid, BY_LID)
    } else {
        format!("{}, {}, lowest index of its rank", best.kind, reach(best))
    };
    let reason = |entry: &GidEntry| {
        if infiniband {
            BY_LID
        } else {
            unusable(entry).unwrap_or_else(|| lost_to(entry, best))
        }
    };
    Ok(choice(view, best, why, reason))
}

fn explicit_gid(view: &PortView, index: u32) -> Result<GidChoice, GidRefusal> {
    let found = view
        .gids
        .iter()
        .find(|e| e.index == index && !e.gid.is_empty());
    let Some(entry) = found else {
        return Err(GidRefusal::NoSuchIndex {
            device: view.device.clone(),
            port: view.port,
            index,
            table_len: view.attributes.gid_table_len,
            table: table(view, |_| None),
        });
    };
    if view.attributes.link_layer == LinkLayer::Ethernet && entry.netdev.is_none() {
        return Err(GidRefusal::ForeignIndex {
            device: view.device.clone(),
            port: view.port,
            index,
            table: table(view, unusable),
        });
    }
    let why = format!(
        "index {index} was asked for ({}, {})",
        entry.kind,
        reach(entry)
    );
    Ok(choice(view, entry, why, |_| NOT_ASKED))
}

fn choice(
    view: &PortView,
    entry: &GidEntry,
    why: String,
    reason: impl Fn(&GidEntry) -> &'static str,
) -> GidChoice {
    let others = view.gids.iter().filter(|e| e.index != entry.index);
    GidChoice {
        entry: entry.clone(),
        needs_grh: view.attributes.link_layer == LinkLayer::Ethernet,
        why,
        skipped: others
            .map(|e| SkippedGid {
                entry: e.clone(),
                reason: reason(e),
            })
            .collect(),
    }
}

fn table(view: &PortView, reason: impl Fn(&GidEntry) -> Option<&'static str>) -> GidTable {
    GidTable(
        view.gids
            .iter()
            .map(|entry| (entry.clone(), reason(entry)))
            .collect(),
    )
}

/// Why an entry of an Ethernet port cannot be used at all.
fn unusable(entry: &GidEntry) -> Option<&'static str> {
    if entry.gid.is_empty() {
        Some(EMPTY)
    } else if entry.kind == GidType::InfiniBand {
        Some(WRONG_KIND)
    } else if entry.netdev.is_none() {
        Some(FOREIGN)
    } else {
        None
    }
}

/// Order of usable entries, best first.
fn rank(entry: &GidEntry) -> (bool, bool, bool, u32) {
    let (older, link_local) = standing(entry);
    (older, link_local, !is_ipv4(entry), entry.index)
}

/// The two properties that make a path better or worse, `false` first.
pub(super) fn standing(entry: &GidEntry) -> (bool, bool) {
    let infiniband = entry.kind == GidType::InfiniBand;
    let link_local = !infiniband && !entry.gid.is_routable();
    (entry.kind == GidType::RoceV1, link_local)
}

/// Why a usable entry lost to the best one.
fn lost_to(entry: &GidEntry, best: &GidEntry) -> &'static str {
    let (ours, theirs) = (rank(entry), rank(best));
    if ours.0 != theirs.0 {
        OLDER
    } else if ours.1 != theirs.1 {
        LINK_LOCAL
    } else if ours.2 != theirs.2 {
        SECOND_FAMILY
    } else {
        HIGHER
    }
}

fn reach(entry: &GidEntry) -> &'static str {
    match (entry.kind, entry.gid.is_routable(), is_ipv4(entry)) {
        (GidType::InfiniBand, ..) => "InfiniBand",
        (_, true, true) => "routable IPv4",
        (_, true, false) => "routable IPv6",
        (_, false, _) => "link-local",
    }
}

fn is_ipv4(entry: &GidEntry) -> bool {
    matches!(entry.gid.ip(), IpAddr::V4(_))
}
