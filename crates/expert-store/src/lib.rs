//! Expert stores: what is in a checkpoint, where each byte of each expert record lies, and proof
//! that the bytes are the right ones.
//!
//! * [`catalogue`] is the one in-memory shape, whatever lies on disk. Start there.
//! * `docs/store.md` describes the files for people who write another implementation.
//!
//! Not here: networks, pinned memory, mappings. Files are read with `pread` only, so a file that
//! is truncated under a reader is an error and never a signal. Nothing read from disk is
//! believed: sizes are bounded before memory is reserved and sums are checked.
#![forbid(unsafe_code)]

pub mod build;
pub mod catalogue;
pub mod checkpoint;
pub mod codec;
mod containers;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod extract;
pub mod index;
pub mod info;
mod inline;
mod manifest;
mod open;
pub mod pack;
pub mod packed;
mod pieces;
pub mod progress;
mod quiet;
pub mod select;
mod staging;
pub mod stamp;
pub mod store;
mod subset;
pub mod synth;
pub mod unpack;
pub mod v1;
pub mod verify;
pub mod work;
mod writeback;

pub use catalogue::{
    CHUNK_BYTES, Catalogue, Class, Container, IMAGE_ALIGN_BYTES, Layer, Leaf, LeafSource, Role,
    Segment, StackClass, Stacking, Transform,
};
pub use build::{BuildOptions, Report};
pub use digest::{PayloadDigest, payload_digest};
pub use dtype::Dtype;
pub use error::StoreError;
pub use expert_wire::Key;
pub use extract::extract;
pub use index::{IndexOptions, index};
pub use pack::pack;
pub use pieces::Piece;
pub use progress::Progress;
pub use select::Selection;
pub use store::{OpenOptions, Store, StoreFile};
pub use synth::{SynthReport, SynthSpec, synth};
pub use unpack::{UnpackOptions, UnpackReport, unpack};
pub use v1::pack_v1;
pub use verify::{BadChunk, VerifyOptions, VerifyReport, verify};
pub use work::WorkOptions;

#[cfg(test)]
mod tests;
