//! The server's side of a session, without I/O: bytes in, events and bytes out.
//!
//! The driver owns the socket and the clock. It sends [`ServerSession::output`], reads into
//! [`ServerSession::space`] and then calls [`ServerSession::poll_event`] until it yields nothing.
//! Requests come out as [`Event`]s; answers other than DATA go back in through
//! [`ServerSession::reply`] and [`ServerSession::reply_error`]. DATA and v1 records never pass
//! through here: the driver sends them straight from the file, after it has flushed the output.
//!
//! *Invariant*: at most [`INPUT_MAX_BYTES`] are buffered, whatever arrives, and the events do not
//! depend on how the bytes were cut into pieces.

mod proof;
mod reason;

use crate::auth::{self, NONCE_BYTES, Token};
use crate::frame::{self, FrameHeader, FrameKind, HEADER_BYTES};
use crate::message::{
    CatalogueRequest, ChecksumReport, ClientHello, ErrorCode, ErrorFrame, ReadRequest, ServerHello,
    VERSION, Welcome,
};
use crate::v1::{self, Greeting, V2Offer};
use crate::v1_verbs::{self, V1Endpoint, V1Rail};
use crate::verbs::OpenRail;
use crate::{Key, WireError, limits};

pub use reason::CloseReason;

/// Most bytes of a client that a session holds: one largest frame.
pub const INPUT_MAX_BYTES: usize = HEADER_BYTES + limits::REQUEST_MAX_BYTES as usize;
/// Input buffer of a new session: about two hundred pipelined READ requests.
const INPUT_START_BYTES: usize = 8 << 10;
/// Largest payload before the handshake is done: a stranger gets no more memory than its hello needs.
const HELLO_MAX_BYTES: u32 = 256;
/// Largest payload of a ping.
const PING_MAX_BYTES: u32 = 64;

/// What a client asked for, or that its session is over.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The client chose the v1 TCP loop; its handshake is done.
    V1Start,
    /// v1: answer with a status byte and, if it is [`v1::STATUS_OK`], the record.
    V1Read(Key),
    /// v1: the client ended the session.
    V1End,
    /// v1: the client wants so many rails; answer with [`ServerSession::offer_v1_rails`] or
    /// [`ServerSession::refuse`], nothing else comes before that.
    V1Verbs {
        /// 1 to 8.
        rails: u8,
    },
    /// v1: the client's queue pairs; connect them, then call [`ServerSession::v1_rails_ready`] or
    /// [`ServerSession::refuse`]. Afterwards the session is silent until the client hangs up.
    V1Connect(Vec<V1Endpoint>),
    /// v2: answer with a `RailsReply`.
    Rails {
        /// Goes into the answer.
        id: u64,
    },
    /// v2: answer with a `RailOpened`.
    OpenRail {
        /// Goes into the answer.
        id: u64,
        /// What is asked for; rail and epoch have not been checked.
        request: OpenRail,
    },
    /// v2: answer with [`ServerSession::accept`] or [`ServerSession::refuse`]; nothing else comes
    /// before that.
    Hello(ClientHello),
    /// v2: answer with a `StoreInfoReply`.
    StoreInfo {
        /// Goes into the answer.
        id: u64,
    },
    /// v2: answer with a `CatalogueReply`.
    Catalogue {
        /// Goes into the answer.
        id: u64,
        /// What is asked for.
        request: CatalogueRequest,
    },
    /// v2: answer with a DATA frame of exactly the bytes asked for. Neither key nor range nor
    /// epoch has been checked.
    Read {
        /// Goes into the answer.
        id: u64,
        /// What is asked for.
        request: ReadRequest,
    },
    /// v2: look at the file below; there is no answer.
    ChecksumReport(ChecksumReport),
    /// v2: the client ended the session.
    Goodbye,
    /// v2: the client ended the session and said why.
    ClientError(ErrorFrame),
    /// The session cannot go on; send what is left of the output and close.
    Closed(CloseReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waits for the mode byte.
    Mode,
    /// In the v1 TCP loop.
    V1,
    /// v1 verbs: waits for the count of rails.
    V1RailCount,
    /// v1 verbs: waits for the driver's offer of that many.
    V1Offering {
        rails: u8,
    },
    /// v1 verbs: waits for the client's rails, as many.
    V1Rails {
        rails: u8,
    },
    /// v1 verbs: waits for the driver to connect them.
    V1Connecting,
    /// v1 verbs: nothing more is said.
    V1Silent,
    /// Waits for the client's hello.
    Hello,
    /// Waits for the client's proof that it knows the token.
    Proof {
        id: u64,
        hello: ClientHello,
    },
    /// Waits for the driver's answer to the hello.
    Accepting {
        id: u64,
    },
    /// v2 requests.
    Open,
    Closed,
}

/// The state of one connection.
#[derive(Debug)]
pub struct ServerSession {
    state: State,
    serves_v1: bool,
    serves_v1_verbs: bool,
    is_v2: bool,
    auth: Option<Box<proof::Proof>>,
    input: Vec<u8>,
    start: usize,
    end: usize,
    output: Vec<u8>,
    messages: u64,
}

/// The first message to a connection that is refused at once, e.g. for `busy`.
///
/// v1 clients find none of their keys in it, v2 clients the reason.
pub fn refusal(instance_id: u64, reason: &str) -> Vec<u8> {
    Greeting {
        manifest: None,
        v2: Some(V2Offer {
            versions: vec![VERSION],
            instance_id,
            capabilities: Vec::new(),
            refused: Some(reason.to_owned()),
        }),
    }
    .encode()
}

impl ServerSession {
    /// A session whose greeting is in the output. The v1 mode is open iff the greeting has a manifest.
    pub fn new(greeting: &Greeting) -> Self {
        Self {
            state: State::Mode,
            serves_v1: greeting.manifest.is_some(),
            serves_v1_verbs: false,
            is_v2: false,
            auth: None,
            input: vec![0; INPUT_START_BYTES],
            start: 0,
            end: 0,
            output: greeting.encode(),
            messages: 0,
        }
    }

    /// A session that tells nothing about the store before the client has proven that it knows the
    /// token; `nonce` is random and was never used before. No v1 mode is open: v1 has no proofs.
    pub fn with_token(instance_id: u64, token: &Token, nonce: [u8; NONCE_BYTES]) -> Self {
        let mut session = Self::new(&Greeting {
            manifest: None,
            v2: Some(V2Offer {
                versions: vec![VERSION],
                instance_id,
                capabilities: vec!["tcp".into(), auth::CAPABILITY.into()],
                refused: None,
            }),
        });
        session.auth = Some(Box::new(proof::Proof::new(instance_id, token, nonce)));
        session
    }

    /// Whether the client was asked for its proof and has not given it.
    pub fn awaits_proof(&self) -> bool {
        matches!(self.state, State::Proof { .. })
    }

    /// Opens the v1 verbs mode, too.
    pub fn serve_v1_verbs(&mut self) {
        self.serves_v1_verbs = self.serves_v1;
    }

    /// Where to put the next bytes of the client. Not empty after [`Self::poll_event`] yielded
    /// `None`, except where the session is closed or waits for [`Self::accept`].
    pub fn space(&mut self) -> &mut [u8] {
        if self.state == State::Closed {
            return &mut [];
        }
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        } else if self.start > 0 && self.end == self.input.len() {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.input[self.end..]
    }

    /// Says that the first `bytes` bytes of [`Self::space`] are the client's.
    pub fn filled(&mut self, bytes: usize) {
        self.end = self.end.saturating_add(bytes).min(self.input.len());
    }

    /// Takes as many of `bytes` as fit and says how many those are.
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        let space = self.space();
        let n = bytes.len().min(space.len());
        space[..n].copy_from_slice(&bytes[..n]);
        self.filled(n);
        n
    }

    /// Bytes to send before anything else; the driver removes what it has sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Bytes of a message that has not arrived whole.
    pub fn partial_bytes(&self) -> usize {
        self.end - self.start
    }

    /// Messages that have arrived whole, pings and others without an event among them: a driver
    /// measures by it how long one has been arriving.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Bytes of memory that the input takes.
    pub fn input_capacity_bytes(&self) -> usize {
        self.input.len()
    }

    /// Whether the client has shown what it is: time-outs of the handshake end here.
    pub fn handshake_done(&self) -> bool {
        matches!(self.state, State::V1 | State::V1Silent | State::Open)
    }

    /// Whether the client chose v2, so that it understands error frames.
    pub fn is_v2(&self) -> bool {
        self.is_v2
    }

    /// Whether the session is over.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// The next request, `None` where more bytes are needed (or [`Self::accept`]).
    ///
    /// Pings are answered here: their answers are in the output afterwards.
    pub fn poll_event(&mut self) -> Option<Event> {
        loop {
            let event = match self.state {
                State::Closed
                | State::Accepting { .. }
                | State::V1Offering { .. }
                | State::V1Connecting => return None,
                State::Mode => {
                    let [mode] = self.take_array()?;
                    self.mode(mode)
                }
                State::V1RailCount => {
                    let [count] = self.take_array()?;
                    self.v1_rail_count(count)
                }
                State::V1Rails { rails } => {
                    let bytes = 1 + usize::from(rails) * v1_verbs::CLIENT_RAIL_BYTES;
                    if self.end - self.start < bytes {
                        self.reserve(bytes);
                        return None;
                    }
                    self.v1_rails(rails, bytes)
                }
                State::V1Silent => {
                    let [byte] = self.take_array()?;
                    Err(CloseReason::BadFrame(WireError::Unexpected {
                        what: "byte in a v1 verbs session",
                        got: byte.into(),
                    }))
                }
                State::V1 => {
                    let request = self.take_array()?;
                    match v1::decode_request(request) {
                        Some(key) => Ok(Some(Event::V1Read(key))),
                        None => {
                            self.state = State::Closed;
                            Ok(Some(Event::V1End))
                        }
                    }
                }
                State::Hello | State::Proof { .. } | State::Open => match self.take_frame() {
                    Ok(None) => return None,
                    Ok(Some((header, payload))) => self.frame(header, payload),
                    Err(reason) => Err(reason),
                },
            };
            match event {
                Ok(Some(event)) => return Some(event),
                Ok(None) => {}
                Err(reason) => return Some(self.fail(reason)),
            }
        }
    }

    /// Answers the hello: the handshake is done.
    pub fn accept(&mut self, welcome: &Welcome) {
        let State::Accepting { id } = self.state else {
            return;
        };
        if self.auth.is_none() {
            let hello = ServerHello {
                version: VERSION,
                auth: 0,
                instance_id: welcome.instance_id,
            };
            self.reply(FrameKind::ServerHello, id, &hello.encode());
        }
        self.reply(FrameKind::Welcome, id, &welcome.encode());
        self.state = State::Open;
    }

    /// Ends the session; a v2 client is told why.
    pub fn refuse(&mut self, code: ErrorCode, message: impl Into<String>) {
        if self.is_v2 && self.state != State::Closed {
            self.reply_error(0, code, message);
        }
        self.state = State::Closed;
    }

    /// Queues an answer. The payload is at most [`limits::FRAME_MAX_BYTES`] long.
    pub fn reply(&mut self, kind: FrameKind, id: u64, payload: &[u8]) {
        if self.state != State::Closed {
            frame::push_frame(&mut self.output, kind, id, payload);
        }
    }

    /// Queues a typed refusal of request `id`.
    pub fn reply_error(&mut self, id: u64, code: ErrorCode, message: impl Into<String>) {
        let error = ErrorFrame::new(code, message);
        self.reply(FrameKind::Error, id, &error.encode());
    }

    /// Queues the notice that the store is another one now; nothing before the handshake is done.
    pub fn notify_changed(&mut self, welcome: &Welcome) {
        if self.state == State::Open {
            self.reply(FrameKind::StoreChanged, 0, &welcome.encode());
        }
    }

    fn mode(&mut self, mode: u8) -> Result<Option<Event>, CloseReason> {
        match mode {
            v1::MODE_TCP | v1::MODE_VERBS if self.auth.is_some() => {
                Err(CloseReason::V1NeedsNoToken)
            }
            v1::MODE_TCP if self.serves_v1 => {
                self.state = State::V1;
                Ok(Some(Event::V1Start))
            }
            v1::MODE_TCP => Err(CloseReason::V1Unavailable),
            v1::MODE_VERBS if self.serves_v1_verbs => {
                self.state = State::V1RailCount;
                Ok(None)
            }
            v1::MODE_VERBS => Err(CloseReason::VerbsUnsupported),
            v1::MODE_V2 => {
                self.is_v2 = true;
                self.state = State::Hello;
                Ok(None)
            }
            other => Err(CloseReason::UnknownMode(other)),
        }
    }

    /// v1 verbs: the server's rails, as many as were asked for.
    pub fn offer_v1_rails(&mut self, offer: &[V1Rail]) {
        let State::V1Offering { rails } = self.state else {
            return;
        };
        debug_assert_eq!(offer.len(), usize::from(rails), "one for each asked for");
        self.output
            .extend_from_slice(&v1_verbs::encode_server_rails(offer));
        self.state = State::V1Rails { rails };
    }

    /// v1 verbs: the queue pairs answer READs.
    pub fn v1_rails_ready(&mut self) {
        if self.state == State::V1Connecting {
            self.output.push(0);
            self.state = State::V1Silent;
        }
    }

    fn v1_rail_count(&mut self, count: u8) -> Result<Option<Event>, CloseReason> {
        let rails = v1_verbs::check_rail_count(count)?;
        self.state = State::V1Offering { rails };
        Ok(Some(Event::V1Verbs { rails }))
    }

    fn v1_rails(&mut self, rails: u8, bytes: usize) -> Result<Option<Event>, CloseReason> {
        let message = &self.input[self.start..self.start + bytes];
        if message[0] != rails {
            return Err(CloseReason::BadFrame(WireError::Unexpected {
                what: "v1 rail count",
                got: message[0].into(),
            }));
        }
        let endpoints = v1_verbs::decode_client_rails(&message[1..])?;
        self.start += bytes;
        self.messages += 1;
        self.state = State::V1Connecting;
        Ok(Some(Event::V1Connect(endpoints)))
    }

    fn frame(
        &mut self,
        header: FrameHeader,
        payload: (usize, usize),
    ) -> Result<Option<Event>, CloseReason> {
        let id = header.id;
        let payload = &self.input[payload.0..payload.1];
        Ok(match header.kind {
            FrameKind::ClientHello => {
                let hello = ClientHello::decode(payload)?;
                let (min, max) = (hello.version_min, hello.version_max);
                if !(min..=max).contains(&VERSION) {
                    return Err(CloseReason::Version { min, max });
                }
                if let Some(proof) = &mut self.auth {
                    proof.challenge(&mut self.output, id, payload)?;
                    self.state = State::Proof { id, hello };
                    return Ok(None);
                }
                self.state = State::Accepting { id };
                Some(Event::Hello(hello))
            }
            FrameKind::AuthResponse => {
                let (State::Proof { id, hello }, Some(proof)) = (self.state, &mut self.auth) else {
                    return Err(CloseReason::UnexpectedFrame(header.kind));
                };
                proof.check(&mut self.output, id, payload)?;
                self.state = State::Accepting { id };
                Some(Event::Hello(hello))
            }
            FrameKind::StoreInfo => Some(Event::StoreInfo { id }),
            FrameKind::Catalogue => Some(Event::Catalogue {
                id,
                request: CatalogueRequest::decode(payload)?,
            }),
            FrameKind::Read => Some(Event::Read {
                id,
                request: ReadRequest::decode(payload)?,
            }),
            FrameKind::Rails => Some(Event::Rails { id }),
            FrameKind::OpenRail => Some(Event::OpenRail {
                id,
                request: OpenRail::decode(payload)?,
            }),
            FrameKind::ChecksumReport => {
                Some(Event::ChecksumReport(ChecksumReport::decode(payload)?))
            }
            FrameKind::Ping => {
                frame::push_frame(&mut self.output, FrameKind::Pong, id, payload);
                None
            }
            FrameKind::Goodbye => {
                self.state = State::Closed;
                Some(Event::Goodbye)
            }
            FrameKind::Error => {
                let error = ErrorFrame::decode(payload)?;
                self.state = State::Closed;
                Some(Event::ClientError(error))
            }
            // A pong answers nothing (the server never asks), which does no harm; the other kinds
            // were refused with their header.
            _ => None,
        })
    }

    fn fail(&mut self, reason: CloseReason) -> Event {
        self.refuse(reason.code(), reason.to_string());
        Event::Closed(reason)
    }

    fn take_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let array = *self.input[self.start..self.end].first_chunk()?;
        self.start += N;
        self.messages += 1;
        Some(array)
    }

    /// A whole frame: its header and where its payload lies in the input. A frame that is not
    /// welcome is refused with its header, before its payload takes any memory.
    #[allow(clippy::type_complexity)] // a range that is Copy
    fn take_frame(&mut self) -> Result<Option<(FrameHeader, (usize, usize))>, CloseReason> {
        let Some(header) = self.input[self.start..self.end].first_chunk() else {
            self.reserve(HEADER_BYTES);
            return Ok(None);
        };
        let open = self.state == State::Open;
        let max_bytes = match open {
            true => limits::REQUEST_MAX_BYTES,
            false => HELLO_MAX_BYTES,
        };
        let header = FrameHeader::decode(header, max_bytes)?;
        let max_bytes = match header.kind {
            FrameKind::AuthResponse if self.awaits_proof() => max_bytes,
            kind if self.awaits_proof() => return Err(CloseReason::NoProof(kind)),
            FrameKind::ClientHello if !open => max_bytes,
            _ if !open => return Err(CloseReason::UnexpectedFrame(header.kind)),
            FrameKind::StoreInfo
            | FrameKind::Catalogue
            | FrameKind::Read
            | FrameKind::Rails
            | FrameKind::OpenRail
                if header.id == 0 =>
            {
                return Err(CloseReason::ZeroId);
            }
            FrameKind::StoreInfo | FrameKind::Rails | FrameKind::Goodbye => 0,
            FrameKind::Ping | FrameKind::Pong => PING_MAX_BYTES,
            FrameKind::Catalogue
            | FrameKind::Read
            | FrameKind::OpenRail
            | FrameKind::ChecksumReport
            | FrameKind::Error => max_bytes,
            _ => return Err(CloseReason::UnexpectedFrame(header.kind)),
        };
        if header.payload_bytes > max_bytes {
            return Err(CloseReason::BadFrame(WireError::TooLarge {
                what: "frame payload bytes",
                got: u64::from(header.payload_bytes),
                limit: u64::from(max_bytes),
            }));
        }
        let frame_bytes = HEADER_BYTES + header.payload_bytes as usize;
        if self.end - self.start < frame_bytes {
            self.reserve(frame_bytes);
            return Ok(None);
        }
        let payload = (self.start + HEADER_BYTES, self.start + frame_bytes);
        self.start = payload.1;
        self.messages += 1;
        Ok(Some((header, payload)))
    }

    /// Makes the input long enough for a message of `bytes`, which the callers have bounded.
    fn reserve(&mut self, bytes: usize) {
        let bytes = bytes.min(INPUT_MAX_BYTES);
        if self.input.len() < bytes {
            self.input.resize(bytes, 0);
        }
        if self.start + bytes > self.input.len() {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
    }
}

#[cfg(test)]
mod tests;
