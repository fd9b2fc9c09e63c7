//! The control connection: the catalogue, on demand, one question at a time.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use expert_wire::auth::Token;
use expert_wire::client::{Outcome, Protocol};
use expert_wire::frame::{self, FrameHeader, FrameKind};
use expert_wire::limits;
use expert_wire::message::{ErrorCode, ErrorFrame, Role, Welcome};

use crate::engine::later;
use crate::error::{Step, TierError};
use crate::rail::ContentTag;
use crate::rails::socket;
use crate::sync::lock;

/// Answers to other questions, notices and pings that may come before the answer.
const STRAY_FRAMES_MAX: u32 = 64;

/// See the module. Connects when first needed, and again when the connection broke.
pub(crate) struct Control {
    addr: String,
    client_id: u64,
    token: Option<Token>,
    connect_timeout: Duration,
    connection: Mutex<Option<Connection>>,
}

/// A v2 connection after its handshake, for questions.
pub(crate) struct Connection {
    stream: TcpStream,
    welcome: Welcome,
    next_id: u64,
}

impl Control {
    pub(crate) fn new(
        addr: &str,
        client_id: u64,
        token: Option<Token>,
        connect_timeout: Duration,
    ) -> Self {
        Self {
            addr: addr.to_owned(),
            client_id,
            token,
            connect_timeout,
            connection: Mutex::new(None),
        }
    }

    pub(crate) fn addr(&self) -> &str {
        &self.addr
    }

    /// What the peer served when it was last asked; `None` while there is no connection.
    pub(crate) fn content(&self) -> Option<ContentTag> {
        self.slot().as_ref().map(|c| ContentTag::of(&c.welcome))
    }

    /// Who the peer is now, and which protocol it speaks.
    pub(crate) fn hello(&self, protocol: Protocol, limit: Instant) -> Result<Outcome, TierError> {
        let limit = limit.min(later(Instant::now(), self.connect_timeout));
        let (stream, outcome) = self.connect(protocol, limit)?;
        if let Outcome::V2(welcome) = outcome {
            self.keep(Connection {
                stream,
                welcome,
                next_id: 1,
            });
        }
        Ok(outcome)
    }

    /// Asks one question; returns the answer and who gave it.
    pub(crate) fn ask(
        &self,
        kind: FrameKind,
        payload: &[u8],
        answer: FrameKind,
        limit: Instant,
    ) -> Result<(Vec<u8>, Welcome), TierError> {
        // Taken out, so that nobody waits for another's question; a second asker gets a connection
        // of its own. One that lay idle may have died with the peer: then a new one is made.
        let idle = self.slot().take();
        if let Some(mut connection) = idle {
            match connection.ask(kind, payload, answer, limit) {
                Ok(bytes) => return Ok((bytes, self.keep(connection))),
                Err(AskError::Refused(frame)) => {
                    self.keep(connection);
                    return Err(self.refused(&frame));
                }
                // There is no time left to ask anew.
                Err(AskError::TimedOut(waited_ms)) => return Err(self.timed_out(waited_ms)),
                Err(AskError::Broken(why)) => {
                    tracing::debug!(addr = %self.addr, "control connection broke: {why}");
                }
            }
        }
        let connect_limit = limit.min(later(Instant::now(), self.connect_timeout));
        let (stream, outcome) = self.connect(Protocol::V2, connect_limit)?;
        let Outcome::V2(welcome) = outcome else {
            unreachable!("the handshake was told to insist on v2")
        };
        let mut connection = Connection {
            stream,
            welcome,
            next_id: 1,
        };
        match connection.ask(kind, payload, answer, limit) {
            Ok(bytes) => Ok((bytes, self.keep(connection))),
            Err(AskError::Refused(frame)) => {
                self.keep(connection);
                Err(self.refused(&frame))
            }
            Err(AskError::TimedOut(waited_ms)) => Err(self.timed_out(waited_ms)),
            Err(AskError::Broken(why)) => Err(TierError::Connect {
                addr: self.addr.clone(),
                why,
            }),
        }
    }

    fn timed_out(&self, waited_ms: u128) -> TierError {
        TierError::TimedOut {
            addr: self.addr.clone(),
            step: Step::Answer,
            waited_ms,
        }
    }

    fn connect(
        &self,
        protocol: Protocol,
        limit: Instant,
    ) -> Result<(TcpStream, Outcome), TierError> {
        socket::connect(
            &self.addr,
            self.client_id,
            Role::Control,
            protocol,
            self.token.as_ref(),
            limit,
        )
    }

    fn slot(&self) -> MutexGuard<'_, Option<Connection>> {
        lock(&self.connection)
    }

    /// Keeps a connection for the next question; says who was asked.
    fn keep(&self, connection: Connection) -> Welcome {
        let welcome = connection.welcome;
        *self.slot() = Some(connection);
        welcome
    }

    fn refused(&self, frame: &ErrorFrame) -> TierError {
        if frame.retryable {
            return TierError::Connect {
                addr: self.addr.clone(),
                why: format!("{} ({:?})", frame.message, frame.code),
            };
        }
        TierError::Catalogue {
            addr: self.addr.clone(),
            why: format!("{} ({:?})", frame.message, frame.code),
        }
    }
}

/// Why there is no answer.
pub(crate) enum AskError {
    /// The peer said so; the connection goes on.
    Refused(ErrorFrame),
    /// Not within so many milliseconds; the connection is of no use any more.
    TimedOut(u128),
    /// The same for another reason.
    Broken(String),
}

impl std::fmt::Display for AskError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(frame) => write!(f, "{} ({:?})", frame.message, frame.code),
            Self::TimedOut(ms) => write!(f, "the peer's answer timed out after {ms} ms"),
            Self::Broken(why) => f.write_str(why),
        }
    }
}

impl Connection {
    /// A connection of its own, which nobody else asks on.
    pub(crate) fn of(stream: TcpStream, welcome: Welcome) -> Self {
        Self {
            stream,
            welcome,
            next_id: 1,
        }
    }

    /// What the peer served when it said so last.
    pub(crate) fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Readable when the peer says something unasked, or hangs up.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Takes one frame that nobody asked for: call it when the stream is readable.
    pub(crate) fn take_notice(&mut self, limit: Instant) -> Result<(), AskError> {
        match self.next_frame(Time::until(limit))? {
            (
                FrameHeader {
                    id: 0,
                    kind: FrameKind::Error,
                    ..
                },
                payload,
            ) => {
                let frame =
                    ErrorFrame::decode(&payload).map_err(|e| AskError::Broken(e.to_string()))?;
                Err(AskError::Broken(frame.message))
            }
            // An answer to a question that was given up.
            _ => Ok(()),
        }
    }

    /// Sends a frame that has no answer.
    pub(crate) fn tell(
        &mut self,
        kind: FrameKind,
        payload: &[u8],
        limit: Instant,
    ) -> Result<(), AskError> {
        let mut out = Vec::new();
        frame::push_frame(&mut out, kind, 0, payload);
        self.write(&out, Time::until(limit))
    }

    /// Asks one question and waits for its answer.
    pub(crate) fn ask(
        &mut self,
        kind: FrameKind,
        payload: &[u8],
        answer: FrameKind,
        limit: Instant,
    ) -> Result<Vec<u8>, AskError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut out = Vec::new();
        frame::push_frame(&mut out, kind, id, payload);
        let time = Time::until(limit);
        self.write(&out, time)?;
        for _ in 0..STRAY_FRAMES_MAX {
            let (header, bytes) = self.next_frame(time)?;
            match header.kind {
                kind if kind == answer && header.id == id => return Ok(bytes),
                FrameKind::Error => {
                    let frame =
                        ErrorFrame::decode(&bytes).map_err(|e| AskError::Broken(e.to_string()))?;
                    let fatal = header.id != id
                        || matches!(frame.code, ErrorCode::BadFrame | ErrorCode::ShuttingDown);
                    return Err(match fatal {
                        true => AskError::Broken(frame.message),
                        false => AskError::Refused(frame),
                    });
                }
                FrameKind::StoreChanged | FrameKind::Ping | FrameKind::Pong => {}
                other => {
                    return Err(AskError::Broken(format!("unexpected {other:?} frame")));
                }
            }
        }
        Err(AskError::Broken(
            "the peer sends frames but no answer".into(),
        ))
    }

    /// The next frame; notices are taken note of and pings answered on the way.
    fn next_frame(&mut self, time: Time) -> Result<(FrameHeader, Vec<u8>), AskError> {
        let mut header = [0; frame::HEADER_BYTES];
        self.read(&mut header, time)?;
        let header = FrameHeader::decode(&header, limits::FRAME_MAX_BYTES)
            .map_err(|e| AskError::Broken(e.to_string()))?;
        if header.kind == FrameKind::Data {
            return Err(AskError::Broken("unexpected DATA frame".into()));
        }
        let bytes = self.read_payload(header.payload_bytes as usize, time)?;
        match header.kind {
            FrameKind::StoreChanged => {
                self.welcome =
                    Welcome::decode(&bytes).map_err(|e| AskError::Broken(e.to_string()))?;
            }
            FrameKind::Ping if bytes.len() <= 64 => {
                let mut pong = Vec::new();
                frame::push_frame(&mut pong, FrameKind::Pong, header.id, &bytes);
                self.write(&pong, time)?;
            }
            FrameKind::Ping => return Err(AskError::Broken("a ping of more than 64 bytes".into())),
            FrameKind::Goodbye => return Err(AskError::Broken("the peer said goodbye".into())),
            _ => {}
        }
        Ok((header, bytes))
    }

    fn write(&mut self, bytes: &[u8], time: Time) -> Result<(), AskError> {
        self.stream
            .set_write_timeout(Some(time.left()?))
            .and_then(|()| self.stream.write_all(bytes))
            .map_err(|e| time.error(&e))
    }

    fn read_payload(&mut self, bytes: usize, time: Time) -> Result<Vec<u8>, AskError> {
        // Grows with what arrives: an announcement alone reserves little.
        let mut payload = Vec::new();
        while payload.len() < bytes {
            let at = payload.len();
            payload.resize(bytes.min(at + (1 << 20)), 0);
            self.read(&mut payload[at..], time)?;
        }
        Ok(payload)
    }

    fn read(&mut self, buffer: &mut [u8], time: Time) -> Result<(), AskError> {
        let mut at = 0;
        while at < buffer.len() {
            let left = time.left()?;
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(&mut buffer[at..]));
            match read {
                Ok(0) => return Err(AskError::Broken("the peer closed the connection".into())),
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(time.error(&e)),
            }
        }
        Ok(())
    }
}

/// When a question was asked, and until when its answer is waited for.
#[derive(Clone, Copy)]
struct Time {
    start: Instant,
    limit: Instant,
}

impl Time {
    fn until(limit: Instant) -> Self {
        Self {
            start: Instant::now(),
            limit,
        }
    }

    fn timed_out(self) -> AskError {
        AskError::TimedOut(self.start.elapsed().as_millis())
    }

    /// What is left of it, never nothing: sockets take 0 for no limit.
    fn left(self) -> Result<Duration, AskError> {
        let left = self.limit.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(self.timed_out()),
            false => Ok(left),
        }
    }

    /// A socket calls its own time-out an operation that would block.
    fn error(self, e: &io::Error) -> AskError {
        match e.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.timed_out(),
            _ => AskError::Broken(e.to_string()),
        }
    }
}
