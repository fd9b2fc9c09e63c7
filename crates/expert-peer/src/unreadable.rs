//! Ranges of files that could not be read: refused for a while, and then tried before any answer
//! needs them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A disk that fails takes seconds to say so, each time.
const RETRY_AFTER: Duration = Duration::from_secs(30);
/// Ranges that are remembered; a disk with more of them is past help, and its oldest are tried again.
const RANGES_MAX: usize = 256;

/// What is known of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Fine,
    Refused,
    /// It failed a while ago: the caller reads the byte at `offset` and calls
    /// [`Unreadable::forget`] if it can. Others are refused meanwhile.
    Try {
        offset: u64,
    },
}

#[derive(Default)]
pub(crate) struct Unreadable {
    /// So that a store without bad ranges needs no lock.
    any: AtomicBool,
    ranges: Mutex<Vec<BadRange>>,
}

struct BadRange {
    file: u32,
    /// The byte that could not be read.
    start: u64,
    end: u64,
    tried: Instant,
}

impl Unreadable {
    /// Remembers that the byte at `offset` could not be read, nor what follows it.
    pub(crate) fn note(&self, file: u32, offset: u64, bytes: u64, now: Instant) {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.retain(|r| (r.file, r.start) != (file, offset));
        if ranges.len() >= RANGES_MAX {
            ranges.remove(0);
        }
        ranges.push(BadRange {
            file,
            start: offset,
            end: offset.saturating_add(bytes.max(1)),
            tried: now,
        });
        self.any.store(true, Ordering::SeqCst);
    }

    pub(crate) fn verdict(&self, file: u32, offset: u64, bytes: u64, now: Instant) -> Verdict {
        if !self.any.load(Ordering::SeqCst) {
            return Verdict::Fine;
        }
        let end = offset.saturating_add(bytes);
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let overlaps = |r: &BadRange| r.file == file && r.start < end && offset < r.end;
        let is_fresh = |r: &BadRange| now.saturating_duration_since(r.tried) < RETRY_AFTER;
        if ranges.iter().any(|r| overlaps(r) && is_fresh(r)) {
            return Verdict::Refused;
        }
        match ranges.iter_mut().find(|r| overlaps(r)) {
            None => Verdict::Fine,
            Some(range) => {
                range.tried = now;
                Verdict::Try {
                    offset: range.start,
                }
            }
        }
    }

    /// The byte at `offset` can be read again.
    pub(crate) fn forget(&self, file: u32, offset: u64) {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.retain(|r| (r.file, r.start) != (file, offset));
        self.any.store(!ranges.is_empty(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_that_failed_is_refused_then_tried_by_one_and_forgotten_when_it_can_be_read() {
        let unreadable = Unreadable::default();
        let now = Instant::now();
        assert_eq!(unreadable.verdict(1, 0, 1 << 20, now), Verdict::Fine);
        unreadable.note(1, 5000, 100, now);
        for (file, offset, bytes, verdict) in [
            (1, 0, 5000, Verdict::Fine),
            (1, 5100, 9, Verdict::Fine),
            (2, 0, 1 << 20, Verdict::Fine),
            (1, 0, 5001, Verdict::Refused),
            (1, 5099, 1, Verdict::Refused),
        ] {
            assert_eq!(unreadable.verdict(file, offset, bytes, now), verdict);
        }
        let later = now + RETRY_AFTER;
        let verdict = || unreadable.verdict(1, 5050, 1, later);
        assert_eq!(verdict(), Verdict::Try { offset: 5000 });
        assert_eq!(verdict(), Verdict::Refused, "someone else tries");
        unreadable.forget(1, 5000);
        assert_eq!(verdict(), Verdict::Fine);
    }

    #[test]
    fn range_is_fine_only_when_all_that_failed_in_it_was_tried() {
        let unreadable = Unreadable::default();
        let now = Instant::now();
        unreadable.note(0, 10, 5, now);
        unreadable.note(0, 20, 5, now);
        let later = now + RETRY_AFTER;
        for offset in [10, 20] {
            let verdict = unreadable.verdict(0, 0, 100, later);
            assert_eq!(verdict, Verdict::Try { offset });
            unreadable.forget(0, offset);
        }
        assert_eq!(unreadable.verdict(0, 0, 100, later), Verdict::Fine);
    }

    #[test]
    fn no_more_ranges_are_remembered_than_the_limit() {
        let unreadable = Unreadable::default();
        let now = Instant::now();
        for i in 0..2 * RANGES_MAX as u64 {
            unreadable.note(0, i * 10, 5, now);
            unreadable.note(0, i * 10, 5, now);
        }
        assert_eq!(unreadable.ranges.lock().unwrap().len(), RANGES_MAX);
        assert_eq!(unreadable.verdict(0, 0, 5, now), Verdict::Fine);
    }
}
