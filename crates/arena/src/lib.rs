//! Pinned memory for expert records: slabs of slots into which record images land and from which they are read.
//!
//! Start at [`ArenaBuilder`] or [`ExpertArena::new`]. One image goes this way:
//!
//! ```
//! use expert_arena::{ArenaBuilder, ForeignMemory};
//! use std::sync::Arc;
//!
//! let memory = ForeignMemory::heap(2 * 4096)?; // without this line, the arena maps and locks its own
//! let arena = Arc::new(ArenaBuilder::new().slab(2, 4096).foreign(memory).build()?);
//!
//! let mut landing = arena.acquire(5)?;
//! let mut range = landing.split(5).expect("5 bytes are left");
//! range.write(0, b"image"); // or recv, pread, or a NIC through as_mut_ptr
//! range.retire(); // verified
//! let lease = landing.commit().map_err(|(_, error)| error)?;
//! assert_eq!(&lease[..], b"image");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | concept |
//! |---|---|
//! | `builder`, `options` | what a caller chooses |
//! | `memory`, `reserve`, `system`, `memlock` | mapping, huge pages, NUMA, locking; how much may be taken |
//! | `foreign` | memory of an engine, or of the heap |
//! | `slot` | the state machine of slots, without memory or threads |
//! | `arena` | the arena, which joins the two |
//! | `landing`, `range`, `range_io` | images that arrive |
//! | `lease`, `fence` | images that are read |
//! | `file_queue`, `windows` | many reads of files at once, through an io_uring |
//! | `ids`, `error`, `report`, `stats` | names, errors, what people see |
//! | `detached` | a write that breaks the rules, for the simulation's negative controls |
//!
//! **Not here:** tensors, networks, registration with a device, and the choice of what to evict.
//!
//! **Threads.** Everything is `Send`; the arena and leases are `Sync`. No call blocks but for a lock of some tens of
//! nanoseconds (and the system calls of [`LandingRange`], which do what the descriptor does). Steady use allocates
//! nothing.
//!
//! **Cleanup.** Landings, ranges and leases hold the arena: its memory is released when the last of them is gone, in
//! any order. A range that a device may write to for ever is [leaked](LandingRange::leak), and so is the memory then;
//! the same holds for a fence that never fires. No `Drop` panics or waits.
//!
//! *Invariant:* a byte of a slot belongs to at most one [`LandingRange`]. *Invariant:* only committed memory is seen
//! as `&[u8]`, and nobody writes to it. *Boundary:* crates above need no unsafe code to fill a slot, except those that
//! give its address to a device.

mod arena;
mod builder;
mod detached;
mod error;
mod fence;
mod file_queue;
mod foreign;
mod ids;
mod landing;
mod lease;
mod memlock;
mod memory;
mod options;
mod range;
mod range_io;
mod report;
mod reserve;
mod slot;
mod stats;
mod system;
mod windows;

pub use arena::ExpertArena;
pub use builder::ArenaBuilder;
#[doc(hidden)]
pub use detached::DetachedWriter;
pub use error::{ArenaError, CommitError};
pub use fence::{Fence, ReapReport};
pub use file_queue::{FILE_DEPTH_MAX, FileQueue, FileRead, leaked_windows};
pub use foreign::ForeignMemory;
pub use ids::{Generation, Residency, SlotId};
pub use landing::Landing;
pub use lease::Lease;
pub use memlock::{MEMLOCK_ADVICE, memlock_limit_bytes};
pub use memory::SLOT_ALIGN_BYTES;
pub use options::{HugePages, Lock, POISON_BYTE, POISON_CHUNK_BYTES, POISON_MARK_BYTES, Poison};
pub use range::LandingRange;
pub use range_io::RecvFlags;
pub use report::{ArenaReport, LockOutcome, PageKind};
pub use reserve::SystemMemory;
pub use slot::SlotState;
pub use stats::ArenaStats;

// Handles move between threads; what is read may be shared.
const _: () = {
    const fn send<T: Send>() {}
    const fn sync<T: Sync>() {}
    send::<ExpertArena>();
    sync::<ExpertArena>();
    send::<Landing>();
    send::<LandingRange>();
    send::<Lease>();
    sync::<Lease>();
};
