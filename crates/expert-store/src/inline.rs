//! Values of small leaves: collected with few, large reads.
//!
//! Half a million scales of four bytes usually lie side by side, since writers sort tensors by type.
//! Wanted ranges are sorted by place and read together where the gap between them is small.

use crate::StoreError;
use crate::catalogue::{Catalogue, INLINE_MAX_BYTES, LeafSource, Records, Stacking};
use crate::work::Reader;

/// Largest distance between two wanted ranges that are read as one: what a disk delivers in the
/// time of another request.
const GAP_BYTES: u64 = 32 << 10;
const READ_MAX_BYTES: u64 = 1 << 20;

struct Wanted {
    file: u32,
    bytes: u32,
    offset: u64,
    /// Layer, class, leaf, copy.
    to: (u32, u16, u16, u32),
}

/// Reads the values of all small leaves of an in-place catalogue into it.
pub(crate) fn fill(catalogue: &mut Catalogue, reader: &Reader) -> Result<(), StoreError> {
    let mut wanted = Vec::new();
    for (l, layer) in catalogue.layers.iter_mut().enumerate() {
        let Records::InPlace { sources } = &layer.records else {
            continue;
        };
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); layer.classes.len()];
        for (p, &expert) in layer.experts.iter().enumerate() {
            members[layer.class_of.get(p).map_or(0, |&c| usize::from(c))].push(expert);
        }
        let mut inline = Vec::new();
        for (c, class) in layer.classes.iter().enumerate() {
            let mut values = vec![Vec::new(); class.leaves.len()];
            for (i, leaf) in class.leaves.iter().enumerate() {
                if leaf.bytes == 0 || leaf.bytes > INLINE_MAX_BYTES {
                    continue;
                }
                let copies = match leaf.stacking {
                    Stacking::Common => members[c].len().min(1),
                    _ => members[c].len(),
                };
                values[i] = vec![0; leaf.bytes as usize * copies];
                for rank in 0..copies {
                    let (file, offset) = match &sources[c][i] {
                        LeafSource::Strided { file, base, step } => {
                            (*file, base + u64::from(members[c][rank]) * step)
                        }
                        LeafSource::Column { files, offsets } => (files[rank], offsets[rank]),
                    };
                    wanted.push(Wanted {
                        file,
                        offset,
                        bytes: leaf.bytes as u32,
                        to: (l as u32, c as u16, i as u16, rank as u32),
                    });
                }
            }
            inline.push(values);
        }
        layer.inline = inline;
    }
    wanted.sort_unstable_by_key(|w| (w.file, w.offset));
    let mut buf = Vec::new();
    let mut rest = wanted.as_slice();
    while let Some(first) = rest.first() {
        let mut end = first.offset + u64::from(first.bytes);
        let mut n = 1;
        while let Some(next) = rest.get(n) {
            let next_end = end.max(next.offset + u64::from(next.bytes));
            if next.file != first.file
                || next.offset > end + GAP_BYTES
                || next_end - first.offset > READ_MAX_BYTES
            {
                break;
            }
            end = next_end;
            n += 1;
        }
        buf.resize((end - first.offset) as usize, 0);
        reader.read_file(first.file, first.offset, &mut buf)?;
        for w in &rest[..n] {
            let from = (w.offset - first.offset) as usize;
            let bytes = w.bytes as usize;
            let (l, c, i, rank) = w.to;
            let to = rank as usize * bytes;
            catalogue.layers[l as usize].inline[usize::from(c)][usize::from(i)][to..to + bytes]
                .copy_from_slice(&buf[from..from + bytes]);
        }
        rest = &rest[n..];
    }
    Ok(())
}
