//! Bytes of made-up tensors: a function of seed, tensor name and position.
//!
//! A counter through the finaliser of splitmix64: any position can be computed on its own, at
//! several gigabytes per second. Floats are finite and of moderate size, scales positive, so that a
//! forward pass makes sense.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::Dtype;

/// What a tensor is filled with.
#[derive(Debug, Clone)]
pub(super) enum Fill {
    /// Random bits, in each 64-bit word `(x & and) | or`.
    Masked { and: u64, or: u64 },
    /// Blocks of ggml: random, but the scale in each block is made a moderate number.
    Blocks {
        bytes: usize,
        scales: &'static [(usize, Patch)],
    },
    /// These bytes.
    Given(Vec<u8>),
}

/// How a byte of a block is altered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patch {
    and: u8,
    or: u8,
}

/// The high byte of an F16: between 2^-7 and 2^-5.
const F16: Patch = Patch {
    and: 0x07,
    or: 0x20,
};
/// An E8M0 exponent: between 2^-7 and 1.
const E8M0: Patch = Patch {
    and: 0x07,
    or: 0x78,
};

fn repeat(bits: u32, value: u64) -> u64 {
    let mut out = 0;
    let mut at = 0;
    while at < 64 {
        out |= value << at;
        at += bits;
    }
    out
}

impl Fill {
    /// For a weight (or bias) of that type.
    pub(super) fn weight(dtype: Dtype) -> Self {
        let masked = |bits, value| Self::Masked {
            and: repeat(bits, value),
            or: 0,
        };
        // Without the top bit of the exponent a float is below 2 and neither infinite nor NaN.
        match dtype.name() {
            "BF16" | "F16" => masked(16, 0xbfff),
            "F32" => masked(32, 0xbfff_ffff),
            "F64" => masked(64, 0xbfff_ffff_ffff_ffff),
            "F8_E4M3" | "F8_E5M2" => masked(8, 0xbf),
            "F8_E8M0" => masked(8, 0x7f),
            name => match Self::scales_of(name) {
                Some(scales) => Self::Blocks {
                    bytes: (dtype.block_bits() / 8) as usize,
                    scales,
                },
                None => masked(64, u64::MAX),
            },
        }
    }

    /// For a scale of that type: positive and not far from 1.
    pub(super) fn scale(dtype: Dtype) -> Self {
        let (and, or) = match dtype.name() {
            "BF16" => (repeat(16, 0x007f), repeat(16, 0x3f00)),
            "F16" => (repeat(16, 0x03ff), repeat(16, 0x3800)),
            "F32" => (repeat(32, 0x007f_ffff), repeat(32, 0x3f00_0000)),
            "F8_E4M3" => (repeat(8, 0x07), repeat(8, 0x30)),
            "F8_E8M0" | "U8" => (repeat(8, 0x07), repeat(8, 0x78)),
            _ => return Self::weight(dtype),
        };
        Self::Masked { and, or }
    }

    fn scales_of(name: &str) -> Option<&'static [(usize, Patch)]> {
        // Offsets of the high bytes of the scales: ggml-common.h.
        Some(match name {
            "Q4_0" | "Q8_0" => &[(1, F16)],
            "Q5_0" => &[(1, F16)],
            "Q4_K" | "Q5_K" => &[(1, F16), (3, F16)],
            "Q6_K" => &[(209, F16)],
            "MXFP4" => &[(0, E8M0)],
            _ => return None,
        })
    }

    /// Bytes that a position must be a multiple of.
    pub(super) fn unit(&self) -> usize {
        match self {
            Self::Masked { .. } => 8,
            Self::Blocks { bytes, .. } => bytes * 8,
            Self::Given(_) => 1,
        }
    }

    /// Writes the bytes from `at`, a multiple of [`Fill::unit`].
    pub(super) fn write(&self, stream: u64, at: u64, out: &mut [u8]) {
        match self {
            Self::Given(bytes) => {
                let rest = bytes.get(at as usize..).unwrap_or(&[]);
                let n = rest.len().min(out.len());
                out[..n].copy_from_slice(&rest[..n]);
            }
            &Self::Masked { and, or } => words(stream, at / 8, out, and, or),
            Self::Blocks { bytes, scales } => {
                words(stream, at / 8, out, u64::MAX, 0);
                for block in out.chunks_mut(*bytes) {
                    for &(i, patch) in *scales {
                        if let Some(b) = block.get_mut(i) {
                            *b = (*b & patch.and) | patch.or;
                        }
                    }
                }
            }
        }
    }
}

/// The stream of a tensor.
pub(super) fn stream(seed: u64, name: &str) -> u64 {
    xxh3_64_with_seed(name.as_bytes(), seed)
}

fn words(stream: u64, first: u64, out: &mut [u8], and: u64, or: u64) {
    let word = |i: u64| {
        let mut x = stream.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) & and) | or
    };
    let mut chunks = out.chunks_exact_mut(8);
    let mut i = first;
    for chunk in chunks.by_ref() {
        chunk.copy_from_slice(&word(i).to_le_bytes());
        i += 1;
    }
    let rest = chunks.into_remainder();
    let n = rest.len();
    rest.copy_from_slice(&word(i).to_le_bytes()[..n]);
}
