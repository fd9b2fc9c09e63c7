//! One record as the checkpoint has it.

use std::io::Write;

use crate::catalogue::CHUNK_BYTES;
use crate::digest::for_each_leaf_part;
use crate::{Key, Store, StoreError};

/// Writes the leaves of a record, as stored in the checkpoint and without padding, in canonical
/// order; a v1 record comes whole. Where the store has checksums each chunk is verified before any
/// of it is written. Returns the bytes written.
///
/// *Errors*: as [`Store::read_image`] and [`Store::verify_record`]; [`StoreError::Io`] for the writer.
pub fn extract(store: &Store, key: Key, out: &mut dyn Write) -> Result<u64, StoreError> {
    let (layer, position) = store.locate(key)?;
    let class = layer.class(position);
    let sums = layer.record_checksums(position);
    let mut buf = vec![0; CHUNK_BYTES.min(class.image_bytes) as usize];
    let mut written = 0;
    let mut offset = 0;
    while offset < class.image_bytes {
        let n = CHUNK_BYTES.min(class.image_bytes - offset) as usize;
        let part = &mut buf[..n];
        store.read_image(key, offset, part)?;
        let chunk = offset / CHUNK_BYTES;
        if let Some(&want) = sums.and_then(|s| s.get(chunk as usize)) {
            let got = xxhash_rust::xxh3::xxh3_64(part);
            if got != want {
                return Err(StoreError::Checksum {
                    key,
                    chunk: chunk as u32,
                    got,
                    want,
                });
            }
        }
        let mut result = Ok(());
        for_each_leaf_part(class, offset, part, |_, _, bytes| {
            if result.is_ok() {
                result = out.write_all(bytes);
                written += bytes.len() as u64;
            }
        });
        result.map_err(StoreError::io("writing", "the output"))?;
        offset += n as u64;
    }
    Ok(written)
}
