//! What killed builds leave beside their destination: told from builds that are at work by a lock,
//! and removed by the next build into the same place.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::manifest;

/// Locked in the temporary directory of a build for as long as the build runs.
pub(crate) const LOCK: &str = "build.lock";

/// Ends the name of a store that was moved aside.
const ASIDE: &str = "-old";

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

/// Where the store that a build replaces lies for a moment, on file systems that cannot exchange two
/// names.
pub(crate) fn aside(dir: &Path) -> PathBuf {
    let mut aside = dir.as_os_str().to_owned();
    aside.push(ASIDE);
    aside.into()
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

/// Locks a store that a build is about to replace, so that what is left of it under a temporary name
/// is the next build's to remove should this one be killed. `None` where that cannot be done.
pub(crate) fn mark(store: &Path) -> Option<File> {
    let path = store.join(LOCK);
    let file = lock_options().create(true).open(&path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    is_at(&file, &path).then_some(file)
}

fn lock_options() -> OpenOptions {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut options = File::options();
    options.read(true).write(true).custom_flags(flags);
    options
}

/// Takes the lock of a build that was killed.
///
/// *Errors*: `NotFound` where there is none, `WouldBlock` where its build is at work.
fn take_over(dir: &Path) -> io::Result<File> {
    let path = dir.join(LOCK);
    let lock = lock_options().open(&path)?;
    let is_ours = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
    match is_ours && is_at(&lock, &path) {
        true => Ok(lock),
        false => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Removes what killed builds into `out` left: directories of our name, whose lock nobody holds,
/// and which hold nothing but files of ours. What cannot be removed stays. A store that was moved
/// aside and not replaced is put back.
pub(crate) fn sweep(out: &Path) {
    let (Some(parent), Some(name)) = (out.parent(), out.file_name()) else {
        return;
    };
    unlock(out);
    let prefix = prefix(&name.to_string_lossy());
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|n| n.strip_prefix(&prefix)) else {
            continue;
        };
        let numbers = rest.strip_suffix(ASIDE).unwrap_or(rest);
        let ours = numbers
            .split_once('-')
            .is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u64>().is_ok());
        let path = entry.path();
        if !ours {
            continue;
        }
        if numbers != rest && matches!(put_back(&path, out), Ok(true)) {
            tracing::warn!(path = %out.display(), "put back what a build that was killed had moved aside");
        } else if matches!(remove_stale(&path), Ok(true)) {
            tracing::warn!(path = %path.display(), "removed what a build that was killed had left");
        }
    }
}

/// Removes the lock from a store whose build was killed right after the store had appeared.
fn unlock(store: &Path) {
    let path = store.join(LOCK);
    let is_empty = fs::symlink_metadata(&path).is_ok_and(|m| m.is_file() && m.len() == 0);
    if is_empty && manifest::generation_of(store).is_some() && take_over(store).is_ok() {
        let _ = fs::remove_file(path);
    }
}

fn put_back(aside: &Path, out: &Path) -> io::Result<bool> {
    let is_gone =
        matches!(fs::symlink_metadata(out), Err(e) if e.kind() == io::ErrorKind::NotFound);
    if !is_gone || manifest::generation_of(aside).is_none() {
        return Ok(false);
    }
    let _lock = take_over(aside)?;
    fs::rename(aside, out)?;
    fs::remove_file(out.join(LOCK)).map(|()| true)
}

fn remove_stale(dir: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(dir)?.is_dir() {
        return Ok(false);
    }
    let _lock = match take_over(dir) {
        Ok(lock) => lock,
        // Killed before it had a lock: it is empty then. `rmdir` takes no other.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return fs::remove_dir(dir).map(|()| true);
        }
        Err(e) => return Err(e),
    };
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
    fs::remove_file(dir.join(LOCK))?;
    fs::remove_dir(dir).map(|()| true)
}
