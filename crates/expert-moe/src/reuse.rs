//! How many records must be fetched, from the routing alone.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use crate::forward::Use;

/// How many of the records that were needed cannot have been in memory, and how many at most were not, where the least
/// recently used is given up first and memory has room for `slots` records.
///
/// The two differ where it depends on the order in which the records of one layer arrived.
pub fn expected_misses(uses: &[Use], slots: usize) -> RangeInclusive<u64> {
    let (mut least, mut most) = (0, 0);
    let mut last: HashMap<(u32, u32), usize> = HashMap::new();
    for (at, now) in uses.iter().enumerate() {
        for &expert in &now.experts {
            let key = (now.layer, expert);
            let Some(before) = last.get(&key).copied() else {
                least += 1;
                most += 1;
                continue;
            };
            // What was used since is more recent for certain, what was used together with it perhaps.
            let since: HashSet<(u32, u32)> = keys(&uses[before + 1..at]).collect();
            let mut perhaps = since.clone();
            perhaps.extend(keys(&uses[before..=before]).filter(|other| *other != key));
            least += u64::from(since.len() >= slots);
            most += u64::from(perhaps.len() >= slots);
        }
        last.extend(now.experts.iter().map(|&expert| ((now.layer, expert), at)));
    }
    least..=most
}

fn keys(uses: &[Use]) -> impl Iterator<Item = (u32, u32)> + '_ {
    uses.iter()
        .flat_map(|used| used.experts.iter().map(|&expert| (used.layer, expert)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `steps` times three layers with the same three experts each.
    fn cycle(steps: u32) -> Vec<Use> {
        let layers = (0..steps).flat_map(|step| (0..3).map(move |layer| (step, layer)));
        layers
            .map(|(step, layer)| Use {
                step,
                layer,
                experts: vec![1, 4, 5],
            })
            .collect()
    }

    #[test]
    fn all_is_fetched_each_time_where_two_of_three_layers_have_room() {
        assert_eq!(expected_misses(&cycle(4), 6), 36..=36);
        assert_eq!(expected_misses(&cycle(4), 3), 36..=36);
    }

    #[test]
    fn all_is_fetched_once_where_there_is_room() {
        assert_eq!(expected_misses(&cycle(4), 9), 9..=9);
        assert_eq!(expected_misses(&[], 9), 0..=0);
    }

    #[test]
    fn it_is_not_certain_where_a_part_of_a_layer_has_to_go() {
        let expected = expected_misses(&cycle(2), 8);
        assert_eq!(*expected.start(), 9);
        assert_eq!(*expected.end(), 18);
    }
}
