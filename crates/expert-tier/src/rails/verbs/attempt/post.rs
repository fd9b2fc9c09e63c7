//! How a READ becomes work requests on a lane's queue pair.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use atlas_rdma::{LocalPart, ReadDone, Refusal, RemoteKey, RemoteRead};
use expert_store::Layer;

use super::lane::Lane;
use super::shared::Token;
use super::{Attempt, Opened};
use crate::rail::{Read, ReadError};
use crate::rails::verbs::plan::{Limits, Plan, Unplannable};
use crate::rails::verbs::session::Memory;

/// Memory for one plan at a time.
#[derive(Default)]
pub(super) struct Scratch {
    plan: Plan,
    requests: Vec<RemoteRead>,
    parts: Vec<LocalPart>,
}

/// What became of a READ.
pub(super) enum Posted {
    /// The lane has it.
    Taken,
    /// It ended, well or not, without the network.
    Ended,
    /// It comes again: there will be room, or the rail goes down.
    Refused(Box<Read>),
    /// The device takes nothing: it would be asked for ever.
    Broken(Box<Read>, String),
}

impl Attempt {
    /// Posts a READ on a lane.
    pub(super) fn post_on(
        &self,
        scratch: &mut Scratch,
        opened: &Opened,
        lane: &Lane,
        read: Read,
        layer: Option<Arc<Layer>>,
    ) -> Posted {
        let bytes = read.bytes();
        let limits = lane.with_queue(|queue| {
            let options = queue.options();
            // A v1 record of any size must fit half the queue.
            let fits = bytes.div_ceil(u64::from(options.work_requests_max / 2).max(1));
            Limits {
                request_max_bytes: self
                    .config
                    .options
                    .request_bytes
                    .max(fits)
                    .min(u64::from(queue.max_message_bytes())),
                parts_max: options.sge_max as usize,
            }
        });
        let Some(limits) = limits else {
            return Posted::Refused(Box::new(read));
        };
        let Scratch {
            plan,
            requests,
            parts,
        } = scratch;
        let peer = match self.plan(plan, opened, &read, layer, limits) {
            Ok(peer) => peer,
            Err(error) => {
                self.rail.complete(read, Err(error));
                return Posted::Ended;
            }
        };
        if plan.requests.is_empty() {
            // Padding and small leaves alone: nothing to wait for.
            let (token, range) = Token::split(read, peer);
            self.conclude(
                opened,
                ReadDone {
                    token,
                    range,
                    result: Ok(()),
                },
            );
            return Posted::Ended;
        }
        requests.clear();
        requests.extend(plan.requests.iter().map(|r| RemoteRead {
            remote_addr: r.remote_addr,
            rkey: RemoteKey(r.rkey),
            part_count: r.parts,
        }));
        parts.clear();
        let planned = plan.parts.iter();
        parts.extend(planned.map(|&(at, bytes)| LocalPart { at, bytes }));
        let (token, range) = Token::split(read, peer);
        let queue = lane.queue.read().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = queue.as_ref() else {
            return Posted::Refused(Box::new(token.join(range)));
        };
        let is_in_doubt = self.config.local().is_soft() && !self.rail.is_eager();
        let progress_bytes = || {
            queue.look();
            queue.progress_bytes()
        };
        let before = is_in_doubt.then(progress_bytes);
        lane.is_posting.store(true, Ordering::Relaxed);
        let posted = queue.post(token, range, requests, parts);
        lane.is_posting.store(false, Ordering::Relaxed);
        if let Some(before) = before {
            // READs that were posted earlier may have got on, too, but not by as much.
            self.rail.note_post(progress_bytes() - before > bytes / 2);
        }
        let Err(refused) = posted else {
            return Posted::Taken;
        };
        let read = refused.token.join(refused.range);
        match refused.why {
            Refusal::Full | Refusal::Down => Posted::Refused(Box::new(read)),
            why @ Refusal::Failed(_) => Posted::Broken(Box::new(read), why.to_string()),
            why => {
                self.rail
                    .complete(read, Err(ReadError::Refused(why.to_string())));
                Posted::Ended
            }
        }
    }

    /// Fills the plan; says where the record is in the peer's catalogue.
    #[allow(clippy::type_complexity)] // a layer and a position in it
    fn plan(
        &self,
        plan: &mut Plan,
        opened: &Opened,
        read: &Read,
        layer: Option<Arc<Layer>>,
        limits: Limits,
    ) -> Result<Option<(Arc<Layer>, usize)>, ReadError> {
        let offset = read.range.offset() as u64;
        match (&opened.memory, layer) {
            (Memory::Regions(table), Some(layer)) => {
                let position = layer.position(read.key.expert).ok_or_else(|| {
                    ReadError::Refused(format!("the peer does not hold {}", read.key))
                })?;
                let ours = read.layer.class(read.position).image_bytes;
                if layer.class(position).image_bytes != ours {
                    return Err(ReadError::Refused(format!(
                        "the peer's record has {} bytes, the catalogue says {ours}",
                        layer.class(position).image_bytes
                    )));
                }
                plan.of_image(&layer, position, offset, read.bytes(), table, limits)
                    .map_err(|e| {
                        ReadError::Unavailable(match e {
                            Unplannable::NotRegistered => "the file below this record changed on the peer; load the store there again".into(),
                            Unplannable::NotDescribed => "the peer does not say where its records lie".into(),
                        })
                    })?;
                Ok(Some((layer, position)))
            }
            (Memory::Layers { regions, manifest }, _) => {
                let region = regions
                    .get(read.key.layer as usize)
                    .ok_or_else(|| ReadError::Refused("the peer has no such layer".into()))?;
                let addr = u64::from(read.key.expert)
                    .checked_mul(manifest.record_stride)
                    .and_then(|at| at.checked_add(offset))
                    .and_then(|at| at.checked_add(region.base))
                    .ok_or_else(|| ReadError::Refused("an address beyond 64 bits".into()))?;
                plan.of_range(addr, region.rkey, read.bytes(), limits);
                Ok(None)
            }
            (Memory::Regions(_), None) => unreachable!("v2 READs know their layer"),
        }
    }
}
