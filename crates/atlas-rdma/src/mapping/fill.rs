//! Reading files: into copies, and into the page cache ahead of a registration.

use super::{MappableFile, MappedExtent, Mapping, MappingError, page_bytes};
use rustix::fs::{Advice, fadvise};
use rustix::mm::ProtFlags;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of one read: enough to keep a disk busy, and short enough to be interrupted and to be seen progressing.
const STEP_BYTES: usize = 4 << 20;

/// Alignment of direct reads: the largest logical block of today's disks.
const DIRECT_ALIGN_BYTES: usize = 4096;

/// A part of a copy that is to be filled.
pub(crate) struct CopyPart<'a> {
    /// Where it begins in the file, a multiple of the page size.
    pub(crate) file_offset: u64,
    /// The memory, from a page boundary on. It ends inside the file's last page at the latest.
    pub(crate) buffer: &'a mut [u8],
    /// Bytes of it that the file must have.
    pub(crate) needed_bytes: usize,
}

/// Fills a part of a copy, and tells `progress` of each step's bytes.
///
/// It is read past the page cache where the file system can. Elsewhere, what the page cache did not have is given up
/// again after each step, so that a copy leaves the page cache as it was.
pub(crate) fn fill(
    source: &MappableFile,
    part: CopyPart<'_>,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
) -> Result<(), MappingError> {
    let CopyPart {
        file_offset,
        buffer,
        needed_bytes,
    } = part;
    let mut at = 0;
    while at < needed_bytes {
        if stop.load(Ordering::Relaxed) {
            return Err(stopped(source));
        }
        let end = buffer.len().min(at + STEP_BYTES);
        let from = file_offset + at as u64;
        let got =
            read_step(source, from, &mut buffer[at..end]).map_err(|error| MappingError::Read {
                label: source.label().to_owned(),
                offset: from,
                bytes: (end - at) as u64,
                source: error,
            })?;
        if got == 0 {
            return Err(MappingError::Truncated {
                label: source.label().to_owned(),
                offset: from,
                missing_bytes: (needed_bytes - at) as u64,
            });
        }
        progress(got.min(needed_bytes - at) as u64);
        at += got;
    }
    Ok(())
}

fn read_step(source: &MappableFile, from: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let aligned = from % DIRECT_ALIGN_BYTES as u64 == 0
        && buffer.as_ptr().addr() % DIRECT_ALIGN_BYTES == 0
        && buffer.len() % DIRECT_ALIGN_BYTES == 0;
    if let Some(direct) = source.direct().filter(|_| aligned) {
        match read_retrying(direct, from, buffer) {
            // It was accepted when the file was opened, and is refused now: some file systems do.
            Err(error) if is_direct_refusal(&error) => {}
            answer => return answer,
        }
    }
    let was_cached = is_cached(source, from, buffer.len());
    let got = read_retrying(source.quiet(), from, buffer)?;
    if let Some(len) = NonZeroU64::new(got as u64).filter(|_| !was_cached) {
        // A hint; without it the part stays in the page cache.
        let _ = fadvise(source.quiet(), from, Some(len), Advice::DontNeed);
    }
    Ok(got)
}

/// Whether the page cache has a whole step. Asked by way of a mapping: a read that must not wait would start
/// read-ahead on newer kernels.
fn is_cached(source: &MappableFile, from: u64, bytes: usize) -> bool {
    let before = from % page_bytes() as u64;
    // Less than a page.
    let whole = bytes + before as usize;
    let window = Mapping::shared(source.quiet(), from - before, whole, ProtFlags::READ);
    window.is_ok_and(|window| window.is_resident(0..whole))
}

fn read_retrying(file: &File, from: u64, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read_at(buffer, from) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            answer => return answer,
        }
    }
}

fn is_direct_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOTTY)
    )
}

/// Brings a part of a mapping into the page cache by large reads, so that registering it does not fault in page after
/// page, and an unreadable disk is an error with a place. `scratch` is grown as needed.
pub(crate) fn populate(
    source: &MappableFile,
    extent: &MappedExtent,
    part: Range<usize>,
    scratch: &mut Vec<u8>,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
) -> Result<(), MappingError> {
    let mut at = part.start;
    while at < part.end {
        if stop.load(Ordering::Relaxed) {
            return Err(stopped(source));
        }
        let len = STEP_BYTES.min(part.end - at);
        if !extent.is_resident(at..at + len) {
            scratch.resize(STEP_BYTES, 0);
            read_exactly(
                source,
                extent.file_offset() + at as u64,
                &mut scratch[..len],
            )?;
        }
        progress(len as u64);
        at += len;
    }
    Ok(())
}

fn read_exactly(source: &MappableFile, from: u64, buffer: &mut [u8]) -> Result<(), MappingError> {
    let mut at = 0;
    while at < buffer.len() {
        let offset = from + at as u64;
        let rest = &mut buffer[at..];
        let bytes = rest.len() as u64;
        match read_retrying(source.quiet(), offset, rest) {
            Ok(0) => {
                return Err(MappingError::Truncated {
                    label: source.label().to_owned(),
                    offset,
                    missing_bytes: bytes,
                });
            }
            Ok(got) => at += got,
            Err(error) => {
                return Err(MappingError::Read {
                    label: source.label().to_owned(),
                    offset,
                    bytes,
                    source: error,
                });
            }
        }
    }
    Ok(())
}

fn stopped(source: &MappableFile) -> MappingError {
    MappingError::Stopped {
        label: source.label().to_owned(),
    }
}
