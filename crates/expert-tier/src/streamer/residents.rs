//! Records in memory, by layer and expert, and the leases on them.
//!
//! *Invariant*: a resident is taken out only under its layer's lock and only while the layer's own
//! reference is the last one. A lease is cloned from that reference under the same lock, so a
//! record that somebody uses cannot be given up.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use expert_arena::{Fence, Residency, SlotId};
use expert_store::catalogue::{Class, Layer, Leaf};
use expert_wire::Key;

use super::signal::Signal;
use super::table::LayerTable;
use crate::record::Record;
use crate::sync::lock;

/// One record in its slot.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) record: Record,
    /// Its slot's index among all slots of the arena.
    pub(super) entry: u32,
    /// Readers that were handed a fence and are not known to have finished.
    fences: Arc<AtomicUsize>,
    /// Brought by a guess that nobody has needed yet.
    pub(super) is_guess: AtomicBool,
    signal: Arc<Signal>,
}

impl Held {
    pub(super) fn new(record: Record, entry: u32, is_guess: bool, signal: Arc<Signal>) -> Self {
        Self {
            record,
            entry,
            fences: Arc::default(),
            is_guess: AtomicBool::new(is_guess),
            signal,
        }
    }

    /// Whether a reader may still be at work behind a fence.
    pub(super) fn is_fenced(&self) -> bool {
        self.fences.load(Ordering::Acquire) > 0
    }
}

/// A record that can be read. Its slot is not reused while this lives; clones count.
///
/// *Shapes and units*: derefs to the record image (`docs/store.md`): leaves in canonical order,
/// each at a multiple of 256 bytes, zeros between.
pub struct ExpertLease {
    /// Taken by `drop` alone.
    held: Option<Arc<Held>>,
}

impl ExpertLease {
    pub(super) fn new(held: Arc<Held>) -> Self {
        Self { held: Some(held) }
    }

    fn record(&self) -> &Record {
        let held = self.held.as_ref().expect("taken by drop alone");
        &held.record
    }

    /// Its name.
    pub fn key(&self) -> Key {
        self.record().key()
    }

    /// The leaves of the image.
    pub fn class(&self) -> &Class {
        self.record().class()
    }

    /// Layout and checksums of its layer.
    pub fn layer(&self) -> &Arc<Layer> {
        self.record().layer()
    }

    /// One leaf and its bytes, by its index in [`ExpertLease::class`].
    pub fn leaf(&self, index: usize) -> Option<(&Leaf, &[u8])> {
        self.record().leaf(index)
    }

    /// Whether its checksums were compared when it was fetched.
    pub fn is_verified(&self) -> bool {
        self.record().is_verified()
    }

    /// The slot that it is in.
    pub fn slot(&self) -> SlotId {
        self.record().lease().slot()
    }

    /// Slot and generation, to be compared later: an old one is refused by
    /// [`expert_arena::ExpertArena::lease`].
    pub fn residency(&self) -> Residency {
        self.record().residency()
    }

    /// The address of the image's first byte.
    pub fn host_ptr(&self) -> *const u8 {
        self.record().lease().host_ptr()
    }

    /// The same for a device, if someone supplied the arena's device base.
    pub fn dev_va(&self) -> Option<u64> {
        self.record().lease().dev_va()
    }

    /// Releases the lease while a reader that the CPU does not see may still be at work: the slot
    /// is not reused before `fence` has fired. The record stays cached meanwhile, and others may
    /// lease it.
    ///
    /// A fence that never fires costs the slot, which is counted and named in the log; nothing
    /// waits for it.
    pub fn release_after(mut self, fence: Box<dyn Fence>) {
        let held = self.held.take().expect("taken by drop alone");
        held.fences.fetch_add(1, Ordering::AcqRel);
        let counted = Counted {
            fence,
            fences: held.fences.clone(),
        };
        held.record.lease().clone().retain_until(Box::new(counted));
        release(held);
    }
}

/// Gives a reference back, and tells the thread that waits for a slot.
fn release(held: Arc<Held>) {
    // Read before the reference goes: a waiter that announces itself in between looks again within
    // a millisecond.
    match held.signal.is_slot_wanted() {
        true => {
            let signal = held.signal.clone();
            drop(held);
            signal.wake();
        }
        false => drop(held),
    }
}

impl Drop for ExpertLease {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            release(held);
        }
    }
}

impl Clone for ExpertLease {
    fn clone(&self) -> Self {
        Self {
            held: self.held.clone(),
        }
    }
}

impl Deref for ExpertLease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.record().bytes()
    }
}

impl fmt::Debug for ExpertLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertLease")
            .field("key", &self.key())
            .field("residency", &self.residency())
            .finish_non_exhaustive()
    }
}

/// A fence that is counted as long as the arena polls it.
struct Counted {
    fence: Box<dyn Fence>,
    fences: Arc<AtomicUsize>,
}

impl Fence for Counted {
    fn fired(&self) -> bool {
        self.fence.fired()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.fences.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Uses of residents that one layer remembers until the policy is told. A step of a model uses
/// eight or so, so the policy's lock is taken once in several steps.
const TOUCHES_MAX: usize = 64;

/// A use: when, as a count of calls, and of which entry.
pub(super) type Touch = (u64, u32);

/// The residents of one layer.
pub(super) struct LayerShard {
    pub(super) residents: Mutex<Residents>,
    /// Made with the first record: only then the layout is known.
    pub(super) table: OnceLock<LayerTable>,
}

pub(super) struct Residents {
    experts: Box<[Option<Arc<Held>>]>,
    /// What the policy was not told yet.
    touches: Vec<Touch>,
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) guesses_used: u64,
}

impl LayerShard {
    pub(super) fn new(experts: u32) -> Self {
        Self {
            residents: Mutex::new(Residents {
                experts: (0..experts).map(|_| None).collect(),
                touches: Vec::with_capacity(TOUCHES_MAX),
                hits: 0,
                misses: 0,
                guesses_used: 0,
            }),
            table: OnceLock::new(),
        }
    }

    /// Whether a record of such a layer has its place here: a store that replaced another may have
    /// another shape.
    pub(super) fn fits(&self, layer: &Layer, expert: u32) -> bool {
        let has_place = (expert as usize) < lock(&self.residents).experts.len();
        has_place && self.table.get().is_none_or(|table| table.fits(layer))
    }
}

impl Residents {
    /// A lease, if the record is there.
    pub(super) fn lease(&mut self, expert: u32, tick: u64) -> Option<ExpertLease> {
        let found = self.experts.get(expert as usize)?.as_ref()?;
        let held = found.clone();
        if held.is_guess.load(Ordering::Relaxed) {
            held.is_guess.store(false, Ordering::Relaxed);
            self.guesses_used += 1;
        }
        if self.touches.len() < TOUCHES_MAX {
            self.touches.push((tick, held.entry));
        }
        Some(ExpertLease::new(held))
    }

    pub(super) fn contains(&self, expert: u32) -> bool {
        let place = self.experts.get(expert as usize);
        place.is_some_and(Option::is_some)
    }

    /// Whether there is no room for another use.
    pub(super) fn is_due(&self) -> bool {
        self.touches.len() == TOUCHES_MAX
    }

    pub(super) fn drain_touches(&mut self, into: &mut Vec<Touch>) {
        into.append(&mut self.touches);
    }

    pub(super) fn insert(&mut self, held: Arc<Held>) {
        let expert = held.record.key().expert as usize;
        if let Some(place) = self.experts.get_mut(expert) {
            *place = Some(held);
        }
    }

    /// Whether this entry could be taken out now; with `fenced`, also while a reader may be at work
    /// behind a fence.
    pub(super) fn may_take(&self, expert: u32, entry: u32, fenced: bool) -> bool {
        self.experts.get(expert as usize).is_some_and(|place| {
            place.as_ref().is_some_and(|held| {
                let is_free = Arc::strong_count(held) == 1 && (fenced || !held.is_fenced());
                held.entry == entry && is_free
            })
        })
    }

    /// Takes a resident out that [`Residents::may_take`].
    pub(super) fn take(&mut self, expert: u32) -> Option<Arc<Held>> {
        self.experts.get_mut(expert as usize)?.take()
    }

    /// Takes all of them out, those in use too: their leases stay valid.
    pub(super) fn take_all(&mut self) -> Vec<Arc<Held>> {
        let taken = self.experts.iter_mut().filter_map(Option::take);
        taken.collect()
    }
}
