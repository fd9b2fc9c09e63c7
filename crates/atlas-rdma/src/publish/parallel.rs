//! Work spread over threads that end before the call does.

use super::PublishError;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Threads are for waiting on disks and on the kernel's page tables; more than these gain nothing.
const THREADS_MAX: usize = 16;

/// How many threads to use when `wanted` were asked for.
pub(super) fn count(wanted: usize) -> usize {
    match wanted {
        0 => thread::available_parallelism()
            .map_or(1, usize::from)
            .min(THREADS_MAX),
        wanted => wanted,
    }
}

/// Does `work` for each item. After an error no further item is begun, and the first error is returned.
pub(super) fn in_parallel<T: Send>(
    threads: usize,
    items: Vec<T>,
    work: &(dyn Fn(T) -> Result<(), PublishError> + Sync),
) -> Result<(), PublishError> {
    let count = items.len();
    let queue = Mutex::new((items.into_iter(), None));
    let lock = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let next = || {
        let (items, error) = &mut *lock();
        if error.is_some() { None } else { items.next() }
    };
    let worker = || {
        while let Some(item) = next() {
            if let Err(error) = work(item) {
                lock().1.get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            // This thread works, too, so one that cannot be started is only missed.
            let _ = thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
    let (_, error) = queue.into_inner().unwrap_or_else(PoisonError::into_inner);
    error.map_or(Ok(()), Err)
}

/// Drops all values, by several threads where there are many: deregistering unpins page after page.
pub(super) fn drop_in_parallel<T: Send>(threads: usize, values: Vec<T>) {
    // Dropping cannot fail.
    let _ = in_parallel(threads, values, &|value| {
        drop(value);
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_item_is_done_once() {
        let sum = AtomicUsize::new(0);
        in_parallel(4, (1..=100).collect(), &|item: usize| {
            sum.fetch_add(item, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert_eq!(sum.into_inner(), 5050);
    }

    #[test]
    fn nothing_is_begun_after_the_first_error() {
        let begun = AtomicUsize::new(0);
        let error = in_parallel(1, (0..100).collect(), &|item: usize| {
            begun.fetch_add(1, Ordering::Relaxed);
            if item == 3 {
                Err(PublishError::Stopped)
            } else {
                Ok(())
            }
        });
        assert!(matches!(error, Err(PublishError::Stopped)));
        assert_eq!(begun.into_inner(), 4);
    }
}
