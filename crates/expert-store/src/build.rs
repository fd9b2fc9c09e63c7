//! What building an in-place and a packed store have in common.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::catalogue::Catalogue;
use crate::codec::{self, Sections};
use crate::info::{StoreKind, hex128};
use crate::manifest::{
    BlobRange, CATALOGUE, CHECKSUMS, FORMAT, MANIFEST, Manifest, ManifestFile, TABLE_MAX_BYTES,
};
use crate::progress::Progress;
use crate::staging::Staging;
use crate::store::Store;
use crate::{StoreError, WorkOptions, whole};

/// How a store is built.
#[derive(Clone)]
pub struct BuildOptions {
    /// Threads; 0 takes the machine's number.
    pub threads: usize,
    /// Replace the store that is there by a new generation.
    pub replace: bool,
    /// Have all of it on disk before the store appears. Without it the store is left to the page cache,
    /// as `cp` leaves a copy, and a power loss within the next half minute or so may damage it: tables,
    /// lengths of files and headers are checked when it is opened, the bytes of records only when they
    /// are read with checksums, as [`verify()`](crate::verify()) does. With [`replace`](Self::replace)
    /// the old store is gone, too.
    pub sync: bool,
    /// Compute the payload digest; it runs beside the checksums over the same bytes, but on one
    /// thread (about 10 GB/s).
    pub payload_digest: bool,
    /// Who is told how far it is.
    pub progress: Option<Arc<dyn Progress>>,
    /// Set to true to stop; nothing is left behind.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            threads: 0,
            replace: false,
            sync: true,
            payload_digest: true,
            progress: None,
            cancel: None,
        }
    }
}

impl std::fmt::Debug for BuildOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BuildOptions")
            .field("threads", &self.threads)
            .field("replace", &self.replace)
            .field("sync", &self.sync)
            .field("payload_digest", &self.payload_digest)
            .finish_non_exhaustive()
    }
}

impl BuildOptions {
    pub(crate) fn work(&self) -> WorkOptions {
        WorkOptions {
            threads: self.threads,
            progress: self.progress.clone(),
            cancel: self.cancel.clone(),
        }
    }
}

/// What was built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The store's directory.
    pub path: PathBuf,
    /// Records in it.
    pub records: u64,
    /// Sum of their images, bytes.
    pub image_bytes: u64,
    /// Bytes that the store takes on disk, without what it points to.
    pub store_bytes: u64,
    /// Generation in the manifest.
    pub generation: u64,
    /// Identity of the content, `None` without checksums.
    pub content_id: Option<u128>,
    /// Identity of the content that it is a part of, 32 hexadecimal digits; `None` where it is no part or
    /// does not know.
    pub whole_content_id: Option<String>,
    /// Identity of names, types and shapes.
    pub layout_id: u128,
    /// xxh3-128 over the payload, `None` where it was not asked for.
    pub payload_digest: Option<u128>,
    /// What a person should know.
    pub warnings: Vec<String>,
}

/// What is to be committed.
pub(crate) struct Finished<'a> {
    pub(crate) source: &'a Store,
    pub(crate) kind: StoreKind,
    pub(crate) catalogue: Catalogue,
    pub(crate) files: Vec<ManifestFile>,
    pub(crate) content_id: Option<u128>,
    pub(crate) payload_digest: Option<u128>,
    /// Bytes of the record files.
    pub(crate) record_bytes: u64,
}

/// Writes tables and manifest and makes the store appear.
pub(crate) fn commit(
    staging: Staging,
    finished: Finished<'_>,
    work: &WorkOptions,
) -> Result<Report, StoreError> {
    let Finished {
        source,
        kind,
        catalogue,
        files,
        content_id,
        payload_digest,
        record_bytes,
    } = finished;
    let blobs: Vec<Vec<u8>> = catalogue
        .layers
        .iter()
        .map(|l| {
            codec::encode_layer(
                l,
                Sections {
                    segments: true,
                    checksums: false,
                    rest: false,
                },
            )
        })
        .collect();
    let mut layers = Vec::new();
    let mut at = 0;
    for (layer, blob) in catalogue.layers.iter().zip(&blobs) {
        let blob_bytes = blob.len() as u64;
        layers.push(BlobRange {
            layer: layer.layer,
            blob_offset: at,
            blob_bytes,
        });
        at += blob_bytes;
    }
    if at > TABLE_MAX_BYTES {
        return Err(StoreError::Usage(format!(
            "the catalogue takes {at} bytes, the limit is {TABLE_MAX_BYTES}; select fewer layers"
        )));
    }
    let catalogue_table = staging.write_file(CATALOGUE, blobs.iter())?;
    drop(blobs);
    let sums = content_id.is_some().then(|| {
        let bytes = catalogue
            .layers
            .iter()
            .flat_map(|l| l.checksums.as_deref().unwrap_or(&[]))
            .map(|s| s.to_le_bytes());
        staging.write_file(CHECKSUMS, bytes)
    });
    let checksums = sums.transpose()?;
    let layout_id = catalogue.layout_id();
    let checkpoint = match kind {
        StoreKind::InPlace => Some(source.root().to_str().map(str::to_owned).ok_or_else(|| {
            StoreError::Usage(format!(
                "{} is not UTF-8: a manifest cannot name it",
                source.root().display()
            ))
        })?),
        _ => None,
    };
    let store_bytes =
        record_bytes + catalogue_table.bytes + checksums.as_ref().map_or(0, |t| t.bytes);
    let left_out = source.left_out.as_ref().filter(|_| content_id.is_some());
    let whole = left_out.and_then(|l| l.whole(&catalogue.stack, &catalogue.layers));
    let whole_id = whole.as_ref().map(|w| w.content_id.clone());
    let whole = whole
        .map(|whole| whole::write(&staging, whole, &catalogue.layers))
        .transpose()?;
    let manifest = Manifest {
        format: FORMAT.into(),
        version: 2,
        kind,
        generation: staging.generation(),
        stack: catalogue.stack.clone(),
        class: catalogue.class,
        container: catalogue.container,
        content_id: content_id.map(hex128),
        layout_id: hex128(layout_id),
        payload_digest: payload_digest.map(hex128),
        checkpoint,
        metadata: source.metadata().clone(),
        files,
        catalogue: catalogue_table,
        checksums,
        layers,
        whole,
    };
    let text = serde_json::to_vec_pretty(&manifest)
        .map_err(|e| StoreError::store(staging.out(), format!("manifest: {e}")))?;
    // Last of all: whoever changed the checkpoint meanwhile made the sums worthless.
    source.check_unchanged()?;
    work.check_cancel()?;
    staging.write_file(MANIFEST, std::iter::once(text))?;
    let generation = staging.generation();
    let done = staging.commit()?;
    Ok(Report {
        path: done.path,
        records: catalogue.record_count(),
        image_bytes: catalogue.image_bytes(),
        store_bytes,
        generation,
        content_id,
        whole_content_id: whole_id,
        layout_id,
        payload_digest,
        warnings: [source.warnings(), &done.warnings].concat(),
    })
}
