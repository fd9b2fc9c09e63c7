//! Reading without disturbing the page cache: what was cached stays cached, what was not does not
//! stay.
//!
//! Cached bytes come by `preadv2(RWF_NOWAIT)`; the rest by an ordinary read followed by
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

/// A file for reads that leave the page cache as it was.
#[derive(Debug)]
pub(crate) struct QuietFile {
    file: File,
    path: PathBuf,
    /// Cleared when the file system does not know `RWF_NOWAIT`: then what is cached cannot be told,
    /// and dropping this file's pages is the lesser harm than flooding the cache.
    nowait: AtomicBool,
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

    fn try_read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() && self.nowait.load(Ordering::Relaxed) {
            let slice = &mut [IoSliceMut::new(&mut buf[at..])];
            match preadv2(
                &self.file,
                slice,
                offset + at as u64,
                ReadWriteFlags::NOWAIT,
            ) {
                Ok(0) => return Err(ended(offset + at as u64)),
                Ok(n) => at += n,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::PERM) => {
                    self.nowait.store(false, Ordering::Relaxed);
                }
                Err(e) => return Err(e.into()),
            }
        }
        let from = offset + at as u64;
        let rest = &mut buf[at..];
        // Only whole pages are dropped. The first one is shared with the bytes before, which were
        // read before in most passes, so it goes as well.
        let first = from - from % PAGE_BYTES;
        let Some(len) = NonZeroU64::new(rest.len() as u64 + (from - first)) else {
            return Ok(());
        };
        if rest.is_empty() {
            return Ok(());
        }
        let mut done = 0;
        while done < rest.len() {
            match self.file.read_at(&mut rest[done..], from + done as u64) {
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
