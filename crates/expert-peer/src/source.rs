//! What a peer needs of a store.

use std::fs::File;
use std::path::Path;

use expert_wire::message::ErrorCode;
use expert_wire::{Key, v1};
use thiserror::Error;

/// A range of a record image, as the peer sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilePiece {
    /// Bytes of a file.
    File {
        /// Index among the source's files.
        file: u32,
        /// First byte in that file.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// Zeros.
    Zeros {
        /// How many.
        bytes: u64,
    },
}

impl FilePiece {
    /// How many bytes it stands for.
    pub fn bytes(&self) -> u64 {
        match *self {
            Self::File { bytes, .. } | Self::Zeros { bytes } => bytes,
        }
    }
}

/// Why a source does not answer a request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct SourceError {
    /// What the client is told.
    pub code: ErrorCode,
    /// In words.
    pub message: String,
}

impl SourceError {
    /// An error from its parts.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

/// A store as a peer sees it: identity, descriptions, and where the bytes of each record lie.
///
/// It does not change while it lives; another state of the same directory is another source.
pub trait Source: Send + Sync + 'static {
    /// Generation from the manifest.
    fn generation(&self) -> u64;
    /// Content id, `None` without checksums.
    fn content_id(&self) -> Option<u128>;
    /// Layout id.
    fn layout_id(&self) -> u128;
    /// The v1 manifest, where v1 clients can be served.
    fn v1_manifest(&self) -> Option<&v1::Manifest>;
    /// The answer to `StoreInfo`, JSON.
    ///
    /// *Errors*: [`ErrorCode::Internal`].
    fn info_json(&self) -> Result<Vec<u8>, SourceError>;
    /// The answer to `Catalogue`: a layer's blob with the sections asked for.
    ///
    /// *Errors*: [`ErrorCode::NoSuchLayer`].
    fn layer_blob(&self, layer: u32, sections: u32) -> Result<Vec<u8>, SourceError>;
    /// Number of files.
    fn file_count(&self) -> usize;
    /// A file by index.
    fn file(&self, index: u32) -> Option<&File>;
    /// Its path, for people.
    fn file_path(&self, index: u32) -> Option<&Path>;
    /// Says how an open file differs now from what it was when this process opened it (size, times
    /// of content and of attributes), `None` where it does not; one `fstat`.
    fn file_change(&self, index: u32) -> Option<String>;
    /// Files that changed since the store was opened, and how: every file, by path too.
    fn changed_files(&self) -> Vec<(usize, String)>;
    /// Calls `f` for each record with its key and the bytes of its image.
    fn for_each_record(&self, f: &mut dyn FnMut(Key, u64));
    /// Calls `f` for the pieces of `bytes` bytes of a record image from `offset` on, in order.
    ///
    /// *Errors*: [`ErrorCode::NoSuchLayer`], [`ErrorCode::NoSuchExpert`],
    /// [`ErrorCode::IdentityExpert`], [`ErrorCode::BadRange`]; then `f` was not called.
    fn for_each_piece(
        &self,
        key: Key,
        offset: u64,
        bytes: u64,
        f: &mut dyn FnMut(FilePiece),
    ) -> Result<(), SourceError>;
}
