//! What can go wrong with checkpoints and stores, sorted by whose fault it is.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::Key;

/// An error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operating system refused.
    #[error("{action} {path}: {source}", path = path.display())]
    Io {
        /// E.g. `reading`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's words.
        #[source]
        source: io::Error,
    },
    /// A checkpoint that is not one, is damaged or is of a kind that is not supported.
    #[error("{path}: {why}", path = path.display())]
    Checkpoint {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong, the values, the limit and what to do.
        why: String,
    },
    /// The checkpoint is sound but holds no routed experts.
    #[error("{path}: no routed experts found: {why}", path = path.display())]
    NoExperts {
        /// The checkpoint.
        path: PathBuf,
        /// What was there instead.
        why: String,
    },
    /// A store whose manifest, catalogue or files do not fit together.
    #[error("store {path}: {why}", path = path.display())]
    Store {
        /// The store's directory, or one of its files.
        path: PathBuf,
        /// What is wrong and what to do.
        why: String,
    },
    /// A checkpoint's file is not the one that an in-place store was made of.
    #[error("{path} changed since it was indexed ({why}); run `atlas-expert index` again", path = path.display())]
    SourceChanged {
        /// The file.
        path: PathBuf,
        /// Which of size and times differ.
        why: String,
    },
    /// A file changed since it was opened, so what was read of it may not fit together.
    #[error("{path} changed while it was in use ({why}); start again when nothing writes to it", path = path.display())]
    ChangedInUse {
        /// The file, a checkpoint's or a store's.
        path: PathBuf,
        /// What differs.
        why: String,
    },
    /// More files must be open at once than the process may have.
    #[error(
        "{path}: {count} files to open at once make {need} with those of the process, the limit is {limit}; raise it with `ulimit -n {need}` or LimitNOFILE={need}",
        path = path.display()
    )]
    OpenFiles {
        /// The checkpoint or store.
        path: PathBuf,
        /// Files to be opened now.
        count: usize,
        /// Limit that would do.
        need: u64,
        /// The hard limit.
        limit: u64,
    },
    /// Bytes whose checksum does not fit the catalogue.
    #[error("{key} chunk {chunk}: checksum {got:016x}, the catalogue says {want:016x}")]
    Checksum {
        /// The record.
        key: Key,
        /// Index of the 256 KiB chunk of its image.
        chunk: u32,
        /// Of the bytes read.
        got: u64,
        /// Of the catalogue.
        want: u64,
    },
    /// The store holds no such record.
    #[error("{key}: {why}")]
    NoSuchRecord {
        /// What was asked for.
        key: Key,
        /// What the store holds.
        why: String,
    },
    /// The index names a zero expert: the router may choose it, but it has no record (output = input).
    #[error(
        "{key} is a zero expert (the layer has {num_experts} with records): its output is its input"
    )]
    IdentityExpert {
        /// What was asked for.
        key: Key,
        /// Experts with records; ids from here on have none.
        num_experts: u32,
    },
    /// A byte range that reaches beyond the record image.
    #[error("{key}: bytes {offset} to {end} asked for, the record image has {image_bytes}", end = offset.saturating_add(*bytes))]
    BadRange {
        /// The record.
        key: Key,
        /// First byte asked for.
        offset: u64,
        /// How many.
        bytes: u64,
        /// Bytes of the image.
        image_bytes: u64,
    },
    /// The file system cannot take what is to be written.
    #[error("{path} needs {need_bytes} bytes: {why}; free some space or choose another file system", path = path.display())]
    Full {
        /// The file or directory to be written.
        path: PathBuf,
        /// Bytes that it needs.
        need_bytes: u64,
        /// What the system said.
        why: String,
    },
    /// Nothing can be made where the output should appear.
    #[error("cannot write in {dir}: {why}; {todo}", dir = dir.display())]
    Unwritable {
        /// The directory.
        dir: PathBuf,
        /// What the system said.
        why: String,
        /// What to do.
        todo: &'static str,
    },
    /// The output is there already.
    #[error("{path} {why}", path = path.display())]
    OutputExists {
        /// The output asked for.
        path: PathBuf,
        /// What it is and what to do.
        why: String,
    },
    /// A selection or an option that makes no sense for this input.
    #[error("{0}")]
    Usage(String),
    /// The caller asked to stop (an interrupt).
    #[error("interrupted; nothing was left behind")]
    Interrupted,
}

impl StoreError {
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    /// Like [`StoreError::io`] for writes of which `need_bytes` are the whole: a full disk, a quota
    /// and a limit on file size come as [`StoreError::Full`].
    pub(crate) fn write(
        action: &'static str,
        path: impl Into<PathBuf>,
        need_bytes: u64,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Self::Full {
                path,
                need_bytes,
                why: source.to_string(),
            },
            _ => Self::Io {
                action,
                path,
                source,
            },
        }
    }

    /// Like [`StoreError::io`] for files and directories that are made: a directory that takes none
    /// comes as [`StoreError::Unwritable`].
    pub(crate) fn create(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| {
            let todo = match source.kind() {
                io::ErrorKind::PermissionDenied => {
                    "give this user the right to write there (`ls -ld` shows who has it), or choose another place"
                }
                io::ErrorKind::ReadOnlyFilesystem => {
                    "its file system is mounted read-only (`findmnt -T` shows how): choose another place"
                }
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "free some space (`df -h` shows bytes, `df -i` numbers of files), or choose another file system"
                }
                _ => return Self::io("creating", path)(source),
            };
            Self::Unwritable {
                dir: path.parent().map_or_else(PathBuf::new, Into::into),
                why: source.to_string(),
                todo,
            }
        }
    }

    pub(crate) fn checkpoint(path: impl Into<PathBuf>, why: impl Into<String>) -> Self {
        Self::Checkpoint {
            path: path.into(),
            why: why.into(),
        }
    }

    pub(crate) fn store(path: impl Into<PathBuf>, why: impl Into<String>) -> Self {
        Self::Store {
            path: path.into(),
            why: why.into(),
        }
    }
}
