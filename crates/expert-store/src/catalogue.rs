//! The catalogue: for each MoE layer of one stack, what a record is made of and where its bytes lie.
//!
//! Columnar: what all experts of a layer share (names, types, shapes, image offsets) is kept once
//! per *shape class*; per record there are only offsets and checksums. Half a million tensors take
//! a few megabytes.
//!
//! *Invariant*: a [`Layer`] that exists has passed [`Layer::check`]: offsets, sizes and lengths fit
//! together, so that code after it needs no further bounds reasoning.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::Dtype;
use expert_wire::limits;

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

impl Layer {
    /// A layer from its parts, checked.
    ///
    /// *Errors*: text for people that names what does not fit.
    #[allow(clippy::too_many_arguments)] // the columns of one table; a builder would only repeat them
    pub fn new(
        layer: u32,
        model_layer: u32,
        num_experts: u32,
        identity_experts: u32,
        classes: Vec<Class>,
        experts: Vec<u32>,
        class_of: Vec<u8>,
        records: Records,
        checksums: Option<Vec<u64>>,
        inline: Vec<Vec<Vec<u8>>>,
    ) -> Result<Self, String> {
        let mut this = Self {
            layer,
            model_layer,
            num_experts,
            identity_experts,
            classes,
            experts,
            class_of,
            records,
            checksums,
            inline,
            chunk_starts: Vec::new(),
            class_rank: Vec::new(),
        };
        this.check()?;
        this.derive();
        // The number of checksums needs the derived starts.
        if let Some(sums) = &this.checksums {
            if sums.len() as u64 != this.total_chunks() {
                return Err(format!(
                    "{} checksums for {} chunks",
                    sums.len(),
                    this.total_chunks()
                ));
            }
        }
        Ok(this)
    }

    fn check(&self) -> Result<(), String> {
        if self.layer >= limits::LAYERS_MAX {
            return Err(format!(
                "layer {} of at most {}",
                self.layer,
                limits::LAYERS_MAX
            ));
        }
        let all = u64::from(self.num_experts) + u64::from(self.identity_experts);
        if self.num_experts == 0 || all > u64::from(limits::EXPERTS_MAX) {
            return Err(format!(
                "{} experts and {} zero experts, the limit is {}",
                self.num_experts,
                self.identity_experts,
                limits::EXPERTS_MAX
            ));
        }
        if self.experts.is_empty() {
            return Err("a layer without experts".into());
        }
        if !self.experts.windows(2).all(|w| w[0] < w[1])
            || self.experts.last().is_some_and(|&e| e >= self.num_experts)
        {
            return Err("experts are not ascending and below the layer's count".into());
        }
        if self.classes.is_empty() || self.classes.len() > 256 {
            return Err(format!(
                "{} shape classes, the limit is 1 to 256",
                self.classes.len()
            ));
        }
        for class in &self.classes {
            class.check()?;
        }
        let want = if self.classes.len() == 1 {
            0
        } else {
            self.experts.len()
        };
        if self.class_of.len() != want
            || self
                .class_of
                .iter()
                .any(|&c| usize::from(c) >= self.classes.len())
        {
            return Err("the list of shape classes does not fit the experts".into());
        }
        let mut population = vec![0u64; self.classes.len()];
        if self.classes.len() == 1 {
            population[0] = self.experts.len() as u64;
        }
        for &c in &self.class_of {
            population[usize::from(c)] += 1;
        }
        if let Records::InPlace { sources } = &self.records {
            let fits = sources.len() == self.classes.len()
                && sources
                    .iter()
                    .zip(&self.classes)
                    .zip(&population)
                    .all(|((s, c), &n)| {
                        s.len() == c.leaves.len()
                            && s.iter().all(|source| match source {
                                LeafSource::Strided { base, step, .. } => {
                                    u64::from(limits::EXPERTS_MAX)
                                        .checked_mul(*step)
                                        .and_then(|x| x.checked_add(*base))
                                        .and_then(|x| x.checked_add(IMAGE_MAX_BYTES))
                                        .is_some()
                                }
                                LeafSource::Column { files, offsets } => {
                                    files.len() as u64 == n
                                        && offsets.len() as u64 == n
                                        && offsets
                                            .iter()
                                            .all(|o| o.checked_add(IMAGE_MAX_BYTES).is_some())
                                }
                            })
                    });
            if !fits {
                return Err("source columns do not fit the records".into());
            }
        }
        if let Records::Packed {
            stride,
            header_bytes,
            ..
        } = &self.records
        {
            let widest = self
                .classes
                .iter()
                .map(|c| c.image_bytes)
                .max()
                .unwrap_or(0);
            if *stride % 4096 != 0
                || *stride < widest + header_bytes
                || *stride > 2 * IMAGE_MAX_BYTES
            {
                return Err(format!(
                    "record stride {stride} for images of up to {widest} bytes (needs a multiple of 4096)"
                ));
            }
        }
        if !self.inline.is_empty() {
            let fits =
                self.inline.len() == self.classes.len()
                    && self.inline.iter().zip(&self.classes).zip(&population).all(
                        |((v, c), &n)| {
                            v.len() == c.leaves.len()
                                && v.iter().enumerate().all(|(i, bytes)| {
                                    let leaf = &c.leaves[i];
                                    let copies = if leaf.stacking == Stacking::Common {
                                        1
                                    } else {
                                        n
                                    };
                                    bytes.is_empty()
                                        || (c.is_inline(i)
                                            && bytes.len() as u64 == leaf.bytes * copies)
                                })
                        },
                    );
            if !fits {
                return Err("values of small leaves do not fit the records".into());
            }
        }
        Ok(())
    }

    fn derive(&mut self) {
        if self.classes.len() == 1 {
            return;
        }
        let mut chunk = 0;
        let mut seen = vec![0u32; self.classes.len()];
        for &c in &self.class_of {
            self.chunk_starts.push(chunk);
            chunk += chunk_count(self.classes[usize::from(c)].image_bytes);
            self.class_rank.push(seen[usize::from(c)]);
            seen[usize::from(c)] += 1;
        }
        self.chunk_starts.push(chunk);
    }

    /// Position of an expert among the held ones, `None` where it is not held.
    pub fn position(&self, expert: u32) -> Option<usize> {
        // Whole layers are the rule: try the direct hit first.
        match self.experts.get(expert as usize) {
            Some(&e) if e == expert => Some(expert as usize),
            _ => self.experts.binary_search(&expert).ok(),
        }
    }

    /// Class index of the record at a position.
    pub fn class_index(&self, position: usize) -> usize {
        self.class_of.get(position).map_or(0, |&c| usize::from(c))
    }

    /// Class of the record at a position.
    pub fn class(&self, position: usize) -> &Class {
        &self.classes[self.class_index(position)]
    }

    /// Position of a record among those of its class.
    pub fn class_rank(&self, position: usize) -> usize {
        self.class_rank
            .get(position)
            .map_or(position, |&r| r as usize)
    }

    /// Bytes of the largest record image of the layer.
    pub fn image_bytes_max(&self) -> u64 {
        self.classes
            .iter()
            .map(|c| c.image_bytes)
            .max()
            .unwrap_or(0)
    }

    /// Chunks of all records.
    pub fn total_chunks(&self) -> u64 {
        match self.chunk_starts.last() {
            Some(&n) => n,
            None => self.experts.len() as u64 * chunk_count(self.classes[0].image_bytes),
        }
    }

    /// Checksums of the record at a position, `None` where the store has none.
    pub fn record_checksums(&self, position: usize) -> Option<&[u64]> {
        let sums = self.checksums.as_ref()?;
        let n = chunk_count(self.class(position).image_bytes);
        let start = self
            .chunk_starts
            .get(position)
            .copied()
            .unwrap_or(position as u64 * n);
        Some(&sums[start as usize..(start + n) as usize])
    }

    /// Sets the checksums of all records.
    ///
    /// *Errors*: text for people when their number does not fit.
    pub fn set_checksums(&mut self, sums: Vec<u64>) -> Result<(), String> {
        if sums.len() as u64 != self.total_chunks() {
            return Err(format!(
                "{} checksums for {} chunks",
                sums.len(),
                self.total_chunks()
            ));
        }
        self.checksums = Some(sums);
        Ok(())
    }

    /// Value of a small leaf of the record at a position, `None` where it is not in the catalogue.
    pub fn inline_value(&self, position: usize, leaf: usize) -> Option<&[u8]> {
        let class = self.class_index(position);
        let values = self.inline.get(class)?.get(leaf)?;
        let description = &self.classes[class].leaves[leaf];
        if values.is_empty() {
            return None;
        }
        let bytes = description.bytes as usize;
        let rank = match description.stacking {
            Stacking::Common => 0,
            _ => self.class_rank(position),
        };
        values.get(rank * bytes..(rank + 1) * bytes)
    }

    /// Calls `f` for each contiguous range of the record at a position, in image order; ranges
    /// that touch both in the file and in the image come as one. Empty leaves are left out.
    /// Nothing for [`Records::Remote`].
    pub fn for_each_segment(&self, position: usize, mut f: impl FnMut(Segment)) {
        match &self.records {
            Records::Remote => {}
            Records::Packed {
                file,
                stride,
                header_bytes,
            } => f(Segment {
                file: *file,
                file_offset: position as u64 * stride + header_bytes,
                image_offset: 0,
                bytes: self.class(position).image_bytes,
            }),
            Records::InPlace { sources } => {
                let class = self.class_index(position);
                let rank = self.class_rank(position);
                let expert = u64::from(self.experts[position]);
                let mut pending: Option<Segment> = None;
                for (leaf, source) in self.classes[class].leaves.iter().zip(&sources[class]) {
                    if leaf.bytes == 0 {
                        continue;
                    }
                    let (file, file_offset) = match source {
                        LeafSource::Strided { file, base, step } => (*file, base + expert * step),
                        LeafSource::Column { files, offsets } => (files[rank], offsets[rank]),
                    };
                    let next = Segment {
                        file,
                        file_offset,
                        image_offset: leaf.image_offset,
                        bytes: leaf.bytes,
                    };
                    match &mut pending {
                        Some(p)
                            if p.file == file
                                && p.file_offset + p.bytes == next.file_offset
                                && p.image_offset + p.bytes == next.image_offset =>
                        {
                            p.bytes += next.bytes;
                        }
                        _ => {
                            if let Some(p) = pending.replace(next) {
                                f(p);
                            }
                        }
                    }
                }
                if let Some(p) = pending {
                    f(p);
                }
            }
        }
    }

    /// Identity of the layer's content; without checksums (or when told to leave them out) that of
    /// its layout alone. `docs/store.md`, "Content id".
    pub fn id(&self, with_checksums: bool) -> u128 {
        let class_ids: Vec<u128> = self.classes.iter().map(Class::id).collect();
        let mut layer = Xxh3::new();
        layer.update(&self.layer.to_le_bytes());
        layer.update(&self.model_layer.to_le_bytes());
        layer.update(&(self.experts.len() as u32).to_le_bytes());
        let mut record = Vec::new();
        for (position, expert) in self.experts.iter().enumerate() {
            let sums = match with_checksums {
                true => self.record_checksums(position).unwrap_or(&[]),
                false => &[],
            };
            let class = self.class_index(position);
            record.clear();
            record.extend_from_slice(&class_ids[class].to_le_bytes());
            record.extend_from_slice(&self.classes[class].image_bytes.to_le_bytes());
            record.extend_from_slice(&(sums.len() as u32).to_le_bytes());
            for sum in sums {
                record.extend_from_slice(&sum.to_le_bytes());
            }
            layer.update(&expert.to_le_bytes());
            layer.update(&xxh3_128(&record).to_le_bytes());
        }
        layer.digest128()
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
