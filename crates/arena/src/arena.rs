//! The arena: memory, slabs, and the doors to landings and leases.

use crate::builder::ArenaBuilder;
use crate::error::ArenaError;
use crate::fence::{PendingFence, ReapReport};
use crate::ids::{Generation, Residency, SlotId};
use crate::landing::Landing;
use crate::lease::Lease;
use crate::memory::Backing;
use crate::options::{POISON_BYTE, POISON_CHUNK_BYTES, POISON_MARK_BYTES, Poison};
use crate::report::ArenaReport;
use crate::slot::{SlotState, SlotTable};
use crate::stats::ArenaStats;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Slots whose fences one call of [`ExpertArena::reap`] polls: a driver thread calls it in every round, so a round
/// must stay short (a poll is well below a microsecond).
const REAP_SLOTS: usize = 64;

/// Slots that one log line names.
const NAMED_SLOTS: usize = 16;

/// Where a slab lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlabLayout {
    /// Bytes from the start of the arena.
    pub(crate) offset: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) slots: u32,
}

struct Slab {
    layout: SlabLayout,
    /// One lock for a slab: it is held for some tens of nanoseconds, never during a copy, a system call or a call to
    /// someone else's code. Taking and releasing it also orders the bytes of a landing before the reads of a lease,
    /// on every CPU.
    table: Mutex<SlotTable>,
}

/// Pinned memory for record images, cut into slabs of slots.
///
/// Wrap it in an [`Arc`]: landings, ranges and leases hold one, so the memory lives until the last of them is gone.
/// All methods may be called from any thread.
pub struct ExpertArena {
    // Field order is drop order: what refers to the memory goes before the memory.
    slabs: Vec<Slab>,
    /// Slabs by ascending slot size.
    by_size: Vec<u32>,
    /// Slots with fences to poll; each stands in it at most once.
    fence_queue: Mutex<VecDeque<SlotId>>,
    id: u64,
    device_base: OnceLock<u64>,
    poison: Poison,
    poison_freed: bool,
    report: ArenaReport,
    /// Taken only by `drop`.
    backing: Option<Backing>,
}

impl ExpertArena {
    /// Memory for `num_slabs` slabs of `slots_per_slab` slots, each for records of up to `record_stride` bytes, with
    /// every choice of [`ArenaBuilder`] at its default.
    ///
    /// # Errors
    ///
    /// As [`ArenaBuilder::build`].
    pub fn new(
        num_slabs: u32,
        slots_per_slab: u32,
        record_stride: usize,
    ) -> Result<Self, ArenaError> {
        (0..num_slabs)
            .fold(ArenaBuilder::new(), |builder, _| {
                builder.slab(slots_per_slab, record_stride)
            })
            .build()
    }

    pub(crate) fn assemble(
        layouts: Vec<SlabLayout>,
        backing: Backing,
        report: ArenaReport,
        poison: Poison,
        poison_freed: bool,
        device_base: Option<u64>,
    ) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let mut by_size: Vec<u32> = (0..).take(layouts.len()).collect();
        by_size.sort_by_key(|&slab| layouts[slab as usize].slot_bytes);
        let slot_count = layouts.iter().map(|layout| layout.slots as usize).sum();
        let slabs = (0..).zip(layouts).map(|(slab, layout)| Slab {
            layout,
            table: Mutex::new(SlotTable::new(slab, layout.slots)),
        });
        Self {
            slabs: slabs.collect(),
            by_size,
            fence_queue: Mutex::new(VecDeque::with_capacity(slot_count)),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            device_base: device_base.map_or_else(OnceLock::new, OnceLock::from),
            poison,
            poison_freed,
            report,
            backing: Some(backing),
        }
    }

    /// What the arena got: pages, locking, NUMA node, time.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }

    /// The address of the first byte, for registering the memory with a device.
    ///
    /// Reading or writing through it is for whoever owns a [`LandingRange`](crate::LandingRange) (write) or a
    /// [`Lease`] (read) of those bytes.
    pub fn base_ptr(&self) -> *mut u8 {
        let backing = self.backing.as_ref().expect("the backing is taken by drop");
        backing.base().as_ptr()
    }

    /// Bytes of all slots together.
    pub fn total_bytes(&self) -> usize {
        self.report.total_bytes
    }

    /// Count of slabs.
    pub fn num_slabs(&self) -> u32 {
        // The builder counted them in a u32.
        u32::try_from(self.slabs.len()).unwrap_or(u32::MAX)
    }

    /// Count of slots of a slab; 0 if there is no such slab.
    pub fn slots(&self, slab: u32) -> u32 {
        self.slab(slab).map_or(0, |slab| slab.layout.slots)
    }

    /// Bytes of each slot of a slab, as rounded up; 0 if there is no such slab.
    pub fn slot_bytes(&self, slab: u32) -> usize {
        self.slab(slab).map_or(0, |slab| slab.layout.slot_bytes)
    }

    /// Bytes from the start of the arena to a slot, if it exists: the same on the host and on a device.
    pub fn slot_offset(&self, slot: SlotId) -> Option<usize> {
        let layout = self.slab(slot.slab)?.layout;
        // The sum was checked when the arena was built.
        (slot.slot < layout.slots).then(|| layout.offset + slot.slot as usize * layout.slot_bytes)
    }

    /// The address of a slot, if it exists; see [`base_ptr`](Self::base_ptr).
    pub fn slot_host_ptr(&self, slot: SlotId) -> Option<*mut u8> {
        self.slot_offset(slot).map(|offset| self.at(offset))
    }

    /// The address of a slot for a device, if the slot exists and someone supplied a device base.
    pub fn slot_dev_va(&self, slot: SlotId) -> Option<u64> {
        let offset = self.slot_offset(slot)? as u64;
        self.device_base.get()?.checked_add(offset)
    }

    /// Supplies the device address of the first byte, for an engine that learns it when it registers the memory.
    ///
    /// # Errors
    ///
    /// [`ArenaError::DeviceBaseConflict`] if another address is in force: an address that was handed out stays true.
    pub fn set_device_base(&self, device_base: u64) -> Result<(), ArenaError> {
        let first = *self.device_base.get_or_init(|| device_base);
        if first == device_base {
            return Ok(());
        }
        Err(ArenaError::DeviceBaseConflict {
            first,
            second: device_base,
        })
    }

    /// The state of a slot, if it exists; it may have changed by the time it is looked at.
    pub fn slot_state(&self, slot: SlotId) -> Option<SlotState> {
        self.slot_offset(slot)?;
        Some(self.table(slot.slab).slot(slot.slot).state)
    }

    /// How many slots are in which state, and what holds them. Walks over all slots.
    pub fn stats(&self) -> ArenaStats {
        let mut stats = ArenaStats::default();
        for slab in &self.slabs {
            stats.add(lock(&slab.table).slots());
        }
        stats
    }

    /// Starts a landing of `image_bytes` bytes in this slot, which must be Free, or Committed without leases and
    /// fences; the image of a Committed one is evicted. The slot is poisoned.
    ///
    /// # Errors
    ///
    /// [`ArenaError::SlotBusy`]: release what holds it, or take another slot. [`ArenaError::NoSuchSlot`],
    /// [`ArenaError::TooLarge`], [`ArenaError::EmptyImage`]: correct the call.
    pub fn begin_landing(
        self: &Arc<Self>,
        slot: SlotId,
        image_bytes: usize,
    ) -> Result<Landing, ArenaError> {
        if self.slot_offset(slot).is_none() {
            return Err(ArenaError::NoSuchSlot {
                slot,
                slabs: self.num_slabs(),
                slots: self.slots(slot.slab),
            });
        }
        check_image(image_bytes, self.slot_bytes(slot.slab))?;
        let mut table = self.table(slot.slab);
        let Some(generation) = table.begin(slot.slot, image_bytes) else {
            let entry = table.slot(slot.slot);
            return Err(ArenaError::SlotBusy {
                slot,
                state: entry.state,
                readers: entry.readers(),
            });
        };
        drop(table);
        Ok(self.landing(slot, generation, image_bytes))
    }

    /// Starts a landing of `image_bytes` bytes in a Free slot of the smallest slab that fits and has one.
    ///
    /// It never evicts a cached image: which one to give up is the caller's choice ([`evict`](Self::evict), or
    /// [`begin_landing`](Self::begin_landing) on its slot).
    ///
    /// # Errors
    ///
    /// [`ArenaError::NoFreeSlot`]: evict, or [`reap`](Self::reap), and try again. [`ArenaError::TooLarge`],
    /// [`ArenaError::EmptyImage`]: correct the call.
    pub fn acquire(self: &Arc<Self>, image_bytes: usize) -> Result<Landing, ArenaError> {
        let largest = self.by_size.last().map_or(0, |&slab| self.slot_bytes(slab));
        check_image(image_bytes, largest)?;
        let mut slots = 0;
        for &slab in &self.by_size {
            if self.slot_bytes(slab) < image_bytes {
                continue;
            }
            slots += u64::from(self.slots(slab));
            let begun = self.table(slab).begin_any(image_bytes);
            if let Some((slot, generation)) = begun {
                return Ok(self.landing(SlotId { slab, slot }, generation, image_bytes));
            }
        }
        Err(ArenaError::NoFreeSlot { image_bytes, slots })
    }

    fn landing(
        self: &Arc<Self>,
        slot: SlotId,
        generation: Generation,
        image_bytes: usize,
    ) -> Landing {
        self.poison_slot(slot, image_bytes);
        Landing::new(Arc::clone(self), slot, generation, image_bytes)
    }

    /// A lease on the image that a residency names.
    ///
    /// # Errors
    ///
    /// [`ArenaError::StaleResidency`] when the slot no longer holds it, or it is on its way out: fetch the record
    /// again. [`ArenaError::WrongArena`] for a residency of another arena.
    pub fn lease(self: &Arc<Self>, residency: &Residency) -> Result<Lease, ArenaError> {
        let slot = self.check_arena(residency)?;
        let mut table = self.table(slot.slab);
        if !table.lease(slot.slot, residency.generation) {
            return Err(stale(residency, &table));
        }
        let image_bytes = table.slot(slot.slot).image_bytes;
        drop(table);
        let arena = Arc::clone(self);
        Ok(Lease::new(arena, slot, residency.generation, image_bytes))
    }

    /// Gives up a cached image: `true` if its slot is Free now, `false` if it is Draining until the last lease and
    /// fence are gone. Leases that exist stay valid.
    ///
    /// # Errors
    ///
    /// [`ArenaError::StaleResidency`] when the slot does not hold it (any more), [`ArenaError::WrongArena`].
    pub fn evict(&self, residency: &Residency) -> Result<bool, ArenaError> {
        let slot = self.check_arena(residency)?;
        self.end_use(slot, |table| {
            table
                .evict(slot.slot, residency.generation)
                .ok_or_else(|| stale(residency, table))
        })
    }

    fn check_arena(&self, residency: &Residency) -> Result<SlotId, ArenaError> {
        let slot = residency.slot;
        if residency.arena == self.id {
            Ok(slot)
        } else {
            Err(ArenaError::WrongArena { slot })
        }
    }

    /// Polls fences of released leases and frees slots that nobody reads any more.
    ///
    /// One call looks at a bounded number of slots (64), each in turn over several calls. Nothing else polls fences:
    /// call it regularly, and when no slot is free.
    pub fn reap(&self) -> ReapReport {
        let mut report = ReapReport::default();
        let rounds = lock(&self.fence_queue).len().min(REAP_SLOTS);
        for _ in 0..rounds {
            let Some(slot) = lock(&self.fence_queue).pop_front() else {
                break;
            };
            // No lock is held while someone else's code runs. If it panics, the slot's count of fences keeps the slot
            // from being reused.
            let mut fences = self.table(slot.slab).take_fences(slot.slot);
            let before = fences.len();
            fences.retain(|pending| !pending.fence.fired());
            let unfired = fences.len();
            let fired = before - unfired;
            let (freed, queue) = self.end_use(slot, |table| {
                table.return_fences(slot.slot, fences, fired as u64)
            });
            report.fired += fired;
            report.freed += usize::from(freed);
            report.pending += unfired;
            if queue {
                lock(&self.fence_queue).push_back(slot);
            }
        }
        report
    }

    /// The slots that wait for a fence since `at_least`, with the age of their oldest fence: name them in a log when
    /// a fence never fires. They stay unused; neither [`reap`](Self::reap) nor dropping the arena waits for them.
    pub fn waiting_slots(&self, at_least: Duration) -> Vec<(SlotId, Duration)> {
        let now = Instant::now();
        let mut waiting = Vec::new();
        for (slab_index, slab) in (0..).zip(&self.slabs) {
            for (slot_index, slot) in (0..).zip(lock(&slab.table).slots()) {
                let Some(since) = slot.pending.iter().map(|pending| pending.since).min() else {
                    continue;
                };
                let age = now.saturating_duration_since(since);
                if age >= at_least {
                    let slot = SlotId {
                        slab: slab_index,
                        slot: slot_index,
                    };
                    waiting.push((slot, age));
                }
            }
        }
        waiting
    }

    pub(crate) fn add_fence(&self, slot: SlotId, fence: PendingFence, drain: bool) {
        let queue = self.table(slot.slab).add_fence(slot.slot, fence, drain);
        if queue {
            lock(&self.fence_queue).push_back(slot);
        }
    }

    pub(crate) fn residency(&self, slot: SlotId, generation: Generation) -> Residency {
        Residency {
            arena: self.id,
            slot,
            generation,
        }
    }

    /// Does something to the table of a slab that exists which may free this slot: all that does goes through here.
    pub(crate) fn end_use<R>(&self, slot: SlotId, change: impl FnOnce(&mut SlotTable) -> R) -> R {
        let mut table = self.table(slot.slab);
        let was_free = table.slot(slot.slot).state == SlotState::Free;
        let result = change(&mut table);
        let is_free = table.slot(slot.slot).state == SlotState::Free;
        if self.poison_freed && is_free && !was_free {
            // Under the lock, or a landing could begin meanwhile.
            self.fill_slot(slot, 0, self.slot_bytes(slot.slab), POISON_BYTE);
        }
        result
    }

    /// The table of a slab that exists.
    pub(crate) fn table(&self, slab: u32) -> MutexGuard<'_, SlotTable> {
        lock(&self.slabs[slab as usize].table)
    }

    /// The address of a slot that exists.
    pub(crate) fn slot_ptr(&self, slot: SlotId) -> *mut u8 {
        self.slot_host_ptr(slot)
            .expect("landings and leases name slots that exist")
    }

    fn slab(&self, slab: u32) -> Option<&Slab> {
        self.slabs.get(usize::try_from(slab).ok()?)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.total_bytes());
        // SAFETY: slot offsets lie below `total_bytes`, and the backing is one allocation of at least that size
        // (checked for foreign memory, mapped so for ours).
        unsafe { self.base_ptr().add(offset) }
    }

    /// Overwrites a slot that was just taken for a landing, of which no range exists yet.
    fn poison_slot(&self, slot: SlotId, image_bytes: usize) {
        match self.poison {
            Poison::Full => self.fill_slot(slot, 0, self.slot_bytes(slot.slab), POISON_BYTE),
            Poison::Marks => {
                for at in (0..image_bytes).step_by(POISON_CHUNK_BYTES) {
                    let bytes = POISON_MARK_BYTES.min(image_bytes - at);
                    self.fill_slot(slot, at, bytes, POISON_BYTE);
                }
                let bytes = POISON_MARK_BYTES.min(image_bytes);
                self.fill_slot(slot, image_bytes - bytes, bytes, POISON_BYTE);
            }
        }
    }

    /// Zeroes what lies behind the image of a landing of which no range exists any more.
    pub(crate) fn zero_padding(&self, slot: SlotId, image_bytes: usize) {
        let padding = self.slot_bytes(slot.slab) - image_bytes;
        self.fill_slot(slot, image_bytes, padding, 0);
    }

    /// Callers own the slot: it is Landing, theirs, and no range of it exists; or it is Free, and they hold its table.
    fn fill_slot(&self, slot: SlotId, at: usize, bytes: usize, value: u8) {
        assert!(at + bytes <= self.slot_bytes(slot.slab));
        let base = self.slot_ptr(slot);
        // SAFETY: `at` is at most the size of the slot, which lies inside the backing.
        let start = unsafe { base.add(at) };
        // SAFETY: `start..start + bytes` lies inside the slot (asserted) and the slot inside the writable backing; the
        // slot is Landing and has no range, or Free with its table locked, so nobody else reads or writes it.
        unsafe { start.write_bytes(value, bytes) };
    }
}

impl Drop for ExpertArena {
    fn drop(&mut self) {
        let mut held = Vec::new();
        for (slab_index, slab) in (0..).zip(&mut self.slabs) {
            let table = slab.table.get_mut().unwrap_or_else(PoisonError::into_inner);
            for (slot_index, slot) in (0..).zip(table.slots()) {
                let fired = slot.pending.iter().filter(|pending| {
                    catch_unwind(AssertUnwindSafe(|| pending.fence.fired())).unwrap_or(false)
                });
                if slot.leaked_ranges > 0 || slot.fences > fired.count() as u64 {
                    held.push(SlotId {
                        slab: slab_index,
                        slot: slot_index,
                    });
                }
            }
        }
        if held.is_empty() {
            return;
        }
        // A device may still write to it or read from it.
        let names: Vec<String> = held
            .iter()
            .take(NAMED_SLOTS)
            .map(SlotId::to_string)
            .collect();
        tracing::error!(
            "{} bytes of arena memory are leaked: a device may still use {} slots ({}{})",
            self.report.mapped_bytes,
            held.len(),
            names.join(", "),
            if held.len() > NAMED_SLOTS {
                ", …"
            } else {
                ""
            },
        );
        if let Some(backing) = self.backing.take() {
            backing.leak();
        }
    }
}

impl fmt::Debug for ExpertArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertArena")
            .field("slabs", &self.slabs.len())
            .field("total_bytes", &self.total_bytes())
            .finish_non_exhaustive()
    }
}

/// A table is consistent after every call, and no call of ours panics half-way, so a poisoned lock tells nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check_image(image_bytes: usize, limit_bytes: usize) -> Result<(), ArenaError> {
    match image_bytes {
        0 => Err(ArenaError::EmptyImage),
        _ if image_bytes > limit_bytes => Err(ArenaError::TooLarge {
            image_bytes,
            limit_bytes,
        }),
        _ => Ok(()),
    }
}

fn stale(residency: &Residency, table: &SlotTable) -> ArenaError {
    let entry = table.slot(residency.slot.slot);
    ArenaError::StaleResidency {
        slot: residency.slot,
        held: residency.generation,
        current: Generation(entry.generation),
        state: entry.state,
    }
}
