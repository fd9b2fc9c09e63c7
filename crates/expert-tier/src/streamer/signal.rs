//! What wakes the streamer's thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use expert_wire::Key;

use crate::sync::lock;

/// See the module. Those who wake hold no other lock.
#[derive(Debug, Default)]
pub(super) struct Signal {
    /// A record waits for a slot: whoever releases a lease says so.
    slot_wanted: AtomicBool,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    /// Flights whose fetch ended.
    done: Vec<Key>,
    is_woken: bool,
}

impl Signal {
    pub(super) fn is_slot_wanted(&self) -> bool {
        self.slot_wanted.load(Ordering::SeqCst)
    }

    pub(super) fn set_slot_wanted(&self, wanted: bool) {
        self.slot_wanted.store(wanted, Ordering::SeqCst);
    }

    pub(super) fn wake(&self) {
        lock(&self.inbox).is_woken = true;
        self.arrived.notify_one();
    }

    /// A flight's fetch ended.
    pub(super) fn done(&self, key: Key) {
        let mut inbox = lock(&self.inbox);
        inbox.done.push(key);
        inbox.is_woken = true;
        drop(inbox);
        self.arrived.notify_one();
    }

    /// Sleeps until somebody wakes or the time is over; moves what is done into `done`.
    pub(super) fn wait(&self, time: Duration, done: &mut Vec<Key>) {
        let mut inbox = lock(&self.inbox);
        if !inbox.is_woken {
            inbox = self
                .arrived
                .wait_timeout(inbox, time)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        inbox.is_woken = false;
        done.append(&mut inbox.done);
    }
}
