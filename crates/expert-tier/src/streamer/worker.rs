//! The streamer's thread: gives slots to what waits, posts it, publishes what lands.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::SlotId;
use expert_wire::Key;

use super::Inner;
use super::catalogues::Catalogues;
use super::flights::{Flight, Flights, State, Target};
use super::residents::{ExpertLease, Held};
use super::slots::{Layers, Slots};
use crate::config::Class;
use crate::engine::until;
use crate::error::TierError;
use crate::rail::ContentTag;
use crate::record::Record;
use crate::sync::lock;

/// While a record waits for a slot: leases that go are noticed at once, most of the time; fences
/// and slots that rails still hold are asked so often.
const SLOT_NAP: Duration = Duration::from_millis(1);

/// While nothing waits: fences are looked at so often, for the slots that are lost to be named.
const IDLE_NAP: Duration = Duration::from_millis(500);

/// A fence that has not fired after so long is taken for lost.
const FENCE_PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Worker {
    inner: Arc<Inner>,
    slots: Slots,
    /// What records are of; `None` until the first one landed.
    content: Option<ContentTag>,
    done: Vec<Key>,
    catalogues: Catalogues,
    /// The tier had no room for more: until something ends, or this.
    held_back_until: Option<Instant>,
    /// Bytes of the records that are posted.
    posted_bytes: u64,
    /// How many of them were guesses then.
    posted_guesses: usize,
    /// What the tier admits at once, as far as it has said so.
    room_bytes: u64,
    looked_for_late: Instant,
    looked_for_stuck: Instant,
    stuck: Vec<SlotId>,
}

/// What became of an attempt to post.
enum Posted {
    Yes,
    NoSlot,
    NoRoom,
}

impl Worker {
    pub(super) fn new(inner: Arc<Inner>, slots: Slots) -> Self {
        Self {
            inner,
            slots,
            content: None,
            done: Vec::new(),
            catalogues: Catalogues::default(),
            held_back_until: None,
            posted_bytes: 0,
            posted_guesses: 0,
            room_bytes: u64::MAX,
            looked_for_late: Instant::now(),
            looked_for_stuck: Instant::now(),
            stuck: Vec::new(),
        }
    }

    pub(super) fn run(mut self) {
        loop {
            let nap = self.turn();
            let Some(nap) = nap else {
                break;
            };
            self.inner.signal.wait(nap, &mut self.done);
        }
        let open = lock(&self.inner.flights).take_all();
        for (_, flight) in open {
            for waiter in flight.waiters {
                waiter
                    .ticket
                    .deliver(waiter.index, Err(TierError::ShutDown));
            }
        }
        self.inner.notify();
    }

    /// One round; how long to sleep after it, `None` at the end.
    fn turn(&mut self) -> Option<Duration> {
        let done = std::mem::take(&mut self.done);
        if !done.is_empty() {
            self.held_back_until = None;
        }
        for key in done {
            self.land(key);
        }
        if lock(&self.inner.flights).is_stopped {
            return None;
        }
        self.take_catalogues();
        self.expire();
        let blocked = self.post_waiting();
        self.name_stuck();
        self.publish();
        let now = Instant::now();
        let held_back = self.held_back_until.map(|at| until(now, at));
        let nap = match blocked {
            true => SLOT_NAP,
            false => IDLE_NAP,
        };
        Some(held_back.map_or(nap, |held_back| nap.min(held_back)))
    }

    /// A flight's fetch ended.
    fn land(&mut self, key: Key) {
        let inner = self.inner.clone();
        let mut flights = lock(&inner.flights);
        let is_done = flights
            .get_mut(key)
            .is_some_and(|flight| match &flight.state {
                State::Posted { pending, .. } => pending.is_done(),
                State::Waiting => false,
            });
        let Some(mut flight) = is_done.then(|| flights.remove(key)).flatten() else {
            return; // the report of a flight before this one
        };
        let posted = std::mem::replace(&mut flight.state, State::Waiting);
        let State::Posted {
            pending,
            slot,
            bytes,
            is_guess,
        } = posted
        else {
            return;
        };
        self.posted_bytes -= bytes;
        self.posted_guesses -= usize::from(is_guess);
        let result = pending.wait().and_then(|(mut records, _)| {
            let only = records.pop();
            only.unwrap_or(Err(TierError::ShutDown))
        });
        match result.and_then(|record| self.accept(record)) {
            Ok(record) => {
                // Under the flights' lock: whoever finds no flight finds the record.
                self.hold(key, flight, slot, record);
                drop(flights);
                self.inner.notify();
            }
            // The tier's own limit is not the caller's: it waits for its turn again.
            Err(TierError::Backpressure { limit, .. }) => {
                self.slots.give_back(slot);
                self.room_bytes = self.room_bytes.min(limit);
                flights.again(key, flight);
                self.hold_back();
            }
            Err(error) => {
                self.slots.give_back(slot);
                self.fail(&mut flights, key, flight, error);
            }
        }
    }

    /// Refuses a record of another model than those in memory, and one that has no place among them.
    fn accept(&mut self, record: Record) -> Result<Record, TierError> {
        let (key, content) = (record.key(), record.content());
        let is_other = self.content.is_some_and(|before| before != content);
        if is_other && !self.inner.follow_content {
            return Err(self.drop_image(record, TierError::ContentChanged { key }));
        }
        if is_other {
            tracing::warn!(
                "the store changed: all records in memory are given up, and fetched again as they are needed"
            );
            let inner = self.inner.clone();
            self.slots.clear(&Layers(&inner.layers), &inner.uses);
        }
        self.content = Some(content);
        let shard = self.inner.shard(key.layer);
        if shard.is_some_and(|shard| shard.fits(record.layer(), key.expert)) {
            return Ok(record);
        }
        let why = "the store changed its layers or experts: start the streamer again".into();
        Err(self.drop_image(record, TierError::WrongRecord { key, why }))
    }

    /// Else the slot would hold for ever what nobody asks for.
    fn drop_image(&self, record: Record, error: TierError) -> TierError {
        let residency = record.residency();
        drop(record);
        let _ = self.inner.tier.arena().evict(&residency);
        error
    }

    fn hold(&mut self, key: Key, flight: Flight, slot: SlotId, record: Record) {
        let inner = &self.inner;
        let Some(Some(shard)) = inner.layers.get(key.layer as usize) else {
            return; // found once, so it is there
        };
        let keep = flight.class != Class::Stream && flight.target == Target::Pool;
        let entry = self.slots.hold(slot, key, keep, &inner.uses);
        let is_guess = flight.waiters.is_empty();
        let bytes = record.bytes().len() as u64;
        let layer = record.layer().clone();
        let held = Arc::new(Held::new(record, entry, is_guess, inner.signal.clone()));
        let table = shard
            .table
            .get_or_init(|| super::table::LayerTable::new(&layer));
        let mut residents = lock(&shard.residents);
        table.set(&held);
        residents.insert(held.clone());
        drop(residents);
        let mut stats = lock(&inner.counters);
        stats.fetched += 1;
        stats.fetched_bytes += bytes;
        drop(stats);
        for waiter in flight.waiters {
            let lease = ExpertLease::new(held.clone());
            waiter.ticket.deliver(waiter.index, Ok(lease));
        }
    }

    fn fail(&mut self, flights: &mut Flights, key: Key, mut flight: Flight, error: TierError) {
        let now = Instant::now();
        let is_wanted = !flight.waiters.is_empty();
        // Given up by those before, and somebody came since; or there is more time now; or the
        // store is another, which is followed once.
        let is_again = match &error {
            TierError::Cancelled { .. } => is_wanted,
            TierError::Deadline { .. } => is_wanted && flight.deadline > now,
            TierError::ContentChanged { .. } => {
                let first = !flight.is_again && self.inner.follow_content;
                flight.is_again = true;
                first && is_wanted
            }
            _ => false,
        };
        if is_again {
            let (late, rest): (Vec<_>, Vec<_>) =
                flight.waiters.drain(..).partition(|w| w.deadline <= now);
            flight.waiters = rest;
            let any_late = !late.is_empty();
            for waiter in late {
                let late = TierError::Deadline {
                    key,
                    waited: now.saturating_duration_since(flight.began),
                    why: format!("it has to be fetched again: {error}"),
                };
                waiter.ticket.deliver(waiter.index, Err(late));
            }
            flights.again(key, flight);
            if any_late {
                self.inner.notify();
            }
            return;
        }
        if !matches!(error, TierError::Cancelled { .. }) {
            lock(&self.inner.counters).failed += 1;
        }
        for waiter in flight.waiters {
            let error = error.repeat(key);
            waiter.ticket.deliver(waiter.index, Err(error));
        }
        self.inner.notify();
    }

    /// Ends those that wait for a slot and are out of time.
    fn expire(&mut self) {
        let now = Instant::now();
        if now - self.looked_for_late < SLOT_NAP {
            return;
        }
        self.looked_for_late = now;
        let inner = self.inner.clone();
        let mut flights = lock(&inner.flights);
        for key in flights.expired(now) {
            let Some(flight) = flights.remove(key) else {
                continue;
            };
            let waited = now.saturating_duration_since(flight.began);
            let why = self.describe_slots();
            let late = TierError::Deadline { key, waited, why };
            self.fail(&mut flights, key, flight, late);
        }
    }

    fn describe_slots(&self) -> String {
        let stats = self.inner.tier.arena().stats();
        format!(
            "no slot became free: of {} slots {} hold records that are in use or too small, {} land, {} wait for a fence, {} for a rail",
            self.slots.count(),
            stats.committed,
            stats.landing,
            stats.draining,
            stats.quarantined,
        )
    }

    /// Posts what waits, the most urgent first; true where something needs a slot and there is none.
    fn post_waiting(&mut self) -> bool {
        if self.held_back_until.is_some_and(|at| Instant::now() < at) {
            return false;
        }
        self.held_back_until = None;
        self.inner.signal.set_slot_wanted(true);
        let mut blocked = false;
        // Those for other places go past one that cannot go yet, those for the same place do not:
        // the layers of a slab come in their order.
        let mut waited_for = HashSet::new();
        let inner = self.inner.clone();
        let is_known = |key| inner.tier.knows(key);
        let for_slabs = lock(&inner.flights).for_slabs(is_known);
        for (key, slot) in for_slabs {
            if waited_for.contains(&slot) {
                continue;
            }
            match self.post(key, Target::Slab(slot)) {
                Posted::Yes => {}
                Posted::NoSlot | Posted::NoRoom => {
                    blocked = true;
                    waited_for.insert(slot);
                }
            }
        }
        // A demand that comes now must find a slot that no guess is landing in: else it would wait
        // for that guess, and for the next one, which was posted meanwhile.
        let guesses_max = (self.inner.pool_slots / 2).max(1);
        'classes: for class in Class::ALL {
            loop {
                if class == Class::Prefetch && self.posted_guesses >= guesses_max {
                    break;
                }
                let Some(key) = lock(&inner.flights).front(class, is_known) else {
                    break;
                };
                match self.post(key, Target::Pool) {
                    Posted::Yes => {}
                    Posted::NoSlot | Posted::NoRoom => {
                        blocked = true;
                        break 'classes;
                    }
                }
            }
        }
        self.inner.signal.set_slot_wanted(blocked);
        blocked
    }

    fn post(&mut self, key: Key, target: Target) -> Posted {
        let inner = self.inner.clone();
        let Some((class, deadline)) = lock(&inner.flights)
            .get_mut(key)
            .map(|flight| (flight.class, flight.deadline))
        else {
            return Posted::Yes; // given up meanwhile
        };
        let left = until(Instant::now(), deadline);
        if !inner.tier.knows(key) {
            lock(&inner.flights).set_loading(key.layer, true);
            self.catalogues.ask(&inner, key, left);
            return Posted::Yes; // it is next when its layer is known
        }
        let need = match inner.tier.find(key, left) {
            Ok((layer, position)) => layer.class(position).image_bytes as usize,
            Err(error) => return self.refuse(key, error),
        };
        let layers = Layers(&inner.layers);
        let slot = match target {
            Target::Pool => self.slots.take(need, &layers, &inner.uses),
            Target::Slab(slot) => self.slots.claim(slot, &layers).then_some(slot),
        };
        let Some(slot) = slot else {
            return Posted::NoSlot;
        };
        let pending = match inner.tier.submit_as(&[(key, slot)], class, Some(left)) {
            Ok(pending) => pending,
            Err(error) => {
                self.slots.give_back(slot);
                return match error.is_backpressure() {
                    true => self.hold_back(),
                    false => self.refuse(key, error),
                };
            }
        };
        self.posted_bytes += need as u64;
        let mut flights = lock(&inner.flights);
        let posted = State::Posted {
            pending,
            slot,
            bytes: need as u64,
            is_guess: class == Class::Prefetch,
        };
        self.posted_guesses += usize::from(class == Class::Prefetch);
        flights.post(key, posted, class, target);
        // Noted first: the report may come at once.
        if let Some(State::Posted { pending, .. }) = flights.get_mut(key).map(|f| &f.state) {
            let signal = inner.signal.clone();
            pending.on_done(move || signal.done(key));
        }
        Posted::Yes
    }

    /// Lets flights go on whose layer is known now. Where it could not be had, the one that it was
    /// asked for fails, and the next one asks again.
    fn take_catalogues(&mut self) {
        let inner = self.inner.clone();
        for (key, result) in self.catalogues.take(&inner) {
            lock(&inner.flights).set_loading(key.layer, false);
            if let Err(error) = result {
                self.refuse(key, error);
            }
        }
    }

    fn hold_back(&mut self) -> Posted {
        self.held_back_until = Some(Instant::now() + SLOT_NAP);
        Posted::NoRoom
    }

    /// A flight that cannot be posted at all.
    fn refuse(&mut self, key: Key, error: TierError) -> Posted {
        let inner = self.inner.clone();
        let mut flights = lock(&inner.flights);
        if let Some(flight) = flights.remove(key) {
            self.fail(&mut flights, key, flight, error);
        }
        Posted::Yes
    }

    /// Names each slot once whose fence does not fire.
    fn name_stuck(&mut self) {
        let now = Instant::now();
        if now - self.looked_for_stuck < IDLE_NAP {
            return;
        }
        self.looked_for_stuck = now;
        self.slots.sweep();
        let stuck = self.slots.stuck(FENCE_PATIENCE);
        for (slot, age) in &stuck {
            if !self.stuck.contains(slot) {
                tracing::warn!(
                    "{slot} waits for a fence since {age:?}: it is lost until that fires"
                );
            }
        }
        self.stuck = stuck.into_iter().map(|(slot, _)| slot).collect();
    }

    fn publish(&self) {
        let mut counters = lock(&self.inner.counters);
        counters.evictions = self.slots.evictions;
        counters.slots_out = self.slots.out() as u64;
        counters.slots_stuck = self.stuck.len() as u64;
    }
}
