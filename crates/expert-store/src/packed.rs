//! The record files of a packed store: geometry, headers, audits.

use std::path::Path;

use crate::StoreError;
use crate::catalogue::{Catalogue, Layer, Records};
use crate::manifest::Manifest;
use crate::open_files::make_room;
use crate::store::StoreFile;
use crate::work::Reader;

/// Bytes before each record image.
pub const HEADER_BYTES: u64 = 256;
/// Records start at multiples of this.
pub const RECORD_ALIGN_BYTES: u64 = 4096;
/// First word of a record.
pub const MAGIC: u32 = expert_wire::v1::RECORD_MAGIC;
const VERSION: u32 = 2;
/// Bytes of the header that say something; zeros follow.
pub(crate) const HEADER_USED_BYTES: usize = 32;
/// Stores of up to so many records have all their headers read at opening; of larger ones three of
/// each layer (`verify` reads all).
const HEADERS_ALL: u64 = 1024;

/// Bytes from one record to the next for images of at most that size.
pub fn stride(image_bytes_max: u64) -> u64 {
    (image_bytes_max + HEADER_BYTES).next_multiple_of(RECORD_ALIGN_BYTES)
}

/// Name of the file of a layer.
pub(crate) fn file_name(layer: u32) -> String {
    format!("layer_{layer:05}.xp2")
}

/// The part of a record's header that is not zero.
pub(crate) fn header(
    layer: u32,
    expert: u32,
    image_bytes: u64,
    content_id: Option<u128>,
) -> [u8; HEADER_USED_BYTES] {
    let mut out = [0; HEADER_USED_BYTES];
    out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..8].copy_from_slice(&VERSION.to_le_bytes());
    out[8..12].copy_from_slice(&layer.to_le_bytes());
    out[12..16].copy_from_slice(&expert.to_le_bytes());
    out[16..24].copy_from_slice(&image_bytes.to_le_bytes());
    let id = content_id.unwrap_or(0).to_le_bytes();
    out[24..32].copy_from_slice(&id[..8]);
    out
}

/// Opens the record files and compares their lengths with geometry and manifest.
pub(crate) fn open_files(
    dir: &Path,
    manifest: &Manifest,
    catalogue: &Catalogue,
) -> Result<Vec<StoreFile>, StoreError> {
    let mut layer_of: Vec<Option<&Layer>> = vec![None; manifest.files.len()];
    for layer in &catalogue.layers {
        let Records::Packed { file, .. } = layer.records else {
            continue;
        };
        match layer_of.get_mut(file as usize) {
            Some(slot @ None) => *slot = Some(layer),
            _ => {
                return Err(StoreError::store(
                    dir,
                    format!(
                        "layer {} refers to file {file}, which is another layer's or missing",
                        layer.layer
                    ),
                ));
            }
        }
    }
    // Readers open them once more.
    make_room(dir, 2 * manifest.files.len())?;
    let mut files = Vec::new();
    for (entry, layer) in manifest.files.iter().zip(&layer_of) {
        let path = dir.join(&entry.name);
        let Some(layer) = layer else {
            return Err(StoreError::store(&path, "belongs to no layer"));
        };
        let Records::Packed { stride, .. } = layer.records else {
            continue;
        };
        let want = layer.experts.len() as u64 * stride;
        let label = format!("layer {}", layer.layer);
        if entry.bytes != want {
            return Err(StoreError::store(
                &path,
                format!(
                    "{label}: the manifest says {} bytes, {} records of {stride} take {want}",
                    entry.bytes,
                    layer.experts.len()
                ),
            ));
        }
        files.push(open_exact(path, want, &label)?);
    }
    Ok(files)
}

/// Opens a record file that must have exactly `want` bytes.
pub(crate) fn open_exact(
    path: std::path::PathBuf,
    want: u64,
    label: &str,
) -> Result<StoreFile, StoreError> {
    let file = match StoreFile::open(path.clone()) {
        Err(StoreError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(StoreError::store(
                path,
                format!("{label}: the file is missing; build the store again"),
            ));
        }
        other => other?,
    };
    let have = file.stamp.bytes;
    if have != want {
        let (word, n) = if have < want {
            ("short", want - have)
        } else {
            ("long", have - want)
        };
        return Err(StoreError::store(
            path,
            format!(
                "{label}: {have} bytes, expected {want} ({n} too {word}); build the store again"
            ),
        ));
    }
    Ok(file)
}

/// Positions of a layer whose headers are read at opening.
pub(crate) fn sampled(layer: &Layer, records: u64) -> Vec<usize> {
    let n = layer.experts.len();
    if records <= HEADERS_ALL {
        return (0..n).collect();
    }
    let mut positions = vec![0, n / 2, n - 1];
    positions.dedup();
    positions
}

/// Reads the headers of all records, or of some where there are many.
pub(crate) fn audit_headers(
    dir: &Path,
    catalogue: &Catalogue,
    files: &[StoreFile],
    content_id: Option<u128>,
) -> Result<(), StoreError> {
    let records = catalogue.record_count();
    let reader = Reader::open(files)?;
    for layer in &catalogue.layers {
        let Records::Packed { file, .. } = layer.records else {
            continue;
        };
        let Some(open) = files.get(file as usize) else {
            return Err(StoreError::store(dir, format!("no file {file}")));
        };
        for position in sampled(layer, records) {
            check_header(layer, position, &reader, &open.path, content_id)?;
        }
    }
    Ok(())
}

/// Compares the header of one record with what it must be.
pub(crate) fn check_header(
    layer: &Layer,
    position: usize,
    reader: &Reader,
    path: &Path,
    content_id: Option<u128>,
) -> Result<(), StoreError> {
    let Records::Packed { file, stride, .. } = layer.records else {
        return Ok(());
    };
    let mut got = [0; HEADER_BYTES as usize];
    reader.read_file(file, position as u64 * stride, &mut got)?;
    let expert = layer.experts[position];
    let want = header(
        layer.layer,
        expert,
        layer.class(position).image_bytes,
        content_id,
    );
    if got[..HEADER_USED_BYTES] != want || got[HEADER_USED_BYTES..].iter().any(|&b| b != 0) {
        let word = |at: usize| u32::from_le_bytes([got[at], got[at + 1], got[at + 2], got[at + 3]]);
        return Err(StoreError::store(
            path,
            format!(
                "layer {} expert {expert}: its header says magic {:#010x}, version {}, layer {}, expert {} and does not fit the catalogue or the content id",
                layer.layer,
                word(0),
                word(4),
                word(8),
                word(12)
            ),
        ));
    }
    Ok(())
}
