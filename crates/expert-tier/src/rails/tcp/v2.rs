//! A lane that speaks v2 frames.

use std::convert::Infallible;
use std::net::TcpStream;
use std::time::Duration;

use expert_wire::frame::{self, FrameHeader, FrameKind};
use expert_wire::limits;
use expert_wire::message::{ChecksumReport, ErrorCode, ErrorFrame, Welcome};

use super::{Attempt, LaneEnd, recv_exact};
use crate::rail::{Read, ReadError};
use crate::sync::lock;

/// Most bytes that may wait for a peer that does not read: far more than a window of READs needs.
const UNSENT_MAX_BYTES: usize = 1 << 20;

/// One connection after its handshake.
pub(super) struct LaneV2<'a> {
    attempt: &'a Attempt,
    index: usize,
    stream: &'a TcpStream,
    welcome: Welcome,
    /// Bytes of the next header that came with the last READ.
    carry: [u8; frame::HEADER_BYTES],
    carried: usize,
    spin: Duration,
}

impl<'a> LaneV2<'a> {
    pub(super) fn new(
        attempt: &'a Attempt,
        index: usize,
        stream: &'a TcpStream,
        welcome: Welcome,
        spin: Duration,
    ) -> Self {
        Self {
            attempt,
            index,
            stream,
            welcome,
            carry: [0; frame::HEADER_BYTES],
            carried: 0,
            spin,
        }
    }

    /// Serves until the connection ends; says why it did.
    pub(super) fn serve(mut self) -> Result<Infallible, LaneEnd> {
        loop {
            let mut header = self.carry;
            if self.carried == 0 {
                self.attempt.look(self.index, self.stream, self.spin);
            }
            recv_exact(self.stream, &mut header[self.carried..])?;
            self.carried = 0;
            let header = FrameHeader::decode(&header, limits::REQUEST_MAX_BYTES)
                .map_err(|e| format!("the peer sent garbage: {e}"))?;
            match header.kind {
                FrameKind::Data => self.take_data(header)?,
                FrameKind::Error => self.take_error(header)?,
                FrameKind::StoreChanged => {
                    let payload = self.payload(header)?;
                    let welcome = Welcome::decode(&payload).map_err(|e| e.to_string())?;
                    self.welcome = welcome;
                    self.attempt.content_changed(&welcome);
                }
                FrameKind::Ping => {
                    let payload = self.payload(header)?;
                    if payload.len() > 64 {
                        return Err("the peer sent a ping of more than 64 bytes".into());
                    }
                    self.send(FrameKind::Pong, header.id, &payload)?;
                }
                FrameKind::Pong => drop(self.payload(header)?),
                FrameKind::Goodbye => return Err("the peer said goodbye".into()),
                other => return Err(format!("the peer sent an unexpected {other:?} frame")),
            }
        }
    }

    fn take_data(&mut self, header: FrameHeader) -> Result<(), LaneEnd> {
        let mut read = self.attempt.next_posted(self.index, Some(header.id))?;
        if u64::from(header.payload_bytes) != read.bytes() {
            let why = format!(
                "the peer sent {} bytes where {} were asked for",
                header.payload_bytes,
                read.bytes()
            );
            self.attempt
                .end_read(self.index, read, Err(ReadError::Flushed));
            return Err(why);
        }
        match self
            .attempt
            .receive(self.index, self.stream, &mut read, Some(&mut self.carry))
        {
            Ok((landed, surplus)) => {
                self.carried = surplus;
                let reported = match &landed {
                    Err(ReadError::Checksum(bad)) => self.report(&read, bad.chunk),
                    _ => Ok(()),
                };
                self.attempt.end_read(self.index, read, landed);
                reported
            }
            Err(why) => {
                self.attempt
                    .end_read(self.index, read, Err(ReadError::Flushed));
                Err(why)
            }
        }
    }

    /// Tells the peer, so that it looks at its files now.
    fn report(&self, read: &Read, chunk: u32) -> Result<(), LaneEnd> {
        let report = ChecksumReport {
            key: read.key,
            chunk,
            epoch: self.welcome.epoch,
        };
        self.send(FrameKind::ChecksumReport, 0, &report.encode())
    }

    fn send(&self, kind: FrameKind, id: u64, payload: &[u8]) -> Result<(), LaneEnd> {
        let lane = &self.attempt.lanes[self.index];
        let mut unsent = lock(&lane.unsent);
        frame::push_frame(&mut unsent, kind, id, payload);
        lane.flush(&mut unsent);
        match unsent.len() {
            0..=UNSENT_MAX_BYTES => Ok(()),
            n => Err(format!("the peer does not read: {n} bytes wait to be sent")),
        }
    }

    fn take_error(&mut self, header: FrameHeader) -> Result<(), LaneEnd> {
        let payload = self.payload(header)?;
        let error = ErrorFrame::decode(&payload).map_err(|e| e.to_string())?;
        let is_ours = lock(&self.attempt.lanes[self.index].queue)
            .posted
            .front()
            .is_some_and(|(id, _)| *id == header.id);
        // An error without a READ concerns the connection.
        if !is_ours || matches!(error.code, ErrorCode::ShuttingDown | ErrorCode::BadFrame) {
            return Err(format!("peer: {} ({:?})", error.message, error.code));
        }
        let read = self.attempt.next_posted(self.index, Some(header.id))?;
        let result = match error.code {
            ErrorCode::StoreChanged => ReadError::ContentChanged,
            ErrorCode::NoSuchLayer
            | ErrorCode::NoSuchExpert
            | ErrorCode::IdentityExpert
            | ErrorCode::BadRange => ReadError::Refused(error.message),
            _ => ReadError::Unavailable(error.message),
        };
        self.attempt.end_read(self.index, read, Err(result));
        Ok(())
    }

    fn payload(&self, header: FrameHeader) -> Result<Vec<u8>, LaneEnd> {
        let mut payload = vec![0; header.payload_bytes as usize];
        recv_exact(self.stream, &mut payload)?;
        Ok(payload)
    }
}
