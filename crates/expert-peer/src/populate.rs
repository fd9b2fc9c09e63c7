//! Reads a store into the page cache, so that the first clients do not wait for the disk.

use std::fmt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::extents::{Extent, extents};
use crate::{PeerError, Source};

/// One read: large enough that disks deliver at their full rate.
const READ_BYTES: u64 = 4 << 20;
/// Ranges of a file with a smaller gap between them are read as one.
const GAP_BYTES: u64 = 256 << 10;
/// Share of the available memory, in percent, that a store may take: what is above it would evict
/// itself while it is read.
const MEMORY_PERCENT: u64 = 80;
/// Between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Called about once a second with bytes read and bytes in all.
pub type ProgressFn = dyn Fn(u64, u64) + Send + Sync;

/// How to read a store into the page cache.
#[derive(Clone, Default)]
pub struct PopulateOptions {
    /// Reading threads; 0 (default) means two per processor, at most 16.
    pub threads: usize,
    /// Called from one thread at a time.
    pub progress: Option<Arc<ProgressFn>>,
    /// Set it to stop with [`PeerError::Interrupted`].
    pub cancel: Arc<AtomicBool>,
    /// Bytes that may be read; `None` (default) means 80 % of the available memory.
    pub limit_bytes: Option<u64>,
}

/// What [`populate`] did.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct PopulateReport {
    /// Bytes read.
    pub bytes: u64,
    /// Time that it took.
    pub elapsed: Duration,
    /// Why nothing was read, if so.
    pub skipped: Option<String>,
}

/// Reads all record bytes of a store once, in parallel and in order of the files.
///
/// A store larger than the limit is left alone, which is logged and said in the report. Bytes that
/// cannot be read are logged: serving them will fail with a typed error.
///
/// *Errors*: [`PeerError::Interrupted`] when cancelled, [`PeerError::System`] without threads.
pub fn populate(
    source: &dyn Source,
    options: &PopulateOptions,
) -> Result<PopulateReport, PeerError> {
    let start = Instant::now();
    let reads = plan(source);
    let total: u64 = reads.iter().map(|r| r.bytes).sum();
    let limit = options.limit_bytes.or_else(|| {
        expert_arena::SystemMemory::now().map(|m| m.available_bytes / 100 * MEMORY_PERCENT)
    });
    if let Some(limit) = limit.filter(|&limit| total > limit) {
        let why = format!(
            "the store's records have {total} bytes, more than the {limit} that may be filled ({MEMORY_PERCENT} % of the available memory): records are read from disk when they are asked for"
        );
        warn!("not reading the store into memory: {why}");
        return Ok(PopulateReport {
            bytes: 0,
            elapsed: start.elapsed(),
            skipped: Some(why),
        });
    }
    let threads = match options.threads {
        0 => thread::available_parallelism().map_or(4, |n| (2 * n.get()).min(16)),
        n => n,
    };
    let next = AtomicUsize::new(0);
    let done = AtomicU64::new(0);
    let cancelled = || options.cancel.load(Ordering::Relaxed);
    let work = |reports: bool| {
        let mut buffer = vec![0; READ_BYTES as usize];
        let mut reported = Instant::now();
        while let Some(read) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
            if cancelled() {
                return;
            }
            read_once(source, read, &mut buffer);
            let now_done = done.fetch_add(read.bytes, Ordering::Relaxed) + read.bytes;
            if reports && reported.elapsed() >= PROGRESS_INTERVAL {
                reported = Instant::now();
                if let Some(progress) = &options.progress {
                    progress(now_done, total);
                }
            }
        }
    };
    let work = &work;
    thread::scope(|scope| {
        for i in 0..threads.min(reads.len()) {
            thread::Builder::new()
                .name(format!("peer-populate-{i}"))
                .spawn_scoped(scope, move || work(i == 0))?;
        }
        Ok(())
    })
    .map_err(|source| PeerError::System {
        what: "starting a thread",
        source,
    })?;
    if cancelled() {
        return Err(PeerError::Interrupted);
    }
    if let Some(progress) = &options.progress {
        progress(total, total);
    }
    let elapsed = start.elapsed();
    info!(
        "read {total} bytes into memory in {:.1} s ({:.2} GB/s)",
        elapsed.as_secs_f64(),
        total as f64 / 1e9 / elapsed.as_secs_f64().max(1e-9)
    );
    Ok(PopulateReport {
        bytes: total,
        elapsed,
        skipped: None,
    })
}

/// The records' ranges in order of the files, neighbours joined, cut into reads.
fn plan(source: &dyn Source) -> Vec<Extent> {
    let mut reads = Vec::new();
    for extent in extents(source, GAP_BYTES) {
        let end = extent.offset + extent.bytes;
        let mut offset = extent.offset;
        while offset < end {
            let bytes = (end - offset).min(READ_BYTES);
            reads.push(Extent {
                offset,
                bytes,
                ..extent
            });
            offset += bytes;
        }
    }
    reads
}

fn read_once(source: &dyn Source, read: &Extent, buffer: &mut [u8]) {
    let Some(file) = source.file(read.file) else {
        return;
    };
    if let Err(e) = file.read_exact_at(&mut buffer[..read.bytes as usize], read.offset) {
        let path = source.file_path(read.file).unwrap_or("?".as_ref());
        warn!("{} cannot be read at {}: {e}", path.display(), read.offset);
    }
}

impl fmt::Debug for PopulateOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PopulateOptions")
            .field("threads", &self.threads)
            .field("limit_bytes", &self.limit_bytes)
            .finish_non_exhaustive()
    }
}
