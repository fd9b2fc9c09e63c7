//! A connection to a peer whose client sends whatever the test wants.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};

use expert_wire::client::{Handshake, Outcome, Protocol};
use expert_wire::frame::{self, FrameHeader, FrameKind};
use expert_wire::limits;
use expert_wire::message::{ReadRequest, Role, Welcome};
use expert_wire::v1::Greeting;

use super::SLACK;

/// See the module. Every read ends within [`SLACK`].
#[derive(Debug)]
pub struct RawClient {
    /// The connection.
    pub stream: TcpStream,
}

impl RawClient {
    /// Connects and says nothing.
    pub fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).expect("a peer that listens");
        stream.set_read_timeout(Some(SLACK)).expect("a time-out");
        stream.set_write_timeout(Some(SLACK)).expect("a time-out");
        Self { stream }
    }

    /// Connects and shakes hands for v2.
    pub fn v2(addr: SocketAddr) -> (Self, Welcome) {
        let mut client = Self::connect(addr);
        let mut handshake = Handshake::new(1, Role::Stream, Protocol::V2);
        loop {
            let bytes = handshake.take_transmit();
            client.stream.write_all(&bytes).expect("room");
            let mut bytes = vec![0; handshake.wants()];
            client.stream.read_exact(&mut bytes).expect("an answer");
            if let Some(outcome) = handshake.handle(&bytes).expect("a handshake") {
                let Outcome::V2(welcome) = outcome else {
                    panic!("v2 was insisted on");
                };
                return (client, welcome);
            }
        }
    }

    /// The peer's first message.
    pub fn greeting(&mut self) -> Greeting {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).expect("a length");
        let length = u32::from_le_bytes(length);
        assert!(length <= limits::MANIFEST_MAX_BYTES);
        let mut json = vec![0; length as usize];
        self.stream.read_exact(&mut json).expect("a greeting");
        Greeting::decode(&json).expect("a sound greeting")
    }

    /// Sends bytes; a peer that hung up already is no failure of the test.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a READ.
    pub fn send_read(&mut self, id: u64, request: &ReadRequest) {
        let bytes = frame(FrameKind::Read, id, &request.encode());
        self.send(&bytes).expect("room");
    }

    /// The next frame.
    pub fn frame(&mut self) -> io::Result<(FrameHeader, Vec<u8>)> {
        read_frame(&mut self.stream, limits::FRAME_MAX_BYTES)
    }

    /// Reads to the end of the connection, which has to come within [`SLACK`], and gives back what came.
    pub fn read_to_end(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.stream.read_to_end(&mut bytes) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {}
            Err(e) => panic!("the peer does not hang up: {e}"),
        }
        bytes
    }
}

/// The bytes of a frame.
pub fn frame(kind: FrameKind, id: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::push_frame(&mut bytes, kind, id, payload);
    bytes
}

/// Reads one frame.
pub fn read_frame(stream: &mut TcpStream, max_bytes: u32) -> io::Result<(FrameHeader, Vec<u8>)> {
    let mut header = [0; frame::HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let header = FrameHeader::decode(&header, max_bytes).map_err(io::Error::other)?;
    let mut payload = vec![0; header.payload_bytes as usize];
    stream.read_exact(&mut payload)?;
    Ok((header, payload))
}
