//! The arena's slots in the streamer's hands: which are free, which hold what, which to give up.
//!
//! The streamer's thread alone gives slots out and takes them back. A slot is *free* (listed here),
//! *held* by a record (in `owners`), in *flight* (nowhere), or *out*: on its way back to free,
//! because a fence has not fired or a rail may still write to it. Those that are out are asked
//! again when a slot is needed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use expert_arena::{ExpertArena, SlotId, SlotState};
use expert_wire::Key;

use super::residents::{LayerShard, Touch};
use crate::eviction::EvictionPolicy;
use crate::sync::lock;

/// Fences of a kernel that runs fire within milliseconds.
const DRAIN_PAUSE: Duration = Duration::from_millis(5);

/// The policy, and memory to tell it of uses.
pub(super) struct Uses {
    policy: Box<dyn EvictionPolicy>,
    scratch: Vec<Touch>,
}

impl Uses {
    pub(super) fn new(policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            policy,
            scratch: Vec::new(),
        }
    }

    /// Tells the policy what one layer remembered.
    pub(super) fn tell(&mut self, touches: impl FnOnce(&mut Vec<Touch>)) {
        touches(&mut self.scratch);
        self.scratch.sort_unstable();
        for (_, entry) in self.scratch.drain(..) {
            self.policy.touch(entry);
        }
    }
}

/// See the module.
pub(super) struct Slots {
    arena: Arc<ExpertArena>,
    /// Index of each slab's first slot among all.
    first_entry: Vec<u32>,
    /// Slabs of the pool, the smallest slots first, and their free slots.
    pool: Vec<(u32, Vec<SlotId>)>,
    /// Slabs for streaming; their slots are never in `pool`.
    stream_slabs: Vec<u32>,
    out: Vec<SlotId>,
    /// What each slot holds, by entry.
    owners: Vec<Option<Key>>,
    /// Held records that are not to be kept: given up first, the oldest first.
    passing: VecDeque<u32>,
    /// When a record with a fence was last given up for want of another.
    drained_at: Option<Instant>,
    pub(super) evictions: u64,
}

impl Slots {
    pub(super) fn new(arena: Arc<ExpertArena>, stream_slabs: Vec<u32>) -> Self {
        let mut first_entry = Vec::new();
        let mut entries = 0;
        let mut pool = Vec::new();
        for slab in 0..arena.num_slabs() {
            first_entry.push(entries);
            entries += arena.slots(slab);
            if !stream_slabs.contains(&slab) {
                let slots = (0..arena.slots(slab)).rev();
                pool.push((slab, slots.map(|slot| SlotId { slab, slot }).collect()));
            }
        }
        pool.sort_by_key(|(slab, _): &(u32, Vec<SlotId>)| arena.slot_bytes(*slab));
        Self {
            first_entry,
            pool,
            stream_slabs,
            out: Vec::new(),
            owners: vec![None; entries as usize],
            passing: VecDeque::new(),
            drained_at: None,
            evictions: 0,
            arena,
        }
    }

    pub(super) fn entry(&self, slot: SlotId) -> u32 {
        self.first_entry[slot.slab as usize] + slot.slot
    }

    fn slot(&self, entry: u32) -> SlotId {
        let slab = self.first_entry.partition_point(|&first| first <= entry) - 1;
        SlotId {
            slab: slab as u32,
            slot: entry - self.first_entry[slab],
        }
    }

    fn is_pool(&self, slot: SlotId) -> bool {
        !self.stream_slabs.contains(&slot.slab)
    }

    pub(super) fn count(&self) -> usize {
        self.owners.len()
    }

    /// Slots that are on their way back.
    pub(super) fn out(&self) -> usize {
        self.out.len()
    }

    /// A record landed in a slot that was in flight.
    pub(super) fn hold(&mut self, slot: SlotId, key: Key, keep: bool, uses: &Mutex<Uses>) -> u32 {
        let entry = self.entry(slot);
        self.owners[entry as usize] = Some(key);
        if keep && self.is_pool(slot) {
            lock(uses).policy.insert(entry);
        } else if self.is_pool(slot) {
            self.passing.push_back(entry);
        }
        entry
    }

    /// A slot that was in flight comes back without a record.
    pub(super) fn give_back(&mut self, slot: SlotId) {
        match self.arena.slot_state(slot) {
            Some(SlotState::Free) => self.free(slot),
            _ => self.out.push(slot),
        }
    }

    fn free(&mut self, slot: SlotId) {
        if let Some((_, free)) = self.pool.iter_mut().find(|(slab, _)| *slab == slot.slab) {
            free.push(slot);
        }
    }

    /// Asks fences, and the slots that are out.
    pub(super) fn sweep(&mut self) {
        // Each call polls a bounded number of fences; all have their turn within a few.
        self.arena.reap();
        let mut i = 0;
        while i < self.out.len() {
            let slot = self.out[i];
            match self.arena.slot_state(slot) {
                Some(SlotState::Free) => {
                    self.out.swap_remove(i);
                    self.free(slot);
                }
                _ => i += 1,
            }
        }
    }

    /// A slot of the pool for so many bytes: free, or made free by giving a record up.
    pub(super) fn take(
        &mut self,
        need_bytes: usize,
        layers: &Layers<'_>,
        uses: &Mutex<Uses>,
    ) -> Option<SlotId> {
        if let Some(slot) = self.take_free(need_bytes) {
            return Some(slot);
        }
        if !self.out.is_empty() {
            self.sweep();
            if let Some(slot) = self.take_free(need_bytes) {
                return Some(slot);
            }
        }
        if let Some(slot) = self.take_held(need_bytes, layers, uses, false) {
            return Some(slot);
        }
        // Fences are known to have fired only once they were asked.
        if self.arena.reap().fired > 0 {
            if let Some(slot) = self.take_held(need_bytes, layers, uses, false) {
                return Some(slot);
            }
        }
        self.drain_one(need_bytes, layers, uses)
    }

    /// Gives a record up: one that is not to be kept, or the policy's choice.
    fn take_held(
        &mut self,
        need_bytes: usize,
        layers: &Layers<'_>,
        uses: &Mutex<Uses>,
        fenced: bool,
    ) -> Option<SlotId> {
        self.take_passing(need_bytes, layers, fenced)
            .or_else(|| self.take_victim(need_bytes, layers, uses, fenced))
    }

    /// Only records with fences are left: one of them is on its way out at a time, or the cache
    /// would be emptied before the first fence fires.
    fn drain_one(
        &mut self,
        need_bytes: usize,
        layers: &Layers<'_>,
        uses: &Mutex<Uses>,
    ) -> Option<SlotId> {
        let now = Instant::now();
        if self.drained_at.is_some_and(|at| now - at < DRAIN_PAUSE) {
            return None;
        }
        self.drained_at = Some(now);
        self.take_held(need_bytes, layers, uses, true)
    }

    fn take_free(&mut self, need_bytes: usize) -> Option<SlotId> {
        let arena = &self.arena;
        let fits = |slab: u32| arena.slot_bytes(slab) >= need_bytes;
        let mut slabs = self.pool.iter_mut().filter(|(slab, _)| fits(*slab));
        slabs.find_map(|(_, free)| free.pop())
    }

    fn take_passing(
        &mut self,
        need_bytes: usize,
        layers: &Layers<'_>,
        fenced: bool,
    ) -> Option<SlotId> {
        for i in 0..self.passing.len() {
            let entry = self.passing[i];
            let slot = self.slot(entry);
            let Some(key) = self.owners[entry as usize] else {
                continue;
            };
            let fits = self.arena.slot_bytes(slot.slab) >= need_bytes;
            if !fits || !layers.may_take(key, entry, fenced) {
                continue;
            }
            self.passing.remove(i);
            return self.give_up(entry, layers);
        }
        None
    }

    fn take_victim(
        &mut self,
        need_bytes: usize,
        layers: &Layers<'_>,
        uses: &Mutex<Uses>,
        fenced: bool,
    ) -> Option<SlotId> {
        loop {
            let mut held = lock(uses);
            held.tell(|touches| layers.drain_touches(touches));
            let entry = held.policy.victim(&mut |entry| {
                let fits = self.arena.slot_bytes(self.slot(entry).slab) >= need_bytes;
                let owner = self.owners[entry as usize];
                fits && owner.is_some_and(|key| layers.may_take(key, entry, fenced))
            })?;
            held.policy.remove(entry);
            drop(held);
            match self.give_up(entry, layers) {
                Some(slot) => return Some(slot),
                None if fenced => return None, // it comes back when its fence has fired
                None => {}
            }
        }
    }

    /// Takes the place of a slab for streaming, if whatever is there can go.
    pub(super) fn claim(&mut self, slot: SlotId, layers: &Layers<'_>) -> bool {
        let entry = self.entry(slot);
        if let Some(key) = self.owners[entry as usize] {
            if !layers.may_take(key, entry, true) {
                return false;
            }
            return self.give_up(entry, layers).is_some();
        }
        self.sweep();
        !self.out.contains(&slot) && self.arena.slot_state(slot) == Some(SlotState::Free)
    }

    /// Takes a record out of its slot: the slot, if it is free at once.
    fn give_up(&mut self, entry: u32, layers: &Layers<'_>) -> Option<SlotId> {
        let slot = self.slot(entry);
        let key = self.owners[entry as usize].take()?;
        let Some(residency) = layers.take(key, entry) else {
            // Somebody leased it since: it stays, at the cold end.
            self.owners[entry as usize] = Some(key);
            if self.is_pool(slot) {
                self.passing.push_back(entry);
            }
            return None;
        };
        self.evictions += 1;
        match self.arena.evict(&residency) {
            Ok(true) => Some(slot),
            Ok(false) | Err(_) => {
                self.out.push(slot);
                None
            }
        }
    }

    /// Takes all records out: they are of another model now. Leases on them stay valid.
    pub(super) fn clear(&mut self, layers: &Layers<'_>, uses: &Mutex<Uses>) {
        for entry in 0..self.owners.len() {
            if self.owners[entry].take().is_some() {
                lock(uses).policy.remove(entry as u32);
                self.out.push(self.slot(entry as u32));
            }
        }
        self.passing.clear();
        for residency in layers.take_all() {
            let _ = self.arena.evict(&residency);
        }
        self.sweep();
    }

    /// Slots whose fence has not fired for so long.
    pub(super) fn stuck(&self, at_least: Duration) -> Vec<(SlotId, Duration)> {
        self.arena.waiting_slots(at_least)
    }
}

/// The residents of all layers, as the slots see them.
pub(super) struct Layers<'a>(pub(super) &'a [Option<LayerShard>]);

impl Layers<'_> {
    fn shard(&self, layer: u32) -> Option<&LayerShard> {
        self.0.get(layer as usize)?.as_ref()
    }

    fn may_take(&self, key: Key, entry: u32, fenced: bool) -> bool {
        self.shard(key.layer).is_some_and(|shard| {
            let residents = lock(&shard.residents);
            residents.may_take(key.expert, entry, fenced)
        })
    }

    fn drain_touches(&self, into: &mut Vec<Touch>) {
        for shard in self.0.iter().flatten() {
            lock(&shard.residents).drain_touches(into);
        }
    }

    /// Takes a record out that nobody uses.
    fn take(&self, key: Key, entry: u32) -> Option<expert_arena::Residency> {
        let shard = self.shard(key.layer)?;
        let mut residents = lock(&shard.residents);
        if !residents.may_take(key.expert, entry, true) {
            return None;
        }
        let held = residents.take(key.expert)?;
        // The table tells first, then the slot can be used again.
        if let Some(table) = shard.table.get() {
            table.clear(key.expert);
        }
        drop(residents);
        Some(held.record.residency())
    }

    pub(super) fn take_all(&self) -> Vec<expert_arena::Residency> {
        let mut taken = Vec::new();
        for shard in self.0.iter().flatten() {
            let held = lock(&shard.residents).take_all();
            for held in held {
                if let Some(table) = shard.table.get() {
                    table.clear(held.record.key().expert);
                }
                taken.push(held.record.residency());
            }
        }
        taken
    }
}
