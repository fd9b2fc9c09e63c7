//! Segmented LRU.

use super::EvictionPolicy;
use super::list::Lists;

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

#[derive(Debug)]
pub(super) struct SegmentedLru {
    lists: Lists<2>,
    protected_max: u32,
}

impl SegmentedLru {
    pub(super) fn new(capacity: u32, protected_max: u32) -> Self {
        Self {
            lists: Lists::new(capacity),
            protected_max,
        }
    }
}

impl EvictionPolicy for SegmentedLru {
    fn insert(&mut self, entry: u32) {
        match self.lists.list_of(entry) {
            Some(_) => self.touch(entry),
            None => self.lists.push_front(PROBATION, entry),
        }
    }

    fn touch(&mut self, entry: u32) {
        if self.lists.list_of(entry).is_none() {
            return;
        }
        self.lists.push_front(PROTECTED, entry);
        if self.lists.len(PROTECTED) > self.protected_max {
            if let Some(oldest) = self.lists.back(PROTECTED) {
                self.lists.push_front(PROBATION, oldest);
            }
        }
    }

    fn remove(&mut self, entry: u32) {
        self.lists.unlink(entry);
    }

    fn victim(&mut self, may: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let probation = self.lists.oldest_first(PROBATION);
        let mut order = probation.chain(self.lists.oldest_first(PROTECTED));
        order.find(|&entry| may(entry))
    }
}
