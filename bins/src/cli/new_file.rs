//! Files that are whole or not there.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::UsageError;

/// What [`write()`] hands to its caller.
pub(super) type Out = Cancellable<BufWriter<File>>;

/// Writes beside the file and renames, so that it is whole or not there.
///
/// *Errors*: the file is there and `replace` was not asked for, an interrupt, or those of writing.
pub(super) fn write<T>(
    path: &Path,
    replace: bool,
    cancel: Arc<AtomicBool>,
    fill: impl FnOnce(&mut Out) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let name = path
        .file_name()
        .ok_or_else(|| UsageError(format!("{} is not the name of a file", path.display())))?
        .to_string_lossy();
    let there = || {
        anyhow::anyhow!(
            "{} exists already; choose another name, or --replace",
            path.display()
        )
    };
    match fs::symlink_metadata(path) {
        Ok(_) if !replace => return Err(there()),
        Ok(m) if !m.is_file() => {
            anyhow::bail!("{} is no regular file and is not replaced", path.display());
        }
        _ => {}
    }
    sweep(path, &name);
    let temporary = path.with_file_name(format!("{}{}", prefix(&name), std::process::id()));
    let written = || -> anyhow::Result<T> {
        let file =
            create(&temporary).with_context(|| format!("creating {}", temporary.display()))?;
        let mut out = Cancellable::new(BufWriter::with_capacity(1 << 20, file), cancel);
        let value = fill(&mut out)?;
        let failed = || format!("writing {}", path.display());
        out.flush().with_context(failed)?;
        out.0.get_ref().sync_all().with_context(failed)?;
        if replace {
            fs::rename(&temporary, path).with_context(failed)?;
        } else {
            // A link, unlike a rename, never takes the place of what appeared meanwhile.
            match fs::hard_link(&temporary, path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(there()),
                linked => linked.with_context(failed)?,
            }
            fs::remove_file(&temporary).with_context(failed)?;
        }
        Ok(value)
    };
    written().inspect_err(|_| {
        // It may not exist yet; the first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    })
}

fn prefix(name: &str) -> String {
    format!(".{name}.tmp-")
}

/// Makes a temporary file and locks it for as long as it is open, so that it is not taken for one
/// that was left. A file system without locks is no error: nobody can lock there, so nobody removes
/// anything.
fn create(path: &Path) -> io::Result<File> {
    let mut tries = 0..10;
    loop {
        let file = match File::create_new(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && tries.next().is_some() => {
                thread::sleep(Duration::from_millis(10));
                continue;
            }
            other => other?,
        };
        let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        // Else another process took it for one that was left: it is gone in a moment.
        if locked != Err(Errno::WOULDBLOCK) && is_at(&file, path) {
            return Ok(file);
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(a), Ok(b)) => a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Removes what killed processes that wrote the same file left: files of our name whose lock nobody
/// holds. What cannot be removed stays.
fn sweep(path: &Path, name: &str) {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let Ok(entries) = fs::read_dir(parent.unwrap_or(Path::new("."))) else {
        return;
    };
    let prefix = prefix(name);
    for entry in entries.flatten() {
        let found = entry.file_name();
        let process = found.to_str().and_then(|n| n.strip_prefix(&prefix));
        if process.is_none_or(|p| p.parse::<u32>().is_err()) {
            continue;
        }
        let path = entry.path();
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let Ok(file) = File::options().write(true).custom_flags(flags).open(&path) else {
            continue;
        };
        let is_free = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        if is_free && is_at(&file, &path) && fs::remove_file(&path).is_ok() {
            tracing::warn!(path = %path.display(), "removed what a process that was killed had left");
        }
    }
}

/// A writer that gives up once an interrupt was asked for.
#[derive(Debug)]
pub(super) struct Cancellable<W>(W, Arc<AtomicBool>);

impl<W> Cancellable<W> {
    pub(super) fn new(out: W, cancel: Arc<AtomicBool>) -> Self {
        Self(out, cancel)
    }
}

impl<W: Write> Write for Cancellable<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.1.load(Ordering::Relaxed) {
            // Not `Interrupted`, which `write_all` tries again.
            true => Err(io::Error::other("interrupted; nothing was left behind")),
            false => self.0.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_process_removes_what_a_killed_one_left_and_nothing_else() {
        let dir = std::env::temp_dir().join(format!("atlas-new-file-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let at = |name: &str| dir.join(name);
        for name in [".out.tmp-1", ".out.tmp-2", ".out.tmp-mine", ".other.tmp-1"] {
            fs::write(at(name), name).unwrap();
        }
        fs::create_dir(at(".out.tmp-3")).unwrap();
        let at_work = File::open(at(".out.tmp-2")).unwrap();
        flock(&at_work, FlockOperation::LockExclusive).unwrap();
        let cancel = Arc::new(AtomicBool::new(false));
        write(&at("out"), false, cancel.clone(), |out| {
            // Another process at the same time leaves it alone.
            sweep(&at("out"), "out");
            Ok(out.write_all(b"new")?)
        })
        .unwrap();
        assert_eq!(fs::read(at("out")).unwrap(), b"new");
        let mut names: Vec<String> = fs::read_dir(&dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let left = [
            ".other.tmp-1",
            ".out.tmp-2",
            ".out.tmp-3",
            ".out.tmp-mine",
            "out",
        ];
        assert_eq!(names, left);
        let again = write(&at("out"), false, cancel, |_| Ok(()));
        assert!(again.unwrap_err().to_string().contains("exists already"));
        fs::remove_dir_all(&dir).unwrap();
    }
}
