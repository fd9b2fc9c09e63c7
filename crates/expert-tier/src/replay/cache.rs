//! The arena of the model: which record is in which slot, and what is given up for another.

use crate::eviction::{Eviction, EvictionPolicy};

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// On its way.
    Loading,
    /// There.
    Ready,
    /// There, prefetched and not used yet.
    Unused,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    record: u32,
    state: State,
    /// Round in which it was last leased.
    leased: u32,
    /// Round in which it was last wanted by the prefetch.
    wanted: u32,
}

#[derive(Debug)]
pub(super) struct Cache {
    policy: Box<dyn EvictionPolicy>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// By record.
    slot_of: Vec<u32>,
    /// One layer of one step; leases and wishes of earlier rounds are over.
    round: u32,
    /// Prefetched records that were given up unused.
    pub(super) wasted: u64,
}

impl Cache {
    pub(super) fn new(eviction: Eviction, slots: u32, records: u32) -> Self {
        let empty = Slot {
            record: NONE,
            state: State::Loading,
            leased: 0,
            wanted: 0,
        };
        Self {
            policy: eviction.build(slots),
            slots: vec![empty; slots as usize],
            free: (0..slots).rev().collect(),
            slot_of: vec![NONE; records as usize],
            round: 0,
            wasted: 0,
        }
    }

    pub(super) fn next_round(&mut self) {
        self.round += 1;
    }

    pub(super) fn find(&self, record: u32) -> Option<(u32, State)> {
        let slot = self.slot_of[record as usize];
        (slot != NONE).then(|| (slot, self.slots[slot as usize].state))
    }

    /// Keeps a slot for the rest of the round.
    pub(super) fn lease(&mut self, slot: u32) {
        self.slots[slot as usize].leased = self.round;
    }

    /// Keeps a slot from being given up for another prefetch of this round.
    pub(super) fn want(&mut self, slot: u32) {
        self.slots[slot as usize].wanted = self.round;
    }

    /// A leased slot for a record that is not there; `None` where all are leased or loading.
    pub(super) fn take_for_demand(&mut self, record: u32) -> Option<u32> {
        let slot = self.take(record, |slot, round| slot.leased != round)?;
        self.lease(slot);
        Some(slot)
    }

    /// A slot for a record that may be needed; `None` where all are leased, wanted or loading.
    pub(super) fn take_for_prefetch(&mut self, record: u32) -> Option<u32> {
        let may = |slot: &Slot, round| slot.leased != round && slot.wanted != round;
        let slot = self.take(record, may)?;
        self.want(slot);
        Some(slot)
    }

    fn take(&mut self, record: u32, may: impl Fn(&Slot, u32) -> bool) -> Option<u32> {
        let Self {
            policy,
            slots,
            round,
            ..
        } = self;
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => policy.victim(&mut |slot| may(&slots[slot as usize], *round))?,
        };
        policy.remove(slot);
        let taken = &mut slots[slot as usize];
        if taken.record != NONE {
            self.slot_of[taken.record as usize] = NONE;
            self.wasted += u64::from(taken.state == State::Unused);
        }
        taken.record = record;
        taken.state = State::Loading;
        self.slot_of[record as usize] = slot;
        Some(slot)
    }

    /// A record is complete; whether the round waits for it.
    ///
    /// One that is waited for is told to the policy when it is used; until then it is leased.
    pub(super) fn landed(&mut self, slot: u32) -> bool {
        let landed = &mut self.slots[slot as usize];
        let is_leased = landed.leased == self.round;
        landed.state = match is_leased {
            true => State::Ready,
            false => State::Unused,
        };
        if !is_leased {
            self.policy.insert(slot);
        }
        is_leased
    }

    /// A leased record is used, in the state in which the round found it.
    pub(super) fn used(&mut self, slot: u32, found: Option<State>) {
        self.slots[slot as usize].state = State::Ready;
        match found {
            Some(State::Ready) => self.policy.touch(slot),
            // The first use of a prefetched record is no second use: it counts as its arrival.
            _ => {
                self.policy.remove(slot);
                self.policy.insert(slot);
            }
        }
    }

    /// Prefetched records that were never used, now that all is over.
    pub(super) fn unused(&self) -> u64 {
        let unused = |slot: &&Slot| slot.record != NONE && slot.state != State::Ready;
        self.slots.iter().filter(unused).count() as u64
    }
}
