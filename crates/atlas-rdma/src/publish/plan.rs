//! What is to be done for each file: its mode, its extents, its regions.

use super::registrar::{RegisterRefusal, Registrar};
use super::{ModeReport, PublishError, PublishFile, PublishOptions};
use crate::mapping::{MappableFile, MappedExtent, MappingError, MappingMode, page_bytes};
use std::sync::Arc;

/// A region is cut at a multiple of this, where the device's limit leaves room for it: no huge page lies in two.
const SEAM_BYTES: u64 = 2 << 20;

/// One file.
pub(super) struct FilePlan {
    pub(super) source: MappableFile,
    pub(super) file_system: String,
    pub(super) mode: MappingMode,
    pub(super) why: String,
    pub(super) extents: Vec<(u64, u64)>,
    pub(super) bytes: u64,
}

/// One region, to be registered on every rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) file: u32,
    pub(super) extent: usize,
    pub(super) at: usize,
    pub(super) bytes: usize,
}

impl FilePlan {
    pub(super) fn report(&self) -> ModeReport {
        ModeReport {
            label: self.source.label().to_owned(),
            file_system: self.file_system.clone(),
            mode: self.mode,
            why: self.why.clone(),
            bytes: self.bytes,
            pages: None,
        }
    }
}

/// Decides on each file by trying: whether a kernel registers a mapping depends on its version, on the file system
/// and on the device, and nothing but a registration tells.
pub(super) fn plan_files<P: Registrar>(
    rails: &[P],
    files: &[PublishFile],
    options: &PublishOptions,
) -> Result<Vec<FilePlan>, PublishError> {
    let plan = |file: &PublishFile| {
        let source = MappableFile::new(&file.label, &file.file)?;
        let extents = merged(&file.extents);
        let file_system = source.file_system();
        let (mode, why) = match extents.first() {
            Some(&first) => decide(rails, &source, &file_system, first, options)?,
            None => (MappingMode::SharedReadOnly, "nothing to map".to_owned()),
        };
        let bytes = extents.iter().fold(0u64, |sum, e| sum.saturating_add(e.1));
        Ok(FilePlan {
            source,
            file_system,
            mode,
            why,
            extents,
            bytes,
        })
    };
    files.iter().map(plan).collect()
}

fn decide<P: Registrar>(
    rails: &[P],
    source: &MappableFile,
    file_system: &str,
    first: (u64, u64),
    options: &PublishOptions,
) -> Result<(MappingMode, String), PublishError> {
    if options.force_copy {
        return Ok((MappingMode::Copy, "a copy was asked for".to_owned()));
    }
    let Err(refusal) = probe(rails, source, first, MappingMode::SharedReadOnly)? else {
        let why = format!("this kernel registers read-only mappings of {file_system}");
        return Ok((MappingMode::SharedReadOnly, why));
    };
    if !options.allow_rw_map {
        let why = format!(
            "a read-only mapping is refused here ({refusal}), and a read-write one was not allowed (--allow-rw-map)"
        );
        return Ok((MappingMode::Copy, why));
    }
    match probe(rails, source, first, MappingMode::SharedReadWrite)? {
        Ok(()) => {
            let why = format!(
                "a read-only mapping is refused here ({refusal}), and a read-write one was allowed: this kernel may \
                 write the file back and change its modification time"
            );
            Ok((MappingMode::SharedReadWrite, why))
        }
        Err(second) => {
            let why = format!(
                "a read-only mapping is refused here ({refusal}), and so is the read-write one that was allowed \
                 ({second})"
            );
            Ok((MappingMode::Copy, why))
        }
    }
}

/// Registers the first page of an extent on every rail and lets go of it. The inner error is a refusal of this mode,
/// in words that are the same for every file; the outer one is a failure that another mode would not mend.
fn probe<P: Registrar>(
    rails: &[P],
    source: &MappableFile,
    (offset, bytes): (u64, u64),
    mode: MappingMode,
) -> Result<Result<(), String>, PublishError> {
    let probe_bytes = bytes.min(page_bytes() as u64);
    // The whole extent is what must be inside the file.
    source.check(offset, bytes)?;
    let extent = match MappedExtent::reserve(source, offset, probe_bytes, mode) {
        Ok(extent) => Arc::new(extent),
        Err(MappingError::Map { source, .. } | MappingError::NotWritable { source, .. }) => {
            return Ok(Err(source.to_string()));
        }
        Err(error) => return Err(error.into()),
    };
    for rail in rails {
        let memory = Arc::clone(&extent);
        match rail.register(memory, 0, extent_bytes(probe_bytes)) {
            Ok(region) => drop(region),
            Err(refusal) if refusal.wrong_memory => {
                return Ok(Err(format!("rail {}: {}", rail.name(), root(&refusal))));
            }
            Err(refusal) => {
                return Err(PublishError::Register {
                    label: source.label().to_owned(),
                    file_offset: offset,
                    bytes: probe_bytes,
                    rail: rail.name().to_owned(),
                    total_bytes: bytes.saturating_mul(rails.len() as u64),
                    rails: rails.len(),
                    source: refusal.source,
                });
            }
        }
    }
    Ok(Ok(()))
}

/// The innermost reason, without what differs from file to file.
fn root(refusal: &RegisterRefusal) -> String {
    let mut reason: &dyn std::error::Error = &*refusal.source;
    while let Some(deeper) = reason.source() {
        reason = deeper;
    }
    reason.to_string()
}

/// Every region of every file; the same cuts on all rails, so that their tables have the same shape.
pub(super) fn pieces<P: Registrar>(
    rails: &[P],
    plans: &[FilePlan],
) -> Result<Vec<Piece>, PublishError> {
    let limit = rails.iter().map(P::region_bytes_max).min().unwrap_or(0);
    let mut pieces = Vec::new();
    for (plan, file) in plans.iter().zip(0..) {
        for (extent, (_, bytes)) in plan.extents.iter().enumerate() {
            let cut = cuts(*bytes, limit).map(|(at, bytes)| Piece {
                file,
                extent,
                at: extent_bytes(at),
                bytes: extent_bytes(bytes),
            });
            pieces.extend(cut);
        }
    }
    let need = pieces.len() as u64;
    for rail in rails {
        let limit = rail.regions_max();
        if limit != 0 && need > limit {
            return Err(PublishError::TooManyRegions {
                rail: rail.name().to_owned(),
                need,
                limit,
            });
        }
    }
    Ok(pieces)
}

/// Cuts `bytes` into ranges of at most `limit` bytes that add up to it; a limit of 0 is none.
fn cuts(bytes: u64, limit: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = match limit {
        0 => u64::MAX,
        limit if limit >= SEAM_BYTES => limit / SEAM_BYTES * SEAM_BYTES,
        limit if limit >= 4096 => limit / 4096 * 4096,
        limit => limit,
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        let len = step.min(bytes - at);
        let cut = (at, len);
        at += len;
        (len > 0).then_some(cut)
    })
}

/// Extents in their order, those that touch or overlap made one. Empty ones and those beyond 2^64 stay as they are:
/// mapping refuses them with a reason.
fn merged(extents: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut sorted = extents.to_vec();
    sorted.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(sorted.len());
    for (offset, bytes) in sorted {
        let end = offset.checked_add(bytes);
        if let (Some((first, len)), Some(end)) = (merged.last_mut(), end) {
            let before = first.checked_add(*len);
            if bytes > 0 && *len > 0 && before.is_some_and(|before| before >= offset) {
                *len = (*len).max(end - *first);
                continue;
            }
        }
        merged.push((offset, bytes));
    }
    merged
}

/// A size that was checked to fit when its extent was mapped.
fn extent_bytes(bytes: u64) -> usize {
    usize::try_from(bytes).expect("an extent fits the address space")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn touching_and_overlapping_extents_become_one() {
        let given = [(100, 50), (0, 10), (10, 5), (120, 10), (140, 20), (200, 1)];
        assert_eq!(merged(&given), [(0, 15), (100, 60), (200, 1)]);
        // Nonsense is kept for the error that names it.
        assert_eq!(merged(&[(5, 0), (5, 3)]), [(5, 0), (5, 3)]);
        assert_eq!(merged(&[(0, 9), (u64::MAX, 2)]), [(0, 9), (u64::MAX, 2)]);
    }

    #[test]
    fn seams_lie_at_whole_huge_pages_where_the_limit_allows() {
        let cut = |bytes, limit| cuts(bytes, limit).collect::<Vec<_>>();
        assert_eq!(cut(10, 0), [(0, 10)]);
        assert_eq!(cut(10, u64::MAX), [(0, 10)]);
        let (two, five) = (2 << 20, 5 << 20);
        assert_eq!(
            cut(five, two + 4095),
            [(0, two), (two, two), (2 * two, 1 << 20)]
        );
        assert_eq!(cut(9000, 5000), [(0, 4096), (4096, 4096), (8192, 808)]);
        assert_eq!(cut(5, 2), [(0, 2), (2, 2), (4, 1)]);
    }

    proptest! {
        #[test]
        fn cuts_add_up_and_none_is_above_the_limit(bytes in 1u64..1 << 30, parts in 1u64..100) {
            let limit = bytes.div_ceil(parts);
            let mut next = 0;
            for (at, len) in cuts(bytes, limit) {
                prop_assert_eq!(at, next);
                prop_assert!(0 < len && len <= limit);
                next += len;
            }
            prop_assert_eq!(next, bytes);
        }
    }
}
