//! Wakes the driver thread from others: an event descriptor, written only while somebody sleeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// What a driver does with what rails bring, on the thread that brought it.
pub(crate) trait Work: Send + Sync {
    /// Does it, or leaves it to who does it already. Called without any lock.
    fn work(&self);
}

/// See the module. One waiter, any number of notifiers.
pub(crate) struct Notifier {
    fd: OwnedFd,
    work: OnceLock<Weak<dyn Work>>,
    /// Set by the waiter before it looks a last time and sleeps, cleared by who wakes it.
    sleeping: AtomicBool,
}

impl Notifier {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            work: OnceLock::new(),
            sleeping: AtomicBool::new(false),
        })
    }

    /// Names the waiter; once.
    pub(crate) fn set_work(&self, work: Weak<dyn Work>) {
        let is_first = self.work.set(work).is_ok();
        debug_assert!(is_first, "a notifier has one waiter");
    }

    /// Does the waiter's work on this thread, which must hold no lock that the waiter, its rails or who is
    /// woken by them could want; wakes it where it has no name.
    pub(crate) fn work(&self) {
        match self.work.get().and_then(Weak::upgrade) {
            Some(work) => work.work(),
            None => {
                self.notify();
            }
        }
    }

    /// Wakes the waiter if it sleeps, and says whether it did; what was written before this call is seen by it.
    pub(crate) fn notify(&self) -> bool {
        let sleeps = self.sleeping.swap(false, Ordering::SeqCst);
        if sleeps {
            // The counter cannot overflow: it is read at each wake-up.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
        sleeps
    }

    /// Announces that the caller is about to sleep. It must look for work once more after this.
    pub(crate) fn prepare(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
    }

    /// Takes the announcement back: work was found.
    pub(crate) fn cancel(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Sleeps until somebody notifies or the time is over (`None`: no limit).
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        self.sleep(&mut [self.poll_fd()], timeout);
    }

    /// The same, and no longer than until `other` is readable.
    pub(crate) fn wait_beside(&self, other: BorrowedFd<'_>, timeout: Option<Duration>) {
        let other = PollFd::from_borrowed_fd(other, PollFlags::IN);
        self.sleep(&mut [self.poll_fd(), other], timeout);
    }

    fn poll_fd(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)
    }

    /// Its own descriptor is the first.
    fn sleep(&self, fds: &mut [PollFd<'_>], timeout: Option<Duration>) {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs().min(3600) as i64,
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        // An interrupted poll is a wake-up without a reason: the caller's loop looks again.
        let ready = poll(fds, timeout.as_ref()).is_ok_and(|n| n > 0);
        if ready && !fds[0].revents().is_empty() {
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An event descriptor that threads wait for beside other descriptors.
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Makes the descriptor readable until it is cleared.
    pub(crate) fn wake(&self) {
        // Fails only where it is readable already, 2^64 times over.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
