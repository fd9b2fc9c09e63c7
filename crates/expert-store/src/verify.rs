//! Checking every byte of a store.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::catalogue::Records;
use crate::digest::PayloadDigest;
use crate::info::StoreKind;
use crate::packed::{self, HEADER_BYTES};
use crate::work::{Block, Scan, WorkOptions};
use crate::{Key, Store, StoreError, v1};

/// A chunk whose bytes are not those that were indexed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct BadChunk {
    /// The record.
    pub key: Key,
    /// Index of the 256 KiB chunk of its image.
    pub chunk: u32,
    /// Checksum of the bytes there.
    pub got: u64,
    /// Checksum of the catalogue.
    pub want: u64,
}

/// How much is listed of what is bad; the counts cover everything.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// Threads, progress and interruption.
    pub work: WorkOptions,
    /// Bad chunks, and errors, that are listed.
    pub listed_max: usize,
    /// Compute the payload digest as well, from the same reads.
    pub payload_digest: bool,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self {
            work: WorkOptions::default(),
            listed_max: 1000,
            payload_digest: false,
        }
    }
}

/// What verification found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct VerifyReport {
    /// Records looked at.
    pub records: u64,
    /// Bytes of their images.
    pub bytes: u64,
    /// Chunks that differ, in order of key, up to the limit of the options.
    pub bad: Vec<BadChunk>,
    /// How many chunks differ.
    pub bad_count: u64,
    /// Records that could not be read, and packed headers, padding and catalogue values that are not
    /// what they must be, up to the limit of the options.
    pub errors: Vec<String>,
    /// How many of these there are.
    pub error_count: u64,
    /// The digest where it was asked for and every byte is right: over others it would tell nothing.
    #[serde(skip)]
    pub payload_digest: Option<u128>,
}

impl VerifyReport {
    /// Whether every byte is right.
    pub fn is_ok(&self) -> bool {
        self.bad_count == 0 && self.error_count == 0
    }
}

#[derive(Default)]
struct Found {
    bad: Vec<BadChunk>,
    errors: Vec<String>,
}

/// Reads all records and compares each chunk with its checksum; in packed and v1 stores also each
/// header and the zeros between records, and everywhere the catalogue's values of small leaves with
/// the records' bytes. What is bad is listed, not returned as an error.
///
/// *Errors*: [`StoreError::Store`] for a store without checksums, [`StoreError::ChangedInUse`],
/// [`StoreError::Interrupted`].
pub fn verify(store: &Store, options: &VerifyOptions) -> Result<VerifyReport, StoreError> {
    let unhashed = store
        .catalogue()
        .layers
        .iter()
        .find(|l| l.checksums.is_none());
    if let Some(layer) = unhashed {
        return Err(StoreError::store(
            store.path(),
            format!(
                "has no checksums (layer {}), so there is nothing to compare with; run `atlas-expert index` or pack it",
                layer.layer
            ),
        ));
    }
    let found = Mutex::new(Found::default());
    let bad_count = AtomicU64::new(0);
    let error_count = AtomicU64::new(0);
    let lock = || found.lock().unwrap_or_else(PoisonError::into_inner);
    let note = |e: String| {
        error_count.fetch_add(1, Ordering::Relaxed);
        let mut f = lock();
        if f.errors.len() < options.listed_max {
            f.errors.push(e);
        }
    };
    let mut digest = PayloadDigest::new();
    let scan = Scan::of(store, &options.work)?;
    scan.run(
        "verifying records",
        |block, buf| {
            let (layer, position) = (block.layer, block.position);
            let read = scan.reader.read_image(layer, position, block.offset, buf);
            if let Err(e) = &read {
                note(format!("{}: {e}", block.key()));
            }
            if block.is_last() {
                if let Err(e) = check_frame(store, &scan, layer, position) {
                    note(e.to_string());
                }
            }
            Ok(read.is_ok())
        },
        |block, bytes, sums| {
            let mut sound = true;
            for (chunk, got, want) in block.mismatches(sums) {
                sound = false;
                bad_count.fetch_add(1, Ordering::Relaxed);
                let mut f = lock();
                if f.bad.len() < options.listed_max {
                    f.bad.push(BadChunk {
                        key: block.key(),
                        chunk,
                        got,
                        want,
                    });
                }
            }
            if sound {
                check_inline(block, bytes, &note);
            }
            Ok(())
        },
        |block, bytes, _| {
            if options.payload_digest {
                digest.update_part(block.class(), block.offset, bytes);
            }
            Ok(())
        },
    )?;
    drop(scan);
    store.check_unchanged()?;
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.bad.sort_by_key(|b| (b.key, b.chunk));
    found.errors.sort();
    let mut report = VerifyReport {
        records: store.catalogue().record_count(),
        bytes: store.catalogue().image_bytes(),
        bad: found.bad,
        bad_count: bad_count.into_inner(),
        errors: found.errors,
        error_count: error_count.into_inner(),
        payload_digest: None,
    };
    if options.payload_digest && report.is_ok() {
        report.payload_digest = Some(digest.value());
    }
    Ok(report)
}

/// Compares the values that the catalogue repeats with the image's bytes: no identity covers them.
fn check_inline(block: &Block<'_>, bytes: &[u8], note: &dyn Fn(String)) {
    let leaves = &block.class().leaves;
    let first = leaves.partition_point(|l| l.image_offset < block.offset);
    for (i, leaf) in leaves.iter().enumerate().skip(first) {
        // Leaves lie at multiples of 256 and blocks at multiples of that: a small leaf is never cut.
        let at = (leaf.image_offset - block.offset) as usize;
        if at >= bytes.len() {
            break;
        }
        let Some(want) = block.layer.inline_value(block.position, i) else {
            continue;
        };
        if bytes.get(at..at + want.len()) != Some(want) {
            note(format!(
                "{}: the catalogue's value of leaf {} ({:?} {}) is not that of the record; build the store again",
                block.key(),
                leaf.name,
                leaf.role,
                leaf.leaf
            ));
        }
    }
}

/// What surrounds the image of a record in a file of ours: its header and the zeros after it.
fn check_frame(
    store: &Store,
    scan: &Scan<'_>,
    layer: &crate::Layer,
    position: usize,
) -> Result<(), StoreError> {
    let Records::Packed { file, stride, .. } = layer.records else {
        return Ok(());
    };
    let Some(open) = store.files().get(file as usize) else {
        return Ok(());
    };
    if store.kind() == StoreKind::V1 {
        return match store.v1_manifest() {
            Some(m) => v1::check_header(m, layer, position, &scan.reader, &open.path),
            None => Ok(()),
        };
    }
    // Not that of what is held: a selection of whole layers has another one.
    let content_id = store.header_content_id;
    packed::check_header(layer, position, &scan.reader, &open.path, content_id)?;
    let end = HEADER_BYTES + layer.class(position).image_bytes;
    let mut at = position as u64 * stride + end;
    let mut rest = stride - end;
    let mut buf = [0; 8192];
    while rest > 0 {
        let part = &mut buf[..rest.min(8192) as usize];
        scan.reader.read_file(file, at, part)?;
        if part.iter().any(|&b| b != 0) {
            return Err(StoreError::store(
                &open.path,
                format!(
                    "layer {} expert {}: the padding after the record is not zero",
                    layer.layer, layer.experts[position]
                ),
            ));
        }
        at += part.len() as u64;
        rest -= part.len() as u64;
    }
    Ok(())
}
