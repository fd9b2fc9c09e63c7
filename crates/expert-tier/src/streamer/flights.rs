//! What is wanted and not in memory: one flight per record, whoever wants it.
//!
//! ```text
//! join ─► Waiting ──(a slot is free)──► Posted ──► landed: every waiter gets a lease
//!            │                             └─────► failed: every waiter gets the error
//!            └──(nobody wants it any more, deadline)──► gone
//! ```
//!
//! Flights wait in one queue per class, in the order in which they came; slots go to the front of
//! the most urgent queue alone, so that a demand is never starved by those that came later.

use std::collections::{HashMap, VecDeque};
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
    Posted { pending: Pending, slot: SlotId },
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
}

/// See the module.
#[derive(Default)]
pub(super) struct Flights {
    open: HashMap<Key, Flight>,
    queues: [VecDeque<Key>; Class::ALL.len()],
    /// Flights for slabs wait for the record before them in their place, each for another.
    slab_queue: VecDeque<Key>,
    pub(super) is_stopped: bool,
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
            flight.waiters.extend(waiter);
            if class < flight.class {
                flight.class = class;
                match &flight.state {
                    State::Posted { pending, .. } => pending.promote(class),
                    State::Waiting if flight.target == Target::Pool => {
                        self.queues[class as usize].push_back(key);
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
        };
        self.open.insert(key, flight);
        self.queue(key, class, target);
    }

    fn queue(&mut self, key: Key, class: Class, target: Target) {
        match target {
            Target::Pool => self.queues[class as usize].push_back(key),
            Target::Slab(_) => self.slab_queue.push_back(key),
        }
    }

    /// The flight whose turn it is to get a slot of the pool.
    pub(super) fn front(&mut self, class: Class) -> Option<Key> {
        let queue = &mut self.queues[class as usize];
        while let Some(&key) = queue.front() {
            let flight = self.open.get(&key);
            let is_here = flight.is_some_and(|f| {
                let waits = matches!(f.state, State::Waiting);
                waits && f.class == class && f.target == Target::Pool
            });
            if is_here {
                return Some(key);
            }
            queue.pop_front();
        }
        None
    }

    /// Takes the flight out of its queue; it stays open.
    pub(super) fn pop_front(&mut self, class: Class) {
        self.queues[class as usize].pop_front();
    }

    /// Puts back what could not be posted.
    pub(super) fn push_front(&mut self, key: Key) {
        if let Some(flight) = self.open.get(&key) {
            match flight.target {
                Target::Pool => self.queues[flight.class as usize].push_front(key),
                Target::Slab(_) => self.slab_queue.push_front(key),
            }
        }
    }

    /// Those that wait for their place in a slab.
    pub(super) fn take_slab_queue(&mut self) -> Vec<(Key, SlotId)> {
        let waiting: Vec<Key> = self.slab_queue.drain(..).collect();
        let place = |key: Key| match self.open.get(&key).map(|f| f.target) {
            Some(Target::Slab(slot)) => Some((key, slot)),
            _ => None,
        };
        waiting.into_iter().filter_map(place).collect()
    }

    /// Ends a flight.
    pub(super) fn remove(&mut self, key: Key) -> Option<Flight> {
        self.open.remove(&key)
    }

    /// Puts a flight that failed back, to be posted again.
    pub(super) fn again(&mut self, key: Key, mut flight: Flight) {
        flight.state = State::Waiting;
        let (class, target) = (flight.class, flight.target);
        self.open.insert(key, flight);
        self.queue(key, class, target);
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
                    self.open.remove(key);
                }
                // Its end is reported like any other.
                State::Posted { pending, .. } => pending.cancel(),
            }
        }
    }

    /// Guesses that wait, at most; beyond that the oldest are forgotten.
    pub(super) fn forget_guesses(&mut self, most: usize) {
        let queue = Class::Prefetch as usize;
        while self.queues[queue].len() > most {
            let Some(key) = self.front(Class::Prefetch) else {
                return;
            };
            self.queues[queue].pop_front();
            if self.open.get(&key).is_some_and(|f| f.waiters.is_empty()) {
                self.open.remove(&key);
            }
        }
    }

    /// Those that wait for a slot and are out of time.
    pub(super) fn expired(&self, now: Instant) -> Vec<Key> {
        let waiting = self.queues.iter().chain([&self.slab_queue]).flatten();
        let late = waiting.filter(|key| {
            self.open
                .get(key)
                .is_some_and(|f| matches!(f.state, State::Waiting) && now >= f.deadline)
        });
        let mut late: Vec<Key> = late.copied().collect();
        late.sort_unstable();
        late.dedup();
        late
    }

    /// Takes all of them out, at the end.
    pub(super) fn take_all(&mut self) -> Vec<(Key, Flight)> {
        for queue in &mut self.queues {
            queue.clear();
        }
        self.slab_queue.clear();
        self.open.drain().collect()
    }
}
