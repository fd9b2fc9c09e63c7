//! Writing large files: to the disk beside the work that makes them, with bounded dirty memory and
//! nothing left in the page cache, or into the page cache alone.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Mutex, PoisonError};

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

    /// Drops what of a range is on disk from the page cache.
    pub(crate) fn release(&self, offset: u64, bytes: u64) {
        if let Some(len) = NonZeroU64::new(bytes) {
            // Linux: starts writeback of the dirty pages, then drops the clean ones. Advice only.
            let _ = fadvise(&self.file, offset, Some(len), Advice::DontNeed);
        }
    }

    /// Waits until all is on disk and leaves nothing in the page cache.
    pub(crate) fn finish(&self) -> Result<(), StoreError> {
        self.sync()?;
        self.release(0, self.bytes);
        Ok(())
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.file
            .sync_data()
            .map_err(StoreError::write("syncing", &self.path, self.bytes))
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

/// Bytes after which complete ranges go to the disk: few enough to begin early, many enough that a
/// disk which takes milliseconds to flush its own cache is not kept from writing.
const STEP_BYTES: u64 = 32 << 20;
/// Steps that may wait for the disk; then whoever writes waits, too. With those that are written (one,
/// and as many as had waited) and the one that is gathered, dirty memory stays below 320 MiB.
const STEPS_MAX: usize = 4;

/// Part of one of the files.
#[derive(Debug, Clone, Copy)]
struct Range {
    file: usize,
    offset: u64,
    bytes: u64,
}

/// Takes note of what is complete and has it written back, in steps.
#[derive(Debug)]
pub(crate) struct Flusher<'a> {
    files: &'a [OutFile],
    by: By<'a>,
    pending: Vec<Range>,
    pending_bytes: u64,
}

/// Who writes back.
#[derive(Debug)]
enum By<'a> {
    /// A thread, so that reading, hashing and copying go on meanwhile; its error is left there.
    Thread(SyncSender<Vec<Range>>, &'a Mutex<Option<StoreError>>),
    /// Whoever says that a range is complete: no thread could be had.
    Caller,
    /// The kernel, when it likes.
    Nobody,
}

/// Does `work`, which writes `files` and tells the [`Flusher`] what is complete. Where `sync` is asked
/// for that is written back beside the work and leaves the page cache; otherwise it stays there. The
/// files are not synced to their end: see [`OutFile::finish`].
///
/// *Errors*: those of `work`, and [`StoreError::Full`] or [`StoreError::Io`] where writing back failed.
pub(crate) fn write_behind<T>(
    files: &[OutFile],
    sync: bool,
    work: impl FnOnce(&mut Flusher<'_>) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let flusher = |by| Flusher {
        files,
        by,
        pending: Vec::new(),
        pending_bytes: 0,
    };
    if !sync {
        return work(&mut flusher(By::Nobody));
    }
    let failed = Mutex::new(None);
    let done = std::thread::scope(|scope| {
        let (to_thread, steps) = mpsc::sync_channel(STEPS_MAX);
        let failed = &failed;
        let thread = std::thread::Builder::new()
            .spawn_scoped(scope, move || flush_all(files, &steps, failed));
        let by = match thread {
            Ok(_) => By::Thread(to_thread, failed),
            Err(e) => {
                tracing::warn!(error = %e, "no thread to write back: copying waits for the disk");
                By::Caller
            }
        };
        // Dropped at the end, which is what ends the thread.
        work(&mut flusher(by))
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    // Of two errors that of the disk comes first: an early end of the work may follow from it.
    match failed {
        Some(e) => Err(e),
        None => done,
    }
}

fn flush_all(files: &[OutFile], steps: &Receiver<Vec<Range>>, failed: &Mutex<Option<StoreError>>) {
    while let Ok(mut ranges) = steps.recv() {
        // What waits goes along: a slow disk gets fewer, larger steps.
        ranges.extend(steps.try_iter().take(STEPS_MAX).flatten());
        if let Err(e) = flush(files, &ranges) {
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
            return;
        }
    }
}

/// Waits until the ranges are on disk and drops their pages.
fn flush(files: &[OutFile], ranges: &[Range]) -> Result<(), StoreError> {
    let mut synced = None;
    for range in ranges {
        if synced != Some(range.file) {
            files[range.file].sync()?;
            synced = Some(range.file);
        }
    }
    // Clean by now: dirty pages would only be looked at, twice.
    for range in ranges {
        files[range.file].release(range.offset, range.bytes);
    }
    Ok(())
}

impl Flusher<'_> {
    /// Bytes of `files[file]` that are complete; waits where too much waits for the disk.
    ///
    /// *Errors*: writing back has failed.
    pub(crate) fn done(&mut self, file: usize, offset: u64, bytes: u64) -> Result<(), StoreError> {
        if matches!(self.by, By::Nobody) {
            return Ok(());
        }
        match self.pending.last_mut() {
            Some(r) if r.file == file && r.offset + r.bytes == offset => r.bytes += bytes,
            _ => self.pending.push(Range {
                file,
                offset,
                bytes,
            }),
        }
        self.pending_bytes += bytes;
        if self.pending_bytes < STEP_BYTES {
            return Ok(());
        }
        self.pending_bytes = 0;
        let step = std::mem::take(&mut self.pending);
        match &self.by {
            By::Thread(steps, failed) => steps.send(step).map_err(|_| {
                let failed = failed.lock().unwrap_or_else(PoisonError::into_inner).take();
                // It ends before its channel does only where it failed.
                failed.unwrap_or(StoreError::Interrupted)
            }),
            By::Caller => flush(self.files, &step),
            By::Nobody => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that can be written to but not synced.
    fn unsyncable() -> Vec<OutFile> {
        let file = File::options().write(true).open("/dev/full").unwrap();
        vec![OutFile {
            file,
            path: "/dev/full".into(),
            bytes: 1,
        }]
    }

    #[test]
    fn failure_to_write_back_ends_the_work_and_is_what_is_told() {
        let files = unsyncable();
        let mut steps = 0;
        let e = write_behind(&files, true, |flusher| {
            for step in 0..1000 {
                flusher.done(0, step * STEP_BYTES, STEP_BYTES)?;
                steps += 1;
            }
            Ok(())
        })
        .unwrap_err();
        assert!(e.to_string().contains("/dev/full"), "{e}");
        // One that is taken, those that go along or wait, and one on its way.
        assert!(steps <= 2 * STEPS_MAX + 2, "{steps}");
    }

    #[test]
    fn failure_to_write_back_the_last_step_is_told_after_the_work() {
        let files = unsyncable();
        let done = |sync, bytes| {
            write_behind(&files, sync, |flusher| {
                // Whether the thread was quick or not, work of one step ends well.
                flusher.done(0, 0, bytes)
            })
        };
        assert!(done(true, STEP_BYTES).is_err());
        // Less than a step is left to the sync of the whole file, and without one nothing is synced.
        done(true, STEP_BYTES - 1).unwrap();
        done(false, 2 * STEP_BYTES).unwrap();
    }

    #[test]
    fn error_of_the_work_is_told_where_the_disk_is_well() {
        let dir = tempfile::tempdir().unwrap();
        let files = [OutFile::create(dir.path().join("file"), 2 * STEP_BYTES).unwrap()];
        let e = write_behind(&files, true, |flusher| -> Result<(), StoreError> {
            files[0].write_at(b"x", 0)?;
            flusher.done(0, 0, 2 * STEP_BYTES)?;
            Err(StoreError::Usage("as the test wants".into()))
        })
        .unwrap_err();
        assert!(matches!(e, StoreError::Usage(_)), "{e}");
    }
}
