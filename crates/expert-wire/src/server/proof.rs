//! The server's part of [`crate::auth`].

use super::CloseReason;
use crate::WireError;
use crate::auth::{
    self, AuthChallenge, AuthProof, AuthResponse, METHOD_TOKEN, NONCE_BYTES, Side, Token,
    Transcript,
};
use crate::frame::{self, FrameKind};
use crate::message::{ServerHello, VERSION};

/// What a session that wants a token remembers of the handshake.
#[derive(Debug)]
pub(super) struct Proof {
    token: Token,
    transcript: Transcript,
}

impl Proof {
    pub(super) fn new(instance_id: u64, token: &Token, nonce: [u8; NONCE_BYTES]) -> Self {
        let hello = ServerHello {
            version: VERSION,
            auth: METHOD_TOKEN,
            instance_id,
        };
        let server_hello = auth::exact("server hello", &hello.encode());
        Self {
            token: token.clone(),
            transcript: Transcript {
                server_nonce: nonce,
                client_nonce: [0; NONCE_BYTES],
                client_hello: [0; 32],
                server_hello: server_hello.expect("its size is fixed"),
            },
        }
    }

    /// Answers a hello, whose bytes count as they came.
    pub(super) fn challenge(
        &mut self,
        output: &mut Vec<u8>,
        id: u64,
        hello: &[u8],
    ) -> Result<(), WireError> {
        self.transcript.client_hello = auth::exact("client hello", hello)?;
        let challenge = AuthChallenge {
            nonce: self.transcript.server_nonce,
        };
        let server_hello = &self.transcript.server_hello;
        frame::push_frame(output, FrameKind::ServerHello, id, server_hello);
        frame::push_frame(output, FrameKind::AuthChallenge, id, &challenge.encode());
        Ok(())
    }

    /// Checks the client's proof and gives the server's own.
    pub(super) fn check(
        &mut self,
        output: &mut Vec<u8>,
        id: u64,
        response: &[u8],
    ) -> Result<(), CloseReason> {
        let response = AuthResponse::decode(response)?;
        self.transcript.client_nonce = response.nonce;
        let transcript = &self.transcript;
        if !transcript.is_proven(&self.token, Side::Client, &response.mac) {
            return Err(CloseReason::WrongToken);
        }
        let proof = AuthProof {
            mac: transcript.prove(&self.token, Side::Server),
        };
        frame::push_frame(output, FrameKind::AuthProof, id, &proof.encode());
        Ok(())
    }
}
