//! Which records a content has, and what it is part of: several peers that each hold some experts
//! add up to one model.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use expert_store::info::{LayerInfo, StoreInfo};
use expert_wire::Key;

use crate::rail::ContentTag;

/// The records that a store holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Coverage {
    /// Ascending, disjoint `[first, end)` ranges of experts, by dense layer index.
    layers: BTreeMap<u32, Vec<[u32; 2]>>,
}

impl Coverage {
    /// What a store says that it holds.
    pub fn of(info: &StoreInfo) -> Self {
        Self::of_layers(&info.layers)
    }

    /// What these layers are said to hold.
    pub fn of_layers(layers: &[LayerInfo]) -> Self {
        Self::of_ranges(layers.iter().map(|l| (l.layer, l.experts.clone())))
    }

    /// These `[first, end)` ranges of experts, by dense layer index; ascending and disjoint.
    pub fn of_ranges(layers: impl IntoIterator<Item = (u32, Vec<[u32; 2]>)>) -> Self {
        Self {
            layers: layers.into_iter().collect(),
        }
    }

    /// Whether it holds a record.
    pub fn covers(&self, key: Key) -> bool {
        let Some(ranges) = self.layers.get(&key.layer) else {
            return false;
        };
        let after = ranges.partition_point(|range| range[0] <= key.expert);
        after > 0 && key.expert < ranges[after - 1][1]
    }

    /// The ranges of a layer.
    pub fn ranges(&self, layer: u32) -> &[[u32; 2]] {
        self.layers.get(&layer).map_or(&[], Vec::as_slice)
    }

    /// Whether it has no record.
    pub fn is_empty(&self) -> bool {
        self.layers.values().all(Vec::is_empty)
    }

    /// Number of records.
    pub fn records(&self) -> u64 {
        let ranges = self.layers.values().flatten();
        ranges.map(|[first, end]| u64::from(end - first)).sum()
    }

    /// Takes in what another has.
    pub fn add(&mut self, other: &Self) {
        for (&layer, more) in &other.layers {
            let ranges = self.layers.entry(layer).or_default();
            ranges.extend_from_slice(more);
            ranges.sort_unstable();
            let mut merged: Vec<[u32; 2]> = Vec::with_capacity(ranges.len());
            for &[first, end] in ranges.iter() {
                match merged.last_mut() {
                    Some(last) if first <= last[1] => last[1] = last[1].max(end),
                    _ => merged.push([first, end]),
                }
            }
            *ranges = merged;
        }
    }

    /// What it has and another has not.
    pub fn without(&self, other: &Self) -> Self {
        let left = |(&layer, ranges): (&u32, &Vec<[u32; 2]>)| {
            let mut left = Vec::new();
            for &[first, end] in ranges {
                let mut at = first;
                for &[from, to] in other.ranges(layer) {
                    if to <= at || from >= end {
                        continue;
                    }
                    if from > at {
                        left.push([at, from]);
                    }
                    at = to;
                }
                if at < end {
                    left.push([at, end]);
                }
            }
            (!left.is_empty()).then_some((layer, left))
        };
        Self::of_ranges(self.layers.iter().filter_map(left))
    }
}

/// Groups of layers that are shown; more are counted.
const GROUPS_SHOWN: usize = 8;
/// ... and ranges of each.
const RANGES_SHOWN: usize = 8;

/// For people: `layer 3: experts 128..256; layers 4 to 9: experts 0..8`, the ends not included.
impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers: Vec<(&u32, &Vec<[u32; 2]>)> =
            self.layers.iter().filter(|(_, r)| !r.is_empty()).collect();
        if layers.is_empty() {
            return f.write_str("nothing");
        }
        let groups: Vec<_> = layers
            .chunk_by(|a, b| *a.0 + 1 == *b.0 && a.1 == b.1)
            .collect();
        for (i, group) in groups.iter().take(GROUPS_SHOWN).enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            let (first, last) = (group[0].0, group[group.len() - 1].0);
            match first == last {
                true => write!(f, "layer {first}: experts ")?,
                false => write!(f, "layers {first} to {last}: experts ")?,
            }
            let ranges = group[0].1;
            for (i, [first, end]) in ranges.iter().take(RANGES_SHOWN).enumerate() {
                let comma = if i > 0 { ", " } else { "" };
                write!(f, "{comma}{first}..{end}")?;
            }
            if ranges.len() > RANGES_SHOWN {
                write!(f, " and {} ranges more", ranges.len() - RANGES_SHOWN)?;
            }
        }
        match groups.len().saturating_sub(GROUPS_SHOWN) {
            0 => Ok(()),
            n => write!(f, "; and {n} groups of layers more"),
        }
    }
}

/// What is known of a content beyond its name. By default it is a whole of its own, with every
/// record that it is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holding {
    /// The content that it is part of, if of another.
    pub whole: Option<ContentTag>,
    /// The records that it has, if not all.
    pub held: Option<Arc<Coverage>>,
}

/// Contents that are remembered: of each peer the present one, and some before it.
const HOLDINGS_MAX: usize = 256;

/// What was told of contents; the oldest word is forgotten first.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    told: VecDeque<(ContentTag, Holding)>,
}

impl Holdings {
    pub(crate) fn insert(&mut self, content: ContentTag, holding: Holding) {
        self.told.retain(|(tag, _)| *tag != content);
        if self.told.len() == HOLDINGS_MAX {
            self.told.pop_front();
        }
        self.told.push_back((content, holding));
    }

    pub(crate) fn knows(&self, content: ContentTag) -> bool {
        self.told.iter().any(|(tag, _)| *tag == content)
    }

    pub(crate) fn find(&self, content: ContentTag) -> Holding {
        let known = self.told.iter().find(|(tag, _)| *tag == content);
        known.map_or_else(Holding::default, |(_, holding)| holding.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Some records of a few layers, as a set: the plain model of a coverage.
    fn records() -> impl Strategy<Value = BTreeSet<(u32, u32)>> {
        proptest::collection::btree_set((0u32..4, 0u32..12), 0..40)
    }

    fn coverage(records: &BTreeSet<(u32, u32)>) -> Coverage {
        let layers: BTreeSet<u32> = records.iter().map(|r| r.0).collect();
        Coverage::of_ranges(layers.into_iter().map(|layer| {
            let of_layer = records.iter().filter(|r| r.0 == layer);
            let experts: Vec<u32> = of_layer.map(|r| r.1).collect();
            (layer, expert_store::codec::to_ranges(&experts))
        }))
    }

    proptest! {
        #[test]
        fn sums_and_differences_are_those_of_sets(
            parts in proptest::collection::vec(records(), 1..5), whole in records(),
        ) {
            let mut sum = Coverage::default();
            let mut model = BTreeSet::new();
            for part in &parts {
                sum.add(&coverage(part));
                model.extend(part.iter().copied());
            }
            prop_assert_eq!(&sum, &coverage(&model));
            prop_assert_eq!(sum.records(), model.len() as u64);
            let missing: BTreeSet<_> = whole.difference(&model).copied().collect();
            let got = coverage(&whole).without(&sum);
            prop_assert_eq!(&got, &coverage(&missing));
            prop_assert_eq!(got.is_empty(), missing.is_empty());
            for layer in 0..5 {
                for expert in 0..13 {
                    prop_assert_eq!(sum.covers(Key { layer, expert }), model.contains(&(layer, expert)));
                }
            }
        }
    }

    #[test]
    fn ranges_are_shown_by_layer() {
        let coverage = Coverage::of_ranges([
            (3, vec![[128, 256]]),
            (4, vec![[0, 1], [5, 8]]),
            (5, vec![[0, 1], [5, 8]]),
            (7, vec![[0, 1], [5, 8]]),
        ]);
        assert_eq!(
            coverage.to_string(),
            "layer 3: experts 128..256; layers 4 to 5: experts 0..1, 5..8; layer 7: experts 0..1, 5..8"
        );
        assert_eq!(Coverage::default().to_string(), "nothing");
        let many = Coverage::of_ranges((0..100).map(|l| (l, vec![[l, l + 1]])));
        assert!(many.to_string().ends_with("and 92 groups of layers more"));
    }

    #[test]
    fn ranges_are_half_open() {
        let coverage = Coverage {
            layers: [(3, vec![[2, 4], [8, 9]])].into(),
        };
        let held: Vec<u32> = (0..12)
            .filter(|&expert| coverage.covers(Key { layer: 3, expert }))
            .collect();
        assert_eq!(held, [2, 3, 8]);
        assert!(!coverage.covers(Key {
            layer: 2,
            expert: 2
        }));
    }
}
