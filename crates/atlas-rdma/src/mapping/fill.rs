//! Reading files: into copies, and into the page cache ahead of a registration.

use super::{MappableFile, MappedExtent, MappingError};
use rustix::fs::{Advice, fadvise};
use rustix::io::{IoSliceMut, ReadWriteFlags, preadv2};
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
/// What the page cache has comes from there. The rest is read past it where the file system can, and else given up
/// again, so that a copy leaves the page cache as it was.
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
    if let Some(got) = read_cached(source.quiet(), from, buffer) {
        return Ok(got);
    }
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
    let got = read_retrying(source.quiet(), from, buffer)?;
    if let Some(len) = NonZeroU64::new(got as u64) {
        // A hint; without it the part stays in the page cache.
        let _ = fadvise(source.quiet(), from, Some(len), Advice::DontNeed);
    }
    Ok(got)
}

/// The whole step from the page cache, if all of it is there.
fn read_cached(file: &File, from: u64, buffer: &mut [u8]) -> Option<usize> {
    let len = buffer.len();
    let got = preadv2(
        file,
        &mut [IoSliceMut::new(buffer)],
        from,
        ReadWriteFlags::NOWAIT,
    );
    got.ok().filter(|got| *got == len)
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
