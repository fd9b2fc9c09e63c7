//! Registers a store on all rails, if it may and can be.

use std::fs::File;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use atlas_rdma::mapping::copy_room_bytes;
use expert_wire::limits;
use tracing::{info, warn};

use super::Verbs;
use super::fabric::{PublishFile, PublishRequest};
use super::served::Served;
use crate::extents::{Extent, extents};
use crate::{PeerError, Source};

/// Ranges of a file with a smaller gap between them are one region: what lies between records is
/// small, and a region costs more than a megabyte.
const GAP_BYTES: u64 = 1 << 20;
/// Between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// `f_type` of tmpfs and ramfs: their pages are in memory anyway.
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];

impl Verbs {
    /// Whether a store fits beside `beside_bytes` that stay pinned.
    ///
    /// *Errors*: [`PeerError::BladeTooLarge`], [`PeerError::MemoryShort`].
    pub(crate) fn check_fits(
        &self,
        source: &dyn Source,
        beside_bytes: u64,
    ) -> Result<(), PeerError> {
        self.fits(source, &extents(source, GAP_BYTES), beside_bytes)
            .map(drop)
    }

    /// Registers a store on all rails, for all clients.
    ///
    /// *Errors*: as [`Self::check_fits`]; [`PeerError::Rdma`] and [`PeerError::Publish`];
    /// [`PeerError::Interrupted`].
    pub(crate) fn publish(
        &self,
        source: &dyn Source,
        beside_bytes: u64,
    ) -> Result<Served, PeerError> {
        let start = Instant::now();
        let extents = extents(source, GAP_BYTES);
        let need_bytes = total(&extents);
        let copy_bytes_max = self.fits(source, &extents, beside_bytes)?;
        let files = files(source, &extents)?;
        let rails = self.rails.len() as u64;
        let progress = Progress::default();
        let publication = self.fabric.publish(&PublishRequest {
            files: &files,
            allow_rw_map: self.options.allow_rw_map,
            copy_bytes_max,
            threads: self.options.threads,
            cancel: &self.options.cancel,
            progress: &|what, done, total| progress.report(what, done, total),
        });
        if self.options.cancel.load(Ordering::SeqCst) {
            return Err(PeerError::Interrupted);
        }
        let served = Served::new(publication?, self.rails.len(), need_bytes);
        let regions = (0..self.rails.len()).map(|rail| served.regions(rail).len());
        let regions = regions.max().unwrap_or(0);
        if regions > limits::REGIONS_MAX as usize {
            return Err(PeerError::TooManyRegions { regions });
        }
        info!(
            "{need_bytes} bytes registered on {rails} rails ({}) in {:.1} s, {regions} regions each",
            self.fabric.names().join(", "),
            start.elapsed().as_secs_f64()
        );
        Ok(served)
    }

    /// Whether a store fits by itself into what the caller lets it pin.
    pub(crate) fn check_limit(&self, source: &dyn Source) -> Result<(), PeerError> {
        self.within_limit(total(&extents(source, GAP_BYTES)), 0)
    }

    fn within_limit(&self, need_bytes: u64, beside_bytes: u64) -> Result<(), PeerError> {
        match self.options.max_blade_bytes {
            Some(limit_bytes) if need_bytes.saturating_add(beside_bytes) > limit_bytes => {
                Err(PeerError::BladeTooLarge {
                    need_bytes,
                    beside_bytes,
                    limit_bytes,
                })
            }
            _ => Ok(()),
        }
    }

    /// Says how many bytes may be copied; `None` where the system does not say what it has.
    fn fits(
        &self,
        source: &dyn Source,
        extents: &[Extent],
        beside_bytes: u64,
    ) -> Result<Option<u64>, PeerError> {
        let need_bytes = total(extents);
        self.within_limit(need_bytes, beside_bytes)?;
        let Some(memory) = expert_arena::SystemMemory::now() else {
            warn!(
                "the system does not say how much memory is available: registering the store all the same"
            );
            return Ok(None);
        };
        let reserve_bytes = self
            .options
            .reserve_bytes
            .unwrap_or_else(|| memory.default_reserve_bytes(need_bytes));
        // Page cache counts as available until it is pinned; a file system in memory has its
        // pages already, and only a copy would need more.
        let on_disk: u64 = extents
            .iter()
            .filter(|e| !source.file(e.file).is_some_and(is_in_memory))
            .map(|e| e.bytes)
            .sum();
        let usable = memory.available_bytes.saturating_sub(reserve_bytes);
        if on_disk > usable {
            return Err(PeerError::MemoryShort {
                need_bytes: on_disk,
                available_bytes: memory.available_bytes,
                reserve_bytes,
            });
        }
        // Copies can use the huge pages that are set aside, too.
        let room_bytes = copy_room_bytes().map_or(memory.available_bytes, |(room, _)| room);
        Ok(Some(room_bytes.saturating_sub(reserve_bytes)))
    }
}

fn total(extents: &[Extent]) -> u64 {
    extents.iter().map(|e| e.bytes).sum()
}

fn is_in_memory(file: &File) -> bool {
    // The width of the field differs between machines.
    #[allow(clippy::unnecessary_cast)]
    let is_known =
        |f: rustix::fs::StatFs| MEMORY_FILE_SYSTEMS.contains(&(f.f_type as u64 & 0xffff_ffff));
    rustix::fs::fstatfs(file).is_ok_and(is_known)
}

/// The files of the extents, each with its own. A file that is not what it was when the store was
/// opened is left out: its records are refused, others are not.
fn files(source: &dyn Source, extents: &[Extent]) -> Result<Vec<PublishFile>, PeerError> {
    let mut files: Vec<PublishFile> = Vec::new();
    for group in extents.chunk_by(|a, b| a.file == b.file) {
        let Some((first, end)) = group.first().zip(group.last().map(|e| e.offset + e.bytes)) else {
            continue;
        };
        let index = first.file;
        let path = source.file_path(index).unwrap_or("?".as_ref());
        let leave_out = |why: &str| warn!("{} is left out: {why}", path.display());
        let Some(file) = source.file(index) else {
            leave_out("the store has no such file");
            continue;
        };
        if let Some(why) = source.file_change(index) {
            leave_out(&why);
            continue;
        }
        if file.metadata().is_ok_and(|m| m.len() < end) {
            leave_out("it ends before its last record");
            continue;
        }
        let file = file.try_clone().map_err(|source| PeerError::System {
            what: "duplicating a file descriptor",
            source,
        })?;
        files.push(PublishFile {
            index,
            path: path.to_owned(),
            file: file.into(),
            extents: group.iter().map(|e| (e.offset, e.bytes)).collect(),
        });
    }
    Ok(files)
}

/// Lines about a registration that takes long.
#[derive(Default)]
struct Progress {
    last: Mutex<Option<Instant>>,
}

impl Progress {
    fn report(&self, what: &str, done_bytes: u64, total_bytes: u64) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.get_or_insert_with(Instant::now).elapsed() >= PROGRESS_INTERVAL {
            *last = Some(Instant::now());
            info!("{what} {done_bytes} of {total_bytes} bytes");
        }
    }
}
