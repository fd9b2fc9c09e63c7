//! Windows: page-aligned memory that files are read into when a slot will not do, mapped once and used again and again.

use crate::error::ArenaError;
use crate::memory::{Mapping, map_plain};
use crate::options::HugePages;
use crate::system::{System, page_bytes};

/// Equal windows in one mapping. *Boundary:* who may use which window when is not decided here, but by the queue that
/// hands them to the kernel.
pub(crate) struct Windows {
    mapping: Mapping,
    window_bytes: usize,
}

impl Windows {
    /// Maps `count` windows of at least `window_bytes`, and makes their pages present.
    pub(crate) fn map(count: usize, window_bytes: usize) -> Result<Self, ArenaError> {
        let overflow = || ArenaError::Map {
            bytes: usize::MAX,
            source: std::io::ErrorKind::OutOfMemory.into(),
        };
        let window_bytes = window_bytes
            .checked_next_multiple_of(page_bytes())
            .ok_or_else(overflow)?;
        let total_bytes = window_bytes.checked_mul(count).ok_or_else(overflow)?;
        let system = System::default();
        let (mapping, pages) = map_plain(total_bytes, HugePages::Auto, &system)?;
        mapping.make_present(None, pages, &system)?;
        // A child that is forked while the kernel writes would make the kernel's pages and ours two different ones.
        mapping.keep_from_children();
        Ok(Self {
            mapping,
            window_bytes,
        })
    }

    pub(crate) fn window_bytes(&self) -> usize {
        self.window_bytes
    }

    /// The address of a window, which has [`window_bytes`](Self::window_bytes) behind it.
    ///
    /// # Panics
    ///
    /// If there is no such window.
    pub(crate) fn ptr(&self, index: usize) -> *mut u8 {
        let at = index * self.window_bytes;
        assert!(
            at + self.window_bytes <= self.mapping.bytes(),
            "there is no window {index}"
        );
        self.mapping.at(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn windows_are_aligned_to_pages_and_do_not_overlap() {
        let windows = Windows::map(3, page_bytes() + 1).unwrap();
        assert_eq!(windows.window_bytes(), 2 * page_bytes());
        let addr = |index| windows.ptr(index).addr();
        assert_eq!(addr(0) % page_bytes(), 0);
        assert_eq!(
            [addr(1), addr(2)],
            [addr(0) + 2 * page_bytes(), addr(0) + 4 * page_bytes()]
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn more_than_can_be_counted_is_an_error() {
        for (count, bytes) in [(1, usize::MAX), (usize::MAX / 2, 4096)] {
            assert!(matches!(
                Windows::map(count, bytes),
                Err(ArenaError::Map { .. })
            ));
        }
    }
}
