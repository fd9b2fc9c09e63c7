//! What is wanted and not in memory: one flight per record, whoever wants it.
//!
//! ```text
//! join ─► Waiting ──(a slot is free)──► Posted ──► landed: every waiter gets a lease
//!            │                             └─────► failed: every waiter gets the error
//!            └──(nobody wants it any more, deadline)──► gone
//! ```
//!
//! Flights wait in one queue per class, in the order in which they came to it; slots go to the front
//! of the most urgent queue alone, so that a demand is never starved by those that came later. What
//! was tried and has to be tried again keeps its turn.
//!
//! *Invariant*: a flight is in exactly one queue while it is Waiting, and in none otherwise.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use expert_arena::SlotId;
use expert_wire::Key;

use super::ticket::Shared;
use crate::config::Class;
use crate::core::Pending;

/// Who gets a record.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) ticket: Arc<Shared>,
    pub(super) index: usize,
    pub(super) deadline: Instant,
}

/// Where it lands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// In a slot that is free, or whose record is given up.
    Pool,
    /// In its place of a slab for streaming.
    Slab(SlotId),
}

pub(super) enum State {
    Waiting,
    Posted {
        pending: Pending,
        slot: SlotId,
        /// Of the record image.
        bytes: u64,
        /// Nobody waited for it when it was posted.
        is_guess: bool,
    },
}

pub(super) struct Flight {
    pub(super) class: Class,
    pub(super) target: Target,
    pub(super) waiters: Vec<Waiter>,
    pub(super) state: State,
    pub(super) began: Instant,
    /// The latest of its waiters'.
    pub(super) deadline: Instant,
    /// Fetched again because the store changed.
    pub(super) is_again: bool,
    /// Its place in its queue.
    turn: u64,
}

/// See the module.
#[derive(Default)]
pub(super) struct Flights {
    open: HashMap<Key, Flight>,
    /// Those that wait for a slot of the pool, by turn.
    queues: [BTreeMap<u64, Key>; Class::ALL.len()],
    /// Those that wait for the record before them in their place of a slab, each for another.
    for_slabs: BTreeMap<u64, Key>,
    /// Turns given out.
    turns: u64,
    pub(super) is_stopped: bool,
    /// Layers whose catalogue is on its way: their flights wait, others go past them.
    loading: HashSet<u32>,
    /// Guesses that somebody came to wait for.
    pub(super) guesses_late: u64,
}

impl Flights {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Flight> {
        self.open.get_mut(&key)
    }

    pub(super) fn contains(&self, key: Key) -> bool {
        self.open.contains_key(&key)
    }

    /// Where in a slab a record is to land.
    pub(super) fn place(&self, key: Key) -> Option<SlotId> {
        let flight = self.open.get(&key)?;
        match (flight.target, &flight.state) {
            (_, State::Posted { slot, .. }) => Some(*slot),
            (Target::Slab(slot), State::Waiting) => Some(slot),
            (Target::Pool, State::Waiting) => None,
        }
    }

    /// Wants a record: joins its flight, or makes one.
    pub(super) fn join(
        &mut self,
        key: Key,
        class: Class,
        target: Target,
        deadline: Instant,
        waiter: Option<Waiter>,
        now: Instant,
    ) {
        if let Some(flight) = self.open.get_mut(&key) {
            flight.deadline = flight.deadline.max(deadline);
            let is_guess = flight.waiters.is_empty() && flight.class == Class::Prefetch;
            self.guesses_late += u64::from(is_guess && waiter.is_some());
            flight.waiters.extend(waiter);
            if class < flight.class {
                let before = std::mem::replace(&mut flight.class, class);
                match &flight.state {
                    State::Posted { pending, .. } => pending.promote(class),
                    State::Waiting if flight.target == Target::Pool => {
                        self.queues[before as usize].remove(&flight.turn);
                        flight.turn = self.turns;
                        self.turns += 1;
                        self.queues[class as usize].insert(flight.turn, key);
                    }
                    State::Waiting => {}
                }
            }
            return;
        }
        let flight = Flight {
            class,
            target,
            waiters: waiter.into_iter().collect(),
            state: State::Waiting,
            began: now,
            deadline,
            is_again: false,
            turn: self.turns,
        };
        self.turns += 1;
        self.again(key, flight);
    }

    fn queue(&mut self, class: Class, target: Target) -> &mut BTreeMap<u64, Key> {
        match target {
            Target::Pool => &mut self.queues[class as usize],
            Target::Slab(_) => &mut self.for_slabs,
        }
    }

    /// The flight whose turn it is to get a slot of the pool, past those whose layer is being asked
    /// for, but for records that are known. It stays in its queue until it is posted or removed.
    pub(super) fn front(&self, class: Class, is_known: impl Fn(Key) -> bool) -> Option<Key> {
        let mut queue = self.queues[class as usize].values();
        let first = queue.find(|key| !self.loading.contains(&key.layer) || is_known(**key));
        first.copied()
    }

    /// Has the flights of a layer wait for its catalogue, or go on.
    pub(super) fn set_loading(&mut self, layer: u32, is_loading: bool) {
        match is_loading {
            true => self.loading.insert(layer),
            false => self.loading.remove(&layer),
        };
    }

    /// Those that wait for their place in a slab, in their order.
    pub(super) fn for_slabs(&self, is_known: impl Fn(Key) -> bool) -> Vec<(Key, SlotId)> {
        let place = |&key: &Key| match self.open.get(&key).map(|f| f.target) {
            Some(Target::Slab(slot)) => {
                let waits = self.loading.contains(&key.layer) && !is_known(key);
                (!waits).then_some((key, slot))
            }
            _ => None,
        };
        self.for_slabs.values().filter_map(place).collect()
    }

    /// Notes that a flight is on its way. One that nobody wants any more is given up, and open until
    /// that is reported: its slot may hold its bytes by now.
    pub(super) fn post(&mut self, key: Key, state: State, class: Class, target: Target) {
        let flight = match self.open.get_mut(&key) {
            Some(flight) => flight,
            None => {
                if let State::Posted { pending, .. } = &state {
                    pending.cancel();
                }
                let now = Instant::now();
                self.join(key, class, target, now, None, now);
                self.open.get_mut(&key).expect("joined above")
            }
        };
        flight.state = state;
        let (class, target, turn) = (flight.class, flight.target, flight.turn);
        self.queue(class, target).remove(&turn);
    }

    /// Ends a flight.
    pub(super) fn remove(&mut self, key: Key) -> Option<Flight> {
        let flight = self.open.remove(&key)?;
        if matches!(flight.state, State::Waiting) {
            self.queue(flight.class, flight.target).remove(&flight.turn);
        }
        Some(flight)
    }

    /// Puts a flight that was removed back, to be posted when it is its turn.
    pub(super) fn again(&mut self, key: Key, mut flight: Flight) {
        flight.state = State::Waiting;
        let turn = flight.turn;
        self.queue(flight.class, flight.target).insert(turn, key);
        self.open.insert(key, flight);
    }

    /// A ticket was given up: flights that nobody waits for any more end.
    pub(super) fn give_up(&mut self, ticket: &Arc<Shared>, keys: &[Key]) {
        for key in keys {
            let Some(flight) = self.open.get_mut(key) else {
                continue;
            };
            let before = flight.waiters.len();
            flight.waiters.retain(|w| !Arc::ptr_eq(&w.ticket, ticket));
            if before == 0 || !flight.waiters.is_empty() {
                continue;
            }
            match &flight.state {
                State::Waiting => {
                    self.remove(*key);
                }
                // Its end is reported like any other.
                State::Posted { pending, .. } => pending.cancel(),
            }
        }
    }

    /// Guesses that wait, at most; beyond that the oldest are forgotten. One that somebody waits
    /// for is no mere guess.
    pub(super) fn forget_guesses(&mut self, most: usize) {
        let queue = &self.queues[Class::Prefetch as usize];
        let over = queue.len().saturating_sub(most);
        if over == 0 {
            return;
        }
        let is_guess = |key: &&Key| self.open.get(*key).is_some_and(|f| f.waiters.is_empty());
        let oldest = queue.values().filter(is_guess).take(over);
        for key in oldest.copied().collect::<Vec<_>>() {
            self.remove(key);
        }
    }

    /// Those that wait for a slot and are out of time.
    pub(super) fn expired(&self, now: Instant) -> Vec<Key> {
        let queues = self.queues.iter().chain([&self.for_slabs]);
        let is_late = |key: &&Key| self.open.get(*key).is_some_and(|f| now >= f.deadline);
        let waiting = queues.flat_map(BTreeMap::values);
        waiting.filter(is_late).copied().collect()
    }

    /// Takes all of them out, at the end.
    pub(super) fn take_all(&mut self) -> Vec<(Key, Flight)> {
        for queue in &mut self.queues {
            queue.clear();
        }
        self.for_slabs.clear();
        self.open.drain().collect()
    }
}

#[cfg(test)]
mod tests;
