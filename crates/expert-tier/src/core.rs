//! What all tiers share: from keys and slots to orders, from finished requests to records.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use expert_arena::{ArenaError, ExpertArena, SlotId, SlotState};
use expert_store::Layer;
use expert_store::info::StoreInfo;
use expert_wire::Key;

use crate::config::{Class, Deadline, Verify};
use crate::driver::{Driver, Outcome, Ticket};
use crate::engine::{Committed, Failure, Order, later};
use crate::error::TierError;
use crate::peers::Watch;
use crate::rail::ContentTag;
use crate::record::Record;
use crate::replan;
use crate::seen::{Run, Seen};
use crate::stats::{RequestStats, TierStats};
use crate::sync::lock;
use crate::view::View;

/// How much longer than its deadline a caller waits for the driver: it ends requests on time
/// unless the machine does not run it.
const GRACE: Duration = Duration::from_secs(2);

/// Gets the view of what the rails fetch now.
/// Given what they serve and until when to try.
pub(crate) type Refresh = Box<dyn Fn(ContentTag, Instant) -> Result<View, TierError> + Send + Sync>;

/// See the module. *Field order is drop order*: the driver, and with it the rails, before the arena.
pub(crate) struct Core {
    /// Where there are several sources.
    watch: Option<Watch>,
    driver: Driver,
    view: RwLock<Arc<View>>,
    refresh: Refresh,
    verify: Verify,
    /// Whether records whose content changed are fetched once more.
    replans: bool,
    replanned: AtomicU64,
    seen: Arc<Mutex<Seen>>,
    deadline: Deadline,
    /// Bytes of batches under way: they are ahead of a new one in the queue.
    inflight_bytes: Arc<AtomicU64>,
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
            watch: None,
            driver,
            view: RwLock::new(Arc::new(view)),
            refresh,
            verify,
            replans: false,
            replanned: AtomicU64::new(0),
            seen: Arc::default(),
            deadline,
            inflight_bytes: Arc::default(),
            arena,
        }
    }

    pub(crate) fn replan_changed(mut self, replans: bool) -> Self {
        self.replans = replans;
        self
    }

    pub(crate) fn note_replanned(&self, records: u64) {
        self.replanned.fetch_add(records, Ordering::Relaxed);
    }

    /// With somebody who watches the sources.
    pub(crate) fn watched_by(self, watch: Option<Watch>) -> Self {
        Self { watch, ..self }
    }

    pub(crate) fn arena(&self) -> &Arc<ExpertArena> {
        &self.arena
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.driver.is_healthy()
    }

    pub(crate) fn stats(&self) -> TierStats {
        TierStats {
            replanned: self.replanned.load(Ordering::Relaxed),
            peers_refused: self.watch.as_ref().map_or(0, Watch::refused),
            ..self.driver.stats()
        }
    }

    pub(crate) fn info(&self) -> StoreInfo {
        self.view().info()
    }

    pub(crate) fn view(&self) -> Arc<View> {
        self.view
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The view of what the rails serve now; read again where they changed.
    pub(crate) fn current_view(&self, limit: Instant) -> Result<Arc<View>, TierError> {
        let view = self.view();
        match self.driver.content() {
            Some(content) if content != view.tag => {
                let fresh = Arc::new((self.refresh)(content, limit)?);
                if view.has_checksums && !fresh.has_checksums {
                    tracing::warn!(
                        "the store was replaced by one without checksums: bytes are not verified from now on"
                    );
                }
                *self.view.write().unwrap_or_else(PoisonError::into_inner) = fresh.clone();
                Ok(fresh)
            }
            _ => Ok(view),
        }
    }

    pub(crate) fn submit(
        &self,
        batch: &[(Key, SlotId)],
        class: Class,
        time: Option<Duration>,
    ) -> Result<Pending, TierError> {
        let start = Instant::now();
        let patience = later(start, time.unwrap_or(self.deadline.base));
        let view = self.current_view(patience)?;
        let verify = self.verify != Verify::Off && view.has_checksums;
        let run = self.driver.run();
        // What can be known is refused before the first slot is touched; a slot that somebody
        // leases, or that comes twice, is refused when its turn comes.
        let mut members = Vec::with_capacity(batch.len());
        let mut bytes = 0;
        for &(key, slot) in batch {
            let (layer, position) = view.find(key, patience)?;
            let need = layer.class(position).image_bytes;
            bytes += need;
            self.check_slot(key, slot, need)?;
            members.push((key, layer, position));
        }
        let mut orders = Vec::with_capacity(batch.len());
        for (&(key, slot), (_, layer, position)) in batch.iter().zip(&members) {
            let image_bytes = layer.class(*position).image_bytes;
            orders.push(Order {
                key,
                position: *position,
                layer: layer.clone(),
                content: view.tag,
                landing: self.arena.begin_landing(slot, image_bytes as usize)?,
                verify: verify && self.must_verify((view.tag, run), key),
            });
        }
        let ahead = self.inflight_bytes.fetch_add(bytes, Ordering::Relaxed);
        let allowed = time.unwrap_or_else(|| self.deadline.for_bytes(ahead.saturating_add(bytes)));
        let deadline = later(start, allowed);
        Ok(Pending {
            ticket: self.driver.submit(orders, class, deadline),
            inflight_bytes: self.inflight_bytes.clone(),
            seen: (self.verify == Verify::First).then(|| self.seen.clone()),
            members,
            content: (view.tag, run),
            bytes,
            deadline,
            allowed,
        })
    }

    pub(crate) fn find(&self, key: Key, limit: Instant) -> Result<(Arc<Layer>, usize), TierError> {
        self.current_view(limit)?.find(key, limit)
    }

    /// Whether [`Core::find`] asks nobody.
    pub(crate) fn knows(&self, key: Key) -> bool {
        let view = self.view();
        let is_current = self.driver.content().is_none_or(|now| now == view.tag);
        is_current && view.knows(key)
    }

    /// Submits and waits; records whose content changed under way are fetched once more, where
    /// that was asked for.
    pub(crate) fn fetch(&self, batch: &[(Key, SlotId)]) -> Result<BatchResult, TierError> {
        let pending = self.submit(batch, Class::Demand, None)?;
        let deadline = pending.deadline;
        let mut result = pending.wait()?;
        if self.replans {
            replan::fetch_again(self, batch, deadline, &mut result);
        }
        Ok(result)
    }

    fn check_slot(&self, key: Key, slot: SlotId, need: u64) -> Result<(), TierError> {
        let Some(state) = self.arena.slot_state(slot) else {
            // There is none: the arena says so.
            self.arena.begin_landing(slot, need as usize)?;
            return Ok(());
        };
        let have = self.arena.slot_bytes(slot.slab) as u64;
        if need > have {
            return Err(TierError::SlotTooSmall {
                key,
                slot,
                need,
                have,
            });
        }
        match state {
            SlotState::Free | SlotState::Committed => Ok(()),
            state => Err(TierError::Arena(ArenaError::SlotBusy {
                slot,
                state,
                readers: 0,
            })),
        }
    }

    fn must_verify(&self, content: Run, key: Key) -> bool {
        self.verify != Verify::First || !lock(&self.seen).contains(content, key)
    }
}

/// A batch under way. Dropping it cancels it: its slots return when the rails are done with them.
///
/// It does not keep the tier alive: once that is gone, it ends with [`TierError::ShutDown`].
pub struct Pending {
    ticket: Ticket,
    inflight_bytes: Arc<AtomicU64>,
    /// Where it is to be noted what was verified.
    seen: Option<Arc<Mutex<Seen>>>,
    members: Vec<(Key, Arc<Layer>, usize)>,
    content: Run,
    bytes: u64,
    deadline: Instant,
    allowed: Duration,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.inflight_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What became of each record of a batch, in its order, and where the time went.
pub type BatchResult = (Vec<Result<Record, TierError>>, RequestStats);

impl Pending {
    /// Whether [`Pending::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }

    /// Has `waker` called when the end has come; at once if it has. It runs on the tier's own
    /// thread and must not block.
    pub fn on_done(&self, waker: impl FnOnce() + Send + 'static) {
        self.ticket.on_end(Box::new(waker));
    }

    /// Makes the batch more urgent.
    pub fn promote(&self, class: Class) {
        self.ticket.promote(class);
    }

    /// When it ends at the latest.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Gives the batch up.
    pub fn cancel(&self) {
        self.ticket.cancel();
    }

    /// Waits for the end: the deadline, and two seconds more where the machine does not run the
    /// driver.
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
        (key, layer, position): &(Key, Arc<Layer>, usize),
    ) -> Result<Record, TierError> {
        let key = *key;
        match result {
            Ok(committed) => {
                if let Some(seen) = self.seen.as_ref().filter(|_| committed.verified) {
                    lock(seen).insert(self.content, key);
                }
                Ok(Record {
                    key,
                    lease: committed.lease,
                    layer: layer.clone(),
                    position: *position,
                    content: self.content.0,
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
