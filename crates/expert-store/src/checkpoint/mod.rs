//! Checkpoints: finding the routed experts in the files that a model came in.
//!
//! [`open`] reads headers only. Tensor names and shapes decide what an expert is; `config.json` and
//! GGUF metadata are a cross-check whose disagreement is a warning. Nothing in a file is believed:
//! counts and sizes are bounded by the file before memory is reserved, and memory stays within a
//! few times the size of the headers.
//!
//! In order of use: `locate` (path to files), `index` (the weight map), `safetensors` and `gguf`
//! (one header), `recognise` (one name), `gather` (what was found), `assemble` and `layer` (the
//! catalogue's layers), `config` (the cross-check).

mod assemble;
mod config;
mod gather;
mod gguf;
mod index;
mod layer;
mod locate;
mod recognise;
mod safetensors;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;

use self::assemble::{Context, assemble, repeated};
use self::config::Config;
use self::gather::Gathered;
use self::index::{Index, first_repeat};
use self::locate::{Located, Source, locate};
use crate::StoreError;
use crate::catalogue::{Container, Layer, StackClass};
use crate::stamp::FileStamp;

/// A checkpoint whose headers were read and whose experts were recognised.
#[derive(Debug)]
pub struct Checkpoint {
    /// Folder that the names of `files` are relative to; absolute.
    pub root: PathBuf,
    /// Files that hold tensors, in bytewise order of name; `Layer`s refer to them by index.
    pub files: Vec<SourceFile>,
    /// File format.
    pub container: Container,
    /// Stacks of MoE layers: trunks first, then MTP; each group in order of name.
    pub stacks: Vec<Stack>,
    /// What is worth keeping of the container's metadata, e.g. `general.architecture`.
    pub metadata: BTreeMap<String, String>,
    /// What a person should know: disagreement of config and tensors, skipped files.
    pub warnings: Vec<String>,
}

/// One file of a checkpoint.
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// Name relative to the checkpoint's root.
    pub name: String,
    /// Size, identity and times when its header was read.
    pub stamp: FileStamp,
}

/// One stack of MoE layers.
#[derive(Debug, Clone)]
pub struct Stack {
    /// Name prefix, e.g. `model.layers`.
    pub prefix: String,
    /// Trunk or MTP.
    pub class: StackClass,
    /// In order of dense index; [`crate::catalogue::Records::InPlace`], without checksums and values.
    pub layers: Vec<Layer>,
}

/// How to open a checkpoint.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// Threads that read headers; 0 is as many as the machine has, at most 4.
    pub threads: usize,
}

/// Whether a path looks like a checkpoint: a folder with, or one of, `.safetensors` and `.gguf` files.
///
/// Looks at names only, so that callers who take stores and checkpoints alike can tell them apart;
/// ask for a store first.
pub fn is_checkpoint(path: &Path) -> bool {
    locate::is_checkpoint(path)
}

/// Opens a checkpoint: reads its headers and finds its routed experts.
///
/// `path` is a folder with safetensors or one GGUF model, a single `.safetensors` file, an index
/// file, any part of a split GGUF, or the root of a model in a hub cache. Links are followed.
///
/// *Errors*: [`StoreError::NoExperts`] for a sound dense model; [`StoreError::Checkpoint`] for what is
/// damaged, incomplete or not supported, with what to do; [`StoreError::Io`].
pub fn open(path: &Path) -> Result<Checkpoint, StoreError> {
    open_with(path, &OpenOptions::default())
}

/// As [`open`], with options.
///
/// *Errors*: those of [`open`].
pub fn open_with(path: &Path, options: &OpenOptions) -> Result<Checkpoint, StoreError> {
    let Located {
        root,
        source,
        notes: mut warnings,
    } = locate(path)?;
    let (container, names, stamps, gathered, config) = match source {
        Source::Safetensors { files, index } => {
            let (stamps, gathered) = read_safetensors(path, &root, &files, index, options)?;
            let config = Config::read(&root, &mut warnings);
            (Container::Safetensors, files, stamps, gathered, config)
        }
        Source::Gguf { files } => {
            let (stamps, gathered, config) = read_gguf(path, &root, &files, &mut warnings)?;
            (Container::Gguf, files, stamps, gathered, config)
        }
    };
    if gathered.unknown > 0 {
        warnings.push(format!(
            "{} tensors below experts were not recognised and left out, e.g. {}",
            gathered.unknown,
            gathered.unknown_name.as_deref().unwrap_or("")
        ));
    }
    let context = Context {
        container,
        config: &config,
        files: &names,
    };
    let stacks = assemble(&gathered, &context, &mut warnings)
        .map_err(|why| StoreError::checkpoint(path, why))?;
    if stacks.is_empty() {
        return Err(no_experts(path, &gathered, &warnings));
    }
    for stack in &stacks {
        config.check(stack, &mut warnings);
    }
    Ok(Checkpoint {
        root,
        files: names
            .into_iter()
            .zip(stamps)
            .map(|(name, stamp)| SourceFile { name, stamp })
            .collect(),
        container,
        stacks,
        metadata: config.metadata,
        warnings,
    })
}

fn no_experts(path: &Path, gathered: &Gathered, warnings: &[String]) -> StoreError {
    if gathered.adapters > 0 && gathered.adapters * 2 > gathered.tensors {
        return StoreError::checkpoint(
            path,
            "an adapter (LoRA), which has no experts of its own; give the base model",
        );
    }
    let why = match (gathered.tensors, warnings.last()) {
        (0, _) => "the files hold no tensors".to_owned(),
        (n, None) => format!("{n} tensors, none of them a routed expert's (a dense model?)"),
        (n, Some(last)) => format!("{n} tensors; {last}"),
    };
    StoreError::NoExperts {
        path: path.to_path_buf(),
        why,
    }
}

/// Most threads that read headers: each may hold one header.
const THREADS_MAX: usize = 64;

fn read_safetensors(
    path: &Path,
    root: &Path,
    files: &[String],
    index: Option<(PathBuf, Index)>,
    options: &OpenOptions,
) -> Result<(Vec<FileStamp>, Gathered), StoreError> {
    let threads = match options.threads {
        0 => std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(4),
        n => n,
    }
    .min(files.len())
    .min(THREADS_MAX);
    let next = AtomicUsize::new(0);
    type Read = Result<(FileStamp, Vec<u128>), StoreError>;
    let results: Mutex<Vec<(usize, Read)>> = Mutex::new(Vec::with_capacity(files.len()));
    let work = || {
        let mut found = Gathered::default();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(name) = files.get(i) else {
                return found;
            };
            let read = safetensors::gather(&root.join(name), i as u32, &mut found);
            if read.is_err() {
                // The others finish their file; what follows would be thrown away.
                next.store(files.len(), Ordering::Relaxed);
            }
            if let Ok(mut results) = results.lock() {
                results.push((i, read));
            }
        }
    };
    let gathered = std::thread::scope(|scope| {
        // Where no more threads are to be had, those there are do the work.
        let helpers: Vec<_> = (1..threads)
            .filter_map(|_| {
                std::thread::Builder::new()
                    .name("checkpoint-headers".into())
                    .spawn_scoped(scope, work)
                    .ok()
            })
            .collect();
        let mut all = work();
        for helper in helpers {
            match helper.join() {
                Ok(found) => all.merge(found),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    });
    let mut results = results
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_unstable_by_key(|(i, _)| *i);
    let mut stamps = Vec::with_capacity(files.len());
    let mut names = Vec::with_capacity(files.len());
    for (_, read) in results {
        let (stamp, hashes) = read?;
        stamps.push(stamp);
        names.push(hashes);
    }
    if let Some((index_path, index)) = &index {
        index.check_listed(index_path, &names)?;
    }
    if let Some((hash, a, b)) = first_repeat(&names) {
        let (a, b) = (&files[a], &files[b]);
        let name = safetensors::find_name(&root.join(a), hash).unwrap_or_default();
        return Err(StoreError::checkpoint(path, repeated(&name, a, b)));
    }
    Ok((stamps, gathered))
}

fn read_gguf(
    path: &Path,
    root: &Path,
    files: &[String],
    warnings: &mut Vec<String>,
) -> Result<(Vec<FileStamp>, Gathered, Config), StoreError> {
    let mut gathered = Gathered::default();
    let mut parts = Vec::with_capacity(files.len());
    for (i, name) in files.iter().enumerate() {
        let mut part = gguf::gather(&root.join(name), i as u32, &mut gathered)?;
        warnings.extend(part.warning.take());
        parts.push(part);
    }
    gguf::check_parts(files, &parts).map_err(|why| StoreError::checkpoint(path, why))?;
    let names: Vec<Vec<u128>> = parts
        .iter_mut()
        .map(|p| std::mem::take(&mut p.names))
        .collect();
    if let Some((_, a, b)) = first_repeat(&names) {
        return Err(StoreError::checkpoint(
            path,
            format!(
                "{} and {} hold a tensor of the same name",
                files[a], files[b]
            ),
        ));
    }
    // Only the first part of a split describes the model.
    let config = parts
        .first()
        .map(|p| Config::of_gguf(&p.metadata))
        .unwrap_or_default();
    if config
        .metadata
        .get("general.type")
        .is_some_and(|t| t == "adapter")
    {
        return Err(StoreError::checkpoint(
            path,
            "a GGUF adapter (LoRA), which has no experts of its own; give the base model",
        ));
    }
    if !config.metadata.contains_key("general.architecture") {
        warnings.push(
            "the GGUF metadata has no general.architecture, so layers and experts were not cross-checked"
                .into(),
        );
    }
    Ok((parts.iter().map(|p| p.stamp).collect(), gathered, config))
}

/// A JSON text, borrowed where it has no escapes.
#[derive(Deserialize)]
struct TextKey<'a>(#[serde(borrow)] Cow<'a, str>);

/// Opens a regular file and stamps it; anything else (a pipe would block) is refused unopened.
fn open_regular(path: &Path) -> Result<(File, FileStamp), StoreError> {
    let refuse = || StoreError::checkpoint(path, "not a regular file");
    let kind = std::fs::metadata(path).map_err(StoreError::io("opening", path))?;
    if !kind.is_file() {
        return Err(refuse());
    }
    let file = File::open(path).map_err(StoreError::io("opening", path))?;
    let metadata = file.metadata().map_err(StoreError::io("reading", path))?;
    if !metadata.is_file() {
        return Err(refuse());
    }
    Ok((file, FileStamp::of(&metadata)))
}

/// A whole file of at most `limit` bytes.
fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, StoreError> {
    let (file, stamp) = open_regular(path)?;
    if stamp.bytes > limit {
        return Err(StoreError::checkpoint(
            path,
            format!(
                "{} bytes, the limit for such a file is {limit}",
                stamp.bytes
            ),
        ));
    }
    let mut text = Vec::with_capacity(stamp.bytes as usize);
    file.take(limit)
        .read_to_end(&mut text)
        .map_err(StoreError::io("reading", path))?;
    Ok(text)
}

#[cfg(test)]
mod tests;
