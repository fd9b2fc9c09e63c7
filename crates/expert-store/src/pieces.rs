//! A record image as a sequence of file ranges and zeros.

use crate::StoreError;
use crate::catalogue::Layer;

/// One part of a record image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Bytes of a file.
    File {
        /// Index into the store's files.
        file: u32,
        /// First byte in that file.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// Padding.
    Zeros {
        /// How many.
        bytes: u64,
    },
}

impl Piece {
    /// Bytes of the image that it covers.
    pub fn bytes(&self) -> u64 {
        match *self {
            Self::File { bytes, .. } | Self::Zeros { bytes } => bytes,
        }
    }
}

/// Calls `f` for the pieces of bytes `offset..offset + bytes` of an image, in order. The caller has
/// checked that the range lies in the image.
pub(crate) fn for_each_piece(
    layer: &Layer,
    position: usize,
    offset: u64,
    bytes: u64,
    mut f: impl FnMut(Piece),
) {
    let end = offset + bytes;
    let mut at = offset;
    layer.for_each_segment(position, |segment| {
        let from = segment.image_offset.max(at);
        let to = (segment.image_offset + segment.bytes).min(end);
        if from >= to {
            return;
        }
        if from > at {
            f(Piece::Zeros { bytes: from - at });
        }
        f(Piece::File {
            file: segment.file,
            offset: segment.file_offset + (from - segment.image_offset),
            bytes: to - from,
        });
        at = to;
    });
    if at < end {
        f(Piece::Zeros { bytes: end - at });
    }
}

/// Fills `buf` with a record image's bytes from `offset`: padding as zeros, the rest by `read(file,
/// offset in the file, part)`. The first error ends the reading.
pub(crate) fn fill(
    layer: &Layer,
    position: usize,
    offset: u64,
    buf: &mut [u8],
    mut read: impl FnMut(u32, u64, &mut [u8]) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut at = 0;
    let mut result = Ok(());
    for_each_piece(layer, position, offset, buf.len() as u64, |piece| {
        let part = &mut buf[at..at + piece.bytes() as usize];
        at += part.len();
        match piece {
            Piece::Zeros { .. } => part.fill(0),
            Piece::File { file, offset, .. } if result.is_ok() => {
                result = read(file, offset, part);
            }
            Piece::File { .. } => {}
        }
    });
    result
}
