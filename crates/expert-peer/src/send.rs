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
use crate::shares::{NoTurn, Share, TURN_BYTES};
use crate::{FilePiece, Source, Transfer};

/// Pieces up to this size are read and sent together with what surrounds them: below it the
/// system calls cost more than the copy.
const SMALL_MAX_BYTES: u64 = 16 << 10;
/// Gathered bytes are sent when there are this many between two calls of `sendfile`.
const GATHER_BYTES: usize = 64 << 10;
/// ... and this many where all bytes are copied: fits into the cache of a processor.
const COPY_BYTES: usize = 128 << 10;
/// What `sendfile` leaves of an answer: these bytes go out after the last look at the files, so
/// that the answer can be broken off until then.
const TAIL_BYTES: u64 = 4 << 10;

/// Why bytes could not be sent.
#[derive(Debug)]
pub(crate) enum SendError {
    /// No progress within the time-out.
    Stalled,
    /// The client is gone.
    Gone(io::Error),
    /// A file ended before its piece did.
    Truncated { file: u32, offset: u64 },
    /// A range of a file cannot be read.
    Unreadable {
        file: u32,
        offset: u64,
        bytes: u64,
        source: io::Error,
    },
    /// A file is not what it was when it was opened.
    Changed { file: u32 },
}

/// An answer with bytes of records.
pub(crate) struct Answer<'a> {
    /// Goes out before its bytes.
    pub(crate) head: &'a [u8],
    pub(crate) source: &'a dyn Source,
    pub(crate) pieces: &'a [FilePiece],
    /// Looks at the files below the pieces, and gives back one that is not to be read any more.
    pub(crate) check: &'a dyn Fn() -> Result<(), u32>,
    /// Whether the client has nothing to notice wrong bytes by. Then they are copied, and looked
    /// at before they go out: pages that `sendfile` has queued change with the file.
    pub(crate) guarded: bool,
}

/// One connection's way out.
pub(crate) struct Sender<'a> {
    stream: BorrowedFd<'a>,
    /// Longest time without progress.
    stall: Duration,
    transfer: Transfer,
    /// Its turns: each byte goes out in one.
    share: Share<'a>,
    /// The first `filled` bytes wait to be sent; the rest is there to be filled again.
    buffer: Vec<u8>,
    filled: usize,
    started: bool,
}

impl<'a> Sender<'a> {
    pub(crate) fn new(
        stream: &'a impl AsFd,
        stall: Duration,
        transfer: Transfer,
        share: Share<'a>,
    ) -> Self {
        Self {
            stream: stream.as_fd(),
            stall,
            transfer,
            share,
            buffer: Vec::new(),
            filled: 0,
            started: false,
        }
    }

    /// Whether any byte of the last answer, its head included, may have gone out.
    pub(crate) fn started(&self) -> bool {
        self.started
    }

    /// The client has said who it is.
    pub(crate) fn identify(&self, client_id: u64) {
        self.share.identify(client_id);
    }

    /// Begins an answer of that many bytes; the caller calls [`Self::end`] however it ends.
    pub(crate) fn begin(&self, bytes: u64) -> Result<(), SendError> {
        let deadline = Instant::now() + self.stall;
        self.share.begin(bytes, deadline).map_err(stalled)
    }

    /// The answer is over: others have their turn.
    pub(crate) fn end(&self) {
        self.share.end();
    }

    /// Sends bytes; `more` says that others follow at once. `deadline` ends it beside the stall
    /// time-out.
    pub(crate) fn bytes(
        &self,
        bytes: &[u8],
        more: bool,
        deadline: Option<Instant>,
    ) -> Result<(), SendError> {
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        flags.set(SendFlags::MORE, more);
        let outcome = self.bytes_in_turns(bytes, flags, deadline);
        if !self.share.is_answering() {
            self.share.end();
        }
        outcome
    }

    fn bytes_in_turns(
        &self,
        mut bytes: &[u8],
        flags: SendFlags,
        deadline: Option<Instant>,
    ) -> Result<(), SendError> {
        while !bytes.is_empty() {
            self.turn(deadline)?;
            match rustix::net::send(self.stream, bytes, flags) {
                Ok(n) => {
                    self.share.sent(n as u64);
                    bytes = &bytes[n..];
                }
                Err(Errno::AGAIN) => self.wait_for_room(deadline)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(SendError::Gone(e.into())),
            }
        }
        Ok(())
    }

    /// Sends an answer, nothing less.
    ///
    /// Each byte was read before the last look at its file, so bytes that were copied are those of
    /// the file that was opened: a file's time moves before its bytes do.
    pub(crate) fn answer(&mut self, answer: &Answer<'_>) -> Result<(), SendError> {
        self.started = false;
        self.filled = 0;
        self.space(answer.head.len()).copy_from_slice(answer.head);
        for (i, piece) in answer.pieces.iter().enumerate() {
            let is_last = i + 1 == answer.pieces.len();
            match *piece {
                FilePiece::Zeros { bytes } => self.gather_zeros(answer, bytes)?,
                FilePiece::File {
                    file,
                    offset,
                    bytes,
                } => {
                    let handle = answer.source.file(file).ok_or(SendError::Unreadable {
                        file,
                        offset,
                        bytes,
                        source: io::ErrorKind::NotFound.into(),
                    })?;
                    let mut sent = 0;
                    if bytes > SMALL_MAX_BYTES && !self.copies(answer) {
                        self.flush(answer, true)?;
                        let direct = if is_last { bytes - TAIL_BYTES } else { bytes };
                        sent = self.sendfile(file, handle, offset, direct)?;
                    }
                    self.gather_file(answer, (file, handle), offset + sent, bytes - sent)?;
                }
            }
        }
        self.flush(answer, false)
    }

    fn copies(&self, answer: &Answer<'_>) -> bool {
        answer.guarded || self.transfer != Transfer::Sendfile
    }

    /// The next `bytes` bytes of the buffer. They hold what was sent before.
    fn space(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.filled;
        self.filled += bytes;
        if self.buffer.len() < self.filled {
            self.buffer.resize(self.filled, 0);
        }
        &mut self.buffer[start..self.filled]
    }

    /// How many bytes can be gathered now; sends if there would be none. Called only when bytes
    /// follow, so that the last ones of an answer are always sent by its end.
    fn room(&mut self, answer: &Answer<'_>) -> Result<usize, SendError> {
        let limit = match self.copies(answer) {
            true => answer.head.len() + COPY_BYTES,
            false => answer.head.len() + GATHER_BYTES,
        };
        if self.filled >= limit {
            self.flush(answer, true)?;
        }
        Ok(limit - self.filled)
    }

    fn gather_zeros(&mut self, answer: &Answer<'_>, mut bytes: u64) -> Result<(), SendError> {
        while bytes > 0 {
            let n = bytes.min(self.room(answer)? as u64);
            self.space(n as usize).fill(0);
            bytes -= n;
        }
        Ok(())
    }

    fn gather_file(
        &mut self,
        answer: &Answer<'_>,
        (file, handle): (u32, &File),
        mut offset: u64,
        mut bytes: u64,
    ) -> Result<(), SendError> {
        while bytes > 0 {
            let n = bytes.min(self.room(answer)? as u64);
            read_exact(file, handle, offset, self.space(n as usize))?;
            offset += n;
            bytes -= n;
        }
        Ok(())
    }

    /// Sends what is gathered, if the files below still are what they were.
    fn flush(&mut self, answer: &Answer<'_>, more: bool) -> Result<(), SendError> {
        if answer.guarded || !more {
            (answer.check)().map_err(|file| SendError::Changed { file })?;
        }
        self.started = true;
        // What is many segments long goes out as it is: the kernel would hold its last bytes back until
        // more come, and the client would wait for them.
        let hold = more && self.filled < GATHER_BYTES;
        self.bytes(&self.buffer[..self.filled], hold, None)?;
        self.filled = 0;
        Ok(())
    }

    /// Sends from a file, and says how many bytes went: fewer where the file does not support it.
    fn sendfile(
        &mut self,
        file: u32,
        handle: &File,
        offset: u64,
        bytes: u64,
    ) -> Result<u64, SendError> {
        let mut sent = 0;
        while sent < bytes {
            self.turn(None)?;
            let count = (bytes - sent).min(TURN_BYTES) as usize;
            let at = offset + sent;
            // The kernel moves the offset; what it reports as sent is what counts.
            let mut position = at;
            match rustix::fs::sendfile(self.stream, handle, Some(&mut position), count) {
                Ok(0) => return Err(SendError::Truncated { file, offset: at }),
                Ok(n) => {
                    self.share.sent(n as u64);
                    sent += n as u64;
                }
                Err(Errno::AGAIN) => self.wait_for_room(None)?,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    tracing::debug!("sendfile is not supported for this file: copying");
                    self.transfer = Transfer::Copy;
                    break;
                }
                // The file or the socket: a file that can be read there is not to blame.
                Err(e) => match handle.read_exact_at(&mut [0], at) {
                    Ok(()) => return Err(SendError::Gone(e.into())),
                    Err(source) => {
                        return Err(SendError::Unreadable {
                            file,
                            offset: at,
                            bytes: bytes - sent,
                            source,
                        });
                    }
                },
            }
        }
        Ok(sent)
    }

    fn turn(&self, deadline: Option<Instant>) -> Result<(), SendError> {
        let limit = || self.limit(deadline);
        self.share.turn(limit).map_err(stalled)
    }

    fn limit(&self, deadline: Option<Instant>) -> Instant {
        let stalled = Instant::now() + self.stall;
        deadline.map_or(stalled, |d| d.min(stalled))
    }

    fn wait_for_room(&self, deadline: Option<Instant>) -> Result<(), SendError> {
        self.share.pause();
        let deadline = self.limit(deadline);
        let mut fds = [PollFd::from_borrowed_fd(self.stream, PollFlags::OUT)];
        match wait(&mut fds, Some(deadline)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(SendError::Stalled),
            Err(e) => Err(SendError::Gone(e)),
        }
    }
}

fn stalled(_: NoTurn) -> SendError {
    SendError::Stalled
}

fn read_exact(file: u32, handle: &File, offset: u64, into: &mut [u8]) -> Result<(), SendError> {
    let mut done = 0;
    while done < into.len() {
        let at = offset + done as u64;
        match handle.read_at(&mut into[done..], at) {
            Ok(0) => return Err(SendError::Truncated { file, offset: at }),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => {
                return Err(SendError::Unreadable {
                    file,
                    offset: at,
                    bytes: (into.len() - done) as u64,
                    source,
                });
            }
        }
    }
    Ok(())
}
