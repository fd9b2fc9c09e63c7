//! Building next to the destination and appearing there in one step, or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::StoreError;
use crate::manifest;

/// A temporary directory beside the destination; dropped without commit, it goes away with all
/// that is in it.
#[derive(Debug)]
pub(crate) struct Staging {
    dir: PathBuf,
    out: PathBuf,
    /// Generation of the store that is to be replaced, 0 where there is none.
    old_generation: u64,
    replace: bool,
    live: bool,
}

/// Files that `--replace` may delete: those of stores.
fn is_store_file(name: &str) -> bool {
    matches!(name, "manifest.json" | "catalogue.bin" | "checksums.xxh3")
        || name.ends_with(".xp2")
        || name.ends_with(".xpr")
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
            let dir = out.with_file_name(format!(
                ".{}.tmp-{}-{}",
                name.to_string_lossy(),
                std::process::id(),
                COUNT.fetch_add(1, Ordering::Relaxed)
            ));
            match fs::create_dir(&dir) {
                Ok(()) => {
                    return Ok(Self {
                        dir,
                        out,
                        old_generation,
                        replace,
                        live: true,
                    });
                }
                // Left by a process of the same number that was killed.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(StoreError::io("creating", &dir)(e)),
            }
        }
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

    /// Makes the directory appear; its files have been synced by their writers.
    pub(crate) fn commit(mut self) -> Result<PathBuf, StoreError> {
        sync_dir(&self.dir)?;
        let io = |e: Errno| StoreError::io("renaming to", &self.out)(e.into());
        let rename = |flags| renameat_with(CWD, &self.dir, CWD, &self.out, flags);
        if self.replace && fs::symlink_metadata(&self.out).is_ok() {
            match rename(RenameFlags::EXCHANGE) {
                // The old store now has our temporary name.
                Ok(()) => {}
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    let old = self.dir.with_extension("old");
                    fs::rename(&self.out, &old).map_err(StoreError::io("renaming", &self.out))?;
                    if let Err(e) = fs::rename(&self.dir, &self.out) {
                        // Puts the old one back; if even that fails, the first error says enough.
                        let _ = fs::rename(&old, &self.out);
                        return Err(StoreError::io("renaming to", &self.out)(e));
                    }
                    self.dir = old;
                }
                Err(e) => return Err(io(e)),
            }
            sync_parent(&self.out)?;
            // What is left there is the old store; `Drop` removes it.
            return Ok(self.out.clone());
        }
        match rename(RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                // rename(2) of a directory fails on anything but an empty directory.
                fs::rename(&self.dir, &self.out)
                    .map_err(StoreError::io("renaming to", &self.out))?;
            }
            Err(e) => return Err(io(e)),
        }
        self.live = false;
        sync_parent(&self.out)?;
        Ok(self.out.clone())
    }

    /// Makes the only file of the directory appear as `out`.
    pub(crate) fn commit_file(self, name: &str) -> Result<PathBuf, StoreError> {
        let from = self.dir.join(name);
        match renameat_with(CWD, &from, CWD, &self.out, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                fs::rename(&from, &self.out).map_err(StoreError::io("renaming to", &self.out))?;
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
