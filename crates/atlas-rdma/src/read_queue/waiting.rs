//! Waiting for queues: poll for a while, then sleep, and lose no completion between the two.

use super::ReadQueue;
use crate::completion::CompletionStatus;
use crate::error::{RdmaError, os};
use crate::wait::readable;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Queues that one call of [`ReadQueue::wait_any`] waits for at most.
pub const WAIT_QUEUES_MAX: usize = 32;

impl<T: Send> ReadQueue<T> {
    /// Waits until a post has ended, `wake` is readable, or the time is over: first it polls for `spin`, then it sleeps.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Wait`] when the completion queue cannot be read any more: close the queue.
    pub fn wait(
        &self,
        timeout: Duration,
        spin: Duration,
        wake: Option<BorrowedFd<'_>>,
    ) -> Result<(), RdmaError> {
        Self::wait_any(&[self], timeout, spin, wake)
    }

    /// [`wait`](Self::wait) for the first of up to [`WAIT_QUEUES_MAX`] queues.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait); [`RdmaError::Invalid`] for too many queues.
    pub fn wait_any(
        queues: &[&Self],
        timeout: Duration,
        spin: Duration,
        wake: Option<BorrowedFd<'_>>,
    ) -> Result<(), RdmaError> {
        let start = Instant::now();
        if queues.len() > WAIT_QUEUES_MAX {
            return Err(RdmaError::Invalid {
                what: "the count of queues to wait for",
                value: queues.len().to_string(),
                next: "wait for 32 at most",
            });
        }
        loop {
            if any_ready(queues)? {
                return Ok(());
            }
            if start.elapsed() >= spin.min(timeout) {
                break;
            }
            std::hint::spin_loop();
        }
        for queue in queues {
            queue.arm()?;
        }
        // What came before the queues were armed makes no event.
        if any_ready(queues)? {
            return Ok(());
        }
        let fds = queues.iter().map(|queue| queue.channel.fd()).chain(wake);
        let Some(some) = fds.clone().next() else {
            std::thread::sleep(timeout.saturating_sub(start.elapsed()));
            return Ok(());
        };
        let mut watched = [some; WAIT_QUEUES_MAX + 1];
        let mut count = 0;
        for (slot, fd) in watched.iter_mut().zip(fds) {
            *slot = fd;
            count += 1;
        }
        let left = timeout.saturating_sub(start.elapsed());
        let slept = readable(&watched[..count], Some(left));
        for queue in queues {
            if queue.channel.take_events() > 0 {
                queue.armed.store(false, Ordering::Release);
            }
        }
        slept.map_err(|source| RdmaError::Wait {
            device: queues
                .first()
                .map_or_else(String::new, |q| q.device().to_owned()),
            what: "completions",
            source,
        })
    }
}

/// Whether one of the queues has something to hand out.
fn any_ready<T: Send>(queues: &[&ReadQueue<T>]) -> Result<bool, RdmaError> {
    let mut any = false;
    for queue in queues {
        let mut state = queue.lock();
        let failed = queue.harvest(&mut state);
        any |= !state.ready.is_empty();
        let root = state.table.root();
        drop(state);
        if failed {
            queue.to_error();
        }
        if let Some(CompletionStatus::QueueBroken(errno)) = root.map(|root| root.status) {
            if !any {
                return Err(RdmaError::Wait {
                    device: queue.device().to_owned(),
                    what: "completions",
                    source: os(errno),
                });
            }
        }
    }
    Ok(any)
}
