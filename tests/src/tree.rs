//! Folders, remembered byte for byte.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use xxhash_rust::xxh3::xxh3_128;

/// State of one file, folder or link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Last change of content.
    pub modified: SystemTime,
    /// Length and hash of a file.
    pub content: Option<(u64, u128)>,
    /// Where a link points.
    pub link: Option<PathBuf>,
}

/// Everything below a folder, by path relative to it.
pub fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Entry> {
    let mut out = BTreeMap::new();
    walk(folder, Path::new(""), &mut out);
    out
}

fn walk(root: &Path, below: &Path, out: &mut BTreeMap<PathBuf, Entry>) {
    for name in names(&root.join(below)) {
        let relative = below.join(name);
        let path = root.join(&relative);
        let metadata = fs::symlink_metadata(&path).expect("metadata");
        let content = metadata.is_file().then(|| {
            let bytes = fs::read(&path).expect("a readable file");
            (bytes.len() as u64, xxh3_128(&bytes))
        });
        let entry = Entry {
            modified: metadata.modified().expect("a modification time"),
            content,
            link: metadata
                .is_symlink()
                .then(|| fs::read_link(&path).expect("a link")),
        };
        out.insert(relative.clone(), entry);
        if metadata.is_dir() {
            walk(root, &relative, out);
        }
    }
}

/// The bytes of each file in a folder, by name.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |n: String| {
        let bytes = fs::read(folder.join(&n)).expect("a readable file");
        (n, bytes)
    };
    names(folder).into_iter().map(read).collect()
}

/// Names in a folder in order, with those that start with a dot.
pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap_or_else(|e| panic!("listing {}: {e}", folder.display()))
        .map(|e| {
            e.expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        })
        .collect();
    names.sort();
    names
}

/// Copies the files of a flat folder; links become files.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new folder");
    for name in names(from) {
        if from.join(&name).is_file() {
            fs::copy(from.join(&name), to.join(&name)).expect("a copy");
        }
    }
}

/// Flips the lowest bit of one byte of a file.
pub fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).expect("a readable file");
    bytes[usize::try_from(at).expect("an offset")] ^= 1;
    fs::write(path, bytes).expect("a writable file");
}
