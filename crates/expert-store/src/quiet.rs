//! Reading without disturbing the page cache: what was cached stays cached, what was not does not
//! stay.
//!
//! Linux 6.14 and later do that themselves (`RWF_DONTCACHE`). Elsewhere, step by step, cached bytes
//! come by `preadv2(RWF_NOWAIT)`; the rest of a step by an ordinary read followed by
//! `POSIX_FADV_DONTNEED` for just that range. The descriptor is our own and set to
//! `POSIX_FADV_RANDOM`: otherwise readahead would bring pages that nobody drops.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::StoreError;

/// Smallest page of the machines this runs on; rounding to less than a page merely drops less.
const PAGE_BYTES: u64 = 4096;
/// Files are read in steps that end at multiples of this. Where a page of a step is not cached, the
/// rest of the step is read and dropped without another look: cached pages behind a gap lose at most
/// so much, and a disk is still kept busy by a few threads.
const STEP_BYTES: u64 = 128 << 10;
/// `RWF_DONTCACHE` of linux/fs.h: pages that the read brings go, those that were there stay.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
/// Smaller reads share pages with their neighbours, which would be read from the disk again and
/// again if they went each time.
const DONTCACHE_MIN_BYTES: usize = 64 << 10;

/// A file for reads that leave the page cache as it was.
#[derive(Debug)]
pub(crate) struct QuietFile {
    file: File,
    path: PathBuf,
    /// Cleared when the file system does not know `RWF_NOWAIT`: then what is cached cannot be told,
    /// and dropping this file's pages is the lesser harm than flooding the cache.
    nowait: AtomicBool,
    /// Cleared when kernel or file system do not know `RWF_DONTCACHE`.
    dontcache: AtomicBool,
}

/// Opens a regular file read-only; a fifo or a device is an error rather than a wait.
pub(crate) fn open_read(path: &Path) -> Result<File, StoreError> {
    let io = |source| StoreError::Io {
        action: "opening",
        path: path.to_owned(),
        source,
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file: File = rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        .map_err(|e| io(e.into()))?
        .into();
    if !file.metadata().map_err(io)?.is_file() {
        return Err(io(io::Error::other("not a regular file")));
    }
    Ok(file)
}

impl QuietFile {
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        let file = open_read(path)?;
        // Advice only: a file system that does not know it reads as well.
        let _ = fadvise(&file, 0, None, Advice::Random);
        Ok(Self {
            file,
            path: path.to_owned(),
            nowait: AtomicBool::new(true),
            dontcache: AtomicBool::new(true),
        })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Fills `buf` from `offset`; a file that ends before is an error.
    pub(crate) fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), StoreError> {
        self.try_read(buf, offset)
            .map_err(StoreError::io("reading", &self.path))
    }

    fn try_read(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        if buf.len() >= DONTCACHE_MIN_BYTES {
            let n = self.read_flagged(buf, offset, DONTCACHE, &self.dontcache)?;
            buf = &mut buf[n..];
            offset += n as u64;
        }
        while !buf.is_empty() {
            // A read that must not wait may start readahead for all it asks for, and what it brought
            // would look cached next time: so no request goes beyond the step that is dropped.
            let step = STEP_BYTES - offset % STEP_BYTES;
            let n = step.min(buf.len() as u64) as usize;
            let (now, later) = buf.split_at_mut(n);
            let cached = self.read_flagged(now, offset, ReadWriteFlags::NOWAIT, &self.nowait)?;
            self.read_and_drop(&mut now[cached..], offset + cached as u64)?;
            offset += n as u64;
            buf = later;
        }
        Ok(())
    }

    /// Reads with a flag, up to where that would wait, or nothing where the flag is not known, which
    /// clears `known`; says how many bytes that were.
    fn read_flagged(
        &self,
        buf: &mut [u8],
        offset: u64,
        flag: ReadWriteFlags,
        known: &AtomicBool,
    ) -> io::Result<usize> {
        let mut at = 0;
        while at < buf.len() && known.load(Ordering::Relaxed) {
            let slice = &mut [IoSliceMut::new(&mut buf[at..])];
            match preadv2(&self.file, slice, offset + at as u64, flag) {
                Ok(0) => return Err(ended(offset + at as u64)),
                Ok(n) => at += n,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::PERM) => {
                    known.store(false, Ordering::Relaxed);
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(at)
    }

    /// Reads bytes of which the first page is not cached, and drops their pages.
    fn read_and_drop(&self, buf: &mut [u8], from: u64) -> io::Result<()> {
        // Only whole pages are dropped. The first one is shared with the bytes before, which were
        // read before in most passes, so it goes as well.
        let first = from - from % PAGE_BYTES;
        let Some(len) = NonZeroU64::new(buf.len() as u64 + (from - first)) else {
            return Ok(());
        };
        if buf.is_empty() {
            return Ok(());
        }
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], from + done as u64) {
                Ok(0) => return Err(ended(from + done as u64)),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let _ = fadvise(&self.file, first, Some(len), Advice::DontNeed);
        Ok(())
    }
}

fn ended(at: u64) -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        format!("the file ends at byte {at}, more was promised"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_cached(file: &File, page: u64) -> bool {
        let mut buf = [0; PAGE_BYTES as usize];
        let slice = &mut [IoSliceMut::new(&mut buf)];
        preadv2(file, slice, page * PAGE_BYTES, ReadWriteFlags::NOWAIT).is_ok()
    }

    /// Both ways: that of this kernel, and that of those without `RWF_DONTCACHE`.
    #[test]
    fn pages_behind_a_gap_stay_cached() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes = 8 * STEP_BYTES;
        let content: Vec<u8> = (0..bytes).map(|i| (i / 7) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        for dontcache in [true, false] {
            // Dropping pages is a wish: one that another processor has just touched may stay. What
            // is looked at is whether the gap can be as it was, and whether the rest always is.
            let gap_stayed = (0..5).any(|_| {
                let quiet = QuietFile::open(&path).unwrap();
                quiet.dontcache.store(dontcache, Ordering::Relaxed);
                // Dropped as a whole, since what is cached in large folios is not dropped in part;
                // then read page by page but for the first step.
                let _ = fadvise(&file, 0, None, Advice::Random);
                let _ = fadvise(&file, 0, None, Advice::DontNeed);
                for page in STEP_BYTES / PAGE_BYTES..bytes / PAGE_BYTES {
                    let mut buf = [0; PAGE_BYTES as usize];
                    file.read_exact_at(&mut buf, page * PAGE_BYTES).unwrap();
                }
                let mut got = vec![0; bytes as usize];
                quiet.read_exact_at(&mut got, 0).unwrap();
                assert!(got == content);
                for page in STEP_BYTES / PAGE_BYTES..bytes / PAGE_BYTES {
                    assert!(is_cached(&file, page), "{dontcache}: page {page}");
                }
                // Only where the kernel knows the flag.
                !quiet.dontcache.load(Ordering::Relaxed) || !is_cached(&file, 0)
            });
            assert!(gap_stayed, "{dontcache}: the gap is cached");
        }
    }
}
