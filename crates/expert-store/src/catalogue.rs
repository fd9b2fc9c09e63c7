//! The catalogue: for each MoE layer of one stack, what a record is made of and where its bytes lie.
//!
//! Columnar: what all experts of a layer share (names, types, shapes, image offsets) is kept once
//! per *shape class*; per record there are only offsets and checksums. Half a million tensors take
//! a few megabytes.
//!
//! *Invariant*: a [`Layer`] that exists has passed the checks of [`Layer::new`]: offsets, sizes and lengths fit
//! together, so that code after it needs no further bounds reasoning.

mod layer;
mod rest;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::Dtype;
pub use rest::Rest;

/// Each leaf starts at a multiple of this in the record image; the image's size is one, too.
pub const IMAGE_ALIGN_BYTES: u64 = 256;
/// The granule of checksums in a record image; the last chunk may be shorter.
pub const CHUNK_BYTES: u64 = 256 << 10;
/// Leaves of at most this many bytes travel in the catalogue.
pub const INLINE_MAX_BYTES: u64 = 64;
/// Largest record image that is accepted: the largest known expert (DBRX, 396 MB) times 40.
pub const IMAGE_MAX_BYTES: u64 = 1 << 34;
/// Most leaves of one record.
pub const LEAVES_MAX: usize = 4096;

/// What a projection does in the expert; its order is the canonical order of leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Gate projection.
    Gate,
    /// Gate and up in one tensor.
    GateUp,
    /// Up projection.
    Up,
    /// Down projection.
    Down,
    /// Something below an expert that is none of these; kept as opaque bytes.
    Other,
}

/// How the source tensor of a leaf holds the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stacking {
    /// One tensor per expert; the leaf's `name` has `{}` in place of the expert index.
    PerExpert,
    /// One tensor for all, the expert is dimension 0.
    Stacked,
    /// One tensor for all, the expert is a block of rows of dimension 0.
    Flattened,
    /// One tensor that belongs to all experts as it is; each record holds a copy.
    Common,
}

/// What was done to a leaf's bytes on the way into the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transform {
    /// Nothing.
    #[default]
    None,
    /// Bytes of the `[rows, cols]` matrix transposed to `[cols, rows]` (v1 stores).
    TransposeBytes,
}

/// One tensor of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaf {
    /// What it does.
    pub role: Role,
    /// Canonical leaf name below the projection (`weight`, `weight_scale`, …); orders the leaves of one role.
    pub leaf: String,
    /// Source tensor's name; `{}` stands for the expert index where `stacking` is per expert.
    pub name: String,
    /// How the source tensor holds the experts.
    pub stacking: Stacking,
    /// Element type.
    pub dtype: Dtype,
    /// Shape of this expert's part, outermost dimension first; `[]` is a scalar.
    pub shape: Vec<u64>,
    /// Dimension 0 of the source tensor where it is stacked or flattened, else 0.
    #[serde(default)]
    pub source_dim0: u64,
    /// First byte in the record image, a multiple of 256.
    pub image_offset: u64,
    /// Bytes of this expert's part.
    pub bytes: u64,
    /// What was done to them.
    #[serde(default)]
    pub transform: Transform,
}

/// The leaves that a group of experts of one layer share, in canonical order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// In canonical order: role, then leaf name, then source name.
    pub leaves: Vec<Leaf>,
    /// Bytes of the record image, a multiple of 256.
    pub image_bytes: u64,
}

/// Where one leaf of all records of a class lies in the source files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeafSource {
    /// At `base + expert * step` of one file (stacked tensors; step 0 for a common one).
    Strided {
        /// Index into the catalogue's files.
        file: u32,
        /// Offset of expert 0, bytes from the start of the file.
        base: u64,
        /// Bytes from one expert to the next.
        step: u64,
    },
    /// Anywhere: one entry per record of the class, in order of expert.
    Column {
        /// File of each record.
        files: Vec<u32>,
        /// Offset of each record, bytes from the start of that file.
        offsets: Vec<u64>,
    },
}

/// One contiguous byte range of one file that maps to one range of the record image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index into the catalogue's files.
    pub file: u32,
    /// First byte in that file.
    pub file_offset: u64,
    /// First byte in the record image.
    pub image_offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Where the records of a layer lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Records {
    /// In the files of a checkpoint: `sources[class][leaf]`.
    InPlace {
        /// Per class and leaf.
        sources: Vec<Vec<LeafSource>>,
    },
    /// In a packed file of ours: record `k` (in order of expert) at `k * stride`, its image
    /// `header_bytes` later.
    Packed {
        /// Index into the catalogue's files.
        file: u32,
        /// Bytes from one record to the next, a multiple of 4096.
        stride: u64,
        /// Bytes before the image: 256 for v2, 0 for v1 (whose image includes its header).
        header_bytes: u64,
    },
    /// Not known here: a client over TCP does not need it.
    Remote,
}

/// One MoE layer of a catalogue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Dense index among the MoE layers of its stack.
    pub layer: u32,
    /// Number in the checkpoint.
    pub model_layer: u32,
    /// Routed experts that the checkpoint's layer has, held here or not.
    pub num_experts: u32,
    /// Zero experts: ids `num_experts..num_experts + identity_experts` have no record, output = input.
    pub identity_experts: u32,
    /// Shape classes; nearly always one.
    pub classes: Vec<Class>,
    /// Experts held, ascending.
    pub experts: Vec<u32>,
    /// Class of each held expert; empty where there is one class.
    pub class_of: Vec<u8>,
    /// Where the bytes lie.
    pub records: Records,
    /// Chunk checksums (xxh3-64) of all records, in order of expert then chunk; `None`: not computed.
    pub checksums: Option<Vec<u64>>,
    /// Values of small leaves: `inline[class][leaf]` is empty or holds the bytes of all records
    /// of the class in order of expert (one copy for a common leaf).
    pub inline: Vec<Vec<Vec<u8>>>,
    /// The records of the model's layer that are not held, where that is known.
    rest: Option<Rest>,
    /// First chunk of each record in `checksums`; derived, empty where one class makes it a product.
    chunk_starts: Vec<u64>,
    /// Position of each record among those of its class; derived, empty where there is one class.
    class_rank: Vec<u32>,
}

/// The part of a checkpoint that a store describes: one stack of MoE layers.
#[derive(Debug, Clone)]
pub struct Catalogue {
    /// Name prefix of the stack, e.g. `model.layers`.
    pub stack: String,
    /// Trunk or MTP.
    pub class: StackClass,
    /// The container that the checkpoint came in.
    pub container: Container,
    /// Ascending by `layer`; a partial store leaves some out.
    pub layers: Vec<Layer>,
}

/// Whether a stack is the model's trunk or its multi-token-prediction part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StackClass {
    /// Ordinary layers.
    Trunk,
    /// Multi-token prediction.
    Mtp,
}

/// File format of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Container {
    /// safetensors, one file or several.
    Safetensors,
    /// GGUF, one file or several.
    Gguf,
    /// A v1 store, whose source is not known.
    V1,
}

/// Rounds up to [`IMAGE_ALIGN_BYTES`]; `None` on overflow.
pub fn align_image(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(IMAGE_ALIGN_BYTES)
}

/// Number of checksum chunks of an image.
pub fn chunk_count(image_bytes: u64) -> u64 {
    image_bytes.div_ceil(CHUNK_BYTES)
}

impl Class {
    /// A class from leaves in any order: sorts them canonically and lays out the image.
    ///
    /// *Errors*: text for people when there are no leaves or too many, a size does not follow from
    /// shape and type, or the image grows beyond [`IMAGE_MAX_BYTES`].
    pub fn layout(mut leaves: Vec<Leaf>) -> Result<Self, String> {
        leaves.sort_by(|a, b| (a.role, &a.leaf, &a.name).cmp(&(b.role, &b.leaf, &b.name)));
        let mut at = 0u64;
        for leaf in &mut leaves {
            leaf.image_offset = at;
            at = at
                .checked_add(leaf.bytes)
                .and_then(align_image)
                .ok_or("record image overflows 64 bits")?;
        }
        let class = Self {
            leaves,
            image_bytes: at,
        };
        class.check()?;
        Ok(class)
    }

    /// Checks order, sizes and offsets of a class that came from outside.
    pub fn check(&self) -> Result<(), String> {
        if self.leaves.is_empty() || self.leaves.len() > LEAVES_MAX {
            return Err(format!(
                "{} leaves in a record, the limit is 1 to {LEAVES_MAX}",
                self.leaves.len()
            ));
        }
        let mut at = 0u64;
        for pair in self.leaves.windows(2) {
            let order = |l: &Leaf| (l.role, l.leaf.clone(), l.name.clone());
            if order(&pair[0]) >= order(&pair[1]) {
                return Err(format!(
                    "leaves {:?} and {:?} are not in canonical order",
                    pair[0].name, pair[1].name
                ));
            }
        }
        for leaf in &self.leaves {
            if leaf.image_offset != at {
                return Err(format!(
                    "leaf {:?} lies at {} of the record image, expected {at}",
                    leaf.name, leaf.image_offset
                ));
            }
            if leaf.dtype.tensor_bytes(&leaf.shape) != Some(leaf.bytes) {
                return Err(format!(
                    "leaf {:?} of type {} and shape {:?} says {} bytes",
                    leaf.name, leaf.dtype, leaf.shape, leaf.bytes
                ));
            }
            if leaf.name.len() > 4096 || leaf.leaf.len() > 4096 || leaf.shape.len() > 16 {
                return Err("leaf name over 4096 bytes or more than 16 dimensions".into());
            }
            if (leaf.stacking == Stacking::PerExpert) != leaf.name.contains("{}") {
                return Err(format!("leaf {:?} does not fit its stacking", leaf.name));
            }
            at = at
                .checked_add(leaf.bytes)
                .and_then(align_image)
                .filter(|&n| n <= IMAGE_MAX_BYTES)
                .ok_or_else(|| format!("record image exceeds {IMAGE_MAX_BYTES} bytes"))?;
        }
        if self.image_bytes != at {
            return Err(format!(
                "record image of {} bytes, its leaves make {at}",
                self.image_bytes
            ));
        }
        Ok(())
    }

    /// Whether a leaf travels in the catalogue.
    pub fn is_inline(&self, leaf: usize) -> bool {
        self.leaves[leaf].bytes <= INLINE_MAX_BYTES
    }

    /// Sum of the leaves' bytes, without padding.
    pub fn payload_bytes(&self) -> u64 {
        self.leaves.iter().map(|l| l.bytes).sum()
    }

    fn id(&self) -> u128 {
        let mut out = Vec::new();
        let text = |out: &mut Vec<u8>, s: &str| {
            out.extend_from_slice(&(s.len() as u16).to_le_bytes());
            out.extend_from_slice(s.as_bytes());
        };
        out.extend_from_slice(&(self.leaves.len() as u32).to_le_bytes());
        for leaf in &self.leaves {
            out.push(leaf.role as u8);
            text(&mut out, &leaf.name);
            out.push(leaf.stacking as u8);
            out.push(leaf.transform as u8);
            text(&mut out, leaf.dtype.name());
            out.push(leaf.shape.len() as u8);
            for d in &leaf.shape {
                out.extend_from_slice(&d.to_le_bytes());
            }
        }
        xxh3_128(&out)
    }
}

/// Identity of a stack from the identities of its layers; `docs/store.md`, "Content id".
pub fn stack_id(stack: &str, layers: impl ExactSizeIterator<Item = (u32, u128)>) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(b"atlas-content-2\0");
    hash.update(&(stack.len() as u16).to_le_bytes());
    hash.update(stack.as_bytes());
    hash.update(&(layers.len() as u32).to_le_bytes());
    for (layer, id) in layers {
        hash.update(&layer.to_le_bytes());
        hash.update(&id.to_le_bytes());
    }
    hash.digest128()
}

impl Catalogue {
    /// The content id, `None` where a layer has no checksums.
    pub fn content_id(&self) -> Option<u128> {
        self.layers.iter().all(|l| l.checksums.is_some()).then(|| {
            stack_id(
                &self.stack,
                self.layers.iter().map(|l| (l.layer, l.id(true))),
            )
        })
    }

    /// Identity of names, types and shapes alone.
    pub fn layout_id(&self) -> u128 {
        stack_id(
            &self.stack,
            self.layers.iter().map(|l| (l.layer, l.id(false))),
        )
    }

    /// The layer with that dense index.
    pub fn layer(&self, layer: u32) -> Option<&Layer> {
        match self.layers.get(layer as usize) {
            Some(l) if l.layer == layer => Some(l),
            _ => self
                .layers
                .binary_search_by_key(&layer, |l| l.layer)
                .ok()
                .map(|i| &self.layers[i]),
        }
    }

    /// Number of records held.
    pub fn record_count(&self) -> u64 {
        self.layers.iter().map(|l| l.experts.len() as u64).sum()
    }

    /// Sum of the record images of all records held, bytes.
    pub fn image_bytes(&self) -> u64 {
        let of = |l: &Layer| match l.classes.as_slice() {
            [one] => one.image_bytes.saturating_mul(l.experts.len() as u64),
            _ => (0..l.experts.len()).fold(0u64, |n, p| n.saturating_add(l.class(p).image_bytes)),
        };
        self.layers.iter().map(of).fold(0, u64::saturating_add)
    }
}
