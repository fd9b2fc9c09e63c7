//! Doubly linked lists over dense indices, all in one table: an entry is in one list or in none.

/// No entry: the end of a list.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    /// Towards the front, the most recently used.
    newer: u32,
    /// Towards the back.
    older: u32,
    /// Which list, [`OUTSIDE`] for none.
    list: u8,
}

/// In no list.
const OUTSIDE: u8 = u8::MAX;

#[derive(Debug, Clone, Copy)]
struct Ends {
    front: u32,
    back: u32,
    len: u32,
}

/// `N` lists that share the entries `0..capacity`.
#[derive(Debug)]
pub(super) struct Lists<const N: usize> {
    nodes: Vec<Node>,
    ends: [Ends; N],
}

impl<const N: usize> Lists<N> {
    pub(super) fn new(capacity: u32) -> Self {
        // The last index stands for "none"; an arena is smaller by far.
        assert!(capacity < NONE, "{capacity} entries are too many");
        let outside = Node {
            newer: NONE,
            older: NONE,
            list: OUTSIDE,
        };
        let empty = Ends {
            front: NONE,
            back: NONE,
            len: 0,
        };
        Self {
            nodes: vec![outside; capacity as usize],
            ends: [empty; N],
        }
    }

    /// The list that holds the entry.
    pub(super) fn list_of(&self, entry: u32) -> Option<usize> {
        let node = self.nodes.get(entry as usize)?;
        (node.list != OUTSIDE).then_some(usize::from(node.list))
    }

    pub(super) fn len(&self, list: usize) -> u32 {
        self.ends[list].len
    }

    pub(super) fn back(&self, list: usize) -> Option<u32> {
        some(self.ends[list].back)
    }

    /// Puts an entry at the front of a list; it leaves the place where it was.
    pub(super) fn push_front(&mut self, list: usize, entry: u32) {
        self.unlink(entry);
        let front = self.ends[list].front;
        self.nodes[entry as usize] = Node {
            newer: NONE,
            older: front,
            list: list as u8,
        };
        match some(front) {
            Some(front) => self.nodes[front as usize].newer = entry,
            None => self.ends[list].back = entry,
        }
        self.ends[list].front = entry;
        self.ends[list].len += 1;
    }

    /// Takes an entry out of the list where it is, if it is in one.
    pub(super) fn unlink(&mut self, entry: u32) {
        let Some(list) = self.list_of(entry) else {
            return;
        };
        let Node { newer, older, .. } = self.nodes[entry as usize];
        match some(newer) {
            Some(newer) => self.nodes[newer as usize].older = older,
            None => self.ends[list].front = older,
        }
        match some(older) {
            Some(older) => self.nodes[older as usize].newer = newer,
            None => self.ends[list].back = newer,
        }
        self.ends[list].len -= 1;
        self.nodes[entry as usize].list = OUTSIDE;
    }

    /// From the back to the front.
    pub(super) fn oldest_first(&self, list: usize) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.back(list), |&entry| {
            some(self.nodes[entry as usize].newer)
        })
    }
}

fn some(entry: u32) -> Option<u32> {
    (entry != NONE).then_some(entry)
}
