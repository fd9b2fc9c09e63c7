//! A lane that speaks the frozen v1 protocol: whole records, identified by their headers alone.

use std::convert::Infallible;
use std::net::TcpStream;

use expert_wire::Key;
use expert_wire::v1::{self, Manifest};
use xxhash_rust::xxh3::xxh3_128;

use super::{Attempt, LaneEnd, recv_exact};
use crate::rail::{ContentTag, Read, ReadError};

/// v1 has no content id: its manifest is all there is to tell one store from another.
///
/// `run` tells one set of connections from another: a peer that was restarted may serve other weights
/// of the same geometry, and nothing would show it.
pub(crate) fn v1_tag(manifest: &Manifest, run: u64) -> ContentTag {
    let text = serde_json::to_vec(manifest).expect("a manifest is plain data");
    ContentTag {
        id: xxh3_128(&text),
        instance: Some((run, 0)),
    }
}

impl Attempt {
    pub(super) fn serve_v1(
        &self,
        index: usize,
        stream: &TcpStream,
        manifest: &Manifest,
    ) -> Result<Infallible, LaneEnd> {
        loop {
            let mut status = [0u8];
            recv_exact(stream, &mut status)?;
            let mut read = self.next_posted(index, None)?;
            if status[0] != v1::STATUS_OK {
                let why = format!("status {}", status[0]);
                let is_known = status[0] == v1::STATUS_ERROR;
                self.end_read(index, read, Err(ReadError::Refused(why)));
                if !is_known {
                    return Err("the peer sent an unknown status".into());
                }
                continue;
            }
            let received = self.receive(index, stream, &mut read, None);
            match received {
                Ok((landed, _)) => {
                    let landed = landed.and_then(|landed| {
                        check_v1_header(&read, manifest).map_err(ReadError::WrongRecord)?;
                        Ok(landed)
                    });
                    let is_lost = matches!(landed, Err(ReadError::WrongRecord(_)));
                    self.end_read(index, read, landed);
                    // Where the wrong record came the next may be wrong, too: the stream may be off
                    // by some bytes.
                    if is_lost {
                        return Err("the peer answered with another record".into());
                    }
                }
                Err(why) => {
                    self.end_read(index, read, Err(ReadError::Flushed));
                    return Err(why);
                }
            }
        }
    }
}

/// Checks that a record's header is that of the record asked for, in the manifest's geometry.
pub(crate) fn check_v1_header(read: &Read, manifest: &Manifest) -> Result<(), String> {
    let mut header = [0u8; 28];
    if read.range.len() < header.len() {
        return Err("record without a header".into());
    }
    read.range.copy_out(0, &mut header);
    let word = |i: usize| u32::from_le_bytes(header[i * 4..i * 4 + 4].try_into().expect("4 bytes"));
    if word(0) != v1::RECORD_MAGIC || word(1) != 1 {
        return Err(format!(
            "record header has magic {:#x} version {}, expected {:#x} version 1",
            word(0),
            word(1),
            v1::RECORD_MAGIC
        ));
    }
    let got = Key::new(word(2), word(3));
    if got != read.key {
        return Err(format!("the peer answered with {got}"));
    }
    let geometry = (word(4), word(5), word(6));
    let want = (manifest.inter, manifest.hidden, manifest.group_size);
    if geometry != want {
        return Err(format!(
            "record of inter, hidden, group {geometry:?}, the manifest says {want:?}"
        ));
    }
    Ok(())
}
