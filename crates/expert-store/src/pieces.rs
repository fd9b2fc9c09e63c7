//! A record image as a sequence of file ranges and zeros.

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
