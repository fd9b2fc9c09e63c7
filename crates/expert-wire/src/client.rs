//! The client's side of the handshake, without I/O.
//!
//! ```text
//! Length ─► Greeting ─► v1 chosen ─────────────────────────► Done(V1)
//!                    └► ServerHello ─► Welcome ─────────────► Done(V2)
//! with a token:         ServerHello ─► AuthChallenge ─► AuthProof ─► Welcome ─► Done(V2)
//! ```
//!
//! The caller reads exactly [`Handshake::wants`] bytes and hands them over, so that no byte of what
//! follows the handshake is swallowed.

use thiserror::Error;

use crate::auth::{
    self, AuthChallenge, AuthProof, AuthResponse, METHOD_TOKEN, NONCE_BYTES, Side, Token,
    Transcript,
};
use crate::frame::{self, FrameHeader, FrameKind};
use crate::message::{self, ClientHello, ErrorFrame, Role, ServerHello, Welcome};
use crate::v1::{self, Greeting, Manifest};
use crate::{WireError, limits};

/// Which protocol a client insists on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// v2 where the peer offers it, else v1.
    #[default]
    Best,
    /// v1 only, over TCP.
    V1,
    /// v1 only, up to the mode byte of verbs; the queue-pair exchange follows.
    V1Verbs,
    /// v2 only.
    V2,
}

/// What both sides agreed on.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The frozen protocol in TCP mode, with the store that the manifest describes.
    V1(Box<Manifest>),
    /// v2 frames from here on.
    V2(Welcome),
}

/// Why no session came about.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The peer's bytes make no sense; it is no expert peer, or a damaged one.
    #[error("the other side is no expert peer that this client understands: {0}")]
    Garbage(#[from] WireError),
    /// The peer refuses for now.
    #[error("peer refuses the connection: {0}")]
    Refused(String),
    /// The peer answered with an error frame.
    #[error("peer refuses the handshake ({code:?}): {message}", code = .0.code, message = .0.message)]
    Error(ErrorFrame),
    /// The peer wants what this client does not offer.
    #[error("{0}")]
    Unsupported(String),
    /// The peer wants a token, and there is none.
    #[error(
        "peer wants a token and this client has none; give it the peer's token file with --auth-token-file FILE or ATLAS_EXPERT_TOKEN_FILE"
    )]
    TokenNeeded,
    /// There is a token, and the peer wants none: it is another one, or somebody in between.
    #[error(
        "peer does not authenticate itself, and a token was given: it is not the peer that was meant, or was started without --auth-token-file; nothing was fetched"
    )]
    ServerDoesNotAuthenticate,
    /// The peer's proof is wrong.
    #[error(
        "the other side does not know the token: it is not the peer that was meant, or the two token files differ; nothing was fetched"
    )]
    NotThePeer,
    /// A token was given, and v1 insisted on.
    #[error("v1 has no authentication; use v2, or no token")]
    V1HasNoToken,
}

impl HandshakeError {
    /// Whether the same handshake can succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Refused(_) => true,
            Self::Error(frame) => frame.retryable,
            _ => false,
        }
    }
}

#[derive(Debug)]
enum State {
    Length,
    Greeting(usize),
    Header(FrameKind),
    Payload(FrameHeader),
    Done,
}

/// What a client with a token remembers of the handshake.
#[derive(Debug)]
struct Auth {
    token: Token,
    transcript: Transcript,
}

/// A handshake in progress.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    protocol: Protocol,
    hello: ClientHello,
    auth: Option<Box<Auth>>,
    transmit: Vec<u8>,
}

impl Handshake {
    /// Starts a handshake; `client_id` joins the connections of one client.
    pub fn new(client_id: u64, role: Role, protocol: Protocol) -> Self {
        Self {
            state: State::Length,
            protocol,
            hello: ClientHello {
                version_min: message::VERSION,
                version_max: message::VERSION,
                client_id,
                role,
            },
            auth: None,
            transmit: Vec::new(),
        }
    }

    /// Proves that it knows the token, and insists that the peer does; `nonce` is random and was
    /// never used before.
    pub fn with_token(mut self, token: &Token, nonce: [u8; NONCE_BYTES]) -> Self {
        self.auth = Some(Box::new(Auth {
            token: token.clone(),
            transcript: Transcript {
                server_nonce: [0; NONCE_BYTES],
                client_nonce: nonce,
                client_hello: [0; 32],
                server_hello: [0; 16],
            },
        }));
        self
    }

    /// Bytes that [`Handshake::handle`] needs next; 0 when done.
    pub fn wants(&self) -> usize {
        match &self.state {
            State::Length => 4,
            State::Greeting(bytes) => *bytes,
            State::Header(_) => frame::HEADER_BYTES,
            State::Payload(header) => header.payload_bytes as usize,
            State::Done => 0,
        }
    }

    /// Bytes to send, empty where there are none.
    pub fn take_transmit(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.transmit)
    }

    /// Takes exactly [`Handshake::wants`] bytes.
    ///
    /// *Errors*: [`HandshakeError`]; hang up after any.
    pub fn handle(&mut self, bytes: &[u8]) -> Result<Option<Outcome>, HandshakeError> {
        debug_assert_eq!(bytes.len(), self.wants(), "the caller reads what is wanted");
        match std::mem::replace(&mut self.state, State::Done) {
            State::Length => {
                let bytes: [u8; 4] = bytes.try_into().map_err(|_| WireError::Short {
                    what: "length of the first message",
                    got: bytes.len(),
                    need: 4,
                })?;
                let len = v1::check_manifest_bytes(u32::from_le_bytes(bytes))?;
                self.state = State::Greeting(len);
                Ok(None)
            }
            State::Greeting(_) => self.handle_greeting(Greeting::decode(bytes)?),
            State::Header(wanted) => {
                let bytes: &[u8; frame::HEADER_BYTES] =
                    bytes.try_into().map_err(|_| WireError::Short {
                        what: "frame header",
                        got: bytes.len(),
                        need: frame::HEADER_BYTES,
                    })?;
                let header = FrameHeader::decode(bytes, limits::REQUEST_MAX_BYTES)?;
                if header.kind != wanted && header.kind != FrameKind::Error {
                    return Err(WireError::Unexpected {
                        what: "frame kind during the handshake",
                        got: header.kind as u64,
                    }
                    .into());
                }
                self.state = State::Payload(header);
                Ok(None)
            }
            State::Payload(header) => match header.kind {
                FrameKind::ServerHello => self.handle_hello(bytes),
                FrameKind::AuthChallenge => self.handle_challenge(bytes),
                FrameKind::AuthProof => self.handle_proof(bytes),
                FrameKind::Welcome => Ok(Some(Outcome::V2(Welcome::decode(bytes)?))),
                _ => Err(HandshakeError::Error(ErrorFrame::decode(bytes)?)),
            },
            State::Done => Ok(None),
        }
    }

    fn handle_hello(&mut self, bytes: &[u8]) -> Result<Option<Outcome>, HandshakeError> {
        let hello = ServerHello::decode(bytes)?;
        let next = match (hello.auth, &mut self.auth) {
            (0, None) => FrameKind::Welcome,
            (0, Some(_)) => return Err(HandshakeError::ServerDoesNotAuthenticate),
            (METHOD_TOKEN, None) => return Err(HandshakeError::TokenNeeded),
            (METHOD_TOKEN, Some(auth)) => {
                auth.transcript.server_hello = auth::exact("server hello", bytes)?;
                FrameKind::AuthChallenge
            }
            (method, _) => {
                return Err(HandshakeError::Unsupported(format!(
                    "peer wants authentication method {method}, this client has method {METHOD_TOKEN} alone"
                )));
            }
        };
        self.state = State::Header(next);
        Ok(None)
    }

    fn handle_challenge(&mut self, bytes: &[u8]) -> Result<Option<Outcome>, HandshakeError> {
        let auth = self.auth.as_mut().ok_or(HandshakeError::TokenNeeded)?;
        auth.transcript.server_nonce = AuthChallenge::decode(bytes)?.nonce;
        let response = AuthResponse {
            nonce: auth.transcript.client_nonce,
            mac: auth.transcript.prove(&auth.token, Side::Client),
        };
        let kind = FrameKind::AuthResponse;
        frame::push_frame(&mut self.transmit, kind, 0, &response.encode());
        self.state = State::Header(FrameKind::AuthProof);
        Ok(None)
    }

    fn handle_proof(&mut self, bytes: &[u8]) -> Result<Option<Outcome>, HandshakeError> {
        let auth = self.auth.as_ref().ok_or(HandshakeError::TokenNeeded)?;
        let mac = AuthProof::decode(bytes)?.mac;
        if !auth.transcript.is_proven(&auth.token, Side::Server, &mac) {
            return Err(HandshakeError::NotThePeer);
        }
        self.state = State::Header(FrameKind::Welcome);
        Ok(None)
    }

    fn handle_greeting(&mut self, greeting: Greeting) -> Result<Option<Outcome>, HandshakeError> {
        let Greeting { manifest, v2 } = greeting;
        if let Some(why) = v2.as_ref().and_then(|o| o.refused.clone()) {
            return Err(HandshakeError::Refused(why));
        }
        let wants_token = v2
            .as_ref()
            .is_some_and(|o| o.capabilities.iter().any(|c| c == auth::CAPABILITY));
        let speaks_v2 = v2.is_some_and(|o| o.versions.contains(&message::VERSION));
        let wants_v1 = matches!(self.protocol, Protocol::V1 | Protocol::V1Verbs);
        match (&self.auth, speaks_v2) {
            (Some(_), _) if wants_v1 => return Err(HandshakeError::V1HasNoToken),
            (Some(_), false) => return Err(HandshakeError::ServerDoesNotAuthenticate),
            (None, _) if wants_v1 && wants_token => return Err(HandshakeError::TokenNeeded),
            _ => {}
        }
        if speaks_v2 && !wants_v1 {
            let hello = self.hello.encode();
            if let Some(auth) = &mut self.auth {
                auth.transcript.client_hello = auth::exact("client hello", &hello)?;
            }
            self.transmit.push(v1::MODE_V2);
            frame::push_frame(&mut self.transmit, FrameKind::ClientHello, 0, &hello);
            self.state = State::Header(FrameKind::ServerHello);
            return Ok(None);
        }
        match manifest {
            Some(manifest) if self.protocol != Protocol::V2 => {
                self.transmit.push(match self.protocol {
                    Protocol::V1Verbs => v1::MODE_VERBS,
                    _ => v1::MODE_TCP,
                });
                Ok(Some(Outcome::V1(Box::new(manifest))))
            }
            Some(_) => Err(HandshakeError::Unsupported(
                "peer speaks v1 only, and v2 was asked for".into(),
            )),
            None => Err(HandshakeError::Unsupported(
                "peer does not serve v1 from this store, and no common v2 version exists".into(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::V2Offer;
    use proptest::prelude::*;

    fn offer() -> V2Offer {
        V2Offer {
            versions: vec![2],
            instance_id: 5,
            capabilities: vec![],
            refused: None,
        }
    }

    fn welcome() -> Welcome {
        Welcome {
            instance_id: 5,
            epoch: 1,
            read_max_bytes: 1 << 20,
            generation: 3,
            content_id: Some(77),
            layout_id: 78,
        }
    }

    fn feed(
        handshake: &mut Handshake,
        mut bytes: &[u8],
    ) -> Result<Option<Outcome>, HandshakeError> {
        while handshake.wants() > 0 && handshake.wants() <= bytes.len() {
            let (now, rest) = bytes.split_at(handshake.wants());
            bytes = rest;
            if let Some(outcome) = handshake.handle(now)? {
                return Ok(Some(outcome));
            }
        }
        Ok(None)
    }

    #[test]
    fn v2_is_chosen_where_it_is_offered() {
        let mut handshake = Handshake::new(9, Role::Stream, Protocol::Best);
        let greeting = Greeting {
            manifest: None,
            v2: Some(offer()),
        };
        assert_eq!(feed(&mut handshake, &greeting.encode()), Ok(None));
        let sent = handshake.take_transmit();
        assert_eq!(sent[0], v1::MODE_V2);
        let hello = ClientHello::decode(&sent[1 + frame::HEADER_BYTES..]).unwrap();
        assert_eq!((hello.client_id, hello.role), (9, Role::Stream));
        let mut answer = Vec::new();
        let server = ServerHello {
            version: 2,
            auth: 0,
            instance_id: 5,
        };
        frame::push_frame(&mut answer, FrameKind::ServerHello, 0, &server.encode());
        frame::push_frame(&mut answer, FrameKind::Welcome, 0, &welcome().encode());
        assert_eq!(
            feed(&mut handshake, &answer),
            Ok(Some(Outcome::V2(welcome())))
        );
    }

    #[test]
    fn busy_peer_is_a_retryable_refusal() {
        let mut handshake = Handshake::new(9, Role::Control, Protocol::Best);
        let greeting = Greeting {
            manifest: None,
            v2: Some(V2Offer {
                refused: Some("busy".into()),
                ..offer()
            }),
        };
        let error = feed(&mut handshake, &greeting.encode()).unwrap_err();
        assert!(error.is_retryable(), "{error}");
    }

    #[test]
    fn four_gigabytes_of_manifest_are_refused_before_they_are_read() {
        let mut handshake = Handshake::new(9, Role::Control, Protocol::Best);
        let error = handshake.handle(&u32::MAX.to_le_bytes()).unwrap_err();
        assert!(matches!(
            error,
            HandshakeError::Garbage(WireError::TooLarge { .. })
        ));
    }

    proptest! {
        #[test]
        fn garbage_never_panics_and_never_wants_more_than_the_limit(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut handshake = Handshake::new(1, Role::Control, Protocol::Best);
            let _ = feed(&mut handshake, &bytes);
            prop_assert!(handshake.wants() <= limits::MANIFEST_MAX_BYTES as usize);
        }
    }
}
