//! The name of an expert record.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Names one expert record of one stack.
///
/// *Units*: `layer` is the dense index among the MoE layers of a stack (not the number in the
/// checkpoint), `expert` the index of the routed expert as the router counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Dense index of the MoE layer.
    pub layer: u32,
    /// Index of the expert in its layer.
    pub expert: u32,
}

impl Key {
    /// A key from its two indices.
    pub const fn new(layer: u32, expert: u32) -> Self {
        Self { layer, expert }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.expert)
    }
}
