//! What can go wrong when files are published.

use crate::mapping::MappingError;
use std::error::Error;

/// Files that did not become readable; nothing of them is registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// No rail to publish on.
    #[error("there is no rail to publish on; choose at least one")]
    NoRails,
    /// A file did not become memory.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// More bytes of copies than allowed.
    #[error(
        "{files} files need {need_bytes} bytes of copies, the limit is {limit_bytes}: {why}; raise the limit, publish \
         fewer layers, or use a kernel that registers read-only mappings (Linux 6.2 and later), which need no copy"
    )]
    CopyLimit {
        /// Files that have to be copied.
        files: usize,
        /// Bytes of all of them.
        need_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// Why the first of them has to be copied.
        why: String,
    },
    /// More regions than a device has.
    #[error(
        "{need} regions are to be registered on rail {rail}, the device has {limit}; merge extents into fewer and \
         larger ones (a packed store has one for each layer)"
    )]
    TooManyRegions {
        /// The rail.
        rail: String,
        /// Regions needed.
        need: u64,
        /// The device's limit.
        limit: u64,
    },
    /// It was clear before registering that it would fail.
    #[error("publishing on rail {rail} cannot work: {source}")]
    Preflight {
        /// The rail.
        rail: String,
        /// What is missing.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A region was refused.
    #[error(
        "publishing {bytes} bytes at offset {file_offset} of {label} on rail {rail} failed ({total_bytes} bytes are to \
         be registered on {rails} rails, each counted): {source}"
    )]
    Register {
        /// The file.
        label: String,
        /// First byte.
        file_offset: u64,
        /// Bytes of the region.
        bytes: u64,
        /// The rail.
        rail: String,
        /// Bytes that are registered in the end, on all rails.
        total_bytes: u64,
        /// Count of rails.
        rails: usize,
        /// The rail's reason.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The caller's flag was set.
    #[error("publishing was stopped as asked")]
    Stopped,
}

impl PublishError {
    /// Whether the same call may work a little later without anybody changing a setting.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Register { source, .. } => source
                .downcast_ref::<crate::RdmaError>()
                .is_some_and(crate::RdmaError::is_retryable),
            _ => false,
        }
    }
}
