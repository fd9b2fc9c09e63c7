//! The ranges of files that records lie in.

use tracing::warn;

use crate::{FilePiece, Source};

/// A range of a file of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Extent {
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// The ranges of all records in order of the files, disjoint; two with at most `gap_bytes` between
/// them are one.
pub(crate) fn extents(source: &dyn Source, gap_bytes: u64) -> Vec<Extent> {
    let mut ranges: Vec<(u32, u64, u64)> = Vec::new();
    source.for_each_record(&mut |key, image_bytes| {
        let outcome = source.for_each_piece(key, 0, image_bytes, &mut |piece| {
            let FilePiece::File {
                file,
                offset,
                bytes,
            } = piece
            else {
                return;
            };
            let end = offset.saturating_add(bytes);
            // A packed record follows the one before it: most joins happen here, and what is
            // sorted below stays short.
            match ranges.last_mut() {
                _ if bytes == 0 => {}
                Some(last)
                    if last.0 == file
                        && (last.1..=last.2.saturating_add(gap_bytes)).contains(&offset) =>
                {
                    last.2 = last.2.max(end);
                }
                _ => ranges.push((file, offset, end)),
            }
        });
        if let Err(e) = outcome {
            warn!("{key}: {e}");
        }
    });
    ranges.sort_unstable();
    let mut joined: Vec<(u32, u64, u64)> = Vec::new();
    for (file, start, end) in ranges {
        match joined.last_mut() {
            Some(last) if last.0 == file && start <= last.2.saturating_add(gap_bytes) => {
                last.2 = last.2.max(end);
            }
            _ => joined.push((file, start, end)),
        }
    }
    joined
        .into_iter()
        .map(|(file, start, end)| Extent {
            file,
            offset: start,
            bytes: end - start,
        })
        .collect()
}
