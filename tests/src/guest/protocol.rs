//! What client and agent say to each other: one JSON header and up to two blobs a message.
//!
//! `u32` header bytes, `u32` blob count, the header, then per blob `u32` bytes and the blob; all
//! little-endian, every length checked before memory is taken.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A header is a command or a line of text; a shell script of this size is a file.
const MAX_HEADER_BYTES: usize = 1 << 20;
/// What is sent of a program's output or of a file: enough for logs and JSON, not for stores.
pub(super) const MAX_BLOB_BYTES: usize = 8 << 20;
const MAX_BLOBS: usize = 2;

/// Signals that tests send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as in signal(7)")]
pub enum Signal {
    Hup,
    Int,
    Kill,
    Term,
    Stop,
    Cont,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Exit code, `None` where a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// Names this connection; its programs' output goes to a folder of that name.
    Hello {
        label: String,
    },
    Run {
        command: String,
        timeout_ms: u64,
    },
    Spawn {
        name: String,
        command: String,
    },
    Signal {
        name: String,
        signal: Signal,
    },
    Wait {
        name: String,
        timeout_ms: u64,
    },
    WaitLine {
        name: String,
        pattern: String,
        nth: usize,
        timeout_ms: u64,
    },
    Output {
        name: String,
    },
    ReadFile {
        path: String,
    },
    Quit,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    Done,
    /// Blobs: standard output and error.
    Ended(Ended),
    Started {
        pid: u32,
    },
    Line {
        text: String,
    },
    /// Blobs: a file; or standard output and error.
    Bytes,
    /// Blobs: standard output and error, where a program was waited for.
    TimedOut,
    Refused {
        message: String,
    },
}

/// A header with its blobs.
#[derive(Debug)]
pub(super) struct Message<T> {
    pub(super) header: T,
    pub(super) blobs: Vec<Vec<u8>>,
}

impl<T> From<T> for Message<T> {
    fn from(header: T) -> Self {
        let blobs = Vec::new();
        Self { header, blobs }
    }
}

impl<T: Serialize + DeserializeOwned> Message<T> {
    pub(super) fn write(&self, mut to: impl Write) -> io::Result<()> {
        let header = serde_json::to_vec(&self.header)?;
        let mut frame = Vec::new();
        frame.extend(length(header.len(), MAX_HEADER_BYTES, "header bytes")?);
        frame.extend(length(self.blobs.len(), MAX_BLOBS, "blobs")?);
        frame.extend(header);
        for blob in &self.blobs {
            frame.extend(length(blob.len(), MAX_BLOB_BYTES, "blob bytes")?);
            frame.extend(blob);
        }
        to.write_all(&frame)
    }

    pub(super) fn read(mut from: impl Read) -> io::Result<Self> {
        let header_bytes = read_length(&mut from, MAX_HEADER_BYTES, "header bytes")?;
        let blob_count = read_length(&mut from, MAX_BLOBS, "blobs")?;
        let header = serde_json::from_slice(&read_bytes(&mut from, header_bytes)?)?;
        let mut blobs = Vec::new();
        for _ in 0..blob_count {
            let bytes = read_length(&mut from, MAX_BLOB_BYTES, "blob bytes")?;
            blobs.push(read_bytes(&mut from, bytes)?);
        }
        Ok(Self { header, blobs })
    }
}

fn length(value: usize, limit: usize, what: &str) -> io::Result<[u8; 4]> {
    match u32::try_from(value) {
        Ok(short) if value <= limit => Ok(short.to_le_bytes()),
        _ => Err(over(value, limit, what)),
    }
}

fn read_length(from: &mut impl Read, limit: usize, what: &str) -> io::Result<usize> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    let value = u32::from_le_bytes(bytes) as usize;
    if value > limit {
        return Err(over(value, limit, what));
    }
    Ok(value)
}

fn read_bytes(from: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn over(value: usize, limit: usize, what: &str) -> io::Error {
    let text = format!("a message of {value} {what}, the limit is {limit}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_comes_back_as_it_was_and_a_cut_one_is_an_error() {
        let message = Message {
            header: Request::Run {
                command: "echo 'ä'".into(),
                timeout_ms: 7,
            },
            blobs: vec![vec![0, 255], vec![]],
        };
        let mut frame = Vec::new();
        message.write(&mut frame).unwrap();
        let back = Message::<Request>::read(frame.as_slice()).unwrap();
        assert_eq!((back.header, back.blobs), (message.header, message.blobs));
        for cut in 0..frame.len() {
            let error = Message::<Request>::read(&frame[..cut]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "cut at {cut}");
        }
    }

    #[test]
    fn lengths_over_the_limit_are_refused_before_memory_is_taken() {
        let frame = [0xFF; 8];
        let error = Message::<Request>::read(frame.as_slice()).unwrap_err();
        assert!(
            error.to_string().contains("4294967295 header bytes"),
            "{error}"
        );
        let many = Message {
            header: Request::Quit,
            blobs: vec![Vec::new(); 3],
        };
        assert!(many.write(io::sink()).is_err());
    }
}
