//! From a path to the files of one checkpoint.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::index::Index;
use crate::StoreError;

/// Name of the index that Hugging Face checkpoints carry.
const INDEX_NAME: &str = "model.safetensors.index.json";
/// Directory entries looked at in one folder: far more than any checkpoint has files.
const ENTRIES_MAX: usize = 100_000;

/// The files of one checkpoint.
#[derive(Debug)]
pub(crate) struct Located {
    /// Their folder, absolute.
    pub(crate) root: PathBuf,
    /// What they are.
    pub(crate) source: Source,
    /// What was left out, for people.
    pub(crate) notes: Vec<String>,
}

/// Container and files, names relative to the root.
#[derive(Debug)]
pub(crate) enum Source {
    /// safetensors in bytewise order of name.
    Safetensors {
        /// Names.
        files: Vec<String>,
        /// Index and its path, where there is one.
        index: Option<(PathBuf, Index)>,
    },
    /// GGUF parts in order of part number.
    Gguf {
        /// Names.
        files: Vec<String>,
    },
}

/// The number of a file among those of one model, from `<prefix>-00001-of-00003<suffix>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Part {
    /// What comes before the numbers.
    pub(crate) prefix: String,
    /// How many parts there are.
    pub(crate) of: u32,
    /// This one, from 1.
    pub(crate) number: u32,
}

impl Part {
    /// The part that a name with that suffix says it is.
    pub(crate) fn of_name(name: &str, suffix: &str) -> Option<Self> {
        let stem = name.strip_suffix(suffix)?;
        let (head, of) = stem.rsplit_once("-of-")?;
        let (prefix, number) = head.rsplit_once('-')?;
        let parse = |digits: &str| {
            (digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit()))
                .then(|| digits.parse().ok())
                .flatten()
        };
        let (of, number): (u32, u32) = (parse(of)?, parse(number)?);
        (number >= 1 && number <= of).then(|| Self {
            prefix: prefix.to_owned(),
            of,
            number,
        })
    }

    fn name_of(&self, number: u32, suffix: &str) -> String {
        format!("{}-{number:05}-of-{:05}{suffix}", self.prefix, self.of)
    }
}

/// Whether a path looks like a checkpoint, without reading any tensor header.
pub(crate) fn is_checkpoint(path: &Path) -> bool {
    let known = |p: &Path| {
        let name = p.file_name().and_then(|n| n.to_str()).unwrap_or("");
        name.ends_with(".safetensors")
            || name.ends_with(".gguf")
            || name.ends_with(".safetensors.index.json")
    };
    match fs::metadata(path) {
        Ok(m) if m.is_file() => known(path),
        Ok(m) if m.is_dir() => {
            let dir = snapshot(path).unwrap_or_else(|| path.to_path_buf());
            fs::read_dir(dir).is_ok_and(|entries| {
                entries
                    .take(ENTRIES_MAX)
                    .filter_map(Result::ok)
                    .any(|e| known(&e.path()))
            })
        }
        _ => false,
    }
}

/// Finds the files that belong to the checkpoint at `path`.
///
/// *Errors*: nothing there that this crate can read, or not clear which of several models is meant.
pub(crate) fn locate(path: &Path) -> Result<Located, StoreError> {
    let metadata = fs::metadata(path).map_err(StoreError::io("opening", path))?;
    if metadata.is_dir() {
        let dir = snapshot(path).unwrap_or_else(|| path.to_path_buf());
        return folder(&dir, path);
    }
    // The folder is resolved, the file is not: in a hub cache it is a link to a blob without a name.
    let parent = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    let root = fs::canonicalize(parent).map_err(StoreError::io("opening", parent))?;
    let name = file_name(path).ok_or_else(|| {
        StoreError::checkpoint(
            path,
            "the file's name is not UTF-8, or has control characters",
        )
    })?;
    let mut notes = Vec::new();
    let source = if name.ends_with(".gguf") {
        Source::Gguf {
            files: split_set(&root, &name)?,
        }
    } else if name.ends_with(".safetensors.index.json") {
        with_index(&root, &name)?
    } else if name.ends_with(".safetensors") {
        if let Some(part) = Part::of_name(&name, ".safetensors").filter(|p| p.of > 1) {
            notes.push(format!(
                "{name} is part {} of {} and was opened alone; give the folder for the whole model",
                part.number, part.of
            ));
        }
        Source::Safetensors {
            files: vec![name],
            index: None,
        }
    } else if is_pickle(&name) {
        return Err(StoreError::checkpoint(path, PICKLE));
    } else {
        return Err(StoreError::checkpoint(
            path,
            "neither a folder nor a .safetensors or .gguf file",
        ));
    };
    Ok(Located {
        root,
        source,
        notes,
    })
}

const PICKLE: &str = "PyTorch pickle files (.bin, .pt) are not read, because loading one runs code; \
     convert the model to safetensors first (save_pretrained(..., safe_serialization=True))";

const GGUF_LEFT_OUT: &str = "GGUF files beside the safetensors were left out";

/// Whether a name is that of a safetensors file with a model's own weights.
fn is_model(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.starts_with("adapter")
}

fn is_pickle(name: &str) -> bool {
    [".bin", ".pt", ".pth", ".ckpt"]
        .iter()
        .any(|s| name.ends_with(s))
}

fn file_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    (!name.chars().any(char::is_control)).then(|| name.to_owned())
}

/// In the root of a hub cache (`models--org--name`), the snapshot that `refs/main` names, or the only one.
fn snapshot(path: &Path) -> Option<PathBuf> {
    let snapshots = path.join("snapshots");
    if !snapshots.is_dir() || !path.join("blobs").is_dir() {
        return None;
    }
    let main = fs::read_to_string(path.join("refs/main")).unwrap_or_default();
    let main = main.trim();
    if !main.is_empty() && main.len() <= 64 && main.bytes().all(|b| b.is_ascii_alphanumeric()) {
        let dir = snapshots.join(main);
        if dir.is_dir() {
            return Some(dir);
        }
    }
    let mut all = fs::read_dir(&snapshots)
        .ok()?
        .take(ENTRIES_MAX)
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.is_dir());
    let only = all.next()?;
    all.next().is_none().then_some(only)
}

fn folder(dir: &Path, given: &Path) -> Result<Located, StoreError> {
    let root = fs::canonicalize(dir).map_err(StoreError::io("opening", dir))?;
    let mut names = Vec::new();
    for entry in fs::read_dir(&root).map_err(StoreError::io("listing", &root))? {
        let entry = entry.map_err(StoreError::io("listing", &root))?;
        if names.len() >= ENTRIES_MAX {
            return Err(StoreError::checkpoint(
                given,
                format!("more than {ENTRIES_MAX} entries in the folder"),
            ));
        }
        // A folder is not a model file whatever its name; a dangling link is one that is missing.
        let is_dir = entry.path().metadata().is_ok_and(|m| m.is_dir());
        if let (Some(name), false) = (file_name(&entry.path()), is_dir) {
            names.push(name);
        }
    }
    names.sort_unstable();
    let has = |suffix: &str| names.iter().filter(|n| n.ends_with(suffix)).count();
    let mut notes = Vec::new();
    let source = if let Some(index) = index_name(&names) {
        if has(".gguf") > 0 {
            notes.push(GGUF_LEFT_OUT.into());
        }
        let source = with_index(&root, index)?;
        if let Source::Safetensors { files, .. } = &source {
            let mut unlisted = names
                .iter()
                .filter(|n| is_model(n) && files.binary_search(n).is_err());
            if let Some(first) = unlisted.next() {
                notes.push(format!(
                    "{} safetensors files that {index} does not list were left out, e.g. {first}",
                    unlisted.count() + 1
                ));
            }
        }
        source
    } else if names.iter().any(|n| is_model(n)) || (has(".safetensors") > 0 && has(".gguf") == 0) {
        if has(".gguf") > 0 {
            notes.push(GGUF_LEFT_OUT.into());
        }
        without_index(&names, given, &mut notes)?
    } else if has(".gguf") > 0 {
        gguf_folder(&root, &names, given, &mut notes)?
    } else if names.iter().any(|n| is_pickle(n)) {
        return Err(StoreError::checkpoint(given, PICKLE));
    } else {
        return Err(StoreError::checkpoint(
            given,
            "no .safetensors or .gguf files in this folder",
        ));
    };
    Ok(Located {
        root,
        source,
        notes,
    })
}

/// The index to use: the usual name, else the only one there is.
fn index_name(names: &[String]) -> Option<&str> {
    if names.iter().any(|n| n == INDEX_NAME) {
        return Some(INDEX_NAME);
    }
    let mut all = names
        .iter()
        .filter(|n| n.ends_with(".safetensors.index.json") && !n.starts_with("adapter"));
    let only = all.next()?;
    all.next().is_none().then_some(only)
}

fn with_index(root: &Path, name: &str) -> Result<Source, StoreError> {
    let path = root.join(name);
    let index = Index::read(&path)?;
    let missing: Vec<&String> = index
        .files
        .iter()
        .filter(|f| !root.join(f).is_file())
        .collect();
    if let Some(first) = missing.first() {
        return Err(StoreError::checkpoint(
            &path,
            format!(
                "{} of {} files that the index lists are missing, the first is {first}; finish the download",
                missing.len(),
                index.files.len()
            ),
        ));
    }
    Ok(Source::Safetensors {
        files: index.files.clone(),
        index: Some((path, index)),
    })
}

fn without_index(
    names: &[String],
    given: &Path,
    notes: &mut Vec<String>,
) -> Result<Source, StoreError> {
    let all = || names.iter().filter(|n| n.ends_with(".safetensors"));
    let is_consolidated = |n: &String| n.starts_with("consolidated");
    let mut files: Vec<String> = all().filter(|n| is_model(n)).cloned().collect();
    if files.is_empty() {
        return Err(StoreError::checkpoint(
            given,
            "this folder holds only an adapter (LoRA), which has no experts of its own; \
             give the base model's folder",
        ));
    }
    if all().any(|n| !is_model(n)) {
        notes.push("adapter files were left out".into());
    }
    if files.iter().any(is_consolidated) && !files.iter().all(is_consolidated) {
        files.retain(|n| !is_consolidated(n));
        notes.push(
            "consolidated*.safetensors were left out: they hold the same weights again".into(),
        );
    }
    let mut sets: BTreeMap<(String, u32), Vec<u32>> = BTreeMap::new();
    for part in files
        .iter()
        .filter_map(|n| Part::of_name(n, ".safetensors"))
    {
        sets.entry((part.prefix, part.of))
            .or_default()
            .push(part.number);
    }
    for ((prefix, of), there) in sets {
        if there.len() as u64 != u64::from(of) {
            let first = (1..=of).find(|n| !there.contains(n)).unwrap_or(of);
            return Err(StoreError::checkpoint(
                given,
                format!(
                    "{} of {of} parts are missing, the first is {prefix}-{first:05}-of-{of:05}.safetensors; \
                     finish the download",
                    of as usize - there.len()
                ),
            ));
        }
    }
    Ok(Source::Safetensors { files, index: None })
}

/// The one GGUF model of a folder; projectors of multimodal models are no model.
fn gguf_folder(
    root: &Path,
    names: &[String],
    given: &Path,
    notes: &mut Vec<String>,
) -> Result<Source, StoreError> {
    let mut models: BTreeMap<String, String> = BTreeMap::new();
    for name in names.iter().filter(|n| n.ends_with(".gguf")) {
        if name.contains("mmproj") {
            notes.push(format!("{name} was left out: a multimodal projector"));
            continue;
        }
        let key = match Part::of_name(name, ".gguf") {
            Some(part) => part.name_of(1, ".gguf"),
            None => name.clone(),
        };
        models.entry(key).or_insert_with(|| name.clone());
    }
    let mut all = models.values();
    match (all.next(), all.next()) {
        (Some(only), None) => Ok(Source::Gguf {
            files: split_set(root, only)?,
        }),
        (Some(a), Some(b)) => Err(StoreError::checkpoint(
            given,
            format!(
                "{} GGUF models in this folder ({a}, {b}, ...); give the file that you mean",
                models.len()
            ),
        )),
        _ => Err(StoreError::checkpoint(
            given,
            "no GGUF model in this folder, only a projector",
        )),
    }
}

/// All parts of the split that `name` belongs to, in order; just the file where it is no part.
fn split_set(root: &Path, name: &str) -> Result<Vec<String>, StoreError> {
    let Some(part) = Part::of_name(name, ".gguf") else {
        return Ok(vec![name.to_owned()]);
    };
    let files: Vec<String> = (1..=part.of).map(|n| part.name_of(n, ".gguf")).collect();
    let missing: Vec<&String> = files.iter().filter(|f| !root.join(f).is_file()).collect();
    if let Some(first) = missing.first() {
        return Err(StoreError::checkpoint(
            root.join(name),
            format!(
                "{} of {} parts are missing, the first is {first}; finish the download",
                missing.len(),
                part.of
            ),
        ));
    }
    Ok(files)
}

#[cfg(test)]
#[path = "tests/locate.rs"]
mod tests;
