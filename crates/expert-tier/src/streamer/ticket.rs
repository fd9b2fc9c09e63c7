//! A batch that was asked for, and what has arrived of it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use expert_wire::Key;

use super::Inner;
use super::residents::ExpertLease;
use crate::engine::{later, until};
use crate::error::TierError;
use crate::sync::lock;

/// Place of a record in its batch, and what became of it.
pub(super) type Arrival = (usize, Result<ExpertLease, TierError>);

/// What a ticket and the streamer's thread share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug)]
struct State {
    ready: VecDeque<Arrival>,
    /// Records that have not arrived.
    missing: usize,
    /// Nobody takes what arrives any more.
    is_given_up: bool,
}

impl Shared {
    pub(super) fn new(records: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                ready: VecDeque::with_capacity(records),
                missing: records,
                is_given_up: false,
            }),
            arrived: Condvar::new(),
        })
    }

    pub(super) fn deliver(&self, index: usize, result: Result<ExpertLease, TierError>) {
        let mut state = lock(&self.state);
        state.missing -= 1;
        // A lease that nobody takes goes back after the lock.
        let unwanted = match state.is_given_up {
            true => Some(result),
            false => {
                state.ready.push_back((index, result));
                None
            }
        };
        drop(state);
        drop(unwanted);
        self.arrived.notify_all();
    }

    fn give_up(&self) -> usize {
        let mut state = lock(&self.state);
        state.is_given_up = true;
        let ready = std::mem::take(&mut state.ready);
        let missing = state.missing;
        drop(state);
        drop(ready);
        missing
    }
}

/// Records asked for by [`super::ExpertStreamer::submit`]. Dropping it gives up what has not been taken.
#[derive(Debug)]
pub struct Ticket {
    pub(super) shared: Arc<Shared>,
    pub(super) inner: Weak<Inner>,
    pub(super) keys: Vec<Key>,
}

impl Ticket {
    /// The next record that arrived, in the order of arrival; waits for one until `deadline`.
    /// `None` when all have been taken.
    ///
    /// *Errors*: what befell one record, which the error names; the others still come.
    /// [`TierError::NotYet`] where the deadline came first: the ticket goes on.
    pub fn next(&mut self, deadline: Instant) -> Option<Result<ExpertLease, TierError>> {
        let (_, result) = self.next_indexed(deadline)?;
        Some(result)
    }

    /// The same with the record's place in the batch. (That of what is late is 0.)
    pub fn next_indexed(&mut self, deadline: Instant) -> Option<Arrival> {
        let began = Instant::now();
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(arrival) = state.ready.pop_front() {
                return Some(arrival);
            }
            if state.missing == 0 || state.is_given_up {
                return None;
            }
            let now = Instant::now();
            if now >= deadline {
                let late = TierError::NotYet {
                    waited: now.saturating_duration_since(began),
                    missing: state.missing,
                    asked: self.keys.len(),
                };
                return Some((0, Err(late)));
            }
            state = self
                .shared
                .arrived
                .wait_timeout(state, until(now, deadline))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits for all of them; they come in the order of the batch.
    ///
    /// *Errors*: the first that befell one record: then none is returned.
    pub fn all(mut self, deadline: Instant) -> Result<Vec<ExpertLease>, TierError> {
        let mut leases: Vec<Option<ExpertLease>> = self.keys.iter().map(|_| None).collect();
        while let Some((index, result)) = self.next_indexed(deadline) {
            leases[index] = Some(result?);
        }
        let whole: Option<Vec<ExpertLease>> = leases.into_iter().collect();
        whole.ok_or(TierError::ShutDown)
    }

    /// How many have arrived and were not taken.
    pub fn ready(&self) -> usize {
        lock(&self.shared.state).ready.len()
    }

    /// Whether all have arrived.
    pub fn is_done(&self) -> bool {
        lock(&self.shared.state).missing == 0
    }

    /// Gives up what has not been taken. What is under way for nobody else ends, its slots return
    /// when no rail can write to them any more.
    pub fn cancel(&mut self) {
        if self.shared.give_up() > 0 {
            if let Some(inner) = self.inner.upgrade() {
                inner.give_up(&self.shared, &self.keys);
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// A moment after now, for callers that think in durations.
pub(super) fn from_now(time: Duration) -> Instant {
    later(Instant::now(), time)
}
