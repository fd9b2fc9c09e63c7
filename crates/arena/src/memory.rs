//! Mapping memory: huge pages, NUMA, pre-faulting, locking. All system calls on whole mappings are here.

use crate::error::ArenaError;
use crate::foreign::ForeignMemory;
use crate::memlock::memlock_limit_bytes;
use crate::options::{HugePages, Lock};
use crate::report::{ArenaReport, LockOutcome, PageKind};
use crate::reserve::check_reserve;
use crate::system::{System, page_bytes};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Alignment of every slot, and the unit to which slot sizes are rounded up.
///
/// 4096 on every machine, whatever its page size: it satisfies direct I/O and devices, keeps one layout for all
/// machines, and a slot is no unit of protection, so it needs no whole pages.
pub const SLOT_ALIGN_BYTES: usize = 4096;

/// Bytes that one system call populates: long enough to cost nothing, short enough (some 20 ms) that other
/// threads of the process, which wait for the same lock of its address space, keep going.
const STEP_BYTES: usize = 64 << 20;

/// Bytes that one system call locks. The pages are present by then, so a step is short whatever its size; this one is
/// below the limit of an ordinary user (8 MiB), which makes a failure half-way the case that is met and tested.
const LOCK_STEP_BYTES: usize = 4 << 20;

/// A pool is passed over when rounding up to its pages would waste more than this part of the arena.
const HUGE_WASTE_DIVISOR: usize = 8;

/// Where the bytes of an arena come from; dropping it gives them back.
pub(crate) enum Backing {
    Mapped(Mapping),
    Foreign(ForeignMemory),
}

/// What a caller wants of a mapping.
pub(crate) struct Wishes {
    pub(crate) huge_pages: HugePages,
    pub(crate) lock: Lock,
    pub(crate) numa_node: Option<u32>,
    pub(crate) reserve_bytes: Option<u64>,
}

impl Backing {
    /// Maps, binds, populates and locks `total_bytes`.
    pub(crate) fn map(
        total_bytes: usize,
        wishes: &Wishes,
        system: &System,
    ) -> Result<(Self, ArenaReport), ArenaError> {
        if cfg!(miri) {
            return Self::interpreted(total_bytes);
        }
        let start = Instant::now();
        let mut reserve_bytes = None;
        let (mapping, pages) = match map_explicit(total_bytes, wishes, system)? {
            Some(found) => found,
            None => {
                reserve_bytes = Some(check_reserve(total_bytes, wishes.reserve_bytes, system)?);
                if let Some(node) = wishes.numa_node {
                    check_node(total_bytes, node, system)?;
                }
                let (mapping, pages) = map_plain(total_bytes, wishes.huge_pages, system)?;
                mapping.make_present(wishes.numa_node, pages, system)?;
                (mapping, pages)
            }
        };
        let prefault = start.elapsed();
        let huge_bytes = match pages {
            PageKind::Explicit { .. } => mapping.bytes,
            PageKind::Transparent { .. } => {
                system.transparent_huge_bytes(mapping.base.as_ptr().addr(), mapping.bytes)
            }
            _ => 0,
        };
        let lock = mapping.lock(wishes.lock, pages)?;
        let report = ArenaReport {
            total_bytes,
            mapped_bytes: mapping.bytes,
            page_bytes: page_bytes(),
            pages,
            huge_bytes,
            lock,
            numa_node: wishes.numa_node,
            reserve_bytes,
            prefault,
        };
        Ok((Self::Mapped(mapping), report))
    }

    /// Miri's stand-in for a mapping: a block of the heap, of which it sees every access, and none of the system calls
    /// that it has not.
    fn interpreted(total_bytes: usize) -> Result<(Self, ArenaReport), ArenaError> {
        let memory = ForeignMemory::heap(total_bytes)?;
        let (backing, report) = Self::foreign(total_bytes, memory)?;
        let report = ArenaReport {
            pages: PageKind::Plain,
            lock: LockOutcome::NotAsked,
            ..report
        };
        Ok((backing, report))
    }

    /// Takes memory that someone else owns.
    pub(crate) fn foreign(
        total_bytes: usize,
        memory: ForeignMemory,
    ) -> Result<(Self, ArenaReport), ArenaError> {
        let addr = memory.base().as_ptr().addr();
        if addr % SLOT_ALIGN_BYTES != 0 {
            return Err(ArenaError::ForeignMisaligned {
                addr,
                align_bytes: SLOT_ALIGN_BYTES,
            });
        }
        if memory.bytes() < total_bytes {
            return Err(ArenaError::ForeignTooSmall {
                have_bytes: memory.bytes(),
                need_bytes: total_bytes,
            });
        }
        let report = ArenaReport {
            total_bytes,
            mapped_bytes: memory.bytes(),
            page_bytes: page_bytes(),
            pages: PageKind::Foreign,
            huge_bytes: 0,
            lock: LockOutcome::Foreign,
            numa_node: None,
            reserve_bytes: None,
            prefault: Duration::ZERO,
        };
        Ok((Self::Foreign(memory), report))
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        match self {
            Self::Mapped(mapping) => mapping.base,
            Self::Foreign(memory) => memory.base(),
        }
    }

    /// Never gives the memory back, because a device may still write to it or read from it.
    pub(crate) fn leak(self) {
        match self {
            Self::Mapped(mapping) => std::mem::forget(mapping),
            Self::Foreign(memory) => memory.leak(),
        }
    }
}

/// Our own anonymous memory, unmapped on drop.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process and not to a thread; Mapping only holds its address and unmaps it once.
unsafe impl Send for Mapping {}
// SAFETY: a shared Mapping gives out its address and nothing else.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize, flags: libc::c_int) -> io::Result<Self> {
        // SAFETY: a new anonymous mapping at a place that the kernel chooses touches no memory that exists.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes })
    }

    /// A mapping that starts at a multiple of `align`, a power of two.
    fn aligned(bytes: usize, align: usize) -> io::Result<Self> {
        let slack = align.saturating_sub(page_bytes());
        let whole = Self::new(
            bytes.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?,
            0,
        )?;
        let addr = whole.base.as_ptr().addr();
        let before = addr.next_multiple_of(align) - addr;
        // The slack covers the way to the next multiple, so the cut stays inside.
        let (head, rest) = whole.split_at(before);
        let (kept, tail) = rest.split_at(bytes);
        drop((head, tail));
        Ok(kept)
    }

    /// Cuts a mapping in two; a part may be empty. `at` is a multiple of the page size.
    fn split_at(self, at: usize) -> (Self, Self) {
        assert!(at <= self.bytes, "a cut lies inside the mapping");
        // SAFETY: `at` is at most the size of this mapping, which is one allocation.
        let second = unsafe { self.base.add(at) };
        let parts = (
            Self {
                base: self.base,
                bytes: at,
            },
            Self {
                base: second,
                bytes: self.bytes - at,
            },
        );
        std::mem::forget(self);
        parts
    }

    /// Asks for transparent huge pages; whether the kernel heard.
    fn advise_huge(&self) -> bool {
        // SAFETY: the range is this mapping; the advice changes no contents.
        let rc =
            unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, libc::MADV_HUGEPAGE) };
        rc == 0
    }

    fn bind(&self, node: u32, system: &System) -> Result<(), ArenaError> {
        /// Nodes that the mask can name: the most that Linux can be configured for.
        const NODES: usize = 1024;
        /// As the kernel has it (linux/mempolicy.h): these pages only from the nodes of the mask.
        const MPOL_BIND: libc::c_ulong = 2;
        let refused = |source| ArenaError::Numa {
            node,
            bytes: self.bytes,
            online: system.numa_online(),
            source,
        };
        let mut mask = [0u64; NODES / 64];
        let word = mask
            .get_mut(node as usize / 64)
            .ok_or_else(|| refused(io::ErrorKind::InvalidInput.into()))?;
        *word = 1 << (node % 64);
        // SAFETY: the range is this mapping, the mask is valid for reads of NODES bits and outlives the call (the
        // kernel reads one bit less than it is told).
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.bytes as libc::c_ulong,
                MPOL_BIND,
                mask.as_ptr(),
                NODES as libc::c_ulong,
                0 as libc::c_ulong,
            )
        };
        if rc == 0 {
            Ok(())
        } else {
            Err(refused(io::Error::last_os_error()))
        }
    }

    /// Binds the mapping and makes every page present.
    pub(crate) fn make_present(
        &self,
        node: Option<u32>,
        pages: PageKind,
        system: &System,
    ) -> Result<(), ArenaError> {
        if let Some(node) = node {
            self.bind(node, system)?;
        }
        self.populate(pages)
    }

    /// Makes every page present, step by step.
    fn populate(&self, pages: PageKind) -> Result<(), ArenaError> {
        let mut can_advise = true;
        for (at, len) in steps(self.bytes, STEP_BYTES) {
            if can_advise {
                // Linux before 5.14 does not know the advice. Touching is no way out for explicit huge pages: where
                // the node or the control group has none left, it ends in SIGBUS and not in an error.
                let can_touch = !matches!(pages, PageKind::Explicit { .. });
                match self.advise_populate(at, len) {
                    Ok(()) => continue,
                    Err(error) if can_touch && error.raw_os_error() == Some(libc::EINVAL) => {
                        can_advise = false;
                    }
                    Err(source) => {
                        let bytes = self.bytes;
                        return Err(ArenaError::Prefault { bytes, at, source });
                    }
                }
            }
            self.touch(at, len);
        }
        Ok(())
    }

    fn advise_populate(&self, at: usize, len: usize) -> io::Result<()> {
        loop {
            let start = self.at(at);
            // SAFETY: `at..at + len` lies inside this mapping; populating changes no contents.
            let rc = unsafe { libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE) };
            if rc == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                _ => return Err(error),
            }
        }
    }

    fn touch(&self, at: usize, len: usize) {
        for offset in (at..at + len).step_by(page_bytes()) {
            let byte = self.at(offset);
            // SAFETY: `offset` lies inside this writable mapping, which nobody else knows yet; it holds zeros, so the
            // write changes nothing but makes the page present.
            unsafe { byte.write_volatile(0) };
        }
    }

    /// Leaves the mapping out of processes that are forked from here; where the kernel refuses, they get a copy.
    pub(crate) fn keep_from_children(&self) {
        // SAFETY: the range is this mapping; the advice changes nothing in this process.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, libc::MADV_DONTFORK) };
    }

    /// Bytes mapped.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of byte `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        // SAFETY: callers pass offsets inside this mapping, which is one allocation.
        unsafe { self.base.as_ptr().add(offset) }
    }

    fn lock(&self, lock: Lock, pages: PageKind) -> Result<LockOutcome, ArenaError> {
        /// The log line is about the user's limits, which every arena of the process shares.
        static WARNED: AtomicBool = AtomicBool::new(false);
        if matches!(pages, PageKind::Explicit { .. }) {
            return Ok(LockOutcome::Locked);
        }
        if lock == Lock::Never {
            return Ok(LockOutcome::NotAsked);
        }
        let Err((at, source)) = self.lock_steps() else {
            return Ok(LockOutcome::Locked);
        };
        // A part that is locked helps nobody and uses up the limit, which registrations need.
        self.unlock();
        let error = ArenaError::Lock {
            need_bytes: self.bytes,
            at,
            limit_bytes: memlock_limit_bytes(),
            source,
        };
        if lock == Lock::Require {
            return Err(error);
        }
        if !WARNED.swap(true, Ordering::Relaxed) {
            tracing::warn!("the arena is not locked and may be swapped out: {error}");
        }
        Ok(LockOutcome::Failed(error.to_string()))
    }

    fn lock_steps(&self) -> Result<(), (usize, io::Error)> {
        for (at, len) in steps(self.bytes, LOCK_STEP_BYTES) {
            let start = self.at(at);
            // SAFETY: `at..at + len` lies inside this mapping; locking changes no contents.
            let rc = unsafe { libc::mlock(start.cast(), len) };
            if rc != 0 {
                return Err((at, io::Error::last_os_error()));
            }
        }
        Ok(())
    }

    fn unlock(&self) {
        // SAFETY: the range is this mapping; unlocking changes no contents. If it fails, pages merely stay locked.
        unsafe { libc::munlock(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        // SAFETY: this Mapping owns the range and is gone after this; whoever used it kept the Mapping alive.
        let rc = unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        if rc != 0 {
            let error = io::Error::last_os_error();
            tracing::warn!(
                "unmapping {} bytes failed, they are leaked: {error}",
                self.bytes
            );
        }
    }
}

/// The steps in which a mapping is worked through: offset and length.
fn steps(bytes: usize, step: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes)
        .step_by(step)
        .map(move |at| (at, step.min(bytes - at)))
}

/// A mapping of explicit huge pages, present and bound, if they are wanted and there.
fn map_explicit(
    total_bytes: usize,
    wishes: &Wishes,
    system: &System,
) -> Result<Option<(Mapping, PageKind)>, ArenaError> {
    let wish = wishes.huge_pages;
    if wish == HugePages::Never {
        return Ok(None);
    }
    let pools = system.huge_pools();
    for pool in &pools {
        let page_bytes = pool.page_bytes;
        let Some(bytes) = total_bytes.checked_next_multiple_of(page_bytes) else {
            continue;
        };
        let wasteful = bytes - total_bytes > total_bytes / HUGE_WASTE_DIVISOR;
        if (wasteful && wish == HugePages::Auto) || bytes / page_bytes > pool.free_pages {
            continue;
        }
        // The size is encoded as its logarithm (linux/mman.h).
        let size = libc::c_int::try_from(page_bytes.trailing_zeros()).unwrap_or(0);
        let flags = libc::MAP_HUGETLB | (size << libc::MAP_HUGE_SHIFT);
        let pages = PageKind::Explicit { page_bytes };
        let mapping = Mapping::new(bytes, flags)
            .map_err(|source| ArenaError::Map { bytes, source })
            .and_then(|mapping| {
                mapping.make_present(wishes.numa_node, pages, system)?;
                Ok(mapping)
            });
        match mapping {
            Ok(mapping) => return Ok(Some((mapping, pages))),
            // A node that does not exist is no matter of page sizes.
            Err(error @ ArenaError::Numa { .. }) => return Err(error),
            // Someone else took the pages since the pool was read, or they lie on other nodes: try the next size.
            Err(error) => tracing::debug!("no huge pages of {page_bytes} bytes: {error}"),
        }
    }
    if wish == HugePages::Require {
        let pools = pools
            .iter()
            .map(|pool| format!("{} free of {} bytes", pool.free_pages, pool.page_bytes))
            .collect::<Vec<_>>();
        return Err(ArenaError::HugePagesUnavailable {
            need_bytes: total_bytes,
            pools: if pools.is_empty() {
                "this kernel has no pools".to_owned()
            } else {
                pools.join(", ")
            },
        });
    }
    Ok(None)
}

/// A mapping of plain pages, with transparent huge pages if they are wanted and there.
pub(crate) fn map_plain(
    total_bytes: usize,
    wish: HugePages,
    system: &System,
) -> Result<(Mapping, PageKind), ArenaError> {
    let refused = |source| ArenaError::Map {
        bytes: total_bytes,
        source,
    };
    let bytes = total_bytes
        .checked_next_multiple_of(page_bytes())
        .ok_or_else(|| refused(io::ErrorKind::OutOfMemory.into()))?;
    let huge = match wish {
        HugePages::Auto => system.transparent_huge_page_bytes(),
        _ => None,
    };
    match huge.filter(|&page| page <= bytes) {
        Some(page_bytes) => {
            let mapping = Mapping::aligned(bytes, page_bytes).map_err(refused)?;
            let pages = if mapping.advise_huge() {
                PageKind::Transparent { page_bytes }
            } else {
                PageKind::Plain
            };
            Ok((mapping, pages))
        }
        None => Ok((Mapping::new(bytes, 0).map_err(refused)?, PageKind::Plain)),
    }
}

/// Refuses a node that cannot hold the arena: with a strict binding, the kernel would rather kill than spill.
fn check_node(total_bytes: usize, node: u32, system: &System) -> Result<(), ArenaError> {
    let Some(available_bytes) = system.numa_available_bytes(node) else {
        return Ok(());
    };
    let need_bytes = total_bytes as u64;
    if need_bytes <= available_bytes {
        return Ok(());
    }
    Err(ArenaError::NotEnoughMemory {
        need_bytes,
        available_bytes,
        reserve_bytes: 0,
        scope: format!("NUMA node {node}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_every_byte_once() {
        for bytes in [1, STEP_BYTES - 1, STEP_BYTES, 3 * STEP_BYTES + 5] {
            let mut next = 0;
            for (at, len) in steps(bytes, STEP_BYTES) {
                assert_eq!(at, next);
                assert!((1..=STEP_BYTES).contains(&len));
                next = at + len;
            }
            assert_eq!(next, bytes);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "cuts a mapping, which Miri cannot unmap in parts")]
    fn aligned_mapping_is_aligned_and_writable_to_its_end() {
        let align = 4 << 20;
        let bytes = 16 * page_bytes();
        let mapping = Mapping::aligned(bytes, align).unwrap();
        assert_eq!(mapping.base.as_ptr().addr() % align, 0);
        assert_eq!(mapping.bytes, bytes);
        mapping.touch(0, bytes);
        mapping.populate(PageKind::Plain).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the system about pages")]
    fn touching_is_the_fallback_that_makes_pages_present() {
        let bytes = 8 * page_bytes();
        let mapping = Mapping::new(bytes, 0).unwrap();
        mapping.touch(0, bytes);
        let mut present = [0u8; 8];
        // SAFETY: the range is the mapping, and the vector has one byte for each of its 8 pages.
        let rc =
            unsafe { libc::mincore(mapping.base.as_ptr().cast(), bytes, present.as_mut_ptr()) };
        assert_eq!(rc, 0);
        assert_eq!(present.map(|page| page & 1), [1; 8]);
    }
}
