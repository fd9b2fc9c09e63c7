//! A client opens a rail: queue pairs on both sides, and where the store lies.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use atlas_rdma::attributes::{Gid, LinkLayer, Mtu};
use atlas_rdma::{Path, RemoteEndpoint};
use expert_wire::Key;
use expert_wire::message::ErrorCode;
use expert_wire::v1::Manifest;
use expert_wire::v1_verbs::{READS_MAX, V1Endpoint, V1Rail, V1Region};
use expert_wire::verbs::{
    LINK_ETHERNET, LINK_INFINIBAND, OpenRail, QpEndpoint, RailOpened, Region,
};

use super::fabric::RailState;
use super::served::{CountedQp, OpenedRail, Served};
use super::{Rail, Verbs};
use crate::{FilePiece, PeerError, Source, SourceError};

/// Queue pairs do not try more often: 7, which devices and soft-RoCE take for ever where the other
/// side is alive, is what the frozen protocol has.
const V1_RETRY_COUNT: u8 = 7;

/// Opens a rail for a v2 client: as many queue pairs as it has, connected to them.
///
/// `served` is the store of the client's epoch; the caller has compared the epochs. On any error
/// nothing is left behind.
pub(crate) fn open_rail(
    verbs: &Verbs,
    served: &Arc<Served>,
    request: &OpenRail,
) -> Result<(OpenedRail, RailOpened), SourceError> {
    let index = usize::from(request.rail);
    let Some(rail) = verbs.rails.get(index) else {
        return Err(SourceError::new(
            ErrorCode::NoSuchRail,
            format!(
                "rail {} was asked for, this peer has {}",
                request.rail,
                verbs.rails.len()
            ),
        ));
    };
    let qps_max = verbs.options.qps_per_rail_max.max(1);
    if request.qps.len() > usize::from(qps_max) {
        return Err(SourceError::new(
            ErrorCode::BadFrame,
            format!(
                "{} queue pairs were asked for on rail {}, the limit is {qps_max}",
                request.qps.len(),
                rail.name
            ),
        ));
    }
    if served.is_closing() {
        return Err(withdrawn());
    }
    let state = verbs.state(index).map_err(|e| unavailable(rail, &e))?;
    let own_link = link_code(state.link_layer);
    if request.link_layer != own_link {
        return Err(SourceError::new(
            ErrorCode::RailUnavailable,
            format!(
                "rail {} has link layer {own_link}, the client's rail has {}; pair it with another",
                rail.name, request.link_layer
            ),
        ));
    }
    let theirs = Mtu::from_code(request.mtu_code.into()).unwrap_or(Mtu::B256);
    let mtu = state.mtu.min(theirs);
    let reads_max = state.reads_in_max.min(request.reads_max).max(1);
    let mut queue_pairs = Vec::with_capacity(request.qps.len());
    let mut endpoints = Vec::with_capacity(request.qps.len());
    for remote in &request.qps {
        let mut qp = verbs
            .queue_pair(index, verbs.options.pkey_index)
            .map_err(|e| unavailable(rail, &e))?;
        let mut path = path(&state, remote, request.gid, request.lid, mtu);
        path.pkey_index = verbs.options.pkey_index;
        path.reads_in = reads_max;
        path.reads_out = path.reads_out.min(reads_max);
        path.service_level = request.service_level;
        path.traffic_class = request.traffic_class;
        qp.qp.connect(&path).map_err(|e| unavailable(rail, &e))?;
        endpoints.push(qp.qp.local());
        queue_pairs.push(qp);
    }
    let opened = served.keep(false, queue_pairs).ok_or_else(withdrawn)?;
    rail.opens.fetch_add(1, Ordering::Relaxed);
    let reply = RailOpened {
        epoch: request.epoch,
        mtu_code: mtu.code() as u8,
        reads_max,
        link_layer: own_link,
        lid: state.info.lid,
        gid: state.info.gid,
        qps: endpoints,
        // Read last: a file that is revoked from here on fails the client's READs.
        regions: served.regions(index).to_vec(),
    };
    Ok((opened, reply))
}

/// The queue pairs that a v1 client was offered, not connected yet.
pub(crate) struct V1Offer {
    served: Arc<Served>,
    rails: Vec<(RailState, CountedQp)>,
}

/// Offers a v1 client one queue pair on each of the first `count` rails.
pub(crate) fn v1_offer(
    verbs: &Verbs,
    served: &Arc<Served>,
    source: &dyn Source,
    count: u8,
) -> Result<(V1Offer, Vec<V1Rail>), String> {
    let have = verbs.rails.len();
    if usize::from(count) > have {
        return Err(format!(
            "{count} rails were asked for, this peer has {have}"
        ));
    }
    if served.is_closing() {
        return Err("the store is being loaded again".into());
    }
    let manifest = source.v1_manifest().ok_or("this is no v1 store")?;
    let mut offer = V1Offer {
        served: served.clone(),
        rails: Vec::new(),
    };
    let mut rails = Vec::new();
    for index in 0..usize::from(count) {
        let rail = &verbs.rails[index];
        let refuse = |e: PeerError| format!("rail {}: {e}", rail.name);
        let layers = v1_layers(source, manifest, &served.regions(index))
            .ok_or_else(|| format!("rail {}: a file of the store changed", rail.name))?;
        let state = verbs.state(index).map_err(refuse)?;
        // The frozen messages have no LID.
        if state.link_layer == LinkLayer::InfiniBand {
            return Err(format!("rail {}: v1 clients need Ethernet", rail.name));
        }
        let qp = verbs.queue_pair(index, 0).map_err(refuse)?;
        let QpEndpoint { qpn, psn } = qp.qp.local();
        let gid = state.info.gid;
        rails.push(V1Rail {
            endpoint: V1Endpoint { qpn, psn, gid },
            layers,
        });
        offer.rails.push((state, qp));
    }
    Ok((offer, rails))
}

/// Connects what was offered to a v1 client's queue pairs.
pub(crate) fn v1_connect(
    verbs: &Verbs,
    offer: V1Offer,
    remote: &[V1Endpoint],
) -> Result<OpenedRail, String> {
    if remote.len() != offer.rails.len() {
        return Err(format!(
            "{} rails were offered and {} came back",
            offer.rails.len(),
            remote.len()
        ));
    }
    let mut queue_pairs = Vec::with_capacity(remote.len());
    for (rail, ((state, mut qp), remote)) in offer.rails.into_iter().zip(remote).enumerate() {
        let endpoint = QpEndpoint {
            qpn: remote.qpn,
            psn: remote.psn,
        };
        let mut path = path(&state, &endpoint, remote.gid, 0, state.mtu);
        path.pkey_index = 0;
        path.reads_in = READS_MAX.min(state.reads_in_max);
        path.reads_out = READS_MAX.min(state.reads_out_max);
        path.retry_count = V1_RETRY_COUNT;
        qp.qp
            .connect(&path)
            .map_err(|e| format!("rail {}: {e}", verbs.rails[rail].name))?;
        verbs.rails[rail].opens.fetch_add(1, Ordering::Relaxed);
        queue_pairs.push(qp);
    }
    let opened = offer.served.keep(true, queue_pairs);
    opened.ok_or_else(|| "the store is being loaded again".into())
}

/// Where the layers of a v1 store lie; `None` unless each lies in one region.
pub(crate) fn v1_layers(
    source: &dyn Source,
    manifest: &Manifest,
    regions: &[Region],
) -> Option<Vec<V1Region>> {
    let place = |layer, expert| {
        let mut place = None;
        let mut take = |piece| {
            if let FilePiece::File { file, offset, .. } = piece {
                place.get_or_insert((file, offset));
            }
        };
        let key = Key::new(layer, expert);
        source.for_each_piece(key, 0, 1, &mut take).ok()?;
        place
    };
    let last = manifest.num_experts.checked_sub(1)?;
    (0..manifest.num_moe_layers)
        .map(|layer| {
            let (file, offset) = place(layer, 0)?;
            let last_at = offset.checked_add(manifest.record_stride.checked_mul(last.into())?)?;
            if place(layer, last)? != (file, last_at) {
                return None;
            }
            let end = last_at.checked_add(manifest.record_stride)?;
            let at = regions.partition_point(|r| (r.file, r.file_offset) <= (file, offset));
            let region = regions.get(at.checked_sub(1)?)?;
            let holds = region.file == file && end <= region.file_offset + region.bytes;
            holds.then(|| V1Region {
                base: region.addr + (offset - region.file_offset),
                rkey: region.rkey,
            })
        })
        .collect()
}

impl Verbs {
    fn queue_pair(&self, rail: usize, pkey_index: u16) -> Result<CountedQp, PeerError> {
        let qp = self.fabric.responder(rail, pkey_index)?;
        Ok(CountedQp::new(qp, self.rails[rail].qps_open.clone()))
    }
}

fn path(state: &RailState, remote: &QpEndpoint, gid: [u8; 16], lid: u16, mtu: Mtu) -> Path {
    let remote = RemoteEndpoint {
        qpn: remote.qpn,
        psn: remote.psn,
        gid: Gid(gid),
        lid,
    };
    let mut path = Path::new(state.port, state.link_layer, mtu, remote);
    path.gid_index = state.gid_index;
    // Nothing is posted on this side; a device may still refuse a depth beyond its own.
    path.reads_out = path.reads_out.min(state.reads_out_max);
    path
}

fn link_code(link_layer: LinkLayer) -> u8 {
    match link_layer {
        LinkLayer::InfiniBand => LINK_INFINIBAND,
        LinkLayer::Ethernet => LINK_ETHERNET,
    }
}

fn unavailable(rail: &Rail, error: &PeerError) -> SourceError {
    SourceError::new(
        ErrorCode::RailUnavailable,
        format!("rail {}: {error}", rail.name),
    )
}

/// What a client is told whose store is not registered now.
pub(crate) fn withdrawn() -> SourceError {
    SourceError::new(
        ErrorCode::RailUnavailable,
        "the peer's store is not registered now: it is being loaded again, or the peer ends",
    )
}
