//! What can go wrong, by operation and by whose move it is next.

use crate::ids::{Generation, SlotId};
use crate::memlock::MEMLOCK_ADVICE;
use crate::slot::SlotState;
use std::io;

/// Every error of this crate, except [`CommitError`], which comes with the landing that it is about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    // What was asked for makes no sense: change the call.
    /// No slab was described.
    #[error("the arena has no slabs; describe at least one with slab(slots, slot_bytes)")]
    NoSlabs,
    /// A slab without slots, or with slots of no size.
    #[error("slab {slab} has {slots} slots of {slot_bytes} bytes; both must be at least 1")]
    EmptySlab {
        /// Index of the slab.
        slab: u32,
        /// Slots asked for.
        slots: u32,
        /// Bytes per slot asked for.
        slot_bytes: usize,
    },
    /// The sizes do not fit the address space.
    #[error(
        "slab {slab} with {slots} slots of {slot_bytes} bytes brings the arena above {limit} bytes, the most that can \
         be addressed; use fewer or smaller slots"
    )]
    LayoutOverflow {
        /// Index of the slab at which the sum overflowed.
        slab: u32,
        /// Slots asked for.
        slots: u32,
        /// Bytes per slot asked for.
        slot_bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Memory of the engine that cannot hold the slots.
    #[error(
        "foreign memory has {have_bytes} bytes, the slots need {need_bytes}; pass more memory or fewer slots"
    )]
    ForeignTooSmall {
        /// Bytes that were passed.
        have_bytes: usize,
        /// Bytes that the slots need.
        need_bytes: usize,
    },
    /// Memory of the engine that starts at an odd place.
    #[error(
        "foreign memory starts at {addr:#x}, which is not a multiple of {align_bytes}; align the allocation"
    )]
    ForeignMisaligned {
        /// Its address.
        addr: usize,
        /// The alignment that slots need.
        align_bytes: usize,
    },
    /// An option that only applies to memory that the arena maps itself.
    #[error(
        "{option} cannot be applied to foreign memory, whose owner mapped it; drop the option or the memory"
    )]
    ForeignOption {
        /// The builder method.
        option: &'static str,
    },
    /// Two different device addresses for one arena.
    #[error(
        "device base {second:#x} contradicts {first:#x}, which was given before; give one of them"
    )]
    DeviceBaseConflict {
        /// The address that is in force.
        first: u64,
        /// The address that was refused.
        second: u64,
    },
    /// No slot of this name.
    #[error("{slot} does not exist: the arena has {slabs} slabs, and that slab {slots} slots")]
    NoSuchSlot {
        /// The slot asked for.
        slot: SlotId,
        /// Slabs of the arena.
        slabs: u32,
        /// Slots of the named slab, 0 if there is no such slab.
        slots: u32,
    },
    /// An image of no bytes.
    #[error("a record image of 0 bytes cannot land; check where its size was read")]
    EmptyImage,
    /// An image that the slot, or every slot, is too small for.
    #[error(
        "a record image of {image_bytes} bytes is above the limit of {limit_bytes} bytes per slot; build the arena with larger slots"
    )]
    TooLarge {
        /// Size of the image.
        image_bytes: usize,
        /// Size of the slot, or of the largest slots.
        limit_bytes: usize,
    },
    /// A residency of another arena of this process.
    #[error("the residency of {slot} belongs to another arena; ask the arena that issued it")]
    WrongArena {
        /// The slot it names.
        slot: SlotId,
    },

    // The cache moved on: wait or fetch again.
    /// The slot is in use.
    #[error(
        "{slot} is {state} with {readers} readers (leases and pending fences); release them, reap, or take another slot"
    )]
    SlotBusy {
        /// The slot asked for.
        slot: SlotId,
        /// Its state.
        state: SlotState,
        /// Leases plus fences that have not fired.
        readers: u64,
    },
    /// Every slot that is large enough is in use or cached.
    #[error(
        "no free slot for a record image of {image_bytes} bytes: all {slots} slots that are large enough are in use or \
         cached; evict a record, or reap fences, and try again"
    )]
    NoFreeSlot {
        /// Size of the image.
        image_bytes: usize,
        /// Slots that are large enough.
        slots: u64,
    },
    /// The slot no longer holds what the residency says.
    #[error(
        "the residency of {slot} is stale: it has {held}, the slot is {state} at {current}; fetch the record again"
    )]
    StaleResidency {
        /// The slot it names.
        slot: SlotId,
        /// Generation of the residency.
        held: Generation,
        /// Generation of the slot.
        current: Generation,
        /// State of the slot.
        state: SlotState,
    },

    // The machine does not have it: an operator's move.
    /// Taking the memory would leave less than the reserve.
    #[error(
        "an arena of {need_bytes} bytes does not fit: {scope} has {available_bytes} bytes available and {reserve_bytes} \
         must stay free; use fewer slots, free memory, or lower the reserve"
    )]
    NotEnoughMemory {
        /// Bytes that the arena would take.
        need_bytes: u64,
        /// Bytes that are available.
        available_bytes: u64,
        /// Bytes that must stay free.
        reserve_bytes: u64,
        /// What was measured: the machine, a control group, or a NUMA node.
        scope: String,
    },
    /// The available memory could not be learnt.
    #[error(
        "reading {path} to learn the available memory failed: {source}; mount it, or skip the check with a reserve of 0"
    )]
    MemoryUnknown {
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// Explicit huge pages were required and are not there.
    #[error(
        "{need_bytes} bytes of explicit huge pages are required and not available ({pools}); reserve them, for 2 MiB \
         pages with 'sysctl vm.nr_hugepages=COUNT', or choose HugePages::Auto"
    )]
    HugePagesUnavailable {
        /// Bytes that the arena needs.
        need_bytes: usize,
        /// What the system offers.
        pools: String,
    },
    /// `mmap` failed.
    #[error(
        "mapping {bytes} bytes failed: {source}; use fewer slots, or raise 'ulimit -v' and vm.overcommit_memory"
    )]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// The cause.
        source: io::Error,
    },
    /// The kernel could not supply the pages.
    #[error(
        "populating {bytes} bytes failed at byte {at}: {source}; use fewer slots, or check memory limits of the control group"
    )]
    Prefault {
        /// Bytes in all.
        bytes: usize,
        /// Where it stopped.
        at: usize,
        /// The cause.
        source: io::Error,
    },
    /// `mlock` failed and was required.
    #[error(
        "locking {need_bytes} bytes failed at byte {at}: {source}: locked-memory limit (RLIMIT_MEMLOCK) is {}, need \
         {need_bytes}; raise it: {MEMLOCK_ADVICE}",
        crate::memlock::LimitText(*.limit_bytes)
    )]
    Lock {
        /// Bytes to lock.
        need_bytes: usize,
        /// Where it stopped.
        at: usize,
        /// The limit of this process, `None` when there is none.
        limit_bytes: Option<u64>,
        /// The cause.
        source: io::Error,
    },
    /// `mbind` failed.
    #[error(
        "binding {bytes} bytes to NUMA node {node} failed: {source}; nodes online: {online}; choose one of them that \
         this process may use (cpuset, 'numactl --show'), or allow mbind in the container's seccomp profile"
    )]
    Numa {
        /// The node asked for.
        node: u32,
        /// Bytes to bind.
        bytes: usize,
        /// The nodes that the system has, in its own notation.
        online: String,
        /// The cause.
        source: io::Error,
    },
}

impl ArenaError {
    /// Whether the same call may succeed later without a change by an operator.
    pub fn is_retryable(&self) -> bool {
        self.is_backpressure()
    }

    /// Whether the arena is merely full: something has to be released or evicted first.
    pub fn is_backpressure(&self) -> bool {
        matches!(self, Self::SlotBusy { .. } | Self::NoFreeSlot { .. })
    }
}

/// Why a landing could not be committed; the landing comes back with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// A range was dropped without being retired: some bytes were never vouched for.
    #[error(
        "{slot} cannot be committed: a range was dropped before its bytes were verified; abandon the landing and fetch again"
    )]
    Tainted {
        /// The slot.
        slot: SlotId,
    },
    /// A range was leaked: a device may still write to the slot.
    #[error(
        "{slot} cannot be committed: {ranges} leaked ranges may still be written by a device; abandon the landing and use another slot"
    )]
    Leaked {
        /// The slot.
        slot: SlotId,
        /// Ranges that were leaked.
        ranges: u64,
    },
    /// Ranges are still held, so bytes may still arrive.
    #[error("{slot} cannot be committed: {ranges} ranges are outstanding; retire them first")]
    Outstanding {
        /// The slot.
        slot: SlotId,
        /// Ranges that are held.
        ranges: u64,
    },
    /// A part of the image was never split off.
    #[error(
        "{slot} cannot be committed: {remaining_bytes} of {image_bytes} bytes were never split off; land them first"
    )]
    Partial {
        /// The slot.
        slot: SlotId,
        /// Bytes that were not handed out.
        remaining_bytes: usize,
        /// Size of the image.
        image_bytes: usize,
    },
}
