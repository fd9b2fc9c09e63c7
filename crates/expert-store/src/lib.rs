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

pub mod catalogue;
pub mod checkpoint;
pub mod codec;
pub mod dtype;
pub mod error;
pub mod info;
pub mod stamp;

pub use catalogue::{
    CHUNK_BYTES, Catalogue, Class, Container, IMAGE_ALIGN_BYTES, Layer, Leaf, LeafSource, Role,
    Segment, StackClass, Stacking, Transform,
};
pub use dtype::Dtype;
pub use error::StoreError;
pub use expert_wire::Key;
