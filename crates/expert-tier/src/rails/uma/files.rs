//! The store's files, open for direct reads where they can be.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use expert_store::{Store, StoreFile};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, fstat, open, statx};
use rustix::io::Errno;

use super::mode::IoState;
use super::plan::BLOCK_MAX_BYTES;

/// Direct reads begin and end at multiples of this, or of what the file asks for if that is more: blocks of 512 bytes
/// are mostly parts of larger ones, and a kernel before 6.1 does not say.
const BLOCK_BYTES: u64 = 4096;

/// The smallest page of all machines, so what windows are aligned to at least.
const WINDOW_ALIGN_BYTES: u64 = 4096;

/// See the module. Indices are those of the store's files.
pub(super) struct Files {
    files: Vec<OpenFile>,
}

struct OpenFile {
    path: PathBuf,
    direct: Option<Direct>,
    /// A read, and not the opening, told that direct reads are refused.
    is_refused: AtomicBool,
    /// Opened when it is needed.
    buffered: OnceLock<Arc<File>>,
}

struct Direct {
    file: Arc<File>,
    block_bytes: u64,
}

/// A file to read, and how.
pub(super) struct Source {
    pub(super) file: Arc<File>,
    pub(super) block_bytes: u64,
    pub(super) is_direct: bool,
}

impl Files {
    /// Opens all files of a store for direct reads, if that is wanted; what refuses is noted in `state`.
    pub(super) fn open(store: &Store, direct: bool, state: &IoState) -> Self {
        let open_one = |file: &StoreFile| OpenFile {
            path: file.path.clone(),
            direct: direct
                .then(|| open_direct(&file.file, &file.path))
                .and_then(|opened| match opened {
                    Ok(direct) => Some(direct),
                    Err(why) => {
                        state.direct_refused(&file.path, &why);
                        None
                    }
                }),
            is_refused: AtomicBool::new(false),
            buffered: OnceLock::new(),
        };
        Self {
            files: store.files().iter().map(open_one).collect(),
        }
    }

    pub(super) fn path(&self, index: u32) -> &Path {
        &self.files[index as usize].path
    }

    /// What reads of a file are aligned to: 1 where they are buffered.
    pub(super) fn block_bytes(&self, index: u32) -> u64 {
        self.files[index as usize]
            .usable()
            .map_or(1, |direct| direct.block_bytes)
    }

    /// The way to read a file now.
    pub(super) fn source(&self, store: &Store, index: u32) -> io::Result<Source> {
        let file = &self.files[index as usize];
        if let Some(direct) = file.usable() {
            return Ok(Source {
                file: direct.file.clone(),
                block_bytes: direct.block_bytes,
                is_direct: true,
            });
        }
        let buffered = match file.buffered.get() {
            Some(buffered) => buffered.clone(),
            None => {
                let opened = Arc::new(store.files()[index as usize].file.try_clone()?);
                file.buffered.get_or_init(|| opened).clone()
            }
        };
        Ok(Source {
            file: buffered,
            block_bytes: 1,
            is_direct: false,
        })
    }

    /// Has a file of a store that is read through the page cache stand in for a disk.
    #[cfg(test)]
    pub(super) fn stand_in(&self, index: u32, file: File) {
        let file = Arc::new(file);
        assert!(self.files[index as usize].buffered.set(file).is_ok());
    }

    /// A direct read was refused: the file is read through the page cache from now on.
    pub(super) fn refuse_direct(&self, index: u32, state: &IoState, why: &io::Error) {
        let file = &self.files[index as usize];
        if file.usable().is_some() && !file.is_refused.swap(true, Ordering::Relaxed) {
            state.direct_refused(&file.path, &format!("reading it: {why}"));
        }
    }
}

impl OpenFile {
    fn usable(&self) -> Option<&Direct> {
        self.direct
            .as_ref()
            .filter(|_| !self.is_refused.load(Ordering::Relaxed))
    }
}

/// Whether an error of a direct read says that this file takes none, rather than that its bytes cannot be had.
pub(super) fn is_refusal_of_direct(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::INVAL | Errno::OPNOTSUPP))
}

/// Opens the same file once more, for direct reads; the reason where it takes none.
fn open_direct(file: &File, path: &Path) -> Result<Direct, String> {
    let block_bytes = block_of(file)?;
    let flags =
        OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    // What was opened and audited, whatever has its name by now.
    let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = match open(by_descriptor, flags, Mode::empty()) {
        Err(Errno::NOENT) => open(path, flags, Mode::empty()),
        other => other,
    };
    let opened = File::from(opened.map_err(|e| format!("opening it with O_DIRECT: {e}"))?);
    let identity = |file: &File| fstat(file).map(|s| (s.st_dev, s.st_ino));
    match (identity(&opened), identity(file)) {
        (Ok(now), Ok(then)) if now == then => Ok(Direct {
            file: Arc::new(opened),
            block_bytes,
        }),
        _ => Err("its name stands for another file now".into()),
    }
}

/// What direct reads of a file are to be aligned to.
fn block_of(file: &File) -> Result<u64, String> {
    let asked = statx(file.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    match asked {
        Ok(s) if StatxFlags::from_bits_retain(s.stx_mask).contains(StatxFlags::DIOALIGN) => {
            block_for(s.stx_dio_offset_align.into(), s.stx_dio_mem_align.into())
        }
        // The kernel or the file system does not say.
        _ => Ok(BLOCK_BYTES),
    }
}

/// The block for a file that asks for these alignments of offset and of memory; 0 says that it takes no direct reads.
fn block_for(offset_align: u64, memory_align: u64) -> Result<u64, String> {
    if offset_align == 0 || memory_align == 0 {
        return Err("its file system takes no direct reads of it".into());
    }
    let block = offset_align.max(BLOCK_BYTES);
    let fits = offset_align.is_power_of_two() && block <= BLOCK_MAX_BYTES;
    match fits && memory_align <= WINDOW_ALIGN_BYTES {
        true => Ok(block),
        false => Err(format!(
            "it wants reads aligned to {offset_align} bytes in memory aligned to {memory_align}, the limits are {BLOCK_MAX_BYTES} and {WINDOW_ALIGN_BYTES}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_those_of_the_file_but_no_less_than_4096() {
        assert_eq!(block_for(512, 4), Ok(4096));
        assert_eq!(block_for(65_536, 512), Ok(65_536));
        for (offset, memory) in [(0, 0), (131_072, 512), (512, 65_536), (520, 4)] {
            assert!(block_for(offset, memory).is_err(), "{offset} {memory}");
        }
    }

    #[test]
    fn a_file_that_takes_no_direct_reads_is_told_apart_from_a_bad_disk() {
        let errors = [
            (Errno::INVAL, true),
            (Errno::OPNOTSUPP, true),
            (Errno::IO, false),
            (Errno::NOMEM, false),
        ];
        for (errno, refused) in errors {
            assert_eq!(is_refusal_of_direct(&errno.into()), refused, "{errno}");
        }
        assert!(!is_refusal_of_direct(&io::Error::other("no number")));
    }

    /// The kernel's own refusal: files of /proc take no direct reads.
    #[test]
    fn refusal_at_opening_names_the_reason() {
        let path = Path::new("/proc/self/status");
        let why = open_direct(&File::open(path).unwrap(), path).err().unwrap();
        assert!(why.contains("direct") || why.contains("O_DIRECT"), "{why}");
    }

    #[test]
    fn what_is_opened_is_the_file_that_was_open_and_not_what_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![1; 8192]).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, vec![2; 8192]).unwrap();
        // Either way where the folder takes direct reads or not: never the other file.
        if let Ok(direct) = open_direct(&file, &path) {
            let inode = |f: &File| fstat(f).unwrap().st_ino;
            assert_eq!(inode(&direct.file), inode(&file));
        }
    }
}
