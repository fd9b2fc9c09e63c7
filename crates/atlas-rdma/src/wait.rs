//! Sleeping on descriptors.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Descriptors that one call watches at most: the queues of one rail and what wakes it.
const FDS_MAX: usize = 64;

/// Sleeps until one of the descriptors is readable (or in error), or the time is over (`None`: for ever), or a signal
/// came. It allocates nothing.
pub(crate) fn readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let Some(first) = fds.first() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    if fds.len() > FDS_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut watched = [const { None }; FDS_MAX]
        .map(|_: Option<()>| PollFd::from_borrowed_fd(*first, PollFlags::IN));
    for (slot, fd) in watched.iter_mut().zip(fds) {
        *slot = PollFd::from_borrowed_fd(*fd, PollFlags::IN);
    }
    // Longer than the kernel's seconds hold is for ever.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(&mut watched[..fds.len()], timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
