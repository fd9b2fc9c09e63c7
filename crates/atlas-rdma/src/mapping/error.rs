//! What can go wrong between a file and memory.

use super::MappingMode;
use std::io;

/// A file that did not become memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// An extent of no bytes, or beyond the end of the file.
    #[error(
        "{bytes} bytes at offset {offset} do not lie inside {label}, which has {file_bytes} bytes; was it truncated? \
         read the store's index again"
    )]
    Outside {
        /// The file.
        label: String,
        /// First byte.
        offset: u64,
        /// Bytes of the extent.
        bytes: u64,
        /// Bytes of the file.
        file_bytes: u64,
    },
    /// The file's own data cannot be read.
    #[error("asking for the size of {label} failed: {source}; is its file system still there?")]
    Stat {
        /// The file.
        label: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The system refuses the mapping.
    #[error(
        "a {mode} of {bytes} bytes at offset {offset} of {label} failed: {source}; ENOMEM means too many mappings \
         (sysctl vm.max_map_count) or a limit on address space (ulimit -v), ENODEV a file system without mappings: \
         publish a copy instead"
    )]
    Map {
        /// The file.
        label: String,
        /// First byte.
        offset: u64,
        /// Bytes of the extent.
        bytes: u64,
        /// What was tried.
        mode: MappingMode,
        /// The system's reason.
        source: io::Error,
    },
    /// A writable mapping of a file that cannot be opened for writing.
    #[error(
        "{label} cannot be mapped read-write: opening it for writing failed: {source}; allow this user to write it, or \
         publish a copy instead"
    )]
    NotWritable {
        /// The file.
        label: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Not enough memory for a copy.
    #[error(
        "a copy of {label} needs {need_bytes} bytes of memory, {available_bytes} are available ({scope}); free memory, \
         publish fewer layers, or use a kernel that registers read-only mappings (Linux 6.2 and later), which need no \
         copy"
    )]
    NoMemory {
        /// The file, or how many.
        label: String,
        /// Bytes needed.
        need_bytes: u64,
        /// Bytes there are.
        available_bytes: u64,
        /// What limits them.
        scope: String,
    },
    /// Reading a part of the file failed.
    #[error(
        "reading {bytes} bytes at offset {offset} of {label} failed: {source}; look at the disk ('dmesg')"
    )]
    Read {
        /// The file.
        label: String,
        /// First byte of the part.
        offset: u64,
        /// Bytes of the part.
        bytes: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// The file ended before the extent did.
    #[error(
        "{label} ended at offset {offset}, {missing_bytes} bytes before the end of what is to be published: it was \
         truncated meanwhile; restore it and load the store again"
    )]
    Truncated {
        /// The file.
        label: String,
        /// Where it ended.
        offset: u64,
        /// Bytes that are missing.
        missing_bytes: u64,
    },
    /// The caller's flag was set.
    #[error("publishing {label} was stopped as asked")]
    Stopped {
        /// The file.
        label: String,
    },
}
