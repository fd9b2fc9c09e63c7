//! Which records a content has, and what it is part of: several peers that each hold some experts
//! add up to one model.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use expert_store::info::StoreInfo;
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
        let layers = info.layers.iter().map(|l| (l.layer, l.experts.clone()));
        Self {
            layers: layers.collect(),
        }
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
    use super::*;

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
