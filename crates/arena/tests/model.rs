//! The slot state machine against a small reference model: every sequence of operations on two slots up to a depth,
//! and long random ones.

mod common;

use common::{Switch, lasting_pages, slot};
use expert_arena::{
    ArenaBuilder, ArenaError, CommitError, ExpertArena, ForeignMemory, Landing, LandingRange,
    Lease, Poison, Residency, SlotState,
};
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;

const SLOTS: usize = 2;
const SLOT_BYTES: usize = 4096;
const PIECE_BYTES: usize = 24;
const PIECES: usize = 2;
const IMAGE_BYTES: usize = PIECE_BYTES * PIECES;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    Begin,
    Split,
    Retire,
    DropRange,
    Leak,
    Commit,
    Abandon,
    Lease,
    CloneLease,
    DropLease,
    ReleaseAfter,
    RetainUntil,
    FireAndReap,
    Evict,
}

const OPS: [Op; 14] = [
    Op::Begin,
    Op::Split,
    Op::Retire,
    Op::DropRange,
    Op::Leak,
    Op::Commit,
    Op::Abandon,
    Op::Lease,
    Op::CloneLease,
    Op::DropLease,
    Op::ReleaseAfter,
    Op::RetainUntil,
    Op::FireAndReap,
    Op::Evict,
];

/// What one slot should be.
#[derive(Clone, Copy, Debug)]
struct Model {
    state: SlotState,
    generation: u64,
    split: usize,
    held: usize,
    leaked: usize,
    tainted: bool,
    leases: usize,
    fences: usize,
}

impl Model {
    const NEW: Self = Self {
        state: SlotState::Free,
        generation: 0,
        split: 0,
        held: 0,
        leaked: 0,
        tainted: false,
        leases: 0,
        fences: 0,
    };

    fn readers(&self) -> usize {
        self.leases + self.fences
    }

    fn can_begin(&self) -> bool {
        self.state == SlotState::Free || (self.state == SlotState::Committed && self.readers() == 0)
    }

    fn can_commit(&self) -> bool {
        self.split == PIECES && self.held + self.leaked == 0 && !self.tainted
    }

    /// Does the operation if it can be done.
    fn apply(&mut self, op: Op) -> bool {
        use SlotState::{Committed, Draining, Free, Landing, Quarantined};
        let landing = self.state == Landing;
        let readable = self.state == Committed || self.state == Draining;
        let possible = match op {
            Op::Begin => self.can_begin(),
            Op::Split => landing && self.split < PIECES,
            Op::Retire | Op::DropRange | Op::Leak => self.held > 0,
            Op::Commit => landing && self.can_commit(),
            Op::Abandon => landing,
            Op::Lease => self.state == Committed,
            Op::CloneLease | Op::DropLease | Op::ReleaseAfter | Op::RetainUntil => self.leases > 0,
            Op::FireAndReap => self.fences > 0,
            Op::Evict => readable,
        };
        if !possible {
            return false;
        }
        match op {
            Op::Begin => {
                *self = Self {
                    state: Landing,
                    generation: self.generation + 1,
                    ..Self::NEW
                };
            }
            Op::Split => {
                self.split += 1;
                self.held += 1;
            }
            Op::Retire => self.held -= 1,
            Op::DropRange => {
                self.held -= 1;
                self.tainted = true;
            }
            Op::Leak => {
                self.held -= 1;
                self.leaked += 1;
            }
            Op::Commit => {
                self.state = Committed;
                self.leases = 1;
            }
            Op::Abandon => self.state = Quarantined,
            Op::Lease | Op::CloneLease => self.leases += 1,
            Op::DropLease => self.leases -= 1,
            Op::ReleaseAfter => {
                self.leases -= 1;
                self.fences += 1;
                self.state = Draining;
            }
            Op::RetainUntil => {
                self.leases -= 1;
                self.fences += 1;
            }
            Op::FireAndReap => self.fences = 0,
            Op::Evict => self.state = Draining,
        }
        let unused = match self.state {
            Quarantined => self.held + self.leaked == 0,
            Draining => self.readers() == 0,
            _ => false,
        };
        if unused {
            self.state = Free;
        }
        true
    }
}

/// The real thing: an arena, and the handles that its user holds.
struct Real {
    arena: Arc<ExpertArena>,
    slots: [Handles; SLOTS],
}

#[derive(Default)]
struct Handles {
    landing: Option<Landing>,
    ranges: Vec<LandingRange>,
    leases: Vec<Lease>,
    fences: Vec<Switch>,
    residency: Option<Residency>,
    old: Option<Residency>,
}

/// Memory that lasts as long as the process, because a sequence with a leak never gives its own back.
#[derive(Clone, Copy)]
struct Memory(NonNull<u8>);

impl Memory {
    fn new() -> Self {
        Self(lasting_pages())
    }

    /// An arena over this memory; one at a time.
    fn arena(self) -> Arc<ExpertArena> {
        let bytes = SLOTS * SLOT_BYTES;
        // SAFETY: the pages are initialised, aligned, of this size and never freed; each test has its own, and drops
        // one arena before it makes the next.
        let memory = unsafe { ForeignMemory::new(self.0, bytes, None, Box::new(())) };
        let builder = ArenaBuilder::new().slab(2, SLOT_BYTES).foreign(memory);
        Arc::new(builder.poison(Poison::Marks).build().unwrap())
    }
}

fn value(index: usize, generation: u64) -> u8 {
    (generation as u8) << 1 | index as u8
}

impl Real {
    fn new(memory: Memory) -> Self {
        Self {
            arena: memory.arena(),
            slots: Default::default(),
        }
    }

    fn apply(&mut self, op: Op, index: usize, generation: u64) {
        let name = slot(index as u32);
        let handles = &mut self.slots[index];
        match op {
            Op::Begin => {
                let landing = self.arena.begin_landing(name, IMAGE_BYTES).unwrap();
                assert_eq!(landing.generation().0, generation);
                handles.landing = Some(landing);
                handles.old = handles.residency.take();
            }
            Op::Split => {
                let mut range = handles
                    .landing
                    .as_mut()
                    .unwrap()
                    .split(PIECE_BYTES)
                    .unwrap();
                range.write(0, &[value(index, generation); PIECE_BYTES]);
                handles.ranges.push(range);
            }
            Op::Retire => handles.ranges.remove(0).retire(),
            Op::DropRange => drop(handles.ranges.pop().unwrap()),
            Op::Leak => handles.ranges.pop().unwrap().leak(),
            Op::Commit => {
                let lease = handles.landing.take().unwrap().commit().unwrap();
                handles.residency = Some(lease.residency());
                handles.leases.push(lease);
            }
            Op::Abandon => handles.landing.take().unwrap().abandon(),
            Op::Lease => {
                let lease = self.arena.lease(&handles.residency.unwrap()).unwrap();
                handles.leases.push(lease);
            }
            Op::CloneLease => handles.leases.push(handles.leases[0].clone()),
            Op::DropLease => handles.leases.remove(0).release(),
            Op::ReleaseAfter | Op::RetainUntil => {
                let fence = Switch::default();
                handles.fences.push(fence.clone());
                let lease = handles.leases.remove(0);
                match op {
                    Op::ReleaseAfter => lease.release_after(Box::new(fence)),
                    _ => lease.retain_until(Box::new(fence)),
                }
            }
            Op::FireAndReap => {
                let count = handles.fences.len();
                handles.fences.drain(..).for_each(|fence| fence.fire());
                assert_eq!(self.arena.reap().fired, count);
            }
            Op::Evict => {
                let freed = self.arena.evict(&handles.residency.unwrap()).unwrap();
                let state = self.arena.slot_state(name).unwrap();
                assert_eq!(freed, state == SlotState::Free);
            }
        }
    }

    /// Everything that can be seen agrees with the model, and everything that must be refused is.
    fn check(&mut self, models: &[Model; SLOTS]) {
        let stats = self.arena.stats();
        let sum = |field: fn(&Model) -> usize| models.iter().map(field).sum::<usize>() as u64;
        let count = |state| models.iter().filter(|model| model.state == state).count() as u64;
        assert_eq!(stats.free, count(SlotState::Free));
        assert_eq!(stats.landing, count(SlotState::Landing));
        assert_eq!(stats.committed, count(SlotState::Committed));
        assert_eq!(stats.draining, count(SlotState::Draining));
        assert_eq!(stats.quarantined, count(SlotState::Quarantined));
        assert_eq!(stats.leases, sum(|model| model.leases));
        assert_eq!(stats.pending_fences, sum(|model| model.fences));
        assert_eq!(
            stats.outstanding_ranges,
            sum(|model| model.held + model.leaked)
        );
        assert_eq!(stats.leaked, sum(|model| usize::from(model.leaked > 0)));
        if stats.free == 0 {
            let full = self.arena.acquire(1);
            assert!(matches!(full, Err(ArenaError::NoFreeSlot { slots: 2, .. })));
        }
        for (index, model) in models.iter().enumerate() {
            self.check_slot(index, model);
        }
    }

    fn check_slot(&mut self, index: usize, model: &Model) {
        let name = slot(index as u32);
        assert_eq!(self.arena.slot_state(name), Some(model.state));
        let handles = &mut self.slots[index];
        for lease in &handles.leases {
            let expected = value(index, lease.generation().0);
            assert!(lease.iter().all(|&byte| byte == expected));
            assert!(lease.padded()[IMAGE_BYTES..].iter().all(|&byte| byte == 0));
        }
        if let Some(old) = &handles.old {
            assert!(matches!(
                self.arena.lease(old),
                Err(ArenaError::StaleResidency { .. })
            ));
            assert!(self.arena.evict(old).is_err());
        }
        if model.state != SlotState::Committed {
            let refused = handles
                .residency
                .iter()
                .all(|old| self.arena.lease(old).is_err());
            assert!(refused);
        }
        if !model.can_begin() {
            let busy = self.arena.begin_landing(name, 1);
            assert!(
                matches!(busy, Err(ArenaError::SlotBusy { state, .. }) if state == model.state)
            );
        }
        if let Some(landing) = handles.landing.take() {
            assert_eq!(landing.outstanding(), model.held + model.leaked);
            assert_eq!(landing.remaining(), (PIECES - model.split) * PIECE_BYTES);
            if model.can_commit() {
                handles.landing = Some(landing);
                return;
            }
            let (landing, error) = landing.commit().unwrap_err();
            let expected = match error {
                CommitError::Leaked { .. } => model.leaked > 0,
                CommitError::Tainted { .. } => model.tainted,
                CommitError::Outstanding { .. } => model.held > 0,
                CommitError::Partial { .. } => model.split < PIECES,
                _ => false,
            };
            assert!(expected, "{error}");
            handles.landing = Some(landing);
        }
    }
}

/// Runs a sequence on the real thing, and checks it after every step from `check_from` on.
fn replay(memory: Memory, path: &[(Op, usize)], check_from: usize) {
    let mut models = [Model::NEW; SLOTS];
    let mut real = Real::new(memory);
    for (step, &(op, index)) in path.iter().enumerate() {
        if models[index].apply(op) {
            real.apply(op, index, models[index].generation);
        }
        if step >= check_from {
            real.check(&models);
        }
    }
}

/// Tries every possible operation at every step; returns how many sequences that were.
fn explore(
    memory: Memory,
    models: [Model; SLOTS],
    slots: usize,
    path: &mut Vec<(Op, usize)>,
    depth: usize,
) -> usize {
    let mut sequences = 0;
    for index in 0..slots {
        for op in OPS {
            let mut next = models;
            if !next[index].apply(op) {
                continue;
            }
            path.push((op, index));
            // The steps before the last were checked when they were the last.
            replay(memory, path, path.len() - 1);
            sequences += 1;
            if depth > 1 {
                sequences += explore(memory, next, slots, path, depth - 1);
            }
            path.pop();
        }
    }
    sequences
}

#[test]
fn every_short_sequence_on_two_slots_agrees_with_the_model() {
    let depth = if cfg!(miri) { 3 } else { 8 };
    let sequences = explore(
        Memory::new(),
        [Model::NEW; SLOTS],
        2,
        &mut Vec::new(),
        depth,
    );
    println!("{sequences} sequences");
    // A model in which nothing is possible would agree with everything.
    assert!(
        sequences > if cfg!(miri) { 20 } else { 10_000 },
        "{sequences}"
    );
}

#[test]
fn every_longer_sequence_on_one_slot_agrees_with_the_model() {
    let depth = if cfg!(miri) { 5 } else { 12 };
    let sequences = explore(
        Memory::new(),
        [Model::NEW; SLOTS],
        1,
        &mut Vec::new(),
        depth,
    );
    println!("{sequences} sequences");
    assert!(
        sequences > if cfg!(miri) { 20 } else { 10_000 },
        "{sequences}"
    );
}

/// Leaks are rare, because a slot with one is out of the game.
fn any_op() -> impl Strategy<Value = Op> {
    let usual: Vec<Op> = OPS.into_iter().filter(|op| *op != Op::Leak).collect();
    prop_oneof![100 => prop::sample::select(usual), 1 => Just(Op::Leak)]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn long_random_sequences_agree_with_the_model(
        path in prop::collection::vec((any_op(), 0..SLOTS), 1..400),
    ) {
        replay(Memory::new(), &path, 0);
    }
}
