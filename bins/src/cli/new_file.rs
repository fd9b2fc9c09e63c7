//! Files that are whole or not there.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

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
        .ok_or_else(|| UsageError(format!("{} is not the name of a file", path.display())))?;
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
    let temporary = path.with_file_name(format!(
        ".{}.tmp-{}",
        name.to_string_lossy(),
        std::process::id()
    ));
    let written = || -> anyhow::Result<T> {
        let file = File::create_new(&temporary)
            .with_context(|| format!("creating {}", temporary.display()))?;
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
