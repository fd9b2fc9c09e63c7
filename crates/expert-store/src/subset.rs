//! A layer with some of its experts.

use crate::catalogue::{Layer, LeafSource, Records, Stacking};

impl Layer {
    /// This layer with only those of its held experts; `keep` ascends. Indices, checksums and
    /// values of small leaves stay those of the experts.
    ///
    /// A part of a packed layer is described by where each leaf lies in the packed file, because
    /// the position of a record no longer follows from its rank. Where there are checksums the part
    /// remembers the identities of the others ([`Layer::rest`]).
    ///
    /// *Errors*: text for people where `keep` is empty or names an expert that is not held.
    pub fn with_experts(&self, keep: &[u32]) -> Result<Self, String> {
        let positions: Vec<usize> = keep
            .iter()
            .map(|&e| {
                self.position(e)
                    .ok_or_else(|| format!("expert {e} is not held"))
            })
            .collect::<Result<_, _>>()?;
        // Classes that still have records, in their old order.
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); self.classes.len()];
        for &p in &positions {
            members[self.class_index(p)].push(p);
        }
        let used: Vec<usize> = (0..members.len())
            .filter(|&c| !members[c].is_empty())
            .collect();
        let class_of = match used.len() {
            0 | 1 => Vec::new(),
            _ => positions
                .iter()
                .map(|&p| {
                    let old = self.class_index(p);
                    // At most 256 classes: the position fits a byte.
                    used.iter().position(|&c| c == old).unwrap_or(0) as u8
                })
                .collect(),
        };
        let records = match &self.records {
            Records::Remote => Records::Remote,
            Records::InPlace { sources } => Records::InPlace {
                sources: used
                    .iter()
                    .map(|&c| {
                        sources[c]
                            .iter()
                            .map(|s| self.source_of(s, &members[c]))
                            .collect()
                    })
                    .collect(),
            },
            &Records::Packed {
                file,
                stride,
                header_bytes,
            } => Records::InPlace {
                sources: used
                    .iter()
                    .map(|&c| {
                        self.classes[c]
                            .leaves
                            .iter()
                            .map(|leaf| LeafSource::Column {
                                files: vec![file; members[c].len()],
                                offsets: members[c]
                                    .iter()
                                    .map(|&p| p as u64 * stride + header_bytes + leaf.image_offset)
                                    .collect(),
                            })
                            .collect()
                    })
                    .collect(),
            },
        };
        let checksums = self.checksums.as_ref().map(|_| {
            positions
                .iter()
                .flat_map(|&p| self.record_checksums(p).unwrap_or(&[]))
                .copied()
                .collect()
        });
        let mut inline = Vec::new();
        if !self.inline.is_empty() {
            for &c in &used {
                let leaves = &self.classes[c].leaves;
                let mut values = vec![Vec::new(); leaves.len()];
                for (i, value) in values.iter_mut().enumerate() {
                    let copies = match leaves[i].stacking {
                        Stacking::Common => &members[c][..1],
                        _ => &members[c][..],
                    };
                    for &p in copies {
                        value.extend_from_slice(self.inline_value(p, i).unwrap_or(&[]));
                    }
                }
                inline.push(values);
            }
        }
        let mut part = Self::new(
            self.layer,
            self.model_layer,
            self.num_experts,
            self.identity_experts,
            used.iter().map(|&c| self.classes[c].clone()).collect(),
            keep.to_vec(),
            class_of,
            records,
            checksums,
            inline,
        )?;
        part.set_rest(self.rest_without(keep))?;
        Ok(part)
    }

    fn source_of(&self, source: &LeafSource, members: &[usize]) -> LeafSource {
        match source {
            strided @ LeafSource::Strided { .. } => strided.clone(),
            LeafSource::Column { files, offsets } => {
                let ranks = || members.iter().map(|&p| self.class_rank(p));
                LeafSource::Column {
                    files: ranks().map(|r| files[r]).collect(),
                    offsets: ranks().map(|r| offsets[r]).collect(),
                }
            }
        }
    }
}
