//! The end of a connection: last words that arrive.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown};

use super::{Driver, End};
use crate::net::wait;

/// After an error frame the client's unread bytes are read for at most this long: closing on them
/// would reset the connection and could take the error frame with it.
const LINGER: Duration = Duration::from_millis(500);
/// ... and at most this many.
const LINGER_MAX_BYTES: usize = 1 << 20;

impl Driver<'_> {
    /// Sends what the session still has to say, and closes so that it can arrive.
    pub(super) fn close(&mut self, end: &End) {
        let last_words = match end {
            End::Refused(_) | End::Timeout(_) | End::Stopping | End::Done => {
                // A stalled client gets no second time-out: what does not fit now is lost.
                let output = std::mem::take(self.session.output());
                let now = Some(Instant::now() + LINGER);
                !output.is_empty() && self.sender.bytes(&output, false, now).is_ok()
            }
            _ => false,
        };
        if !last_words {
            return;
        }
        let stream = self.connection.stream.as_fd();
        let _ = rustix::net::shutdown(stream, Shutdown::Write);
        let deadline = Instant::now() + LINGER;
        let mut scrap = [0u8; 4096];
        let mut left = LINGER_MAX_BYTES;
        while left > 0 {
            match rustix::net::recv(stream, &mut scrap[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return,
                Ok((_, n)) => left = left.saturating_sub(n),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let mut fds = [PollFd::from_borrowed_fd(stream, PollFlags::IN)];
                    if !wait(&mut fds, Some(deadline)).unwrap_or(false) {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }
}
