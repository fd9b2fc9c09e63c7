//! Building next to the destination and appearing there in one step, or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::StoreError;
use crate::manifest;
use crate::stale::{self, LOCK, is_store_file};

/// A temporary directory beside the destination; dropped without commit, it goes away with all
/// that is in it.
#[derive(Debug)]
pub(crate) struct Staging {
    dir: PathBuf,
    out: PathBuf,
    /// Generation of the store that is to be replaced, 0 where there is none.
    old_generation: u64,
    replace: bool,
    /// Whether all is on disk before it appears.
    sync: bool,
    live: bool,
    /// Held until the end: tells other builds that this one is at work.
    _lock: File,
}

/// What was built, in its place.
#[derive(Debug)]
pub(crate) struct Committed {
    pub(crate) path: PathBuf,
    /// What of the replaced directory is still there, and where.
    pub(crate) warnings: Vec<String>,
}

fn exists(path: PathBuf, why: &str) -> StoreError {
    StoreError::OutputExists {
        path,
        why: why.to_owned(),
    }
}

impl Staging {
    /// Starts to build what will be the directory `out`.
    ///
    /// *Errors*: [`StoreError::OutputExists`] where `out` exists and `replace` is false, or where it holds
    /// anything that is not a store's.
    pub(crate) fn directory(out: &Path, replace: bool) -> Result<Self, StoreError> {
        let out = absolute(out)?;
        // Before anything is looked at: a killed build may have moved the store aside.
        stale::sweep(&out);
        let mut old_generation = 0;
        match fs::symlink_metadata(&out) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(StoreError::io("reading the state of", &out)(e)),
            Ok(_) if !replace => {
                return Err(exists(
                    out,
                    "exists already; choose another name (pack and index can put a new generation in a store's place: --replace)",
                ));
            }
            Ok(m) if m.is_dir() => old_generation = old_store(&out)?,
            Ok(_) => {
                return Err(exists(out, "is not a directory and will not be replaced"));
            }
        }
        Self::start(out, replace, old_generation)
    }

    /// Starts to build what will be the single file `out`; an existing one is never replaced.
    pub(crate) fn file(out: &Path) -> Result<Self, StoreError> {
        let out = absolute(out)?;
        stale::sweep(&out);
        if fs::symlink_metadata(&out).is_ok() {
            return Err(exists(out, "exists already; choose another name"));
        }
        Self::start(out, false, 0)
    }

    fn start(out: PathBuf, replace: bool, old_generation: u64) -> Result<Self, StoreError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = out
            .file_name()
            .ok_or_else(|| StoreError::Usage(format!("{} has no last component", out.display())))?;
        loop {
            let dir = out.with_file_name(stale::dir_name(
                &name.to_string_lossy(),
                std::process::id(),
                COUNT.fetch_add(1, Ordering::Relaxed),
            ));
            match fs::create_dir(&dir) {
                Ok(()) => match stale::lock(&dir) {
                    Ok(Some(lock)) => {
                        return Ok(Self {
                            dir,
                            out,
                            old_generation,
                            replace,
                            sync: true,
                            live: true,
                            _lock: lock,
                        });
                    }
                    // Another build's sweep came first.
                    Ok(None) => {}
                    Err(e) => {
                        let _ = fs::remove_dir(&dir);
                        return Err(StoreError::create(dir.join(LOCK))(e));
                    }
                },
                // Left by a process of the same number that was killed.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(StoreError::create(&dir)(e)),
            }
        }
    }

    /// The same, and whether what is built shall be on disk before it appears; it shall unless told
    /// otherwise.
    pub(crate) fn synced(mut self, sync: bool) -> Self {
        self.sync = sync;
        self
    }

    /// Writes a file into what is being built.
    pub(crate) fn write_file(
        &self,
        name: &str,
        parts: impl Iterator<Item = impl AsRef<[u8]>> + Clone,
    ) -> Result<manifest::Table, StoreError> {
        manifest::write_file(&self.dir, name, self.sync, parts)
    }

    /// Where to build.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where it will appear.
    pub(crate) fn out(&self) -> &Path {
        &self.out
    }

    /// Generation of what is being built.
    pub(crate) fn generation(&self) -> u64 {
        self.old_generation.saturating_add(1)
    }

    /// Makes the directory appear; its files have been synced by their writers, if they shall be.
    pub(crate) fn commit(mut self) -> Result<Committed, StoreError> {
        if self.sync {
            sync_dir(&self.dir)?;
        }
        let io = |e: Errno| StoreError::io("renaming to", &self.out)(e.into());
        let rename = |flags| renameat_with(CWD, &self.dir, CWD, &self.out, flags);
        let mut old = None;
        if self.replace && fs::symlink_metadata(&self.out).is_ok() {
            // Before it gets a temporary name: should we be killed, the next build knows it by this.
            let mark = stale::mark(&self.out);
            let swapped = match rename(RenameFlags::EXCHANGE) {
                // The old store now has our temporary name.
                Ok(()) => Ok(self.dir.clone()),
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => swap(&self.dir, &self.out),
                Err(e) => Err(io(e)),
            };
            match swapped {
                Ok(dir) => old = Some((dir, mark)),
                Err(e) => {
                    if mark.is_some() {
                        let _ = fs::remove_file(self.out.join(LOCK));
                    }
                    return Err(e);
                }
            }
        } else {
            match rename(RenameFlags::NOREPLACE) {
                Ok(()) => {}
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    // rename(2) of a directory fails on anything but an empty directory.
                    fs::rename(&self.dir, &self.out)
                        .map_err(StoreError::io("renaming to", &self.out))?;
                }
                Err(e) => return Err(io(e)),
            }
        }
        self.live = false;
        // Not before: a build that is killed in between would look like one at work for ever.
        if let Err(e) = fs::remove_file(self.out.join(LOCK)) {
            tracing::warn!(path = %self.out.display(), error = %e, "cannot remove its lock");
        }
        if self.sync {
            sync_parent(&self.out)?;
        }
        Ok(Committed {
            path: self.out.clone(),
            warnings: old
                .and_then(|(dir, _mark)| remove_old(&dir))
                .into_iter()
                .collect(),
        })
    }

    /// Makes the only file of the directory appear as `out`.
    pub(crate) fn commit_file(self, name: &str) -> Result<PathBuf, StoreError> {
        let from = self.dir.join(name);
        match renameat_with(CWD, &from, CWD, &self.out, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                link_new(&from, &self.out).map_err(StoreError::io("renaming to", &self.out))?;
            }
            Err(e) => return Err(StoreError::io("renaming to", &self.out)(e.into())),
        }
        sync_parent(&self.out)?;
        Ok(self.out.clone())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.live {
            if let Err(e) = fs::remove_dir_all(&self.dir) {
                tracing::warn!(path = %self.dir.display(), error = %e, "cannot remove a temporary directory");
            }
        }
    }
}

/// Puts `dir` in the place of `out` where the system cannot exchange two names, and says where what
/// was there is now. Killed in between, `out` is not there; the next build puts it back.
fn swap(dir: &Path, out: &Path) -> Result<PathBuf, StoreError> {
    let aside = stale::aside(dir);
    fs::rename(out, &aside).map_err(StoreError::io("renaming", out))?;
    if let Err(e) = fs::rename(dir, out) {
        // Puts the old one back; if even that fails, the first error says enough.
        let _ = fs::rename(&aside, out);
        return Err(StoreError::io("renaming to", out)(e));
    }
    Ok(aside)
}

/// Gives a file a name that nobody else may have, where the system cannot rename so.
fn link_new(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
        // A file system without hard links: takes the name first, and then its own place.
        Err(_) => {
            File::create_new(to)?;
            fs::rename(from, to)
        }
    }
}

/// Removes a store that was replaced. Hours may have passed since it was looked at: only what is a
/// store's goes. Says what is left.
fn remove_old(dir: &Path) -> Option<String> {
    let left = |why: String| {
        Some(format!(
            "what was replaced is not removed and lies at {}: {why}",
            dir.display()
        ))
    };
    let mut kept = Vec::new();
    let removed = fs::read_dir(dir).and_then(|entries| {
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let is_file = entry.file_type()?.is_file();
            match name.to_str().filter(|n| is_file && is_store_file(n)) {
                // Last: a build that is killed here leaves it to the next one.
                Some(LOCK) => {}
                Some(_) => fs::remove_file(entry.path())?,
                None => kept.push(format!("{name:?}")),
            }
        }
        match fs::remove_file(dir.join(LOCK)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    });
    if !kept.is_empty() {
        kept.sort();
        return left(format!("{} not a store's", kept.join(", ")));
    }
    match removed.and_then(|()| fs::remove_dir(dir)) {
        Ok(()) => None,
        Err(e) => left(e.to_string()),
    }
}

/// The generation of the store at `out`, 0 for an empty directory; refuses what is not a store's.
fn old_store(out: &Path) -> Result<u64, StoreError> {
    let mut empty = true;
    for entry in fs::read_dir(out).map_err(StoreError::io("listing", out))? {
        let entry = entry.map_err(StoreError::io("listing", out))?;
        empty = false;
        let name = entry.file_name();
        if !name.to_str().is_some_and(is_store_file) {
            return Err(exists(
                out.to_owned(),
                &format!("holds {name:?}, which is not a store's; it will not be replaced"),
            ));
        }
    }
    if empty {
        return Ok(0);
    }
    manifest::generation_of(out).ok_or_else(|| {
        exists(
            out.to_owned(),
            "has no readable manifest.json, so it will not be replaced; remove it yourself",
        )
    })
}

fn absolute(path: &Path) -> Result<PathBuf, StoreError> {
    std::path::absolute(path).map_err(StoreError::io("resolving", path))
}

pub(crate) fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(StoreError::io("syncing", dir))
}

fn sync_parent(path: &Path) -> Result<(), StoreError> {
    path.parent().map_or(Ok(()), sync_dir)
}

#[cfg(test)]
#[path = "tests/staging.rs"]
mod tests;
