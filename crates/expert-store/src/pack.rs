//! Building a packed store: the record images themselves, one file per layer.

use std::path::Path;

use crate::build::{self, BuildOptions, Finished, Report};
use crate::catalogue::{Catalogue, Container, Layer, Records};
use crate::digest::PayloadDigest;
use crate::info::StoreKind;
use crate::manifest::ManifestFile;
use crate::open_files::make_room;
use crate::packed::{self, HEADER_BYTES};
use crate::staging::Staging;
use crate::store::Store;
use crate::work::{Block, Scan};
use crate::writeback::{OutFile, check_space, write_behind};
use crate::{StoreError, open};

/// Bytes at the start of each record that stay in the page cache until the headers are written.
const HEADER_PAGE_BYTES: u64 = 4096;

/// Packs what a store holds (open a checkpoint with [`crate::OpenOptions::checksums`] off: packing
/// computes them). Reads each byte once and verifies it where the source has checksums.
///
/// The bytes depend on the experts alone: two machines get the same files.
///
/// *Errors*: [`StoreError::Full`] before anything is copied where the disk is too small;
/// [`StoreError::Checksum`]; [`StoreError::ChangedInUse`]; [`StoreError::Interrupted`];
/// [`StoreError::OutputExists`] where `out` exists, or for a v1 source. Nothing is left behind then.
pub fn pack(source: &Store, out: &Path, options: &BuildOptions) -> Result<Report, StoreError> {
    if source.catalogue.container == Container::V1 {
        return Err(StoreError::Usage(format!(
            "{} is a v1 store: its leaves are transposed, so it cannot be packed as v2; pack the checkpoint",
            source.path().display()
        )));
    }
    let work = options.work();
    let staging = Staging::directory(out, options.replace)?.synced(options.sync);
    let mut catalogue = with_packed_records(&source.catalogue)
        .map_err(|why| StoreError::store(source.path(), why))?;
    let sizes: Vec<u64> = catalogue.layers.iter().map(file_bytes).collect();
    let record_bytes = sizes.iter().copied().fold(0u64, u64::saturating_add);
    check_space(staging.dir(), record_bytes)?;
    make_room(staging.out(), catalogue.layers.len())?;
    let mut files = Vec::new();
    for (layer, &bytes) in catalogue.layers.iter().zip(&sizes) {
        work.check_cancel()?;
        let path = staging.dir().join(packed::file_name(layer.layer));
        files.push(OutFile::create(path, bytes)?);
    }

    let strides: Vec<u64> = catalogue.layers.iter().map(stride_of).collect();
    let place =
        |b: &Block<'_>| b.position as u64 * strides[b.layer_index] + HEADER_BYTES + b.offset;
    let scan = Scan::of(source, &work)?;
    let mut sums: Vec<Vec<u64>> = vec![Vec::new(); catalogue.layers.len()];
    let mut digest = PayloadDigest::new();
    write_behind(&files, options.sync, |flusher| {
        scan.run(
            "packing records",
            |block, buf| {
                scan.reader
                    .read_image(block.layer, block.position, block.offset, buf)
                    .map(|()| true)
            },
            |block, bytes, chunk_sums| {
                block.check(chunk_sums)?;
                files[block.layer_index].write_at(bytes, place(block))
            },
            |block, bytes, chunk_sums| {
                sums[block.layer_index].extend_from_slice(chunk_sums);
                if options.payload_digest {
                    digest.update_part(block.class(), block.offset, bytes);
                }
                let mut from = place(block);
                let end = from + bytes.len() as u64;
                if block.offset == 0 {
                    // The header is written last, into a page that should still be there then.
                    from = (from - HEADER_BYTES + HEADER_PAGE_BYTES).min(end);
                }
                flusher.done(block.layer_index, from, end - from)
            },
        )
    })?;
    drop(scan);
    open::set_sums(&mut catalogue, sums).map_err(|why| StoreError::store(source.path(), why))?;
    let content_id = catalogue.content_id();
    for ((layer, file), stride) in catalogue.layers.iter().zip(&files).zip(&strides) {
        for (position, &expert) in layer.experts.iter().enumerate() {
            let image_bytes = layer.class(position).image_bytes;
            let header = packed::header(layer.layer, expert, image_bytes, content_id);
            file.write_at(&header, position as u64 * stride)?;
        }
        work.check_cancel()?;
        if options.sync {
            file.finish()?;
        }
    }
    let names = catalogue.layers.iter().zip(&sizes);
    let manifest_files = names
        .map(|(layer, &bytes)| ManifestFile {
            name: packed::file_name(layer.layer),
            bytes,
            device: None,
            inode: None,
            mtime_ns: None,
            ctime_ns: None,
        })
        .collect();
    let finished = Finished {
        source,
        kind: StoreKind::Packed,
        catalogue,
        files: manifest_files,
        content_id,
        payload_digest: options.payload_digest.then(|| digest.value()),
        record_bytes,
    };
    build::commit(staging, finished, &work)
}

fn stride_of(layer: &Layer) -> u64 {
    packed::stride(layer.image_bytes_max())
}

fn file_bytes(layer: &Layer) -> u64 {
    stride_of(layer).saturating_mul(layer.experts.len() as u64)
}

/// The same layers, their records in packed files and without checksums.
fn with_packed_records(source: &Catalogue) -> Result<Catalogue, String> {
    let layers = source.layers.iter().enumerate().map(|(i, l)| {
        let mut packed = Layer::new(
            l.layer,
            l.model_layer,
            l.num_experts,
            l.identity_experts,
            l.classes.clone(),
            l.experts.clone(),
            l.class_of.clone(),
            Records::Packed {
                file: i as u32,
                stride: stride_of(l),
                header_bytes: HEADER_BYTES,
            },
            None,
            l.inline.clone(),
        )?;
        packed.set_rest(l.rest().cloned())?;
        Ok::<_, String>(packed)
    });
    Ok(Catalogue {
        stack: source.stack.clone(),
        class: source.class,
        container: source.container,
        layers: layers.collect::<Result<_, _>>()?,
    })
}
