//! What all tiers share: from keys and slots to orders, from finished requests to records.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use expert_arena::{ExpertArena, SlotId};
use expert_store::info::StoreInfo;
use expert_wire::Key;

use crate::config::{Deadline, Verify};
use crate::driver::{Driver, Outcome, Ticket};
use crate::engine::{Committed, Failure, Order};
use crate::error::TierError;
use crate::rail::ContentTag;
use crate::record::Record;
use crate::stats::{RequestStats, TierStats};
use crate::view::View;

/// How much longer than its deadline a caller waits for the driver: it ends requests on time
/// unless the machine does not run it.
const GRACE: Duration = Duration::from_secs(2);

/// Gets the view of what the rails fetch now.
pub(crate) type Refresh = Box<dyn Fn(Instant) -> Result<View, TierError> + Send + Sync>;

/// See the module. *Field order is drop order*: the driver, and with it the rails, before the arena.
pub(crate) struct Core {
    driver: Driver,
    view: RwLock<Arc<View>>,
    refresh: Refresh,
    verify: Verify,
    seen: Mutex<Seen>,
    deadline: Deadline,
    arena: Arc<ExpertArena>,
}

impl Core {
    pub(crate) fn new(
        driver: Driver,
        view: View,
        refresh: Refresh,
        verify: Verify,
        deadline: Deadline,
        arena: Arc<ExpertArena>,
    ) -> Self {
        Self {
            driver,
            view: RwLock::new(Arc::new(view)),
            refresh,
            verify,
            seen: Mutex::default(),
            deadline,
            arena,
        }
    }

    pub(crate) fn arena(&self) -> &Arc<ExpertArena> {
        &self.arena
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.driver.is_healthy()
    }

    pub(crate) fn stats(&self) -> TierStats {
        self.driver.stats()
    }

    pub(crate) fn info(&self) -> StoreInfo {
        self.view().info.clone()
    }

    pub(crate) fn view(&self) -> Arc<View> {
        self.view
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The view of what the rails serve now; read again where they changed.
    fn current_view(&self, limit: Instant) -> Result<Arc<View>, TierError> {
        let view = self.view();
        match self.driver.content() {
            Some(content) if content != view.tag => {
                let fresh = Arc::new((self.refresh)(limit)?);
                *self.view.write().unwrap_or_else(PoisonError::into_inner) = fresh.clone();
                Ok(fresh)
            }
            _ => Ok(view),
        }
    }

    pub(crate) fn submit(
        &self,
        batch: &[(Key, SlotId)],
        time: Option<Duration>,
    ) -> Result<Pending<'_>, TierError> {
        let start = Instant::now();
        let patience = time.unwrap_or(self.deadline.base);
        let view = self.current_view(start + patience)?;
        let verify = self.verify != Verify::Off && view.has_checksums;
        let mut orders = Vec::with_capacity(batch.len());
        let mut members = Vec::with_capacity(batch.len());
        let mut bytes = 0;
        for &(key, slot) in batch {
            let (layer, position) = view.find(key, start + patience)?;
            let image_bytes = layer.class(position).image_bytes;
            bytes += image_bytes;
            let have = self.arena.slot_bytes(slot.slab) as u64;
            // A slab that does not exist is the arena's to report.
            if image_bytes > have && have > 0 {
                return Err(TierError::SlotTooSmall {
                    key,
                    slot,
                    need: image_bytes,
                    have,
                });
            }
            let landing = self.arena.begin_landing(slot, image_bytes as usize)?;
            orders.push(Order {
                key,
                position,
                layer: layer.clone(),
                content: view.tag,
                landing,
                verify: verify && self.must_verify(view.tag, key),
            });
            members.push((key, layer, position));
        }
        let allowed = time.unwrap_or_else(|| self.deadline.for_bytes(bytes));
        let deadline = start + allowed;
        Ok(Pending {
            ticket: self.driver.submit(orders, deadline),
            core: self,
            members,
            tag: view.tag,
            deadline,
            allowed,
        })
    }

    fn must_verify(&self, tag: ContentTag, key: Key) -> bool {
        self.verify != Verify::First
            || !self
                .seen
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .contains(tag, key)
    }

    fn note_verified(&self, tag: ContentTag, key: Key) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert(tag, key);
    }
}

/// Records compared once, for [`Verify::First`]: a bit per expert of each layer of one content.
#[derive(Debug, Default)]
struct Seen {
    content: Option<ContentTag>,
    layers: HashMap<u32, Vec<u64>>,
}

impl Seen {
    fn contains(&self, content: ContentTag, key: Key) -> bool {
        let bits = self.layers.get(&key.layer);
        let word = bits.and_then(|bits| bits.get(key.expert as usize / 64));
        self.content == Some(content) && word.is_some_and(|w| w >> (key.expert % 64) & 1 == 1)
    }

    fn insert(&mut self, content: ContentTag, key: Key) {
        if self.content != Some(content) {
            self.layers.clear();
            self.content = Some(content);
        }
        let bits = self.layers.entry(key.layer).or_default();
        let word = key.expert as usize / 64;
        if bits.len() <= word {
            bits.resize(word + 1, 0);
        }
        bits[word] |= 1 << (key.expert % 64);
    }
}

/// A batch under way. Dropping it cancels it: its slots return when the rails are done with them.
pub struct Pending<'a> {
    core: &'a Core,
    ticket: Ticket,
    members: Vec<(Key, Arc<expert_store::Layer>, usize)>,
    tag: ContentTag,
    deadline: Instant,
    allowed: Duration,
}

/// What became of each record of a batch, in its order, and where the time went.
pub type BatchResult = (Vec<Result<Record, TierError>>, RequestStats);

impl Pending<'_> {
    /// Whether [`Pending::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }

    /// Gives the batch up.
    pub fn cancel(&self) {
        self.ticket.cancel();
    }

    /// Waits for the end, at the latest at the deadline.
    ///
    /// *Errors*: [`TierError::Backpressure`] when it was not admitted, [`TierError::ShutDown`].
    /// What befell single records is in the list.
    pub fn wait(self) -> Result<BatchResult, TierError> {
        match self.ticket.wait(self.deadline, GRACE) {
            Outcome::ShutDown => Err(TierError::ShutDown),
            Outcome::Refused(refused) => Err(TierError::Backpressure {
                asked: refused.asked,
                inflight: refused.inflight,
                limit: refused.limit,
            }),
            Outcome::Finished(finished) => {
                let records = finished
                    .records
                    .into_iter()
                    .zip(&self.members)
                    .map(|(result, member)| self.conclude(result, member))
                    .collect();
                Ok((records, finished.stats))
            }
        }
    }

    fn conclude(
        &self,
        result: Result<Committed, Failure>,
        (key, layer, position): &(Key, Arc<expert_store::Layer>, usize),
    ) -> Result<Record, TierError> {
        let key = *key;
        match result {
            Ok(committed) => {
                if committed.verified && self.core.verify == Verify::First {
                    self.core.note_verified(self.tag, key);
                }
                Ok(Record {
                    key,
                    lease: committed.lease,
                    layer: layer.clone(),
                    position: *position,
                    verified: committed.verified,
                    took: committed.took,
                })
            }
            Err(failure) => Err(match failure {
                Failure::Checksum(bad) => TierError::Checksum { key, bad },
                Failure::WrongRecord(why) => TierError::WrongRecord { key, why },
                Failure::Refused(why) => TierError::Refused { key, why },
                Failure::Unavailable(why) => TierError::Unavailable { key, why },
                Failure::ContentChanged => TierError::ContentChanged { key },
                Failure::Deadline(why) => TierError::Deadline {
                    key,
                    waited: self.allowed,
                    why,
                },
                Failure::RailFailed(why) => TierError::RailFailed { key, why },
                Failure::Cancelled => TierError::Cancelled { key },
            }),
        }
    }
}
