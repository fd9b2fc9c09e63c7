//! A table whose places are reused: constant-time insert and remove, stable indices, and a reuse
//! count that tells an old reference from a new one.

/// Reference to an entry of a table whose places are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    /// Place in the table.
    pub index: u32,
    /// How often the place was used before.
    pub reuse: u32,
}

#[derive(Debug)]
struct Place<T> {
    reuse: u32,
    entry: Option<T>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

impl<T> Table<T> {
    pub(super) fn new() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, entry: T) -> Handle {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place {
                reuse: 0,
                entry: None,
            });
            u32::try_from(self.places.len() - 1).expect("admission bounds the table")
        });
        let place = &mut self.places[index as usize];
        place.entry = Some(entry);
        Handle {
            index,
            reuse: place.reuse,
        }
    }

    pub(super) fn get(&self, handle: Handle) -> Option<&T> {
        self.places
            .get(handle.index as usize)
            .filter(|p| p.reuse == handle.reuse)?
            .entry
            .as_ref()
    }

    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        self.places
            .get_mut(handle.index as usize)
            .filter(|p| p.reuse == handle.reuse)?
            .entry
            .as_mut()
    }

    /// A handle of whatever is in the same place now, for the simulation's negative control.
    pub(super) fn newest(&self, handle: Handle) -> Handle {
        let place = self.places.get(handle.index as usize);
        Handle {
            reuse: place.map_or(handle.reuse, |p| p.reuse),
            ..handle
        }
    }

    pub(super) fn remove(&mut self, handle: Handle) -> Option<T> {
        let place = self
            .places
            .get_mut(handle.index as usize)
            .filter(|p| p.reuse == handle.reuse)?;
        let entry = place.entry.take()?;
        place.reuse = place.reuse.wrapping_add(1);
        self.free.push(handle.index);
        Some(entry)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.places.iter().enumerate().filter_map(|(i, p)| {
            p.entry.as_ref().map(|e| {
                (
                    Handle {
                        index: i as u32,
                        reuse: p.reuse,
                    },
                    e,
                )
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_handle_does_not_reach_the_new_entry() {
        let mut table = Table::new();
        let a = table.insert("a");
        assert_eq!(table.remove(a), Some("a"));
        let b = table.insert("b");
        assert_eq!(a.index, b.index);
        assert_eq!(table.get(a), None);
        assert_eq!(table.remove(a), None);
        assert_eq!(table.get(b), Some(&"b"));
        assert_eq!(table.iter().count(), 1);
    }
}
