//! One way to take a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock whose holder may have panicked: in this crate that leaves plain data that is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
