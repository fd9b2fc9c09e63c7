//! Building an in-place store: checksums and a catalogue that point into a checkpoint.

use std::path::Path;

use crate::build::{self, BuildOptions, Finished, Report};
use crate::digest::PayloadDigest;
use crate::info::StoreKind;
use crate::manifest::ManifestFile;
use crate::staging::Staging;
use crate::store::{OpenOptions, Store};
use crate::work::Scan;
use crate::{NameWhole, Selection, StoreError, open};

/// How a checkpoint is indexed.
#[derive(Debug, Clone)]
pub struct IndexOptions {
    /// Name prefix of the stack to take, for a checkpoint that has several.
    pub stack: Option<String>,
    /// The multi-token-prediction stack instead of the trunk.
    pub mtp: bool,
    /// The part of the model to take.
    pub selection: Option<Selection>,
    /// Whether such a part names the whole.
    pub name_whole: NameWhole,
    /// Compute checksums (reads all records); without them only headers and small leaves are read.
    pub checksums: bool,
    /// Everything else.
    pub build: BuildOptions,
}

impl Default for IndexOptions {
    fn default() -> Self {
        Self {
            stack: None,
            mtp: false,
            selection: None,
            name_whole: NameWhole::default(),
            checksums: true,
            build: BuildOptions::default(),
        }
    }
}

/// Writes an in-place store for a checkpoint. The checkpoint is read once and not written.
///
/// The payload digest is sequential over all records while checksums are computed by all threads;
/// blocks are handed on in order of key, so both see each byte while it is in memory, and memory
/// stays below 4 MiB per thread whatever the size of a record.
///
/// *Errors*: as [`Store::open`]; [`StoreError::OutputExists`] where `out` exists (see
/// [`BuildOptions::replace`]); [`StoreError::ChangedInUse`] where the checkpoint changed meanwhile;
/// [`StoreError::Interrupted`]. Nothing is left behind then.
pub fn index(checkpoint: &Path, out: &Path, options: &IndexOptions) -> Result<Report, StoreError> {
    let staging = Staging::directory(out, options.build.replace)?.synced(options.build.sync);
    let mut store = Store::open(
        checkpoint,
        &OpenOptions {
            stack: options.stack.clone(),
            mtp: options.mtp,
            checksums: false,
            threads: options.build.threads,
            selection: options.selection.clone(),
            name_whole: options.name_whole,
            progress: options.build.progress.clone(),
            cancel: options.build.cancel.clone(),
            ..OpenOptions::default()
        },
    )?;
    if !store.on_the_fly {
        return Err(StoreError::Usage(format!(
            "{} is a store already; index takes a checkpoint",
            checkpoint.display()
        )));
    }
    let work = options.build.work();
    let mut digest = PayloadDigest::new();
    let mut content_id = None;
    if options.checksums {
        let with_digest = options.build.payload_digest;
        let scan = Scan::of(&store, &work)?;
        let sums = open::collect_sums(&scan, |block, bytes| {
            if with_digest {
                digest.update_part(block.class(), block.offset, bytes);
            }
        })?;
        drop(scan);
        open::set_sums(&mut store.catalogue, sums)
            .map_err(|why| StoreError::store(checkpoint, why))?;
        content_id = store.catalogue.content_id();
    }
    let files = store
        .names
        .iter()
        .zip(&store.files)
        .map(|(name, file)| ManifestFile::source(name, &file.stamp))
        .collect();
    let hashed = options.checksums && options.build.payload_digest;
    let finished = Finished {
        source: &store,
        kind: StoreKind::InPlace,
        catalogue: store.catalogue.clone(),
        files,
        content_id,
        payload_digest: hashed.then(|| digest.value()),
        record_bytes: 0,
    };
    build::commit(staging, finished, &work)
}
