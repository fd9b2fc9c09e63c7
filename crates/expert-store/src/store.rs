//! An open store: a checked catalogue, open files and the way from a record to its bytes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use xxhash_rust::xxh3::xxh3_64;

use crate::catalogue::{CHUNK_BYTES, Catalogue, Layer, stack_id};
use crate::codec::{self, Sections};
use crate::info::{LayerInfo, StoreInfo, StoreKind, hex128};
use crate::pieces::{self, Piece};
use crate::progress::Progress;
use crate::select::{Selection, describe};
use crate::stamp::FileStamp;
use crate::whole::{LeftOut, NameWhole};
use crate::{Key, StoreError, WorkOptions};

/// How a store is opened; the default takes all there is and verifies what can be verified cheaply.
#[derive(Clone)]
pub struct OpenOptions {
    /// Name prefix of the stack to take, for a checkpoint that has several.
    pub stack: Option<String>,
    /// The multi-token-prediction stack instead of the trunk.
    pub mtp: bool,
    /// Hash all records of a checkpoint that is indexed on the fly (reads all of them).
    pub checksums: bool,
    /// Threads for hashing; 0 takes the machine's number.
    pub threads: usize,
    /// Who is told how far it is.
    pub progress: Option<Arc<dyn Progress>>,
    /// The part of the model to take.
    pub selection: Option<Selection>,
    /// Whether such a part names the whole.
    pub name_whole: NameWhole,
    /// Set to true to stop.
    pub cancel: Option<Arc<AtomicBool>>,
    /// Where the checkpoint of an in-place store lies now, if it was moved.
    pub checkpoint_override: Option<PathBuf>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            stack: None,
            mtp: false,
            checksums: true,
            threads: 0,
            progress: None,
            selection: None,
            name_whole: NameWhole::default(),
            cancel: None,
            checkpoint_override: None,
        }
    }
}

impl std::fmt::Debug for OpenOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenOptions")
            .field("stack", &self.stack)
            .field("mtp", &self.mtp)
            .field("checksums", &self.checksums)
            .field("selection", &self.selection)
            .finish_non_exhaustive()
    }
}

impl OpenOptions {
    pub(crate) fn work(&self) -> WorkOptions {
        WorkOptions {
            threads: self.threads,
            progress: self.progress.clone(),
            cancel: self.cancel.clone(),
        }
    }
}

/// A file that records lie in, open for reading.
#[derive(Debug)]
pub struct StoreFile {
    /// Where it was opened.
    pub path: PathBuf,
    /// Opened read-only.
    pub file: File,
    /// Its state when the store was opened.
    pub stamp: FileStamp,
}

impl StoreFile {
    pub(crate) fn open(path: PathBuf) -> Result<Self, StoreError> {
        let file = crate::quiet::open_read(&path)?;
        let stamp = file
            .metadata()
            .map(|m| FileStamp::of(&m))
            .map_err(StoreError::io("reading the state of", &path))?;
        Ok(Self { path, file, stamp })
    }

    /// How the open file differs from what it was at opening, `None` where it does not: one `fstat`.
    ///
    /// Size, both times, inode and device count. The time of the last change of attributes tells an
    /// overwrite whose modification time was put back; it cannot be told from a `chmod`, a rename or a
    /// new hard link of the file, so these count as changes, too.
    pub fn changed_now(&self) -> Option<String> {
        match self.file.metadata() {
            Ok(now) => self.stamp.change(&FileStamp::of(&now)),
            Err(e) => Some(format!("its state cannot be read: {e}")),
        }
    }
}

/// A store whose manifest, catalogue and files were audited and fit together.
///
/// Threads: everything takes `&self`; reads use `pread` and need no lock.
#[derive(Debug)]
pub struct Store {
    pub(crate) path: PathBuf,
    pub(crate) root: PathBuf,
    pub(crate) on_the_fly: bool,
    pub(crate) catalogue: Catalogue,
    pub(crate) files: Vec<StoreFile>,
    /// Names of the files relative to `root`.
    pub(crate) names: Vec<String>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) payload_digest: Option<u128>,
    /// What the headers of packed records carry.
    pub(crate) header_content_id: Option<u128>,
    pub(crate) v1: Option<expert_wire::v1::Manifest>,
    pub(crate) warnings: Vec<String>,
    /// What it lacks of the whole that it is a part of.
    pub(crate) left_out: Option<LeftOut>,
    content_id: Option<u128>,
    layout_id: u128,
    info: StoreInfo,
}

/// What the ways to open a store come up with.
pub(crate) struct Parts {
    pub(crate) path: PathBuf,
    pub(crate) root: PathBuf,
    pub(crate) on_the_fly: bool,
    pub(crate) kind: StoreKind,
    pub(crate) generation: u64,
    pub(crate) catalogue: Catalogue,
    pub(crate) files: Vec<StoreFile>,
    pub(crate) names: Vec<String>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) payload_digest: Option<u128>,
    /// What the headers of packed records carry.
    pub(crate) header_content_id: Option<u128>,
    pub(crate) v1: Option<expert_wire::v1::Manifest>,
    pub(crate) warnings: Vec<String>,
    pub(crate) left_out: Option<LeftOut>,
}

impl Store {
    /// Opens a store directory (v1 or v2), or indexes a checkpoint folder, a safetensors file or a
    /// GGUF file on the fly.
    ///
    /// *Errors*: [`StoreError::Store`] for a store whose parts do not fit (says which layer or file),
    /// [`StoreError::SourceChanged`] when the checkpoint below is not the one that was indexed,
    /// [`StoreError::Checkpoint`] and [`StoreError::NoExperts`] for what is neither,
    /// [`StoreError::Usage`] for a stack or a selection that is not there.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self, StoreError> {
        crate::open::open(path.as_ref(), options)
    }

    pub(crate) fn from_parts(parts: Parts) -> Self {
        let layers: Vec<LayerInfo> = parts.catalogue.layers.iter().map(LayerInfo::of).collect();
        let stack = &parts.catalogue.stack;
        let hashed =
            !layers.is_empty() && parts.catalogue.layers.iter().all(|l| l.checksums.is_some());
        let content_id = hashed.then(|| {
            let ids = layers.iter().map(|l| {
                // Written by `LayerInfo::of` just now.
                (l.layer, u128::from_str_radix(&l.id, 16).unwrap_or(0))
            });
            stack_id(stack, ids)
        });
        let layout_id = parts.catalogue.layout_id();
        let info = StoreInfo {
            kind: parts.kind,
            stack: stack.clone(),
            class: parts.catalogue.class,
            container: parts.catalogue.container,
            generation: parts.generation,
            content_id: content_id.map(hex128),
            layout_id: hex128(layout_id),
            whole: parts
                .left_out
                .as_ref()
                .and_then(|left_out| left_out.whole(stack, &parts.catalogue.layers)),
            layers,
        };
        Self {
            path: parts.path,
            root: parts.root,
            on_the_fly: parts.on_the_fly,
            catalogue: parts.catalogue,
            files: parts.files,
            names: parts.names,
            metadata: parts.metadata,
            payload_digest: parts.payload_digest,
            header_content_id: parts.header_content_id,
            v1: parts.v1,
            warnings: parts.warnings,
            left_out: parts.left_out,
            content_id,
            layout_id,
            info,
        }
    }

    /// What it holds and where.
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Kind of store.
    pub fn kind(&self) -> StoreKind {
        self.info.kind
    }

    /// Description to send or print; computed when the store was opened.
    pub fn info(&self) -> &StoreInfo {
        &self.info
    }

    /// Counter of rebuilds; 1 for a checkpoint indexed on the fly.
    pub fn generation(&self) -> u64 {
        self.info.generation
    }

    /// Identity of the content of what is held, `None` without checksums.
    pub fn content_id(&self) -> Option<u128> {
        self.content_id
    }

    /// Identity of names, types and shapes of what is held.
    pub fn layout_id(&self) -> u128 {
        self.layout_id
    }

    /// The payload digest that the manifest gives for the whole store; `None` where it gives none
    /// or only a part of the store was opened.
    pub fn recorded_payload_digest(&self) -> Option<u128> {
        self.payload_digest
    }

    /// The manifest of a v1 store that was opened whole: what v1 clients are told.
    pub fn v1_manifest(&self) -> Option<&expert_wire::v1::Manifest> {
        self.v1.as_ref()
    }

    /// What a person should know, one sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// What was opened, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folder that the names of the files are relative to: the checkpoint's, or the store's own.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What was kept of the checkpoint's metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// A layer's blob (`docs/store.md`, "Layer blob"), `None` where the layer is not held.
    pub fn layer_blob(&self, layer: u32, sections: Sections) -> Option<Vec<u8>> {
        self.catalogue
            .layer(layer)
            .map(|l| codec::encode_layer(l, sections))
    }

    /// The files that records lie in; pieces refer to them by index.
    pub fn files(&self) -> &[StoreFile] {
        &self.files
    }

    /// The layer and the position in it of a record.
    ///
    /// *Errors*: [`StoreError::IdentityExpert`] for a zero expert, [`StoreError::NoSuchRecord`] for
    /// any other that is not held.
    pub fn locate(&self, key: Key) -> Result<(&Layer, usize), StoreError> {
        let none = |why| StoreError::NoSuchRecord { key, why };
        let layer = self.catalogue.layer(key.layer).ok_or_else(|| {
            let held = describe(self.catalogue.layers.iter().map(|l| l.layer));
            none(format!("no such layer here; held: {held}"))
        })?;
        match layer.position(key.expert) {
            Some(position) => Ok((layer, position)),
            None if key.expert >= layer.num_experts
                && key.expert - layer.num_experts < layer.identity_experts =>
            {
                Err(StoreError::IdentityExpert {
                    key,
                    num_experts: layer.num_experts,
                })
            }
            None => Err(none(format!(
                "no such expert here; held of {}: {}",
                layer.num_experts,
                describe(layer.experts.iter().copied())
            ))),
        }
    }

    fn locate_range(
        &self,
        key: Key,
        offset: u64,
        bytes: u64,
    ) -> Result<(&Layer, usize), StoreError> {
        let (layer, position) = self.locate(key)?;
        let image_bytes = layer.class(position).image_bytes;
        match offset.checked_add(bytes) {
            Some(end) if end <= image_bytes => Ok((layer, position)),
            _ => Err(StoreError::BadRange {
                key,
                offset,
                bytes,
                image_bytes,
            }),
        }
    }

    /// Calls `f` for the pieces that make up bytes `offset..offset + bytes` of a record image, in
    /// order; neighbours that touch in one file come as one piece.
    ///
    /// *Errors*: as [`Store::locate`], and [`StoreError::BadRange`].
    pub fn for_each_piece(
        &self,
        key: Key,
        offset: u64,
        bytes: u64,
        f: &mut dyn FnMut(Piece),
    ) -> Result<(), StoreError> {
        let (layer, position) = self.locate_range(key, offset, bytes)?;
        pieces::for_each_piece(layer, position, offset, bytes, f);
        Ok(())
    }

    /// Fills `buf` with the record image's bytes from `offset`, padding as zeros.
    ///
    /// *Errors*: as [`Store::for_each_piece`]; [`StoreError::Io`] also for a file that became shorter.
    pub fn read_image(&self, key: Key, offset: u64, buf: &mut [u8]) -> Result<(), StoreError> {
        let (layer, position) = self.locate_range(key, offset, buf.len() as u64)?;
        pieces::fill(layer, position, offset, buf, |file, offset, part| {
            self.read_file(file, offset, part)
        })
    }

    fn read_file(&self, file: u32, offset: u64, buf: &mut [u8]) -> Result<(), StoreError> {
        let Some(f) = self.files.get(file as usize) else {
            return Err(StoreError::store(&self.path, format!("no file {file}")));
        };
        f.file
            .read_exact_at(buf, offset)
            .map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => io::Error::new(
                    e.kind(),
                    format!(
                        "the file ends before byte {}",
                        offset.saturating_add(buf.len() as u64)
                    ),
                ),
                _ => e,
            })
            .map_err(StoreError::io("reading", &f.path))
    }

    /// Reads a record and compares each chunk with its checksum.
    ///
    /// *Errors*: [`StoreError::Checksum`] for the first chunk that differs, [`StoreError::Store`]
    /// where the store has no checksums.
    pub fn verify_record(&self, key: Key) -> Result<(), StoreError> {
        let (layer, position) = self.locate(key)?;
        let sums = layer.record_checksums(position).ok_or_else(|| {
            StoreError::store(&self.path, "has no checksums; run `atlas-expert index`")
        })?;
        let image_bytes = layer.class(position).image_bytes;
        let mut buf = vec![0; CHUNK_BYTES.min(image_bytes) as usize];
        for (chunk, &want) in sums.iter().enumerate() {
            let offset = chunk as u64 * CHUNK_BYTES;
            let part = &mut buf[..CHUNK_BYTES.min(image_bytes - offset) as usize];
            self.read_image(key, offset, part)?;
            let got = xxh3_64(part);
            if got != want {
                return Err(StoreError::Checksum {
                    key,
                    chunk: chunk as u32,
                    got,
                    want,
                });
            }
        }
        Ok(())
    }

    /// Looks at each file again, by descriptor and by path: index and reason of those that changed
    /// since the store was opened ([`StoreFile::changed_now`]), were replaced, or are gone.
    pub fn changed_files(&self) -> Vec<(usize, String)> {
        let state = |f: &StoreFile| -> Option<String> {
            if let Some(why) = f.changed_now() {
                return Some(why);
            }
            match std::fs::metadata(&f.path) {
                Ok(m) => f.stamp.change(&FileStamp::of(&m)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Some("it is gone".into()),
                Err(e) => Some(format!("its path cannot be followed: {e}")),
            }
        };
        self.files
            .iter()
            .enumerate()
            .filter_map(|(i, f)| state(f).map(|why| (i, why)))
            .collect()
    }

    /// [`StoreError::ChangedInUse`] for the first file that changed since the store was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), StoreError> {
        match self.changed_files().into_iter().next() {
            None => Ok(()),
            Some((i, why)) => Err(StoreError::ChangedInUse {
                path: self.files[i].path.clone(),
                why,
            }),
        }
    }
}
