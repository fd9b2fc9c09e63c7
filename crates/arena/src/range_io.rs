//! System calls that write into a range, so that rails over sockets and files need no unsafe code.

use crate::range::LandingRange;
use std::io;
use std::ops::BitOr;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Flags of [`LandingRange::recv`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecvFlags(libc::c_int);

impl RecvFlags {
    /// No flags.
    pub const NONE: Self = Self(0);
    /// Do not wait, even on a blocking socket: [`io::ErrorKind::WouldBlock`] when nothing is there.
    pub const DONT_WAIT: Self = Self(libc::MSG_DONTWAIT);
    /// Wait until everything asked for is there, the stream ends, or a signal arrives.
    pub const WAIT_ALL: Self = Self(libc::MSG_WAITALL);
}

impl BitOr for RecvFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// One system call each; what it says is passed on, short counts, 0 at the end of the stream and
/// [`io::ErrorKind::Interrupted`] included. A part that does not lie inside the range is
/// [`io::ErrorKind::InvalidInput`], and nothing is called.
impl LandingRange {
    /// Receives up to `max` bytes from a socket to byte `at` of the range; returns how many.
    ///
    /// *Source.* recv(2).
    pub fn recv(
        &mut self,
        fd: BorrowedFd<'_>,
        at: usize,
        max: usize,
        flags: RecvFlags,
    ) -> io::Result<usize> {
        let target = self.checked(at, max)?;
        // SAFETY: `target..target + max` lies inside the range (checked), which is borrowed exclusively and covers
        // the bytes alone; the kernel writes nothing else. The descriptor is open while it is borrowed.
        let count = unsafe { libc::recv(fd.as_raw_fd(), target.cast(), max, flags.0) };
        count_or_error(count)
    }

    /// Reads from a socket or pipe, first up to `max` bytes to byte `at` of the range, and then into `tail`; returns
    /// how many in all. A stream reader so picks up the end of a payload and the next header with one system call.
    ///
    /// *Source.* readv(2).
    pub fn recv_vectored_tail(
        &mut self,
        fd: BorrowedFd<'_>,
        at: usize,
        max: usize,
        tail: &mut [u8],
    ) -> io::Result<usize> {
        let parts = [
            libc::iovec {
                iov_base: self.checked(at, max)?.cast(),
                iov_len: max,
            },
            libc::iovec {
                iov_base: tail.as_mut_ptr().cast(),
                iov_len: tail.len(),
            },
        ];
        // SAFETY: both parts are valid for writes: the first lies inside the range (checked), which is borrowed
        // exclusively and covers the bytes alone, the second is an exclusive slice. `parts` outlives the call and has
        // two entries. The descriptor is open while it is borrowed.
        let count = unsafe { libc::readv(fd.as_raw_fd(), parts.as_ptr(), 2) };
        count_or_error(count)
    }

    /// Reads up to `len` bytes at `file_offset` of a file to byte `at` of the range; returns how many.
    ///
    /// *Source.* pread(2).
    pub fn pread(
        &mut self,
        fd: BorrowedFd<'_>,
        at: usize,
        len: usize,
        file_offset: u64,
    ) -> io::Result<usize> {
        let target = self.checked(at, len)?;
        let file_offset =
            libc::off64_t::try_from(file_offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: `target..target + len` lies inside the range (checked), which is borrowed exclusively and covers
        // the bytes alone; the kernel writes nothing else. The descriptor is open while it is borrowed.
        let count = unsafe { libc::pread64(fd.as_raw_fd(), target.cast(), len, file_offset) };
        count_or_error(count)
    }

    fn checked(&self, at: usize, len: usize) -> io::Result<*mut u8> {
        if self.contains(at, len) {
            return Ok(self.ptr(at, len));
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "{len} bytes at {at} do not lie inside a range of {} bytes",
                self.len()
            ),
        ))
    }
}

/// The system's answer: a count, or -1 and `errno`.
fn count_or_error(count: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}
