//! Bytes into a socket: from memory, from a file, or zeros; each wait with a deadline.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::net::wait;
use crate::{FilePiece, Source, Transfer};

/// Pieces up to this size are read and sent together with what surrounds them: below it the
/// system calls cost more than the copy.
const SMALL_MAX_BYTES: u64 = 16 << 10;
/// Gathered bytes are sent when there are this many.
const GATHER_BYTES: usize = 64 << 10;
/// Buffer of [`Transfer::Copy`].
const COPY_BYTES: usize = 256 << 10;
/// Most bytes of one `sendfile`; the kernel's own limit is just below 2 GiB.
const SENDFILE_MAX_BYTES: u64 = 1 << 30;

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Why bytes could not be sent.
#[derive(Debug)]
pub(crate) enum SendError {
    /// No progress within the time-out.
    Stalled,
    /// The client is gone.
    Gone(io::Error),
    /// A file ended before its piece did.
    Truncated { file: u32, offset: u64 },
    /// A file cannot be read.
    Unreadable { file: u32, source: io::Error },
}

/// One connection's way out.
pub(crate) struct Sender<'a> {
    stream: BorrowedFd<'a>,
    /// Longest time without progress.
    stall: Duration,
    transfer: Transfer,
    /// Small pieces and what goes in front of them.
    gathered: Vec<u8>,
    copy: Vec<u8>,
}

impl<'a> Sender<'a> {
    pub(crate) fn new(stream: &'a impl AsFd, stall: Duration, transfer: Transfer) -> Self {
        Self {
            stream: stream.as_fd(),
            stall,
            transfer,
            gathered: Vec::new(),
            copy: Vec::new(),
        }
    }

    /// Sends bytes; `more` says that others follow at once. `deadline` ends it beside the stall
    /// time-out.
    pub(crate) fn bytes(
        &self,
        mut bytes: &[u8],
        more: bool,
        deadline: Option<Instant>,
    ) -> Result<(), SendError> {
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        flags.set(SendFlags::MORE, more);
        while !bytes.is_empty() {
            match rustix::net::send(self.stream, bytes, flags) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::AGAIN) => self.wait_for_room(deadline)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(SendError::Gone(e.into())),
            }
        }
        Ok(())
    }

    /// Sends `head` and then the pieces, nothing less.
    pub(crate) fn pieces(
        &mut self,
        head: &[u8],
        source: &dyn Source,
        pieces: &[FilePiece],
    ) -> Result<(), SendError> {
        self.gathered.clear();
        self.gathered.extend_from_slice(head);
        for (i, piece) in pieces.iter().enumerate() {
            let more = i + 1 < pieces.len();
            match *piece {
                FilePiece::Zeros { bytes } => self.zeros(bytes)?,
                FilePiece::File {
                    file,
                    offset,
                    bytes,
                } => {
                    let handle = source.file(file).ok_or_else(|| SendError::Unreadable {
                        file,
                        source: io::ErrorKind::NotFound.into(),
                    })?;
                    if bytes <= SMALL_MAX_BYTES {
                        self.gather_from(file, handle, offset, bytes as usize)?;
                    } else {
                        self.send_gathered(true)?;
                        self.file(file, handle, offset, bytes, more)?;
                    }
                }
            }
            if self.gathered.len() >= GATHER_BYTES {
                self.send_gathered(more)?;
            }
        }
        self.send_gathered(false)
    }

    fn zeros(&mut self, mut bytes: u64) -> Result<(), SendError> {
        while bytes > 0 {
            let n = bytes.min(ZEROS.len() as u64);
            bytes -= n;
            self.gathered.extend_from_slice(&ZEROS[..n as usize]);
            if bytes > 0 {
                self.send_gathered(true)?;
            }
        }
        Ok(())
    }

    fn gather_from(
        &mut self,
        file: u32,
        handle: &File,
        offset: u64,
        bytes: usize,
    ) -> Result<(), SendError> {
        let start = self.gathered.len();
        self.gathered.resize(start + bytes, 0);
        read_exact(file, handle, offset, &mut self.gathered[start..])
    }

    fn send_gathered(&mut self, more: bool) -> Result<(), SendError> {
        let gathered = std::mem::take(&mut self.gathered);
        let outcome = self.bytes(&gathered, more, None);
        self.gathered = gathered;
        self.gathered.clear();
        outcome
    }

    fn file(
        &mut self,
        file: u32,
        handle: &File,
        offset: u64,
        bytes: u64,
        more: bool,
    ) -> Result<(), SendError> {
        let mut at = offset;
        let end = offset + bytes;
        while at < end && self.transfer == Transfer::Sendfile {
            let count = (end - at).min(SENDFILE_MAX_BYTES) as usize;
            // The kernel moves the offset; what it reports as sent is what counts.
            let mut position = at;
            match rustix::fs::sendfile(self.stream, handle, Some(&mut position), count) {
                Ok(0) => return Err(SendError::Truncated { file, offset: at }),
                Ok(n) => at += n as u64,
                Err(Errno::AGAIN) => self.wait_for_room(None)?,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    tracing::debug!("sendfile is not supported for this file: copying");
                    self.transfer = Transfer::Copy;
                }
                Err(e @ (Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::NOTCONN)) => {
                    return Err(SendError::Gone(e.into()));
                }
                Err(e) => {
                    return Err(SendError::Unreadable {
                        file,
                        source: e.into(),
                    });
                }
            }
        }
        while at < end {
            let n = (end - at).min(COPY_BYTES as u64);
            self.copy.resize(COPY_BYTES, 0);
            let mut copy = std::mem::take(&mut self.copy);
            let outcome = read_exact(file, handle, at, &mut copy[..n as usize])
                .and_then(|()| self.bytes(&copy[..n as usize], more || at + n < end, None));
            self.copy = copy;
            outcome?;
            at += n;
        }
        Ok(())
    }

    fn wait_for_room(&self, deadline: Option<Instant>) -> Result<(), SendError> {
        let stalled = Instant::now() + self.stall;
        let deadline = deadline.map_or(stalled, |d| d.min(stalled));
        let mut fds = [PollFd::from_borrowed_fd(self.stream, PollFlags::OUT)];
        match wait(&mut fds, Some(deadline)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(SendError::Stalled),
            Err(e) => Err(SendError::Gone(e)),
        }
    }
}

fn read_exact(file: u32, handle: &File, offset: u64, into: &mut [u8]) -> Result<(), SendError> {
    match handle.read_exact_at(into, offset) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            Err(SendError::Truncated { file, offset })
        }
        Err(source) => Err(SendError::Unreadable { file, source }),
    }
}
