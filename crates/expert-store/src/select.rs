//! Choosing a part of a model: some layers, some experts, or one of several equal shards.

use std::ops::Range;
use std::str::FromStr;

use crate::StoreError;
use crate::catalogue::{Catalogue, Layer};

/// Which records to take; the default is all. The three conditions add up.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selection {
    /// Dense layer indices, end exclusive.
    pub layers: Option<Vec<Range<u32>>>,
    /// Expert indices of every layer, end exclusive.
    pub experts: Option<Vec<Range<u32>>>,
    /// Shard `(i, n)`, `i` from 1 to `n`: of the experts of every layer, the `i`-th of `n`
    /// contiguous ranges whose sizes differ by at most one (the first ones are the larger).
    pub shard: Option<(u32, u32)>,
}

/// Reads `3`, `0..16` (end exclusive) or a comma-separated list of these.
///
/// *Errors*: [`StoreError::Usage`] that shows the text and what was expected.
pub fn parse_ranges(text: &str) -> Result<Vec<Range<u32>>, StoreError> {
    let bad = |part: &str, why: &str| {
        StoreError::Usage(format!(
            "cannot read {part:?} of {text:?}: {why}; write numbers or ranges such as 3,8..16 (the end is not included)"
        ))
    };
    let mut ranges = Vec::new();
    for part in text.split(',').map(str::trim) {
        let number = |s: &str| {
            u32::from_str(s.trim()).map_err(|e| bad(part, &format!("{:?}: {e}", s.trim())))
        };
        let range = match part.split_once("..") {
            Some((_, end)) if end.trim_start().starts_with('=') => {
                return Err(bad(part, "`..=` is not known"));
            }
            Some((first, end)) => number(first)?..number(end)?,
            None => {
                let n = number(part)?;
                n..n.checked_add(1).ok_or_else(|| bad(part, "too large"))?
            }
        };
        if range.is_empty() {
            return Err(bad(part, "the range is empty"));
        }
        ranges.push(range);
    }
    Ok(ranges)
}

/// Reads `1/2`: the first of two shards.
///
/// *Errors*: [`StoreError::Usage`]; shards count from 1.
pub fn parse_shard(text: &str) -> Result<(u32, u32), StoreError> {
    text.split_once('/')
        .and_then(|(i, n)| Some((i.trim().parse().ok()?, n.trim().parse().ok()?)))
        .filter(|&(i, n): &(u32, u32)| i >= 1 && i <= n)
        .ok_or_else(|| {
            StoreError::Usage(format!(
                "cannot read shard {text:?}: write i/n with i from 1 to n, e.g. 1/2 and 2/2"
            ))
        })
}

impl Selection {
    /// Whether everything is taken.
    pub fn is_all(&self) -> bool {
        self.layers.is_none() && self.experts.is_none() && self.shard.is_none()
    }

    /// Whether each layer that is taken is taken whole.
    pub fn takes_whole_layers(&self) -> bool {
        self.experts.is_none() && self.shard.is_none()
    }

    /// Drops from a catalogue what is not selected; dense indices stay as they are.
    ///
    /// *Errors*: [`StoreError::Usage`] for a range that names layers or experts which are not
    /// there, an impossible shard, or a selection that leaves nothing.
    pub fn apply(&self, catalogue: &mut Catalogue) -> Result<(), StoreError> {
        let usage = StoreError::Usage;
        if let Some(ranges) = &self.layers {
            for range in ranges {
                if range.is_empty() || range.len() > catalogue.layers.len() {
                    return Err(usage(format!(
                        "layers {}..{} selected, there are {}",
                        range.start,
                        range.end,
                        describe(catalogue.layers.iter().map(|l| l.layer))
                    )));
                }
                if let Some(missing) = range.clone().find(|&l| catalogue.layer(l).is_none()) {
                    return Err(usage(format!(
                        "layer {missing} selected, there are {} (dense indices: the first MoE layer is 0)",
                        describe(catalogue.layers.iter().map(|l| l.layer))
                    )));
                }
            }
            catalogue
                .layers
                .retain(|l| ranges.iter().any(|r| r.contains(&l.layer)));
        }
        if self.takes_whole_layers() {
            return Ok(());
        }
        for layer in &mut catalogue.layers {
            let keep = self.experts_of(layer)?;
            if keep.len() != layer.experts.len() {
                *layer = layer
                    .with_experts(&keep)
                    .map_err(|why| usage(format!("layer {}: {why}", layer.layer)))?;
            }
        }
        Ok(())
    }

    fn experts_of(&self, layer: &Layer) -> Result<Vec<u32>, StoreError> {
        let n = layer.num_experts;
        for range in self.experts.iter().flatten() {
            if range.is_empty() || range.end > n {
                return Err(StoreError::Usage(format!(
                    "experts {}..{} selected, layer {} has 0..{n}",
                    range.start, range.end, layer.layer
                )));
            }
        }
        let shard = match self.shard {
            None => 0..n,
            Some((i, count)) if i >= 1 && i <= count && count <= n => {
                let first = |i: u32| {
                    let (i, n, count) = (u64::from(i), u64::from(n), u64::from(count));
                    (i * (n / count) + i.min(n % count)) as u32
                };
                first(i - 1)..first(i)
            }
            Some((i, count)) => {
                return Err(StoreError::Usage(format!(
                    "shard {i}/{count} of the {n} experts of layer {}: shards count from 1 and each needs an expert",
                    layer.layer
                )));
            }
        };
        let keep: Vec<u32> = layer
            .experts
            .iter()
            .copied()
            .filter(|e| shard.contains(e))
            .filter(|e| {
                self.experts
                    .as_ref()
                    .is_none_or(|ranges| ranges.iter().any(|r| r.contains(e)))
            })
            .collect();
        if keep.is_empty() {
            return Err(StoreError::Usage(format!(
                "nothing selected of layer {}: it holds experts {}",
                layer.layer,
                describe(layer.experts.iter().copied())
            )));
        }
        Ok(keep)
    }
}

/// Ascending numbers in few words: `0..4, 7..8`.
pub(crate) fn describe(numbers: impl Iterator<Item = u32>) -> String {
    let numbers: Vec<u32> = numbers.collect();
    let ranges = crate::codec::to_ranges(&numbers);
    let mut words: Vec<String> = ranges
        .iter()
        .take(8)
        .map(|[a, b]| format!("{a}..{b}"))
        .collect();
    if ranges.len() > 8 {
        words.push("…".into());
    }
    words.join(", ")
}
