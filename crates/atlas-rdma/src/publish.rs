//! Files made readable for other machines: every extent registered once on each rail, for all clients.
//!
//! [`publish`] finds out what the kernel accepts for each file, brings the bytes into memory, registers them in
//! parallel and returns only when all of them are readable; if anything fails, nothing stays registered. A
//! [`Publication`] has the table of regions of each rail. It is shared by all rails: one mapping, one region per rail.
//!
//! Ending it goes in one order, whether by [`Publication::revoke`], [`Publication::withdraw`] or drop: regions are
//! deregistered on all rails, then their memory is unmapped. Clients with a READ under way get an access error.

mod error;
mod parallel;
mod plan;
mod registrar;
#[cfg(test)]
mod tests;

pub use error::PublishError;
pub use registrar::{RegisterRefusal, Registered, Registrar};

use crate::mapping::{
    CopyPages, MappableFile, MappedExtent, MappingMode, copy_room_bytes, fill, populate,
};
use crate::memory::StableMemory;
use crate::mr::Mr;
use parallel::{drop_in_parallel, in_parallel};
use plan::{FilePlan, Piece, plan_files};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that one thread reads before it takes the next part: a few reads, so that threads end at the same time.
const READ_PART_BYTES: usize = 64 << 20;

/// A file and what of it is to be readable.
#[derive(Debug, Clone)]
pub struct PublishFile {
    /// Its name for people.
    pub label: String,
    /// The file, open for reading.
    pub file: Arc<File>,
    /// Offset and bytes of each extent. Those that touch or overlap become one.
    pub extents: Vec<(u64, u64)>,
}

/// How files become readable.
#[derive(Debug, Clone, Default)]
pub struct PublishOptions {
    /// Whether a file may be mapped writable where the kernel registers nothing else. Such kernels take every page for
    /// modified: they write the file back and change its modification time.
    pub allow_rw_map: bool,
    /// Whether to copy even where a mapping would do.
    pub force_copy: bool,
    /// Most bytes of copies; `None` for as many as there is memory.
    pub max_copy_bytes: Option<u64>,
    /// Threads that read and register; 0 for as many as there are processors, up to 16.
    pub threads: usize,
    /// Setting it ends [`publish`] at its next step with [`PublishError::Stopped`].
    pub stop: Arc<AtomicBool>,
}

/// What is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Bytes are read into copies or into the page cache.
    Reading,
    /// Bytes are registered, on each rail.
    Registering,
}

/// How far it is. Reading comes first, then registering, whose total counts every rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes of this phase.
    pub total_bytes: u64,
}

/// How one file became memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModeReport {
    /// Its name for people.
    pub label: String,
    /// Its file system.
    pub file_system: String,
    /// The mode.
    pub mode: MappingMode,
    /// Why that mode.
    pub why: String,
    /// Bytes of its extents.
    pub bytes: u64,
    /// Pages of its first extent's copy; `None` for mappings.
    pub pages: Option<CopyPages>,
}

/// A registered range of a file, as a client of one rail is told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// Index of the file in what was published.
    pub file: u32,
    /// First byte in the file.
    pub file_offset: u64,
    /// Count of bytes.
    pub bytes: u64,
    /// Address of the first byte.
    pub addr: u64,
    /// Key for the other machine.
    pub rkey: u32,
}

/// The files that are readable now. Dropping it deregisters everything, then unmaps.
#[derive(Debug)]
pub struct Publication<R: Registered = Mr> {
    tables: Vec<Vec<Region>>,
    files: Vec<Published<R>>,
    modes: Vec<ModeReport>,
    threads: usize,
}

/// One file: field order is drop order, the regions on all rails before the memory that they lie in.
#[derive(Debug)]
struct Published<R> {
    regions: Vec<R>,
    extents: Vec<Arc<MappedExtent>>,
}

/// Makes files readable through rails.
///
/// `progress` is called from several threads.
///
/// # Errors
///
/// Every failure rolls everything back. What to do is in the text of [`PublishError`]; one that
/// [`PublishError::is_retryable`] may pass by itself.
pub fn publish<P: Registrar>(
    rails: &[P],
    files: &[PublishFile],
    options: &PublishOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Publication<P::Region>, PublishError> {
    if rails.is_empty() {
        return Err(PublishError::NoRails);
    }
    let threads = parallel::count(options.threads);
    let plans = plan_files(rails, files, options)?;
    log_modes(&plans);
    check_copies(&plans, options)?;

    let mut extents: Vec<Vec<MappedExtent>> = Vec::with_capacity(plans.len());
    for plan in &plans {
        let reserve = |&(offset, bytes): &(u64, u64)| {
            MappedExtent::reserve(&plan.source, offset, bytes, plan.mode)
        };
        extents.push(plan.extents.iter().map(reserve).collect::<Result<_, _>>()?);
    }
    // Before anything is read, which may take minutes.
    let pieces = plan::pieces(rails, &plans)?;
    let bytes: u64 = plans.iter().map(|plan| plan.bytes).sum();
    let total_bytes = bytes.saturating_mul(rails.len() as u64);
    for rail in rails {
        let refused = |refusal: RegisterRefusal| PublishError::Preflight {
            rail: rail.name().to_owned(),
            source: refusal.source,
        };
        rail.preflight(total_bytes).map_err(refused)?;
    }
    let meter = Meter::new(Phase::Reading, bytes, progress);
    read(&plans, &mut extents, threads, options, &meter)?;

    let published: Vec<Published<P::Region>> = extents
        .into_iter()
        .map(|extents| Published {
            regions: Vec::new(),
            extents: extents.into_iter().map(Arc::new).collect(),
        })
        .collect();
    // From here on the publication rolls back what is registered when it is dropped.
    let mut publication = Publication {
        tables: vec![Vec::new(); rails.len()],
        files: published,
        modes: plans.iter().map(FilePlan::report).collect(),
        threads,
    };
    for (report, file) in publication.modes.iter_mut().zip(&publication.files) {
        report.pages = file.extents.first().and_then(|extent| extent.pages());
    }
    let meter = Meter::new(Phase::Registering, total_bytes, progress);
    register(rails, &pieces, &mut publication, options, &meter)?;
    Ok(publication)
}

impl<R: Registered> Publication<R> {
    /// The regions of a rail, in the order of files and offsets.
    ///
    /// # Panics
    ///
    /// If there is no such rail.
    pub fn regions(&self, rail: usize) -> &[Region] {
        &self.tables[rail]
    }

    /// How each file became memory.
    pub fn modes(&self) -> &[ModeReport] {
        &self.modes
    }

    /// Bytes of mapped files that are readable now.
    pub fn mapped_bytes(&self) -> u64 {
        self.bytes_where(|mode| mode != MappingMode::Copy)
    }

    /// Bytes of copies that are readable now.
    pub fn copied_bytes(&self) -> u64 {
        self.bytes_where(|mode| mode == MappingMode::Copy)
    }

    /// Ends the reading of one file, because it has changed: deregisters its regions on all rails, then unmaps it.
    /// Returns the count of its regions on each rail, 0 if it was revoked before.
    ///
    /// # Panics
    ///
    /// If there is no such file.
    pub fn revoke(&mut self, file: u32) -> usize {
        let published = &mut self.files[file as usize];
        // The memory stays mapped until everything goes: an address that is used again, under a key that a device gives
        // out again, would answer READs of clients that do not know yet.
        drop_in_parallel(self.threads, std::mem::take(&mut published.regions));
        let mut revoked = 0;
        for table in &mut self.tables {
            let before = table.len();
            table.retain(|region| region.file != file);
            revoked = before - table.len();
        }
        revoked
    }

    /// Ends the reading of everything, and keeps the memory: READs fail from now on. It is unmapped with the drop.
    pub fn deregister(&mut self) {
        let regions = self
            .files
            .iter_mut()
            .flat_map(|file| std::mem::take(&mut file.regions))
            .collect();
        drop_in_parallel(self.threads, regions);
        for table in &mut self.tables {
            table.clear();
        }
    }

    /// Ends the reading of everything: deregisters on all rails, then unmaps. The same as dropping it.
    pub fn withdraw(self) {
        drop(self);
    }

    fn bytes_where(&self, wanted: impl Fn(MappingMode) -> bool) -> u64 {
        let extents = self.files.iter().flat_map(|file| &file.extents);
        extents
            .filter(|extent| wanted(extent.mode()))
            .map(|extent| extent.bytes())
            .sum()
    }
}

impl<R: Registered> Drop for Publication<R> {
    fn drop(&mut self) {
        // All regions of all files first; the memory goes with the fields.
        self.deregister();
    }
}

/// One line for each kind of file system and mode.
fn log_modes(plans: &[FilePlan]) {
    let mut kinds: Vec<(&FilePlan, usize, u64)> = Vec::new();
    for plan in plans {
        let same = |(first, ..): &&mut (&FilePlan, usize, u64)| {
            first.file_system == plan.file_system
                && first.mode == plan.mode
                && first.why == plan.why
        };
        match kinds.iter_mut().find(same) {
            Some((_, files, bytes)) => {
                *files += 1;
                *bytes += plan.bytes;
            }
            None => kinds.push((plan, 1, plan.bytes)),
        }
    }
    for (plan, files, bytes) in kinds {
        tracing::info!(
            files,
            bytes,
            "files on {} are published by {}: {}",
            plan.file_system,
            plan.mode,
            plan.why
        );
    }
}

fn check_copies(plans: &[FilePlan], options: &PublishOptions) -> Result<(), PublishError> {
    let copied = || plans.iter().filter(|plan| plan.mode == MappingMode::Copy);
    let need_bytes = copied().map(|plan| plan.bytes).sum();
    let Some(first) = copied().next() else {
        return Ok(());
    };
    if let Some(limit_bytes) = options.max_copy_bytes.filter(|limit| need_bytes > *limit) {
        return Err(PublishError::CopyLimit {
            files: copied().count(),
            need_bytes,
            limit_bytes,
            why: first.why.clone(),
        });
    }
    // Where the system does not say, each copy still is refused or not by itself.
    match copy_room_bytes() {
        Ok((available_bytes, scope)) if need_bytes > available_bytes => {
            let label = match copied().count() {
                1 => first.source.label().to_owned(),
                files => format!("{files} files"),
            };
            Err(PublishError::Mapping(
                crate::mapping::MappingError::NoMemory {
                    label,
                    need_bytes,
                    available_bytes,
                    scope,
                },
            ))
        }
        _ => Ok(()),
    }
}

/// Brings all bytes into memory.
fn read(
    plans: &[FilePlan],
    extents: &mut [Vec<MappedExtent>],
    threads: usize,
    options: &PublishOptions,
    meter: &Meter<'_>,
) -> Result<(), PublishError> {
    let mut copies = Vec::new();
    let mut mappings: Vec<(&MappableFile, &MappedExtent, usize)> = Vec::new();
    for (plan, extents) in plans.iter().zip(extents) {
        if plan.mode == MappingMode::Copy {
            let parts = extents
                .iter_mut()
                .flat_map(|extent| extent.copy_parts(READ_PART_BYTES));
            copies.extend(parts.map(|part| (&plan.source, part)));
            continue;
        }
        for extent in &*extents {
            let starts = (0..extent.len_bytes()).step_by(READ_PART_BYTES);
            mappings.extend(starts.map(|at| (&plan.source, extent, at)));
        }
    }
    in_parallel(threads, copies, &|(source, part)| {
        fill(source, part, &options.stop, &|bytes| meter.add(bytes))?;
        Ok(())
    })?;
    let scratches = Mutex::new(Vec::new());
    in_parallel(threads, mappings, &|(source, extent, at)| {
        let lock = || scratches.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = lock().pop().unwrap_or_default();
        let end = extent.len_bytes().min(at + READ_PART_BYTES);
        let add = |bytes| meter.add(bytes);
        populate(source, extent, at..end, &mut scratch, &options.stop, &add)?;
        lock().push(scratch);
        Ok(())
    })
}

/// Registers every piece on every rail and fills the tables.
fn register<P: Registrar>(
    rails: &[P],
    pieces: &[Piece],
    publication: &mut Publication<P::Region>,
    options: &PublishOptions,
    meter: &Meter<'_>,
) -> Result<(), PublishError> {
    let registered = Mutex::new(Vec::with_capacity(pieces.len() * rails.len()));
    let Publication { files, modes, .. } = &*publication;
    let work: Vec<(Piece, usize)> = pieces
        .iter()
        .flat_map(|piece| (0..rails.len()).map(|rail| (*piece, rail)))
        .collect();
    let outcome = in_parallel(publication.threads, work, &|(piece, rail)| {
        if options.stop.load(Ordering::Relaxed) {
            return Err(PublishError::Stopped);
        }
        let extent = Arc::clone(&files[piece.file as usize].extents[piece.extent]);
        let file_offset = extent.file_offset() + piece.at as u64;
        let region = rails[rail]
            .register(extent, piece.at, piece.bytes)
            .map_err(|refusal| PublishError::Register {
                label: modes[piece.file as usize].label.clone(),
                file_offset,
                bytes: piece.bytes as u64,
                rail: rails[rail].name().to_owned(),
                total_bytes: meter.total_bytes,
                rails: rails.len(),
                source: refusal.source,
            })?;
        let row = Region {
            file: piece.file,
            file_offset,
            bytes: piece.bytes as u64,
            addr: region.addr(),
            rkey: region.rkey(),
        };
        let mut registered = registered.lock().unwrap_or_else(PoisonError::into_inner);
        registered.push((rail, row, region));
        meter.add(piece.bytes as u64);
        Ok(())
    });
    let registered = registered
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    // Also after a failure: the publication is what rolls back.
    for (rail, row, region) in registered {
        publication.tables[rail].push(row);
        publication.files[row.file as usize].regions.push(region);
    }
    for table in &mut publication.tables {
        table.sort_unstable_by_key(|region| (region.file, region.file_offset));
    }
    outcome
}

/// Adds up what threads have done.
struct Meter<'a> {
    phase: Phase,
    done_bytes: AtomicU64,
    total_bytes: u64,
    progress: &'a (dyn Fn(Progress) + Sync),
}

impl<'a> Meter<'a> {
    fn new(phase: Phase, total_bytes: u64, progress: &'a (dyn Fn(Progress) + Sync)) -> Self {
        Self {
            phase,
            done_bytes: AtomicU64::new(0),
            total_bytes,
            progress,
        }
    }

    fn add(&self, bytes: u64) {
        let done = self.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        (self.progress)(Progress {
            phase: self.phase,
            // A copy begins at the page below its extent, and those bytes are read, too.
            done_bytes: done.min(self.total_bytes),
            total_bytes: self.total_bytes,
        });
    }
}
