//! The streamer: a cache of expert records in an arena, filled by a tier.
//!
//! ```text
//! lease_many, submit ─► residents ──hit──────────────────────────────► lease
//!                          └─miss─► flights ─► thread: slot, tier ─► landed ─► ticket ─► lease
//! ```
//!
//! Start with [`ExpertStreamer::lease_many`]. A hit takes one short lock of its layer and no
//! thread's help. A miss joins, or makes, the one flight of its record; the streamer's thread gives
//! slots to flights in the order of class and arrival, giving up records that nobody leases.
//!
//! *Threads*: everything is `Sync`; one thread owns slots and policy. *Cleanup*: dropping the
//! streamer ends what is under way with [`TierError::ShutDown`] and then drops the tier; leases
//! that live on stay valid. The arena belongs to the streamer: nobody else lands in it.
//!
//! Locks, in the order in which they may be held together: `flights`, then a layer's `residents`
//! or the policy (`uses`); `uses`, then `residents`. Who holds `residents` only tries for `uses`.

mod catalogues;
mod flights;
mod residents;
mod signal;
mod slots;
mod stats;
mod table;
#[cfg(test)]
mod tests;
mod ticket;
mod waves;
mod worker;

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use expert_arena::{ExpertArena, SlotId};
use expert_wire::{Key, limits};

use crate::config::Class;
use crate::error::TierError;
use crate::eviction::Eviction;
use crate::notify::Wake;
use crate::sync::lock;
use crate::tier::ExpertTier;

use flights::{Flights, Target, Waiter};
pub use residents::ExpertLease;
use residents::{LayerShard, Residents};
use signal::Signal;
use slots::{Layers, Slots, Uses};
use stats::Counters;
pub use stats::StreamerStats;
pub use table::LayerTable;
pub use ticket::Ticket;
use ticket::from_now;
pub use waves::Waves;
use worker::Worker;

/// Records that may be wanted and not in memory at once. More is a caller that does not wait.
const FLIGHTS_MAX: usize = 1 << 16;

/// Guesses that may wait; a newer one is worth more than the oldest.
const GUESSES_MAX: usize = 1 << 12;

/// Dropping the streamer waits so long for its thread.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);

/// A guess is given up after so long without a slot.
const GUESS_DEADLINE: Duration = Duration::from_secs(10);

/// How a streamer is made; each method replaces a default.
#[derive(Debug, Clone, Default)]
pub struct StreamerBuilder {
    eviction: Eviction,
    stream_slabs: u32,
}

impl StreamerBuilder {
    /// All defaults: LRU, no slabs for streaming.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which record to give up.
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// Sets the arena's last slabs aside for [`ExpertStreamer::stream_layer`].
    pub fn stream_slabs(mut self, slabs: u32) -> Self {
        self.stream_slabs = slabs;
        self
    }

    /// Starts a streamer over a tier and its arena.
    ///
    /// *Errors*: [`TierError::Config`] where no slab is left for the pool, where a slot is smaller
    /// than the largest record, or where there is no thread or descriptor to be had.
    pub fn start(self, tier: impl ExpertTier + 'static) -> Result<ExpertStreamer, TierError> {
        let arena = tier.arena().clone();
        let slabs = arena.num_slabs();
        if self.stream_slabs >= slabs {
            return Err(TierError::Config(format!(
                "{} slabs for streaming, the arena has {slabs}: at least one must be left for the pool",
                self.stream_slabs
            )));
        }
        let info = tier.info();
        let largest = crate::largest_image_bytes(&info);
        let pool = 0..slabs - self.stream_slabs;
        let room = pool.clone().map(|slab| arena.slot_bytes(slab)).max();
        if (room.unwrap_or(0) as u64) < largest {
            return Err(TierError::Config(format!(
                "the largest record has {largest} bytes, the pool's largest slots have {}: make slots of {largest} bytes",
                room.unwrap_or(0)
            )));
        }
        let capacity = (0..slabs).map(|slab| arena.slots(slab)).sum();
        let count = info.layers.iter().map(|l| l.layer + 1).max();
        let count = count.unwrap_or(0).min(limits::LAYERS_MAX);
        let mut layers: Vec<Option<LayerShard>> = (0..count).map(|_| None).collect();
        for layer in &info.layers {
            if let Some(place) = layers.get_mut(layer.layer as usize) {
                *place = Some(LayerShard::new(layer.num_experts.min(limits::EXPERTS_MAX)));
            }
        }
        let no_resources =
            |e: std::io::Error| TierError::Config(format!("no thread or descriptor: {e}"));
        let stream_slabs: Vec<u32> = (slabs - self.stream_slabs..slabs).collect();
        let inner = Arc::new(Inner {
            follow_content: info.content_id.is_none(),
            tier: Box::new(tier),
            layers,
            uses: Mutex::new(Uses::new(self.eviction.build(capacity))),
            flights: Mutex::default(),
            signal: Arc::default(),
            counters: Mutex::default(),
            clock: AtomicU64::new(0),
            arrived: Wake::new().map_err(no_resources)?,
            is_watched: AtomicBool::new(false),
            stream_slabs: stream_slabs.clone(),
            pool_slots: pool.map(|slab| arena.slots(slab) as usize).sum(),
        });
        let (end, ended) = mpsc::channel();
        let worker = Worker::new(inner.clone(), Slots::new(arena, stream_slabs));
        let thread = std::thread::Builder::new()
            .name("expert-streamer".into())
            .spawn(move || {
                let _end = end;
                worker.run();
            })
            .map_err(no_resources)?;
        Ok(ExpertStreamer {
            inner,
            thread: Some(thread),
            ended: Mutex::new(ended),
        })
    }
}

pub(crate) struct Inner {
    tier: Box<dyn ExpertTier>,
    /// By dense index; `None` where the store has no such layer.
    layers: Vec<Option<LayerShard>>,
    uses: Mutex<Uses>,
    flights: Mutex<Flights>,
    signal: Arc<Signal>,
    counters: Mutex<Counters>,
    /// Counts calls, to order uses of different layers.
    clock: AtomicU64,
    /// Readable when something arrived, from the first time that somebody asked for it.
    arrived: Wake,
    is_watched: AtomicBool,
    /// A store without checksums cannot be pinned: what replaces it is followed.
    follow_content: bool,
    stream_slabs: Vec<u32>,
    pool_slots: usize,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").finish_non_exhaustive()
    }
}

impl Inner {
    fn shard(&self, layer: u32) -> Option<&LayerShard> {
        self.layers.get(layer as usize)?.as_ref()
    }

    fn notify(&self) {
        if self.is_watched.load(Ordering::Relaxed) {
            self.arrived.wake();
        }
    }

    fn give_up(&self, ticket: &Arc<ticket::Shared>, keys: &[Key]) {
        lock(&self.flights).give_up(ticket, keys);
        self.signal.wake();
    }

    /// Tells the policy of a layer's uses when it has many; not where somebody else is at it, for
    /// whom they are then lost.
    fn settle(&self, residents: &mut Residents) {
        if residents.is_due() {
            if let Ok(mut uses) = self.uses.try_lock() {
                uses.tell(|touches| residents.drain_touches(touches));
            }
        }
    }

    /// Hands out what is in memory and notes the rest; counts both where it is the first to ask.
    fn hits(
        &self,
        layer: u32,
        experts: &[u32],
        count: bool,
        mut found: impl FnMut(usize, Option<ExpertLease>),
    ) {
        let Some(shard) = self.shard(layer) else {
            (0..experts.len()).for_each(|i| found(i, None));
            return;
        };
        let tick = self.clock.fetch_add(1, Ordering::Relaxed);
        let mut residents = lock(&shard.residents);
        for (i, &expert) in experts.iter().enumerate() {
            self.settle(&mut residents);
            let lease = residents.lease(expert, tick);
            match lease {
                Some(_) => residents.hits += u64::from(count),
                None => residents.misses += u64::from(count),
            }
            found(i, lease);
        }
    }
}

/// Hands out leases on expert records, from memory where they are there.
#[derive(Debug)]
pub struct ExpertStreamer {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
    ended: Mutex<mpsc::Receiver<()>>,
}

impl ExpertStreamer {
    /// Leases several experts of one layer, and waits until all are there; they come in the order
    /// of `experts`, in which one may come twice.
    ///
    /// *Errors*: the first that befell one of them, [`TierError::NotYet`] after `time`; then none
    /// is leased. [`TierError::TooManyAtOnce`] where the arena cannot hold so many.
    pub fn lease_many(
        &self,
        layer: u32,
        experts: &[u32],
        time: Duration,
    ) -> Result<Vec<ExpertLease>, TierError> {
        let mut leases = Vec::with_capacity(experts.len());
        let mut missing = Vec::new();
        self.inner
            .hits(layer, experts, true, |i, lease| match lease {
                Some(lease) => leases.push((i, lease)),
                None => missing.push((i, Key::new(layer, experts[i]))),
            });
        if missing.is_empty() {
            return Ok(leases.into_iter().map(|(_, lease)| lease).collect());
        }
        if experts.len() > self.inner.pool_slots {
            let mut distinct = experts.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            if distinct.len() > self.inner.pool_slots {
                return Err(TierError::TooManyAtOnce {
                    asked: distinct.len(),
                    slots: self.inner.pool_slots,
                });
            }
        }
        let deadline = from_now(time);
        let keys = missing.iter().map(|(_, key)| *key).collect();
        let fetched = self.want(keys, Class::Demand, deadline, false, None)?;
        for ((i, _), lease) in missing.iter().zip(fetched.all(deadline)?) {
            leases.push((*i, lease));
        }
        leases.sort_unstable_by_key(|(i, _)| *i);
        Ok(leases.into_iter().map(|(_, lease)| lease).collect())
    }

    /// Asks for records and returns at once; they arrive on the ticket. Each must arrive within
    /// `time`.
    ///
    /// *Errors*: [`TierError::Backpressure`] where too many are under way already. What befalls
    /// single records comes on the ticket.
    pub fn submit(&self, batch: &[Key], class: Class, time: Duration) -> Result<Ticket, TierError> {
        self.want(batch.to_vec(), class, from_now(time), true, None)
    }

    /// Guesses that records will be needed; what is in memory or under way already is left alone.
    /// Returns how many it tries to get. Guesses take no slot that is leased or waited for, and of
    /// too many the oldest are forgotten.
    pub fn prefetch(&self, batch: &[Key]) -> usize {
        let now = Instant::now();
        let deadline = crate::engine::later(now, GUESS_DEADLINE);
        let mut flights = lock(&self.inner.flights);
        let mut tried = 0;
        for &key in batch {
            let Some(shard) = self.inner.shard(key.layer) else {
                continue;
            };
            let is_here = lock(&shard.residents).contains(key.expert) || flights.contains(key);
            if !is_here && !flights.is_stopped {
                tried += 1;
                flights.join(key, Class::Prefetch, Target::Pool, deadline, None, now);
            }
        }
        flights.forget_guesses(GUESSES_MAX);
        drop(flights);
        lock(&self.inner.counters).guesses += tried as u64;
        self.inner.signal.wake();
        tried
    }

    /// Streams a whole layer, or much of it, through its slab: `slab = layer % stream_slabs`, each
    /// expert in the slot of its place in `experts`; where another one of the call is there already,
    /// in one that no other needs. Nothing is kept: the next layer of the same slab takes each place
    /// as soon as nobody leases it. Experts that the pool has come from there.
    ///
    /// *Errors*: [`TierError::Config`] without slabs for streaming ([`StreamerBuilder::stream_slabs`]),
    /// [`TierError::TooManyAtOnce`] where the slab has fewer slots; as [`ExpertStreamer::submit`].
    pub fn stream_layer(
        &self,
        layer: u32,
        experts: &[u32],
        time: Duration,
    ) -> Result<Ticket, TierError> {
        let slabs = &self.inner.stream_slabs;
        let Some(&slab) = slabs.get(layer as usize % slabs.len().max(1)) else {
            return Err(TierError::Config(
                "the streamer has no slabs for streaming: set some aside with stream_slabs".into(),
            ));
        };
        let slots = self.inner.tier.arena().slots(slab) as usize;
        if experts.len() > slots {
            let asked = experts.len();
            return Err(TierError::TooManyAtOnce { asked, slots });
        }
        let keys = experts.iter().map(|&expert| Key::new(layer, expert));
        let deadline = from_now(time);
        self.want(keys.collect(), Class::Stream, deadline, true, Some(slab))
    }

    /// Walks through experts of a layer that may be more than the arena holds, some at a time: at
    /// most `max_slots` slots are used, half of them for those that are leased and half for the
    /// next ones, which are under way meanwhile. Nothing is kept.
    pub fn waves(
        &self,
        layer: u32,
        experts: &[u32],
        max_slots: usize,
        time_per_wave: Duration,
    ) -> Waves<'_> {
        let max_slots = max_slots.min(self.inner.pool_slots);
        Waves::new(self, layer, experts, max_slots, time_per_wave)
    }

    fn want(
        &self,
        keys: Vec<Key>,
        class: Class,
        deadline: Instant,
        count: bool,
        slab: Option<u32>,
    ) -> Result<Ticket, TierError> {
        let inner = &self.inner;
        let shared = ticket::Shared::new(keys.len());
        let ticket = Ticket {
            shared: shared.clone(),
            inner: Arc::downgrade(inner),
            keys,
        };
        let now = Instant::now();
        let mut flights = lock(&inner.flights);
        if flights.is_stopped {
            return Err(TierError::ShutDown);
        }
        if flights.len() + ticket.keys.len() > FLIGHTS_MAX {
            return Err(TierError::TooManyUnderWay {
                asked: ticket.keys.len(),
                under_way: flights.len(),
                limit: FLIGHTS_MAX,
            });
        }
        let mut places = slab.map(Places::new);
        let mut missing = Vec::new();
        for (index, &key) in ticket.keys.iter().enumerate() {
            // Under the flights' lock: a record that lands meanwhile is found in one place or the
            // other.
            let mut lease = None;
            if inner.shard(key.layer).is_some() {
                inner.hits(key.layer, &[key.expert], count, |_, found| lease = found);
            }
            let slot = match &lease {
                Some(lease) => Some(lease.slot()),
                None => flights.place(key),
            };
            if let Some((places, slot)) = places.as_mut().zip(slot) {
                places.take(slot);
            }
            match lease {
                Some(lease) => shared.deliver(index, Ok(lease)),
                None => missing.push((index, key)),
            }
        }
        let any_missing = !missing.is_empty();
        for (index, key) in missing {
            let waiter = Waiter {
                ticket: shared.clone(),
                index,
                deadline,
            };
            let target = match &mut places {
                Some(places) if !flights.contains(key) => Target::Slab(places.choose(index as u32)),
                _ => Target::Pool, // what is under way has its target
            };
            flights.join(key, class, target, deadline, Some(waiter), now);
        }
        drop(flights);
        match any_missing {
            true => inner.signal.wake(),
            false => inner.notify(),
        }
        Ok(ticket)
    }

    /// A layer's table, from its first record on; it never moves.
    pub fn table(&self, layer: u32) -> Option<&LayerTable> {
        self.inner.shard(layer)?.table.get()
    }

    /// Clears what [`AsFd::as_fd`] shows: call it before taking what arrived.
    pub fn clear_readable(&self) {
        self.inner.arrived.clear();
    }

    /// Where records land.
    pub fn arena(&self) -> &Arc<ExpertArena> {
        self.inner.tier.arena()
    }

    /// The tier below.
    pub fn tier(&self) -> &dyn ExpertTier {
        &*self.inner.tier
    }

    /// Per layer, by its dense index, how many records that were asked for were in memory, and how
    /// many were not.
    pub fn layer_uses(&self) -> Vec<(u32, u64, u64)> {
        let layers = (0..).zip(&self.inner.layers);
        let counted = layers.filter_map(|(layer, shard)| {
            let residents = lock(&shard.as_ref()?.residents);
            Some((layer, residents.hits, residents.misses))
        });
        counted.collect()
    }

    /// The numbers so far. Walks over all layers and slots.
    pub fn stats(&self) -> StreamerStats {
        stats::collect(&self.inner)
    }
}

/// Which places of a slab one call uses: a record that waited for the place of another of the same
/// call would wait for what the caller keeps until it has both.
struct Places {
    slab: u32,
    taken: HashSet<u32>,
}

impl Places {
    fn new(slab: u32) -> Self {
        Self {
            slab,
            taken: HashSet::new(),
        }
    }

    /// A record of the call is there, or will be.
    fn take(&mut self, slot: SlotId) {
        if slot.slab == self.slab {
            self.taken.insert(slot.slot);
        }
    }

    /// This place, or the first that is not taken.
    fn choose(&mut self, wanted: u32) -> SlotId {
        let mut free = std::iter::once(wanted).chain(0..);
        let slot = free.find(|slot| self.taken.insert(*slot));
        SlotId {
            slab: self.slab,
            slot: slot.unwrap_or(wanted),
        }
    }
}

/// Readable when something has arrived on any ticket since it was cleared.
impl AsFd for ExpertStreamer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.is_watched.store(true, Ordering::Relaxed);
        self.inner.arrived.as_fd()
    }
}

impl Drop for ExpertStreamer {
    fn drop(&mut self) {
        lock(&self.inner.flights).is_stopped = true;
        self.inner.signal.wake();
        let ended = lock(&self.ended).recv_timeout(SHUTDOWN_MAX);
        if ended == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::error!(
                "the streamer's thread did not stop within {SHUTDOWN_MAX:?}; it is left behind"
            );
            return;
        }
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                tracing::error!("the streamer's thread panicked");
            }
        }
        // A panic of the thread leaves tickets behind.
        for (_, flight) in lock(&self.inner.flights).take_all() {
            for waiter in flight.waiters {
                waiter
                    .ticket
                    .deliver(waiter.index, Err(TierError::ShutDown));
            }
        }
        // Leases that live on hold their own records; the rest goes before the tier.
        Layers(&self.inner.layers).take_all();
    }
}
