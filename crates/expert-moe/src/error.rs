//! Errors of the block.

use expert_store::StoreError;
use expert_tier::TierError;
use expert_wire::Key;
use thiserror::Error;

/// Why a forward pass could not be made, or what was wrong with its result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MoeError {
    /// A count that cannot be.
    #[error("{0}")]
    Spec(String),
    /// A model that the block cannot compute.
    #[error("{key}: {why}")]
    Unsupported {
        /// An expert of it.
        key: Key,
        /// What it has, and what would do.
        why: String,
    },
    /// Experts did not come.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// Experts could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Resident experts do not fit.
    #[error(
        "no memory for {key}, {bytes} bytes after {before} bytes of other records: a model that does not fit must be streamed"
    )]
    Memory {
        /// The record.
        key: Key,
        /// Its bytes.
        bytes: u64,
        /// Bytes of those before.
        before: u64,
    },
    /// A value that is no number: memory was read that holds no weights, or weights that are none.
    #[error(
        "step {step}, layer {layer}, token {token}: the output is not finite: a slot was read before its record was complete or after it was given up, or the checkpoint has such weights"
    )]
    NotFinite {
        /// Pass through all layers.
        step: u32,
        /// Dense index of the layer.
        layer: u32,
        /// The token.
        token: usize,
    },
}
