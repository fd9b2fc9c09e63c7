//! Writing large files with bounded dirty memory and without leaving them in the page cache.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate, fstatvfs};
use rustix::io::Errno;

use crate::StoreError;

/// A file that is written once.
#[derive(Debug)]
pub(crate) struct OutFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
}

impl OutFile {
    /// Creates a file of that length and reserves its space, so that a full disk shows before the
    /// work begins.
    pub(crate) fn create(path: PathBuf, bytes: u64) -> Result<Self, StoreError> {
        let fail = |e| StoreError::write("reserving space for", &path, bytes)(e);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(StoreError::create(&path))?;
        if bytes > 0 {
            match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                    file.set_len(bytes).map_err(fail)?;
                }
                Err(e) => return Err(fail(e.into())),
            }
        }
        Ok(Self { file, path, bytes })
    }

    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), StoreError> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(StoreError::write("writing", &self.path, self.bytes))
    }

    /// Starts to write a range back and drops what of it is already on disk.
    pub(crate) fn release(&self, offset: u64, bytes: u64) {
        if let Some(len) = NonZeroU64::new(bytes) {
            // Linux: starts writeback of the dirty pages, then drops the clean ones.
            let _ = fadvise(&self.file, offset, Some(len), Advice::DontNeed);
        }
    }

    /// Waits until all is on disk and leaves nothing in the page cache.
    pub(crate) fn finish(&self) -> Result<(), StoreError> {
        self.file
            .sync_data()
            .map_err(StoreError::write("syncing", &self.path, self.bytes))?;
        self.release(0, self.bytes);
        Ok(())
    }
}

/// *Errors*: [`StoreError::Full`] where the file system of `dir` has less room than `need_bytes`.
pub(crate) fn check_space(dir: &Path, need_bytes: u64) -> Result<(), StoreError> {
    let open = File::open(dir).map_err(StoreError::io("opening", dir))?;
    let Ok(stat) = fstatvfs(&open) else {
        return Ok(());
    };
    // Some network file systems report nothing: then the writes tell.
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if stat.f_blocks > 0 && need_bytes > free {
        return Err(StoreError::Full {
            path: dir.to_owned(),
            need_bytes,
            why: format!("its file system has {free} free"),
        });
    }
    Ok(())
}

/// Follows sequential writes to one file after another and releases them in steps: a range is
/// told to be written back when it is complete and dropped one step later.
#[derive(Debug, Default)]
pub(crate) struct Releaser {
    pending: Vec<(usize, u64, u64)>,
    previous: Vec<(usize, u64, u64)>,
    pending_bytes: u64,
}

/// Bytes after which complete ranges are released: with two steps in flight dirty memory stays
/// below a tenth of a gigabyte.
const STEP_BYTES: u64 = 32 << 20;

impl Releaser {
    /// Range of `files[file]` that is complete.
    pub(crate) fn done(&mut self, files: &[OutFile], file: usize, offset: u64, bytes: u64) {
        match self.pending.last_mut() {
            Some((f, at, n)) if *f == file && *at + *n == offset => *n += bytes,
            _ => self.pending.push((file, offset, bytes)),
        }
        self.pending_bytes += bytes;
        if self.pending_bytes < STEP_BYTES {
            return;
        }
        for &(f, at, n) in self.previous.iter().chain(&self.pending) {
            files[f].release(at, n);
        }
        self.previous = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
    }
}
