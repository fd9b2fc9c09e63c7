//! `manifest.json` of a store: reading it without believing it, and writing it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::catalogue::{Container, StackClass};
use crate::info::{LayerInfo, hex128, parse_hex128};
use crate::quiet::open_read;
use crate::stamp::FileStamp;
use crate::{StoreError, info::StoreKind};

/// Name of the file that makes a directory a store.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Name of the file with the layers' blobs.
pub(crate) const CATALOGUE: &str = "catalogue.bin";
/// Name of the file with the chunks' checksums.
pub(crate) const CHECKSUMS: &str = "checksums.xxh3";
/// Name of the file with the identities of the records that a part leaves out.
pub(crate) const WHOLE: &str = "whole.bin";

pub(crate) const FORMAT: &str = "atlas-expert-store";
/// Largest manifest: a line of 200 bytes for each of 100,000 files.
const MANIFEST_MAX_BYTES: u64 = 32 << 20;
/// Largest catalogue or checksums file: 16 bytes for each leaf of 64 million.
pub(crate) const TABLE_MAX_BYTES: u64 = 1 << 30;
pub(crate) const FILES_MAX: usize = 100_000;

/// Manifest of a v2 store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: String,
    pub(crate) version: u64,
    pub(crate) kind: StoreKind,
    pub(crate) generation: u64,
    pub(crate) stack: String,
    pub(crate) class: StackClass,
    pub(crate) container: Container,
    pub(crate) content_id: Option<String>,
    pub(crate) layout_id: String,
    #[serde(default)]
    pub(crate) payload_digest: Option<String>,
    #[serde(default)]
    pub(crate) checkpoint: Option<String>,
    #[serde(default)]
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) files: Vec<ManifestFile>,
    pub(crate) catalogue: Table,
    #[serde(default)]
    pub(crate) checksums: Option<Table>,
    pub(crate) layers: Vec<BlobRange>,
    /// What the store is a part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) whole: Option<ManifestWhole>,
}

/// The content that the store is a part of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ManifestWhole {
    pub(crate) content_id: String,
    pub(crate) layout_id: String,
    /// All its layers, described as wholes.
    pub(crate) layers: Vec<LayerInfo>,
    /// `whole.bin`: an id for each record that a held layer lacks.
    pub(crate) records: Table,
}

/// A file that the store refers to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ManifestFile {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// In place only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inode: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mtime_ns: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ctime_ns: Option<i64>,
}

impl ManifestFile {
    pub(crate) fn source(name: &str, stamp: &FileStamp) -> Self {
        Self {
            name: name.into(),
            bytes: stamp.bytes,
            device: Some(stamp.device),
            inode: Some(stamp.inode),
            mtime_ns: Some(stamp.mtime_ns),
            ctime_ns: Some(stamp.ctime_ns),
        }
    }
}

/// Length and hash of a file of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) bytes: u64,
    pub(crate) xxh3_128: String,
}

/// Where a layer's blob lies in `catalogue.bin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlobRange {
    pub(crate) layer: u32,
    pub(crate) blob_offset: u64,
    pub(crate) blob_bytes: u64,
}

/// What a directory's manifest is.
pub(crate) enum Found {
    V1(serde_json::Value),
    V2(Box<Manifest>),
    /// There is none, or it belongs to something else.
    None,
}

/// Reads `dir/manifest.json`.
pub(crate) fn read(dir: &Path) -> Result<Found, StoreError> {
    let path = dir.join(MANIFEST);
    if !path.exists() {
        return Ok(Found::None);
    }
    let mut text = Vec::new();
    open_read(&path)?
        .take(MANIFEST_MAX_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(StoreError::io("reading", &path))?;
    if text.len() as u64 > MANIFEST_MAX_BYTES {
        return Err(StoreError::store(
            &path,
            format!("more than {MANIFEST_MAX_BYTES} bytes"),
        ));
    }
    let value: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|e| StoreError::store(&path, format!("cannot be read: {e}")))?;
    let ours = value.get("format").and_then(|f| f.as_str()) == Some(FORMAT);
    let v1 = value.get("record_stride").is_some() && value.get("file_template").is_some();
    if !ours && !v1 {
        return Ok(Found::None);
    }
    match value.get("version").and_then(serde_json::Value::as_u64) {
        Some(1) if v1 => Ok(Found::V1(value)),
        Some(2) if ours => Manifest::deserialize(value)
            .map(|m| Found::V2(Box::new(m)))
            .map_err(|e| StoreError::store(&path, format!("cannot be read: {e}"))),
        Some(n) if n > 2 => Err(StoreError::store(
            &path,
            format!(
                "version {n} is from the future: this program knows 1 and 2; use a newer one or build the store again"
            ),
        )),
        Some(n) => Err(StoreError::store(
            &path,
            format!("version {n} does not fit its keys"),
        )),
        None => Err(StoreError::store(&path, "no version")),
    }
}

/// Generation of the store in `dir`, `None` where there is no readable manifest.
pub(crate) fn generation_of(dir: &Path) -> Option<u64> {
    match read(dir).ok()? {
        Found::V1(v) => Some(
            v.get("generation")
                .and_then(serde_json::Value::as_u64)
                .unwrap_or(1),
        ),
        Found::V2(m) => Some(m.generation),
        Found::None => None,
    }
}

/// Checks a name from a manifest: relative, below its root, without control characters.
///
/// *Errors*: text for people.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let confined = Path::new(name)
        .components()
        .all(|c| matches!(c, Component::Normal(_)));
    if name.is_empty() || name.len() > 4096 || !confined || name.chars().any(char::is_control) {
        return Err(format!(
            "file name {name:?} is refused: it must be relative, without `..` and control characters"
        ));
    }
    Ok(())
}

/// Reads a whole file of the store whose length and hash the manifest gives.
pub(crate) fn read_table(dir: &Path, name: &str, table: &Table) -> Result<Vec<u8>, StoreError> {
    let path = dir.join(name);
    if table.bytes > TABLE_MAX_BYTES {
        return Err(StoreError::store(
            &path,
            format!("{} bytes, the limit is {TABLE_MAX_BYTES}", table.bytes),
        ));
    }
    let want = parse_hex128(&table.xxh3_128).map_err(|e| StoreError::store(&path, e))?;
    let bytes = read_exact_file(&path, table.bytes)?;
    let got = xxhash_rust::xxh3::xxh3_128(&bytes);
    if got != want {
        return Err(StoreError::store(
            &path,
            format!(
                "hash {}, the manifest says {}: it is damaged; build the store again",
                hex128(got),
                hex128(want)
            ),
        ));
    }
    Ok(bytes)
}

/// Reads a file that must have exactly `bytes`; its size is looked at before memory is reserved.
pub(crate) fn read_exact_file(path: &Path, bytes: u64) -> Result<Vec<u8>, StoreError> {
    let io = |e| StoreError::io("reading", path)(e);
    let file = open_read(path)?;
    let have = file.metadata().map_err(io)?.len();
    if have != bytes {
        return Err(StoreError::store(
            path,
            format!("{have} bytes, the manifest says {bytes}"),
        ));
    }
    let mut out = Vec::with_capacity(bytes as usize);
    file.take(bytes).read_to_end(&mut out).map_err(io)?;
    if out.len() as u64 != bytes {
        return Err(StoreError::store(path, "became shorter while it was read"));
    }
    Ok(out)
}

/// Writes a file of a store, and waits until it is on disk where `sync` is asked for.
pub(crate) fn write_file(
    dir: &Path,
    name: &str,
    sync: bool,
    parts: impl Iterator<Item = impl AsRef<[u8]>> + Clone,
) -> Result<Table, StoreError> {
    let path = dir.join(name);
    let mut bytes = 0u64;
    let mut hash = Xxh3::new();
    let file = File::create_new(&path).map_err(StoreError::create(&path))?;
    let write = || {
        let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
        for part in parts.clone() {
            let part = part.as_ref();
            hash.update(part);
            bytes += part.len() as u64;
            out.write_all(part)?;
        }
        let file = out.into_inner().map_err(|e| e.into_error())?;
        if sync { file.sync_all() } else { Ok(()) }
    };
    if let Err(e) = write() {
        let need_bytes = parts.map(|part| part.as_ref().len() as u64).sum();
        return Err(StoreError::write("writing", &path, need_bytes)(e));
    }
    Ok(Table {
        bytes,
        xxh3_128: hex128(hash.digest128()),
    })
}
