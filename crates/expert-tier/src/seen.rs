//! Which records were compared with their checksums before: what [`Verify::First`](crate::Verify) goes by.

use std::collections::HashMap;

use expert_wire::Key;

use crate::rail::ContentTag;

/// A content and the run of the rails that serves it: after a reconnect the same id may stand for
/// bytes that went bad meanwhile.
pub(crate) type Run = (ContentTag, u64);

/// Records compared once: a bit per expert of each layer of one content.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    content: Option<Run>,
    layers: HashMap<u32, Vec<u64>>,
}

impl Seen {
    pub(crate) fn contains(&self, content: Run, key: Key) -> bool {
        let bits = self.layers.get(&key.layer);
        let word = bits.and_then(|bits| bits.get(key.expert as usize / 64));
        self.content == Some(content) && word.is_some_and(|w| w >> (key.expert % 64) & 1 == 1)
    }

    pub(crate) fn insert(&mut self, content: Run, key: Key) {
        if self.content.is_some_and(|(_, run)| run > content.1) {
            return; // a batch that ended late
        }
        if self.content != Some(content) {
            self.layers.clear();
            self.content = Some(content);
        }
        let bits = self.layers.entry(key.layer).or_default();
        let word = key.expert as usize / 64;
        if bits.len() <= word {
            bits.resize(word + 1, 0);
        }
        bits[word] |= 1 << (key.expert % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ContentTag = ContentTag {
        id: 1,
        instance: None,
    };
    const B: ContentTag = ContentTag {
        id: 2,
        instance: None,
    };

    #[test]
    fn record_is_known_for_its_content_and_run_alone() {
        let (key, mut seen) = (Key::new(3, 70), Seen::default());
        assert!(!seen.contains((A, 1), key));
        seen.insert((A, 1), key);
        assert!(seen.contains((A, 1), key));
        for other in [Key::new(3, 71), Key::new(3, 6), Key::new(2, 70)] {
            assert!(!seen.contains((A, 1), other));
        }
        assert!(!seen.contains((B, 1), key));
        assert!(!seen.contains((A, 2), key), "the rails were away meanwhile");
    }

    #[test]
    fn new_run_forgets_and_a_batch_of_the_old_one_brings_nothing_back() {
        let (key, late, mut seen) = (Key::new(0, 0), Key::new(0, 1), Seen::default());
        seen.insert((A, 1), key);
        seen.insert((B, 2), key);
        seen.insert((A, 1), late);
        assert!(seen.contains((B, 2), key));
        assert!(!seen.contains((A, 1), key) && !seen.contains((A, 1), late));
    }
}
