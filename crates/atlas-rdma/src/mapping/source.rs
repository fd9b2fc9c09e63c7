//! A file that is to become memory, and the ways in which it is open.

use super::{MappingError, page_bytes};
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::OnceLock;

/// An open file with its name for people.
///
/// It is opened again through `/proc/self/fd` for its own purposes, so that neither the caller's file position and
/// flags nor the file's access time change. Where that is not possible, the caller's handle is used.
#[derive(Debug)]
pub struct MappableFile {
    label: String,
    file: Arc<File>,
    /// Open without access times and without read-ahead: what is read is what was asked for.
    quiet: Option<File>,
    /// Open for reads that pass the page cache by, from the first of them on; `None` where the file system has none.
    direct: OnceLock<Option<File>>,
    file_bytes: u64,
    device: u64,
}

impl MappableFile {
    /// A file, open for reading, and the name that errors use.
    ///
    /// # Errors
    ///
    /// [`MappingError::Stat`].
    pub fn new(label: &str, file: &Arc<File>) -> Result<Self, MappingError> {
        let meta = file.metadata().map_err(|source| MappingError::Stat {
            label: label.to_owned(),
            source,
        })?;
        let quiet = reopen(file, OFlags::empty(), false).ok();
        if let Some(quiet) = &quiet {
            // A hint; without it a little more than the extents may stay in the page cache.
            let _ = fadvise(quiet, 0, None, Advice::Random);
        }
        Ok(Self {
            label: label.to_owned(),
            file: Arc::clone(file),
            quiet,
            direct: OnceLock::new(),
            file_bytes: meta.len(),
            device: meta.dev(),
        })
    }

    /// Its name for people.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Bytes of the file when it was looked at.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Number of the file system's device.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// What kind of file system it is on, in the word of mount(8).
    pub fn file_system(&self) -> String {
        let Ok(stat) = rustix::fs::fstatfs(&*self.file) else {
            return "unknown file system".to_owned();
        };
        // Magic numbers of linux/magic.h; the width of the field differs between machines.
        #[allow(clippy::unnecessary_cast)]
        let magic = stat.f_type as u64 & 0xffff_ffff;
        let known = match magic {
            0xef53 => "ext4",
            0x0102_1994 => "tmpfs",
            0x5846_5342 => "xfs",
            0x9123_683e => "btrfs",
            0x794c_7630 => "overlay",
            0x6969 => "nfs",
            0x0102_1997 => "9p",
            0x6573_5546 => "fuse",
            0x2fc1_2fc1 => "zfs",
            0xf2f5_2010 => "f2fs",
            0x9584_58f6 => "hugetlbfs",
            0x8584_58f6 => "ramfs",
            0x0bd0_0bd0 => "lustre",
            _ => return format!("file system {magic:#x}"),
        };
        known.to_owned()
    }

    /// Checks that an extent lies inside the file. Returns the bytes between the page boundary below and its first
    /// byte, and its length.
    pub(crate) fn check(&self, offset: u64, bytes: u64) -> Result<(usize, usize), MappingError> {
        let outside = || MappingError::Outside {
            label: self.label.clone(),
            offset,
            bytes,
            file_bytes: self.file_bytes,
        };
        let end = offset.checked_add(bytes).ok_or_else(outside)?;
        if bytes == 0 || end > self.file_bytes {
            return Err(outside());
        }
        let page_bytes = page_bytes();
        let delta = usize::try_from(offset % page_bytes as u64).expect("less than a page");
        let len = usize::try_from(bytes).map_err(|_| outside())?;
        // Room for the page at either end.
        len.checked_add(2 * page_bytes).ok_or_else(outside)?;
        Ok((delta, len))
    }

    /// The handle for mappings and reads through the page cache.
    pub(super) fn quiet(&self) -> &File {
        self.quiet.as_ref().unwrap_or(&self.file)
    }

    /// The handle for reads that pass the page cache by.
    pub(super) fn direct(&self) -> Option<&File> {
        self.direct
            .get_or_init(|| reopen(&self.file, OFlags::DIRECT, false).ok())
            .as_ref()
    }

    /// As on a file system without direct reads.
    #[cfg(test)]
    pub(super) fn without_direct(self) -> Self {
        Self {
            direct: OnceLock::from(None),
            ..self
        }
    }

    /// A handle that may be mapped writable.
    pub(super) fn writable(&self) -> Result<Writable<'_>, MappingError> {
        let access = fcntl_getfl(&*self.file).unwrap_or(OFlags::empty()) & OFlags::ACCMODE;
        if access == OFlags::RDWR {
            return Ok(Writable::Given(&self.file));
        }
        match reopen(&self.file, OFlags::empty(), true) {
            Ok(file) => Ok(Writable::Own(file)),
            Err(source) => Err(MappingError::NotWritable {
                label: self.label.clone(),
                source,
            }),
        }
    }
}

/// A file that is open for writing; nothing here writes to it.
pub(super) enum Writable<'a> {
    Given(&'a File),
    Own(File),
}

impl AsRef<File> for Writable<'_> {
    fn as_ref(&self) -> &File {
        match self {
            Self::Given(file) => file,
            Self::Own(file) => file,
        }
    }
}

/// The same file with a position and flags of its own.
fn reopen(file: &File, flags: OFlags, write: bool) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let open = |flags: OFlags| {
        OpenOptions::new()
            .read(true)
            .write(write)
            // The bits of open(2), which std takes as a signed number.
            .custom_flags(flags.bits() as i32)
            .open(&path)
    };
    // Only the owner of a file may leave its access time alone.
    open(flags | OFlags::NOATIME).or_else(|error| match error.raw_os_error() {
        Some(libc::EPERM) => open(flags),
        _ => Err(error),
    })
}
