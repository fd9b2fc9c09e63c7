//! A short read over each pair of rails, against the speed of its links.

use std::sync::Arc;
use std::time::{Duration, Instant};

use atlas_rdma::choose::RailSpec;
use expert_arena::{ArenaBuilder, SlotId};
use expert_store::Key;
use expert_store::info::StoreInfo;
use expert_tier::{
    ExpertTier, Pending, RailsWanted, TierBuilder, TierError, VerbsOptions, Verify,
    largest_image_bytes,
};

use crate::finding::{Check, Finding, Level};
use crate::peer::{Pair, no_arena};
use crate::system::System;
use crate::{MEASURE_MAX, Options};

/// Most bytes that a measurement moves: a second of the fastest rails.
const BYTES_MAX: u64 = 64 << 30;
/// Memory that a measurement takes: two batches, each several times what a rail has under way.
const ARENA_BYTES: u64 = 64 << 20;
/// Most records of a batch.
const BATCH_MAX: u64 = 256;
/// How long one batch may take: a link of a tenth of a gigabit carries one in less.
const BATCH_TIME: Duration = Duration::from_secs(15);
/// Part of a link's speed, in percent, below which something is wrong: headers and one queue cost less.
const SHARE_PERCENT: f64 = 40.0;

pub(crate) fn check(
    out: &mut Vec<Finding>,
    options: &Options,
    system: &System,
    addr: &str,
    info: &StoreInfo,
    pairs: &[Pair<'_>],
) {
    if pairs.is_empty() {
        out.push(over_tcp(options, addr, info));
        return;
    }
    for pair in pairs {
        let verbs = VerbsOptions {
            rails: RailsWanted::List(vec![RailSpec {
                device: pair.own.device.clone(),
                port: Some(pair.own.port),
                gid_index: options
                    .named()
                    .into_iter()
                    .find(|s| s.device == pair.own.device)
                    .and_then(|s| s.gid_index),
            }]),
            require: true,
            ..options.verbs.clone()
        };
        let builder = options.tier.clone().verbs(verbs);
        let is_soft = system.soft_parent(&pair.own.device).is_some();
        out.push(match read(builder, options, addr, info) {
            Ok(speed) => judge(pair, speed, is_soft),
            Err(TierError::Arena(error)) => no_arena(Check::PeerRead, &error),
            Err(error) => failed(options, pair, &error),
        });
    }
}

fn over_tcp(options: &Options, addr: &str, info: &StoreInfo) -> Finding {
    match read(options.tier.clone(), options, addr, info) {
        Ok(speed) => Finding::ok(
            Check::PeerRead,
            format!("records come from {addr} over TCP at {speed}"),
        ),
        Err(TierError::Arena(error)) => no_arena(Check::PeerRead, &error),
        Err(error) => Finding::trouble(
            Level::Failure,
            Check::PeerRead,
            error.to_string(),
            "records do not come from this peer",
            format!(
                "atlas-expert fetch --expert-peer {addr}    (says more; so does the peer's log)"
            ),
        ),
    }
}

/// Bytes in so many seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Speed {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

impl Speed {
    fn gbit_per_s(self) -> f64 {
        match self.seconds > 0.0 {
            true => self.bytes as f64 * 8.0 / self.seconds / 1e9,
            false => 0.0,
        }
    }
}

impl std::fmt::Display for Speed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.2} Gbit/s ({} bytes in {:.2} s)",
            self.gbit_per_s(),
            self.bytes,
            self.seconds
        )
    }
}

/// The slower of both ends is what a link can carry.
pub(crate) fn judge(pair: &Pair<'_>, speed: Speed, is_soft: bool) -> Finding {
    let ends = [
        pair.own.attributes.link_mbit_per_s,
        u64::from(pair.peer.info.link_mbit_per_s),
    ];
    let known = ends.into_iter().filter(|mbit| *mbit > 0);
    let link = known.min().map(|mbit| mbit as f64 / 1000.0);
    let name = pair.name();
    let Some(link) = link.filter(|_| !is_soft) else {
        let why = match is_soft {
            true => "soft-RoCE has no link speed to compare with",
            false => "the link's speed is not known",
        };
        return Finding::ok(Check::PeerRead, format!("{name}: {speed}; {why}"));
    };
    let percent = 100.0 * speed.gbit_per_s() / link;
    let what = format!("{name}: {speed}, {percent:.0} % of the link's {link} Gbit/s");
    if percent >= SHARE_PERCENT {
        return Finding::ok(Check::PeerRead, what);
    }
    Finding::trouble(
        Level::Warning,
        Check::PeerRead,
        what,
        "the link is degraded, shared, losing packets, or the card waits for the machine: see pcie-link, iommu, numa and read-depth",
        format!(
            "ib_read_bw -d {0} -i {1} -x {2} --report_gbits HOST    (if that is as slow, the network is: ethtool -S {3} | grep -i -e discard -e pause)",
            pair.own.device,
            pair.own.port,
            pair.own.gid.entry.index,
            pair.own.gid.entry.netdev.as_deref().unwrap_or("NETDEV")
        ),
    )
}

fn failed(options: &Options, pair: &Pair<'_>, error: &TierError) -> Finding {
    let (port, gid) = (&pair.own.port, &pair.own.gid.entry.index);
    Finding::trouble(
        options.verbs_level(),
        Check::PeerRead,
        format!("{}: {error}", pair.name()),
        "no READ goes through this pair of ports",
        format!(
            "ib_read_bw -d {} -i {port} -x {gid} HOST    (if that fails too: ping the peer's address of this port, and let UDP port 4791 through the firewall)",
            pair.own.device
        ),
    )
}

/// Reads records over and over for [`MEASURE_MAX`], two batches at a time.
fn read(
    builder: TierBuilder,
    options: &Options,
    addr: &str,
    info: &StoreInfo,
) -> Result<Speed, TierError> {
    let record_bytes = largest_image_bytes(info).max(1);
    let batch = (ARENA_BYTES / 2 / record_bytes).clamp(1, BATCH_MAX) as u32;
    let slot_bytes = usize::try_from(record_bytes).unwrap_or(usize::MAX);
    let arena = ArenaBuilder::new()
        .slab(batch, slot_bytes)
        .slab(batch, slot_bytes)
        .reserve_bytes(options.reserve_bytes)
        .build()?;
    // What is measured is the way; one record was compared before.
    let tier = builder
        .verify(Verify::Off)
        .allow_missing(true)
        .connect(addr, Arc::new(arena))?;
    let keys: Vec<Key> = keys(info).take(4 * batch as usize).collect();
    let mut next = keys.iter().copied().cycle();
    let mut submit = |slab: u32| -> Result<Pending, TierError> {
        let wanted: Vec<(Key, SlotId)> = (0..batch)
            .zip(&mut next)
            .map(|(slot, key)| (key, SlotId { slab, slot }))
            .collect();
        tier.submit(&wanted, Some(BATCH_TIME))
    };
    // The first fetch of a layer asks for its description, and that is no read.
    let warm = submit(0)?;
    take(warm)?;
    let start = Instant::now();
    let mut bytes = 0;
    let mut under_way = std::collections::VecDeque::from([(0, submit(0)?), (1, submit(1)?)]);
    while let Some((slab, pending)) = under_way.pop_front() {
        bytes += take(pending)?;
        if start.elapsed() < MEASURE_MAX && bytes < BYTES_MAX {
            under_way.push_back((slab, submit(slab)?));
        }
    }
    Ok(Speed {
        bytes,
        seconds: start.elapsed().as_secs_f64(),
    })
}

fn take(pending: Pending) -> Result<u64, TierError> {
    let mut bytes = 0;
    for record in pending.wait()?.0 {
        bytes += record?.bytes().len() as u64;
    }
    Ok(bytes)
}

fn keys(info: &StoreInfo) -> impl Iterator<Item = Key> + '_ {
    info.layers.iter().flat_map(|layer| {
        let ranges = layer.experts.iter();
        ranges.flat_map(move |&[first, end]| (first..end).map(move |e| Key::new(layer.layer, e)))
    })
}
