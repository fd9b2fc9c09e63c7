//! The other end: whether it answers, what it serves, and whether its rails fit those of this machine.

use std::sync::Arc;

use atlas_rdma::attributes::{Gid, Mtu};
use atlas_rdma::choose::{Endpoint, RailChoice, pair};
use expert_arena::{ArenaBuilder, ArenaError};
use expert_store::Key;
use expert_store::info::{StoreInfo, hex128};
use expert_tier::{ExpertTier, PeerLook, PeerRail, TierError, largest_image_bytes};

use crate::Options;
use crate::finding::{Check, Finding, Level};
use crate::measure;
use crate::port::Rails;
use crate::system::System;

/// READs under way at once below which a card does not reach its speed.
const READ_DEPTH_GOOD: u8 = 16;

pub(crate) fn check(
    out: &mut Vec<Finding>,
    options: &Options,
    system: &System,
    addr: &str,
    rails: &Rails,
) {
    let look = match options.tier.look_at(addr) {
        Ok(look) => look,
        Err(error) => {
            out.push(unreachable(addr, &error));
            return;
        }
    };
    out.push(Finding::ok(
        Check::PeerConnect,
        format!("{addr} answers as a peer"),
    ));
    out.push(protocol(addr, &look));
    let info = match options.tier.describe(addr) {
        Ok(info) => info,
        Err(error) => {
            out.push(undescribed(addr, &error));
            return;
        }
    };
    let content = content(options, addr, &info);
    let is_right = content.level != Level::Failure;
    out.push(content);
    if !is_right {
        return;
    }
    out.push(record(options, addr, &info));
    if look.version == 1 {
        out.push(Finding::ok(
            Check::PeerRails,
            format!("{addr} speaks version 1, which does not tell of rails"),
        ));
    } else {
        out.push(peer_rails(options, addr, &look));
    }
    let pairs = pairing(out, options, addr, rails, &look);
    for pair in &pairs {
        out.push(mtu(pair));
        out.push(read_depth(options, pair));
    }
    measure::check(out, options, system, addr, &info, &pairs);
}

/// A rail of this machine and the one of the peer that it belongs to.
pub(crate) struct Pair<'a> {
    pub(crate) own: &'a RailChoice,
    pub(crate) peer: &'a PeerRail,
}

impl Pair<'_> {
    pub(crate) fn name(&self) -> String {
        format!(
            "{} port {} and the peer's {}",
            self.own.device, self.own.port, self.peer.info.name
        )
    }
}

pub(crate) fn unreachable(addr: &str, error: &TierError) -> Finding {
    let (host, port) = addr.rsplit_once(':').unwrap_or((addr, "9909"));
    match error {
        TierError::Handshake { .. } => Finding::trouble(
            Level::Failure,
            Check::PeerConnect,
            error.to_string(),
            "something answers there, and no session comes about",
            format!(
                "atlas-expert-peer --version    (on {host}: both ends should be of one version; its log says more)"
            ),
        ),
        _ => Finding::trouble(
            Level::Failure,
            Check::PeerConnect,
            error.to_string(),
            "nothing can be fetched from it",
            format!(
                "nc -zv {host} {port}    (then start atlas-expert-peer --listen HOST:{port} there, or open the port in the firewall)"
            ),
        ),
    }
}

pub(crate) fn protocol(addr: &str, look: &PeerLook) -> Finding {
    let what = format!("{addr} and this end speak version {}", look.version);
    if look.version >= 2 {
        return Finding::ok(Check::PeerProtocol, what);
    }
    Finding::trouble(
        Level::Warning,
        Check::PeerProtocol,
        what,
        "version 1 has no checksums, no identity of its content, and one queue pair a rail",
        "serve the store with atlas-expert-peer",
    )
}

fn undescribed(addr: &str, error: &TierError) -> Finding {
    Finding::trouble(
        Level::Failure,
        Check::PeerContent,
        error.to_string(),
        "the peer serves something else than is wanted, or says what cannot be true",
        format!(
            "atlas-expert doctor --store PATH    (where {addr} runs), or correct --expect-content-id"
        ),
    )
}

pub(crate) fn content(options: &Options, addr: &str, info: &StoreInfo) -> Finding {
    let got = info.content_id.as_deref();
    let layers = info.layers.len();
    match (options.expect_content_id.map(hex128), got) {
        (Some(want), got) if got != Some(want.as_str()) && !is_part_of(info, &want) => {
            Finding::trouble(
                Level::Failure,
                Check::PeerContent,
                format!(
                    "{addr} has content {}, expected {want}",
                    got.unwrap_or("without id")
                ),
                "it is another model, or another build of it",
                "start the peer with the right store, or correct --expect-content-id",
            )
        }
        (_, Some(id)) => Finding::ok(
            Check::PeerContent,
            format!("{addr} serves content {id}, {layers} layers"),
        ),
        (_, None) => Finding::trouble(
            Level::Warning,
            Check::PeerContent,
            format!("{addr} serves {layers} layers without checksums"),
            "bytes are not compared on arrival",
            "atlas-expert index CHECKPOINT -o STORE    (where the peer runs, and serve that)",
        ),
    }
}

fn is_part_of(info: &StoreInfo, want: &str) -> bool {
    info.whole.as_ref().is_some_and(|w| w.content_id == want)
}

/// Fetches one record over TCP and compares it.
fn record(options: &Options, addr: &str, info: &StoreInfo) -> Finding {
    let failed = |why: String| {
        Finding::trouble(
            Level::Failure,
            Check::PeerRecord,
            why,
            "fetches from this peer fail, whatever the backend",
            format!("atlas-expert verify STORE    (where {addr} runs)"),
        )
    };
    let Some(key) = first_key(info) else {
        return failed(format!("{addr} has no record at all"));
    };
    match fetch_one(options, addr, info, key) {
        Ok((bytes, true)) => Finding::ok(
            Check::PeerRecord,
            format!("{key} came over TCP, {bytes} bytes, every checksum right"),
        ),
        Ok((bytes, false)) => Finding::ok(
            Check::PeerRecord,
            format!("{key} came over TCP, {bytes} bytes; there are no checksums to compare"),
        ),
        Err(TierError::Arena(error)) => no_arena(Check::PeerRecord, &error),
        Err(error) => failed(error.to_string()),
    }
}

/// What was to land nowhere is no fault of the peer's.
pub(crate) fn no_arena(check: Check, error: &ArenaError) -> Finding {
    Finding::trouble(
        Level::Failure,
        check,
        error.to_string(),
        "this machine has no memory for a small arena, so the peer was not tried: see memory-floor",
        "free memory, raise the container's limit, or leave less free: --reserve-gb 0.5",
    )
}

pub(crate) fn first_key(info: &StoreInfo) -> Option<Key> {
    let layer = info.layers.iter().find(|l| !l.experts.is_empty())?;
    Some(Key::new(layer.layer, layer.experts.first()?[0]))
}

fn fetch_one(
    options: &Options,
    addr: &str,
    info: &StoreInfo,
    key: Key,
) -> Result<(usize, bool), TierError> {
    let slot_bytes = usize::try_from(largest_image_bytes(info)).unwrap_or(usize::MAX);
    let arena = ArenaBuilder::new()
        .slab(1, slot_bytes)
        .reserve_bytes(options.reserve_bytes)
        .build()?;
    let tier = options
        .tier
        .clone()
        .streams(1)
        .allow_missing(true)
        .connect(addr, Arc::new(arena))?;
    let slot = expert_arena::SlotId { slab: 0, slot: 0 };
    let record = tier.fetch(key, slot, 0)?;
    Ok((record.bytes().len(), record.is_verified()))
}

fn peer_rails(options: &Options, addr: &str, look: &PeerLook) -> Finding {
    let words: Vec<String> = look
        .rails
        .iter()
        .map(|r| format!("{} {}", r.info.name, Gid(r.info.gid)))
        .collect();
    if words.is_empty() {
        return Finding::trouble(
            options.verbs_level(),
            Check::PeerRails,
            format!("{addr} offers no rail"),
            "one-sided READs need a card on both ends; TCP works",
            "atlas-expert doctor --expert-backend rdma-verbs    (where the peer runs; its log says why it serves TCP alone)",
        );
    }
    Finding::ok(Check::PeerRails, format!("{addr} has {}", words.join(", ")))
}

pub(crate) fn pairing<'a>(
    out: &mut Vec<Finding>,
    options: &Options,
    addr: &str,
    rails: &'a Rails,
    look: &'a PeerLook,
) -> Vec<Pair<'a>> {
    if rails.usable.is_empty() || look.rails.is_empty() {
        return Vec::new();
    }
    let own: Vec<Endpoint> = rails.usable.iter().map(RailChoice::endpoint).collect();
    let remote: Vec<Endpoint> = look.rails.iter().map(|r| r.endpoint).collect();
    let pairing = pair(&own, &remote);
    let mut pairs = Vec::new();
    for (i, j) in pairing.paired {
        let found = Pair {
            own: &rails.usable[i],
            peer: &look.rails[j],
        };
        let what = format!(
            "{} belong together: {} and {} are in one subnet",
            found.name(),
            found.own.gid.entry.gid,
            Gid(found.peer.info.gid)
        );
        out.push(Finding::ok(Check::PeerPairing, what));
        pairs.push(found);
    }
    let is_alone = pairs.is_empty();
    for (i, candidates) in pairing.candidates {
        let choice = &rails.usable[i];
        let name = format!(
            "{} port {} ({})",
            choice.device, choice.port, choice.gid.entry.gid
        );
        let level = match options.verbs_required && is_alone && candidates.is_empty() {
            true => Level::Failure,
            false => Level::Warning,
        };
        let Some(&first) = candidates.first() else {
            out.push(Finding::trouble(
                level,
                Check::PeerPairing,
                format!("{name} can reach none of the rails of {addr}: another link layer or address family"),
                "this port carries nothing from this peer",
                "give both ends addresses of one kind: ip addr add 192.168.100.1/24 dev NETDEV",
            ));
            continue;
        };
        let tried: Vec<&str> = candidates
            .iter()
            .map(|j| look.rails[*j].info.name.as_str())
            .collect();
        out.push(Finding::trouble(
            level,
            Check::PeerPairing,
            format!(
                "{name} is in no subnet of {addr} that is free; it tries {} in turn",
                tried.join(", ")
            ),
            "it may work through a router or share a port of the peer, or not at all",
            "give both ports an address of one subnet: ip addr add 192.168.100.1/24 dev NETDEV",
        ));
        pairs.push(Pair {
            own: choice,
            peer: &look.rails[first],
        });
    }
    pairs
}

pub(crate) fn mtu(pair: &Pair<'_>) -> Finding {
    let own = pair.own.attributes.active_mtu;
    let peer = Mtu::from_code(pair.peer.info.mtu_code.into()).unwrap_or(Mtu::B256);
    let what = format!(
        "{}: packets of {} and {} bytes",
        pair.name(),
        own.bytes(),
        peer.bytes()
    );
    if own == peer {
        return Finding::ok(Check::PeerMtu, what);
    }
    let (smaller, netdev) = match own < peer {
        true => (
            "here",
            pair.own.gid.entry.netdev.as_deref().unwrap_or("NETDEV"),
        ),
        false => ("on the peer", "NETDEV"),
    };
    Finding::trouble(
        Level::Warning,
        Check::PeerMtu,
        what,
        "both ends use the smaller one, so it works; a switch between them may drop the larger ones",
        format!("ip link set dev {netdev} mtu 9000    ({smaller})"),
    )
}

pub(crate) fn read_depth(options: &Options, pair: &Pair<'_>) -> Finding {
    let peer = pair.peer.info.reads_max;
    let used = options.verbs.read_depth.min(peer);
    let what = format!(
        "{}: the peer answers {peer} READs at once, {used} are used",
        pair.name()
    );
    if used >= READ_DEPTH_GOOD || used == options.verbs.read_depth {
        return Finding::ok(Check::PeerReadDepth, what);
    }
    Finding::trouble(
        Level::Warning,
        Check::PeerReadDepth,
        what,
        "the card waits for answers instead of asking; more queue pairs make up for it",
        "atlas-expert fetch --qps-per-rail 8",
    )
}
