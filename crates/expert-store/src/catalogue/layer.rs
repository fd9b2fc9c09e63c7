//! One layer: its checks, and the way from a record to its segments and checksums.

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::{Class, IMAGE_MAX_BYTES, Layer, LeafSource, Records, Segment, Stacking, chunk_count};
use expert_wire::limits;

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
            rest: None,
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
            let need = widest.checked_add(*header_bytes);
            if *stride % 4096 != 0
                || need.is_none_or(|need| *stride < need)
                || *stride > 2 * IMAGE_MAX_BYTES
            {
                return Err(format!(
                    "record stride {stride} for images of up to {widest} bytes after a header of {header_bytes} (needs a multiple of 4096)"
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
        self.id_over(
            self.experts
                .iter()
                .copied()
                .zip(self.record_ids(with_checksums)),
        )
    }

    /// Identity of each record held, in order of expert.
    pub(super) fn record_ids(&self, with_checksums: bool) -> impl ExactSizeIterator<Item = u128> {
        let class_ids: Vec<u128> = self.classes.iter().map(Class::id).collect();
        let mut record = Vec::new();
        (0..self.experts.len()).map(move |position| {
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
            xxh3_128(&record)
        })
    }

    /// Identity of the layer with these records, ascending by expert.
    pub(super) fn id_over(&self, records: impl ExactSizeIterator<Item = (u32, u128)>) -> u128 {
        let mut layer = Xxh3::new();
        layer.update(&self.layer.to_le_bytes());
        layer.update(&self.model_layer.to_le_bytes());
        layer.update(&(records.len() as u32).to_le_bytes());
        for (expert, id) in records {
            layer.update(&expert.to_le_bytes());
            layer.update(&id.to_le_bytes());
        }
        layer.digest128()
    }
}
