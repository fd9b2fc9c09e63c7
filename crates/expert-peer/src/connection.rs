//! One connection: its thread, from greeting to close.

mod close;
mod rails;

use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use expert_wire::auth::NONCE_BYTES;
use expert_wire::frame::{FrameHeader, FrameKind};
use expert_wire::message::{ErrorCode, ReadRequest};
use expert_wire::server::{CloseReason, Event, ServerSession};
use expert_wire::{Key, limits, v1};
use rand::TryRng;
use rand::rngs::SysRng;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown};
use thiserror::Error;
use tracing::{debug, warn};

use crate::epoch::{self, Epoch};
use crate::look::{Looking, SOON_BYTES};
use crate::net::{self, Wake, wait};
use crate::peer::Shared;
use crate::refusal::Refusal;
use crate::send::{Answer, SendError, Sender};
use crate::shares::Share;
use crate::stats::{Answering, add};
use crate::{FilePiece, SourceError, Transfer};

use rails::Rails;

/// Queued answers are sent when there are this many bytes, so that a client that pipelines large
/// questions does not make the peer hold all their answers.
const OUTPUT_BYTES: usize = 64 << 10;

/// What other threads may touch of a connection.
pub(crate) struct Connection {
    pub(crate) id: u64,
    pub(crate) address: IpAddr,
    pub(crate) stream: OwnedFd,
    /// For notices: a reload, the end of the peer.
    pub(crate) wake: Wake,
    pub(crate) handshaking: AtomicBool,
    pub(crate) accepted_at: Instant,
}

impl Connection {
    /// Ends all waits of the connection's thread at once.
    pub(crate) fn cut(&self) {
        let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
    }
}

/// Why a connection ended.
#[derive(Debug, Error)]
enum End {
    #[error("the client ended the session")]
    Done,
    #[error("the client hung up")]
    Eof,
    #[error("the client hung up within a request")]
    Torn,
    #[error("the client is gone: {0}")]
    Gone(#[source] io::Error),
    #[error("{0}")]
    Refused(CloseReason),
    #[error("no {0} in time")]
    Timeout(&'static str),
    #[error("the store was loaded again, which v1 clients cannot be told")]
    Reloaded,
    #[error("no rails for a v1 client: {0}")]
    NoRails(String),
    #[error("the peer goes down")]
    Stopping,
    #[error("{path} ends before byte {offset}, within an answer")]
    Truncated { path: String, offset: u64 },
    #[error("{path} cannot be read: {source}")]
    Unreadable { path: String, source: io::Error },
    #[error("{path} changed within an answer")]
    Changed { path: String },
}

/// Serves a connection to its end.
pub(crate) fn serve(shared: &Shared, connection: &Connection) {
    let limits = &shared.config.limits;
    let epoch = shared.epoch();
    let session = match session(shared, &epoch) {
        Ok(session) => session,
        Err(e) => {
            shared.counters.refused(Refusal::Resources);
            return warn!("{}: no random numbers: {e}: closed", connection.address);
        }
    };
    let transfer = shared
        .config
        .transfer
        .resolve(connection.address, net::own_address(&connection.stream));
    let is_local = transfer == Transfer::Copy && shared.config.transfer == Transfer::Auto;
    if is_local && shared.config.send_buffer_bytes.is_none() {
        net::keep_in_cache(&connection.stream);
    }
    let mut driver = Driver {
        shared,
        connection,
        session,
        sender: Sender::new(
            &connection.stream,
            limits.send_timeout,
            transfer,
            Share::new(&shared.shares, connection.address),
        ),
        greeted: epoch.number,
        epoch,
        rails: Rails::None,
        handshake_deadline: connection.accepted_at + limits.handshake_timeout,
        partial_since: None,
        answers_soon: false,
        pieces: Vec::new(),
        files: Vec::new(),
        head: Vec::new(),
    };
    let Err(end) = driver.run();
    let address = connection.address;
    let left_early = driver.session.awaits_proof();
    if let Some(why) = refusal(&end, left_early, connection) {
        shared.counters.refused(why);
    }
    match &end {
        End::Refused(reason) if reason.code() == ErrorCode::Unauthorized => {
            unauthorized(shared, address, &end);
        }
        End::Eof | End::Torn | End::Gone(_) if left_early => {
            let why = "the client hung up when it was asked to prove that it knows the token";
            unauthorized(shared, address, &why);
        }
        End::Done | End::Eof | End::Stopping => debug!("{address}: {end}"),
        End::Timeout(_) => {
            add(&shared.counters.timed_out, 1);
            debug!("{address}: {end}: closed");
        }
        // Anyone can provoke these: one line each, but not for the whole log.
        End::Refused(_) | End::NoRails(_) => {
            if shared.refusal_log.allows() {
                warn!("{address}: {end}: closed");
            }
        }
        End::Truncated { .. } | End::Unreadable { .. } | End::Changed { .. } => {
            add(&shared.counters.broken_off, 1);
            if shared.refusal_log.allows() {
                warn!("{address}: {end}: closed");
            }
        }
        End::Torn | End::Gone(_) | End::Reloaded => debug!("{address}: {end}"),
    }
    driver.close(&end);
}

/// Why the connection was not served, where it was not, and not because the client changed its mind.
fn refusal(end: &End, left_early: bool, connection: &Connection) -> Option<Refusal> {
    let handshaking = connection.handshaking.load(Ordering::SeqCst);
    match end {
        End::Refused(reason) if reason.code() == ErrorCode::Unauthorized => Some(Refusal::Auth),
        End::Eof | End::Torn | End::Gone(_) if left_early => Some(Refusal::Auth),
        End::Refused(_) if handshaking => Some(Refusal::Protocol),
        End::Timeout(_) if handshaking => Some(Refusal::HandshakeTimeout),
        End::NoRails(_) => Some(Refusal::Rails),
        _ => None,
    }
}

/// Says now and then that a client does not know the token: anyone can provoke this.
fn unauthorized(shared: &Shared, address: IpAddr, why: &dyn std::fmt::Display) {
    if shared.auth_log.allows() {
        warn!("{address}: unauthorized: {why}: closed");
    }
}

fn session(shared: &Shared, epoch: &Epoch) -> Result<ServerSession, rand::rngs::SysError> {
    if let Some(token) = &shared.config.auth_token {
        let mut nonce = [0; NONCE_BYTES];
        SysRng.try_fill_bytes(&mut nonce)?;
        return Ok(ServerSession::with_token(shared.instance_id, token, nonce));
    }
    let mut session = ServerSession::new(&epoch.greeting);
    if epoch.serves_v1_verbs {
        session.serve_v1_verbs();
    }
    Ok(session)
}

struct Driver<'a> {
    shared: &'a Shared,
    connection: &'a Connection,
    session: ServerSession,
    sender: Sender<'a>,
    epoch: Arc<Epoch>,
    /// Epoch of the greeting: a v1 client works with its manifest.
    greeted: u32,
    rails: Rails,
    handshake_deadline: Instant,
    /// When the message that is not whole was first seen, and how many had come before it.
    partial_since: Option<(Instant, u64)>,
    /// The last answer was small: a client that asks for one such record after the other asks again at once.
    answers_soon: bool,
    /// Pieces of the current answer and the files below them; kept for their memory.
    pieces: Vec<FilePiece>,
    files: Vec<u32>,
    head: Vec<u8>,
}

impl Driver<'_> {
    fn run(&mut self) -> Result<std::convert::Infallible, End> {
        self.flush()?;
        loop {
            self.notices()?;
            while let Some(event) = self.session.poll_event() {
                self.handle(event)?;
                if self.session.output().len() >= OUTPUT_BYTES {
                    self.flush()?;
                }
                self.notices()?;
            }
            self.flush()?;
            self.receive()?;
        }
    }

    /// What the rest of the peer has to tell this connection, between two answers.
    fn notices(&mut self) -> Result<(), End> {
        if self.shared.stopping.load(Ordering::SeqCst) {
            self.refuse(ErrorCode::ShuttingDown, "the peer is shutting down");
            return Err(End::Stopping);
        }
        if self.shared.epoch_number() != self.epoch.number {
            if self.session.handshake_done() && !self.session.is_v2() {
                // One-sided READs go on until the old memory is taken away.
                return match self.rails.is_alive() {
                    true => Ok(()),
                    false => Err(End::Reloaded),
                };
            }
            self.epoch = self.shared.epoch();
            let welcome = self.epoch.welcome;
            self.session.notify_changed(&welcome);
            self.flush()?;
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), End> {
        match event {
            Event::V1Start if self.greeted != self.epoch.number => return Err(End::Reloaded),
            Event::V1Start => self.handshake_done(),
            Event::V1Read(key) => return self.read_v1(key),
            Event::Hello(hello) => {
                debug!(
                    "{}: {:?} connection of client {:016x}",
                    self.connection.address, hello.role, hello.client_id
                );
                self.sender.identify(hello.client_id);
                let welcome = self.epoch.welcome;
                self.session.accept(&welcome);
                self.handshake_done();
            }
            Event::StoreInfo { id } => {
                let info = self.epoch.info();
                return self.answer(FrameKind::StoreInfoReply, id, info);
            }
            Event::Catalogue { id, request } => {
                let blob = self.epoch.blob(request.layer, request.sections);
                return self.answer(FrameKind::CatalogueReply, id, blob);
            }
            Event::Read { id, request } => return self.read(id, &request),
            Event::Rails { id } => self.list_rails(id),
            Event::OpenRail { id, request } => return self.open_rail(id, &request),
            Event::V1Verbs { rails } => return self.offer_v1(rails),
            Event::V1Connect(remote) => return self.connect_v1(&remote),
            Event::ChecksumReport(report) => {
                add(&self.shared.counters.checksum_reports, 1);
                if self.shared.report_log.allows() {
                    warn!(
                        "{} got a wrong checksum for {} chunk {} (epoch {}): looking at the files",
                        self.connection.address, report.key, report.chunk, report.epoch
                    );
                }
                self.shared.report_wake.wake();
            }
            Event::V1End | Event::Goodbye => return Err(End::Done),
            Event::ClientError(error) => {
                debug!("{}: {}", self.connection.address, error.message);
                return Err(End::Done);
            }
            Event::Closed(reason) => {
                if self.session.is_v2() {
                    self.shared.counters.error(reason.code());
                }
                return Err(End::Refused(reason));
            }
            other => debug!("{}: {other:?} ignored", self.connection.address),
        }
        Ok(())
    }

    fn handshake_done(&self) {
        self.connection.handshaking.store(false, Ordering::SeqCst);
    }

    /// Sends a large answer from memory that connections share.
    fn answer(
        &mut self,
        kind: FrameKind,
        id: u64,
        payload: Result<Arc<Vec<u8>>, SourceError>,
    ) -> Result<(), End> {
        add(&self.shared.counters.requests, 1);
        let payload = match payload {
            Ok(payload) => payload,
            Err(e) => return self.error(id, e),
        };
        let header = FrameHeader {
            // Bounded by `Epoch`.
            payload_bytes: payload.len() as u32,
            kind,
            id,
        };
        self.session.output().extend_from_slice(&header.encode());
        let begun = self.sender.begin(u64::from(header.payload_bytes));
        self.sent(begun)?;
        let outcome = self
            .flush_before(!payload.is_empty())
            .and_then(|()| self.sent(self.sender.bytes(&payload, false, None)));
        self.sender.end();
        outcome
    }

    fn read(&mut self, id: u64, request: &ReadRequest) -> Result<(), End> {
        add(&self.shared.counters.requests, 1);
        let bytes = request.bytes;
        self.answers_soon = bytes <= SOON_BYTES;
        let refusal = if request.epoch != self.epoch.number {
            Err(SourceError::new(
                ErrorCode::StoreChanged,
                format!(
                    "the READ was planned with epoch {}, this is epoch {}",
                    request.epoch, self.epoch.number
                ),
            ))
        } else if bytes == 0 || bytes > limits::READ_MAX_BYTES {
            Err(SourceError::new(
                ErrorCode::BadRange,
                format!(
                    "{bytes} bytes asked for, the limit is 1 to {}",
                    limits::READ_MAX_BYTES
                ),
            ))
        } else {
            self.plan(request.key, request.offset, u64::from(bytes))
        };
        if let Err(e) = refusal {
            return self.error(id, e);
        }
        let header = FrameHeader {
            payload_bytes: bytes,
            kind: FrameKind::Data,
            id,
        };
        let guarded = self.epoch.welcome.content_id.is_none();
        match self.send_pieces(&header.encode(), u64::from(bytes), guarded)? {
            Ok(()) => Ok(()),
            Err(e) => self.error(id, e),
        }
    }

    fn read_v1(&mut self, key: Key) -> Result<(), End> {
        add(&self.shared.counters.requests, 1);
        let Some(manifest) = &self.epoch.greeting.manifest else {
            return Err(End::Reloaded);
        };
        let bytes = manifest.record_stride;
        let outcome = match self.plan(key, 0, bytes) {
            Ok(()) => self.send_pieces(&[v1::STATUS_OK], bytes, true)?,
            Err(e) => Err(e),
        };
        if let Err(e) = outcome {
            self.shared.counters.error(e.code);
            debug!("{}: {key}: {e}", self.connection.address);
            self.session.output().push(v1::STATUS_ERROR);
        }
        Ok(())
    }

    /// Fills `pieces` with exactly the range, or says why nothing can be sent.
    fn plan(&mut self, key: Key, offset: u64, bytes: u64) -> Result<(), SourceError> {
        let pieces = &mut self.pieces;
        pieces.clear();
        let mut total = 0u64;
        self.epoch
            .source
            .for_each_piece(key, offset, bytes, &mut |piece| {
                total = total.saturating_add(piece.bytes());
                push_merged(pieces, piece);
            })?;
        if total != bytes {
            return Err(SourceError::new(
                ErrorCode::Internal,
                format!("the store gave {total} bytes for {bytes}"),
            ));
        }
        self.files.clear();
        for piece in &self.pieces {
            if let FilePiece::File { file, .. } = *piece {
                if !self.files.contains(&file) {
                    self.epoch.check_file(file, &self.shared.counters)?;
                    self.files.push(file);
                }
            }
        }
        self.epoch.check_readable(&self.pieces)
    }

    /// Sends what is queued, `header` and the planned pieces; `guarded` as in [`Answer`].
    ///
    /// The inner error says why nothing of the answer was sent: the client can still be told.
    fn send_pieces(
        &mut self,
        header: &[u8],
        bytes: u64,
        guarded: bool,
    ) -> Result<Result<(), SourceError>, End> {
        let begun = self.sender.begin(bytes);
        self.sent(begun)?;
        self.head.clear();
        self.head.append(self.session.output());
        self.head.extend_from_slice(header);
        let counters = &self.shared.counters;
        let answering = Answering::new(counters);
        let changed = |file: &&u32| self.epoch.check_file(**file, counters).is_err();
        let outcome = self.sender.answer(&Answer {
            head: &self.head,
            source: &*self.epoch.source,
            pieces: &self.pieces,
            check: &|| self.files.iter().find(changed).map_or(Ok(()), |f| Err(*f)),
            guarded,
        });
        self.sender.end();
        if outcome.is_ok() {
            add(&counters.payload_bytes, bytes);
            answering.done();
        }
        match self.sent(outcome) {
            Ok(()) => Ok(Ok(())),
            Err(end) if self.sender.started() => Err(end),
            Err(end) => {
                self.head.truncate(self.head.len() - header.len());
                self.session.output().append(&mut self.head);
                if self.shared.refusal_log.allows() {
                    warn!("{}: {end}: refused", self.connection.address);
                }
                Ok(Err(match end {
                    End::Unreadable { .. } => epoch::file_unreadable(),
                    _ => epoch::file_changed(),
                }))
            }
        }
    }

    /// Queues a typed refusal.
    fn error(&mut self, id: u64, error: SourceError) -> Result<(), End> {
        self.shared.counters.error(error.code);
        self.session.reply_error(id, error.code, error.message);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), End> {
        self.flush_before(false)
    }

    fn flush_before(&mut self, more: bool) -> Result<(), End> {
        let deadline = match self.session.handshake_done() {
            true => None,
            false => Some(self.handshake_deadline),
        };
        let output = self.session.output();
        let outcome = self.sender.bytes(output, more, deadline);
        output.clear();
        self.sent(outcome)
    }

    fn sent(&self, outcome: Result<(), SendError>) -> Result<(), End> {
        let path = |file| match self.epoch.source.file_path(file) {
            Some(path) => path.display().to_string(),
            None => format!("file {file}"),
        };
        outcome.map_err(|e| match e {
            SendError::Stalled => End::Timeout("progress of an answer"),
            SendError::Gone(e) => End::Gone(e),
            SendError::Truncated { file, offset } => {
                let why = format!("it ends before byte {offset}");
                self.epoch.revoke(file, &why, &self.shared.counters);
                End::Truncated {
                    path: path(file),
                    offset,
                }
            }
            SendError::Unreadable {
                file,
                offset,
                bytes,
                source,
            } => {
                self.epoch.note_unreadable(file, offset, bytes);
                End::Unreadable {
                    path: path(file),
                    source,
                }
            }
            SendError::Changed { file } => End::Changed { path: path(file) },
        })
    }

    /// Reads what the client has sent, or returns because there is a notice.
    fn receive(&mut self) -> Result<(), End> {
        let frame_timeout = self.shared.config.limits.frame_timeout;
        // By messages, not by events: a ping has none.
        let before = self.session.messages();
        if self.session.partial_bytes() == 0 {
            self.partial_since = None;
        } else if self.partial_since.is_none_or(|(_, n)| n != before) {
            self.partial_since = Some((Instant::now(), before));
        }
        let (deadline, what) = match self.session.handshake_done() {
            false => (Some(self.handshake_deadline), "handshake"),
            true => (
                self.partial_since.map(|(since, _)| since + frame_timeout),
                "end of a request",
            ),
        };
        let stream = self.connection.stream.as_fd();
        // Waking up takes longer than the next request after a small answer needs to come.
        let shared = self.shared;
        let mut looking = match mem::take(&mut self.answers_soon) && self.partial_since.is_none() {
            true => Looking::begin(&shared.looking, shared.config.spin),
            false => None,
        };
        loop {
            match rustix::net::recv(stream, self.session.space(), RecvFlags::DONTWAIT) {
                Ok((_, 0)) if self.session.partial_bytes() > 0 => return Err(End::Torn),
                Ok((_, 0)) => return Err(End::Eof),
                Ok((_, n)) => {
                    self.session.filled(n);
                    return Ok(());
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) if looking.as_ref().is_some_and(Looking::goes_on) => continue,
                Err(Errno::AGAIN) => looking = None,
                Err(e) => return Err(End::Gone(e.into())),
            }
            let mut fds = [
                PollFd::from_borrowed_fd(stream, PollFlags::IN),
                self.connection.wake.poll_fd(),
            ];
            if !wait(&mut fds, deadline).map_err(End::Gone)? {
                self.refuse(ErrorCode::Timeout, format!("no {what} in time"));
                return Err(End::Timeout(what));
            }
            if !fds[1].revents().is_empty() {
                self.connection.wake.clear();
                return Ok(());
            }
        }
    }

    fn refuse(&mut self, code: ErrorCode, message: impl Into<String>) {
        if self.session.is_v2() {
            self.shared.counters.error(code);
        }
        self.session.refuse(code, message);
    }
}

/// Appends a piece, as one with the last where the bytes follow each other.
fn push_merged(pieces: &mut Vec<FilePiece>, piece: FilePiece) {
    match (pieces.last_mut(), piece) {
        (_, FilePiece::File { bytes: 0, .. } | FilePiece::Zeros { bytes: 0 }) => {}
        (Some(FilePiece::Zeros { bytes }), FilePiece::Zeros { bytes: n }) => *bytes += n,
        (
            Some(FilePiece::File {
                file,
                offset,
                bytes,
            }),
            FilePiece::File {
                file: next,
                offset: at,
                bytes: n,
            },
        ) if *file == next && offset.checked_add(*bytes) == Some(at) => *bytes += n,
        _ => pieces.push(piece),
    }
}
