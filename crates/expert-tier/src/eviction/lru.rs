//! Least recently used.

use super::EvictionPolicy;
use super::list::Lists;

const ALL: usize = 0;

#[derive(Debug)]
pub(super) struct Lru {
    lists: Lists<1>,
}

impl Lru {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            lists: Lists::new(capacity),
        }
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, entry: u32) {
        self.lists.push_front(ALL, entry);
    }

    fn touch(&mut self, entry: u32) {
        if self.lists.list_of(entry).is_some() {
            self.lists.push_front(ALL, entry);
        }
    }

    fn remove(&mut self, entry: u32) {
        self.lists.unlink(entry);
    }

    fn victim(&mut self, may: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.lists.oldest_first(ALL).find(|&entry| may(entry))
    }
}
