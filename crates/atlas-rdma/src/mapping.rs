//! Memory of files that a device may read: a mapping where the kernel registers it, a copy where it does not.
//!
//! A [`MappedExtent`] is one byte range of one file in memory that stays where it is. The CPU never reads a mapping, so
//! a file that is truncated meanwhile is no signal, only stale or refused READs; a copy is filled by `pread`, where a
//! short file is an error. [`StableMemory`] of an extent is exactly its bytes, also where the mapping had to begin at
//! the page boundary below: what is registered discloses nothing of its neighbours.

mod anonymous;
mod error;
mod fill;
mod source;
#[cfg(test)]
mod tests;

pub use anonymous::{CopyPages, copy_room_bytes};
pub use error::MappingError;
pub use source::MappableFile;

pub(crate) use fill::{CopyPart, fill, populate};

use crate::memory::StableMemory;
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;

/// How the bytes of a file become memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MappingMode {
    /// The page cache itself, mapped shared and read-only. Linux before 6.2 refuses to register it.
    SharedReadOnly,
    /// The page cache, mapped shared and writable. Such kernels register it, and take every page for modified: they
    /// write the file back and change its modification time. Only for those who asked.
    SharedReadWrite,
    /// A copy in anonymous memory, in huge pages where there are any.
    Copy,
}

impl fmt::Display for MappingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedReadOnly => "shared read-only mapping",
            Self::SharedReadWrite => "shared read-write mapping",
            Self::Copy => "copy",
        })
    }
}

/// One byte range of a file, in memory until this is dropped.
#[derive(Debug)]
pub struct MappedExtent {
    mapping: Mapping,
    /// Bytes of the mapping before the extent.
    delta: usize,
    bytes: usize,
    file_offset: u64,
    mode: MappingMode,
    pages: Option<CopyPages>,
}

// SAFETY: the range is a part of `mapping`, which this value owns and never moves or shrinks; it is unmapped when this
// value is dropped, and nothing else knows the place. Of a shared mapping the pages are the kernel's, as their owner
// wants it; the addresses are this value's.
unsafe impl StableMemory for MappedExtent {
    fn base(&self) -> *mut u8 {
        self.mapping.at(self.delta)
    }

    fn len_bytes(&self) -> usize {
        self.bytes
    }
}

impl MappedExtent {
    /// Maps or copies `bytes` bytes at `offset` of a file. Neither needs to be aligned.
    ///
    /// A copy is read before this returns, in steps of a few megabytes; setting `stop` ends it at the next step.
    ///
    /// # Errors
    ///
    /// An extent that is empty or not inside the file; a mapping or memory that the system refuses; for a copy too
    /// little memory, a file that cannot be read or is shorter by now, and [`MappingError::Stopped`].
    pub fn map(
        source: &MappableFile,
        offset: u64,
        bytes: u64,
        mode: MappingMode,
        stop: &AtomicBool,
    ) -> Result<Self, MappingError> {
        let mut extent = Self::reserve(source, offset, bytes, mode)?;
        for part in extent.copy_parts(usize::MAX) {
            fill(source, part, stop, &|_| {})?;
        }
        Ok(extent)
    }

    /// As `map`, but a copy still holds zeros: every part of `copy_parts` is to be filled.
    pub(crate) fn reserve(
        source: &MappableFile,
        offset: u64,
        bytes: u64,
        mode: MappingMode,
    ) -> Result<Self, MappingError> {
        let (delta, len) = source.check(offset, bytes)?;
        // Both fit, because the sum of them was checked to.
        let mapped = delta + len;
        let refused = |source_error| MappingError::Map {
            label: source.label().to_owned(),
            offset,
            bytes,
            mode,
            source: source_error,
        };
        let start = offset - delta as u64;
        let (mapping, pages) = match mode {
            MappingMode::SharedReadOnly => {
                let mapping = Mapping::shared(source.quiet(), start, mapped, ProtFlags::READ);
                (mapping.map_err(refused)?, None)
            }
            MappingMode::SharedReadWrite => {
                let file = source.writable()?;
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                let mapping = Mapping::shared(file.as_ref(), start, mapped, prot);
                (mapping.map_err(refused)?, None)
            }
            MappingMode::Copy => {
                // Whole pages, so that direct reads have room for their last block.
                let room = mapped.next_multiple_of(page_bytes());
                let (mapping, pages) = anonymous::map(source.label(), room)?;
                (mapping, Some(pages))
            }
        };
        Ok(Self {
            mapping,
            delta,
            bytes: len,
            file_offset: offset,
            mode,
            pages,
        })
    }

    /// The parts of a copy that are to be filled, at most `part_bytes` each, a multiple of the page size; none where
    /// the extent is a mapping.
    pub(crate) fn copy_parts(&mut self, part_bytes: usize) -> impl Iterator<Item = CopyPart<'_>> {
        let start = self.file_offset - self.delta as u64;
        let needed = self.delta + self.bytes;
        let room = match self.mode {
            MappingMode::Copy => needed.next_multiple_of(page_bytes()),
            _ => 0,
        };
        let base = self.mapping.base.as_ptr();
        // SAFETY: `room` bytes from `base` are this extent's own anonymous, writable memory, or none; the exclusive
        // borrow of the extent lasts as long as the slice, so nobody has registered it yet.
        let memory = unsafe { std::slice::from_raw_parts_mut(base, room) };
        memory
            .chunks_mut(part_bytes)
            .enumerate()
            .map(move |(i, buffer)| {
                // The first chunk begins at 0, whatever its size; others follow whole chunks inside `room`.
                let at = i * part_bytes.min(room);
                CopyPart {
                    file_offset: start + at as u64,
                    needed_bytes: buffer.len().min(needed.saturating_sub(at)),
                    buffer,
                }
            })
    }

    /// Offset of the first byte in the file.
    pub fn file_offset(&self) -> u64 {
        self.file_offset
    }

    /// Count of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Bytes between the start of the mapping, which is a page boundary, and the extent.
    pub fn delta(&self) -> usize {
        self.delta
    }

    /// How it became memory.
    pub fn mode(&self) -> MappingMode {
        self.mode
    }

    /// What pages a copy is in; `None` for a mapping.
    pub fn pages(&self) -> Option<CopyPages> {
        self.pages
    }

    /// Bytes of address space that it takes, from page to page.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapping.bytes as u64
    }

    /// The address of a byte of the file.
    ///
    /// # Panics
    ///
    /// If the byte is not inside the extent.
    pub fn address_of(&self, file_offset: u64) -> u64 {
        let at = file_offset.checked_sub(self.file_offset);
        let at = at
            .filter(|at| *at < self.bytes as u64)
            .unwrap_or_else(|| panic!("offset {file_offset} is not inside {self:?}"));
        self.base().addr() as u64 + at
    }

    /// Whether a part of a mapping is in memory already, so that registering it reads nothing.
    pub(crate) fn is_resident(&self, part: Range<usize>) -> bool {
        self.mapping
            .is_resident(self.delta + part.start..self.delta + part.end)
    }
}

/// A range of addresses that is unmapped on drop.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process and not to a thread; Mapping holds its address and unmaps it once.
unsafe impl Send for Mapping {}
// SAFETY: a shared Mapping gives out addresses and nothing else.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn shared(file: &File, start: u64, bytes: usize, prot: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at a place that the kernel chooses touches no memory that exists, and no reference is
        // ever made to this one.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                prot,
                MapFlags::SHARED,
                file,
                start,
            )
        }?;
        Self::of(base.cast(), bytes)
    }

    fn anonymous(bytes: usize, flags: MapFlags) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | flags;
        // SAFETY: a new anonymous mapping at a place that the kernel chooses touches no memory that exists.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, prot, flags) }?;
        Self::of(base.cast(), bytes)
    }

    fn of(base: *mut u8, bytes: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        // A forked child that shared these pages could make the kernel copy one of them at a write, and the device
        // would go on with the other. The children get none.
        let mapping = Self { base, bytes };
        mapping.advise(rustix::mm::Advice::LinuxDontFork);
        Ok(mapping)
    }

    /// Gives the kernel a hint; whether it heard.
    fn advise(&self, advice: rustix::mm::Advice) -> bool {
        let base = self.base.as_ptr().cast();
        // SAFETY: the range is this mapping; the advices used here change no contents.
        unsafe { rustix::mm::madvise(base, self.bytes, advice) }.is_ok()
    }

    /// Whether the file's pages of a range are in memory. Files of other users, which this one may not write, always
    /// seem to be.
    fn is_resident(&self, range: Range<usize>) -> bool {
        let page_bytes = page_bytes();
        let from = range.start / page_bytes * page_bytes;
        let len = range.end.min(self.bytes).saturating_sub(from);
        let mut present = vec![0u8; len.div_ceil(page_bytes)];
        let start = self.at(from);
        // SAFETY: the range lies inside the mapping and begins at a page; the vector has a byte for each page.
        let answer = unsafe { libc::mincore(start.cast(), len, present.as_mut_ptr()) };
        answer == 0 && present.iter().all(|page| page & 1 == 1)
    }

    /// Cuts a mapping in two; a part may be empty. `at` is a multiple of the page size.
    fn split_at(self, at: usize) -> (Self, Self) {
        assert!(at <= self.bytes, "a cut lies inside the mapping");
        let second = NonNull::new(self.at(at)).expect("no mapping is at address 0");
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

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let base = self.base.as_ptr().cast();
        // SAFETY: this Mapping owns the range and is gone after this; whoever registered it kept the Mapping alive.
        if let Err(error) = unsafe { rustix::mm::munmap(base, self.bytes) } {
            tracing::error!(
                "unmapping {} bytes failed, they are leaked: {error}",
                self.bytes
            );
        }
    }
}

/// The size of a page as the system gives it: 4, 16 or 64 KiB.
pub(crate) fn page_bytes() -> usize {
    rustix::param::page_size()
}
