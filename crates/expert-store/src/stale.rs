//! What killed builds leave beside their destination: told from builds that are at work by a lock,
//! and removed by the next build into the same place.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

/// Locked in the temporary directory of a build for as long as the build runs.
pub(crate) const LOCK: &str = "build.lock";

/// Files of stores: all that replacing one may delete.
pub(crate) fn is_store_file(name: &str) -> bool {
    matches!(
        name,
        "manifest.json" | "catalogue.bin" | "checksums.xxh3" | "whole.bin" | LOCK
    ) || name.ends_with(".xp2")
        || name.ends_with(".xpr")
}

/// Files that some build of ours writes.
fn is_built_file(name: &str) -> bool {
    let tensors = [".safetensors", ".gguf"].iter().any(|e| name.ends_with(e));
    is_store_file(name)
        || matches!(name, "config.json" | "model.safetensors.index.json")
        || (tensors && name.starts_with("model"))
}

/// Name of the temporary directory of a build, without its place.
pub(crate) fn dir_name(out_name: &str, process: u32, count: u64) -> String {
    format!("{}{process}-{count}", prefix(out_name))
}

fn prefix(out_name: &str) -> String {
    format!(".{out_name}.tmp-")
}

/// Locks a directory that was just made; `None` where a sweep took it for a stale one.
///
/// A file system without locks is no error: nobody can lock there, so nobody removes anything.
pub(crate) fn lock(dir: &Path) -> io::Result<Option<File>> {
    let path = dir.join(LOCK);
    let file = match File::options().write(true).create_new(true).open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        return Ok(None);
    }
    Ok(is_at(&file, &path).then_some(file))
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(a), Ok(b)) => a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Removes what killed builds into `out` left: directories of our name, whose lock nobody holds,
/// and which hold nothing but files of ours. What cannot be removed stays.
pub(crate) fn sweep(out: &Path) {
    let (Some(parent), Some(name)) = (out.parent(), out.file_name()) else {
        return;
    };
    let prefix = prefix(&name.to_string_lossy());
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let numbers = name.to_str().and_then(|n| n.strip_prefix(&prefix));
        let ours = numbers
            .and_then(|n| n.split_once('-'))
            .is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u64>().is_ok());
        let path = entry.path();
        if ours && matches!(remove_stale(&path), Ok(true)) {
            tracing::warn!(path = %path.display(), "removed what a build that was killed had left");
        }
    }
}

fn remove_stale(dir: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(dir)?.is_dir() {
        return Ok(false);
    }
    let path = dir.join(LOCK);
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let lock = File::options()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(&path);
    let lock = match lock {
        Ok(lock) => lock,
        // Killed before it had a lock: it is empty then. `rmdir` takes no other.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return fs::remove_dir(dir).map(|()| true);
        }
        Err(e) => return Err(e),
    };
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() || !is_at(&lock, &path) {
        return Ok(false);
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if !entry.file_type()?.is_file() || !name.to_str().is_some_and(is_built_file) {
            return Ok(false);
        }
        if name != LOCK {
            names.push(name);
        }
    }
    for name in names {
        fs::remove_file(dir.join(name))?;
    }
    // Last, so that a sweep that is killed itself leaves something for the next one to lock.
    fs::remove_file(&path)?;
    fs::remove_dir(dir).map(|()| true)
}
