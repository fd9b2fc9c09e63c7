//! The payload digest: one number over the leaves' bytes of many records, the same for each kind
//! of store.

use xxhash_rust::xxh3::Xxh3;

use crate::catalogue::Class;
use crate::work::{Scan, WorkOptions};
use crate::{Store, StoreError};

/// Incremental xxh3-128 over leaf bytes without padding; feed it records in order of layer and
/// expert (`docs/store.md`, "Content id").
#[derive(Clone)]
pub struct PayloadDigest {
    hash: Xxh3,
}

impl std::fmt::Debug for PayloadDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PayloadDigest")
    }
}

impl Default for PayloadDigest {
    fn default() -> Self {
        Self::new()
    }
}

impl PayloadDigest {
    /// A digest of nothing yet.
    pub fn new() -> Self {
        Self { hash: Xxh3::new() }
    }

    /// Adds a whole record image; what lies between and after the leaves is left out. For a v1
    /// record, whose only leaf is the record, that is all of it.
    pub fn update(&mut self, class: &Class, image: &[u8]) {
        self.update_part(class, 0, image);
    }

    /// Adds the part of a record image that starts at `offset`; the parts of a record must come in
    /// order and without gaps.
    pub fn update_part(&mut self, class: &Class, offset: u64, part: &[u8]) {
        for_each_leaf_part(class, offset, part, |_, _, bytes| self.hash.update(bytes));
    }

    /// The number so far.
    pub fn value(&self) -> u128 {
        self.hash.digest128()
    }
}

/// Calls `f(leaf index, first byte within the leaf, bytes)` for each leaf that a part of an image
/// touches, in image order; padding is left out.
pub(crate) fn for_each_leaf_part<'a>(
    class: &Class,
    offset: u64,
    part: &'a [u8],
    mut f: impl FnMut(usize, u64, &'a [u8]),
) {
    let end = offset + part.len() as u64;
    let first = class
        .leaves
        .partition_point(|l| l.image_offset + l.bytes <= offset);
    for (i, leaf) in class.leaves.iter().enumerate().skip(first) {
        if leaf.image_offset >= end {
            break;
        }
        let from = leaf.image_offset.max(offset);
        let to = (leaf.image_offset + leaf.bytes).min(end);
        if from < to {
            f(
                i,
                from - leaf.image_offset,
                &part[(from - offset) as usize..(to - offset) as usize],
            );
        }
    }
}

/// The payload digest of all records of a store, read once.
///
/// *Errors*: what reading gives, and [`StoreError::Checksum`] where the store has checksums.
pub fn payload_digest(store: &Store, options: &WorkOptions) -> Result<u128, StoreError> {
    let mut digest = PayloadDigest::new();
    Scan::of(store, options)?.checked("reading records", |block, bytes, _| {
        digest.update_part(block.class(), block.offset, bytes);
        Ok(())
    })?;
    Ok(digest.value())
}
