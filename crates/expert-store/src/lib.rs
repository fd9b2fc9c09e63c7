//! Expert stores: what is in a checkpoint, where each byte of each expert record lies, and proof
//! that the bytes are the right ones.
//!
//! * [`Store`] is an open store of any kind, or a checkpoint indexed on the fly. Start there.
//! * [`catalogue`] is the one in-memory shape, whatever lies on disk; [`checkpoint`] makes it from
//!   safetensors and GGUF headers, [`codec`] carries it over disk and wire.
//! * [`index()`], [`pack()`] and [`pack_v1`] build stores; [`verify()`], [`unpack()`], [`extract()`] and
//!   [`payload_digest`] read them as a whole. All go through the loop in [`work`].
//! * [`synth()`] makes checkpoints to try things on; [`token_file`] reads and makes the files of tokens.
//! * `docs/store.md` describes the files for people who write another implementation.
//!
//! Not here: networks, pinned memory, mappings. Files are read with `pread` only, so a file that
//! is truncated under a reader is an error and never a signal. Nothing read from disk is
//! believed: sizes are bounded before memory is reserved and sums are checked.
//!
//! Threads: a [`Store`] is shared by reference. Work on whole stores starts its own threads and has
//! ended them when it returns. What is built appears by a rename or not at all.
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
mod open_files;
pub mod pack;
pub mod packed;
mod pieces;
pub mod progress;
mod quiet;
pub mod select;
mod staging;
mod stale;
pub mod stamp;
pub mod store;
mod subset;
pub mod synth;
pub mod token_file;
pub mod unpack;
pub mod v1;
pub mod verify;
mod whole;
pub mod work;
mod writeback;

pub use build::{BuildOptions, Report};
pub use catalogue::{
    CHUNK_BYTES, Catalogue, Class, Container, IMAGE_ALIGN_BYTES, Layer, Leaf, LeafSource, Rest,
    Role, Segment, StackClass, Stacking, Transform,
};
pub use digest::{PayloadDigest, payload_digest};
pub use dtype::Dtype;
pub use error::StoreError;
pub use expert_wire::Key;
pub use extract::extract;
pub use index::{IndexOptions, index};
pub use info::{StoreInfo, StoreKind, Whole};
pub use open_files::raise_open_files_limit;
pub use pack::pack;
pub use pieces::Piece;
pub use progress::Progress;
pub use select::Selection;
pub use store::{OpenOptions, Store, StoreFile};
pub use synth::{SynthReport, SynthSpec, synth};
pub use unpack::{UnpackOptions, UnpackReport, unpack};
pub use v1::pack_v1;
pub use verify::{BadChunk, VerifyOptions, VerifyReport, verify};
pub use whole::NameWhole;
pub use work::WorkOptions;

#[cfg(test)]
mod tests;
