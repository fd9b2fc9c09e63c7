//! Element types of safetensors and GGUF, by name: how many elements a block has and its bits.
//!
//! A name means the same in both containers (`F32`, `BF16`), so one table serves. Sizes: safetensors
//! `tensor.rs`, ggml `ggml-common.h` and gguf-py `constants.py`.

use std::fmt;

/// One element type.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype(&'static Entry);

#[derive(Debug, PartialEq, Eq, Hash)]
struct Entry {
    name: &'static str,
    block_elements: u32,
    block_bits: u32,
    gguf_id: Option<u32>,
    safetensors: bool,
}

const fn st(name: &'static str, bits: u32) -> Entry {
    Entry {
        name,
        block_elements: 1,
        block_bits: bits,
        gguf_id: None,
        safetensors: true,
    }
}

const fn both(name: &'static str, bits: u32, id: u32) -> Entry {
    Entry {
        name,
        block_elements: 1,
        block_bits: bits,
        gguf_id: Some(id),
        safetensors: true,
    }
}

const fn gguf(name: &'static str, id: u32, elements: u32, bytes: u32) -> Entry {
    Entry {
        name,
        block_elements: elements,
        block_bits: bytes * 8,
        gguf_id: Some(id),
        safetensors: false,
    }
}

static TABLE: &[Entry] = &[
    st("BOOL", 8),
    st("F4", 4),
    st("F6_E2M3", 6),
    st("F6_E3M2", 6),
    st("U8", 8),
    both("I8", 8, 24),
    st("F8_E5M2", 8),
    st("F8_E4M3", 8),
    st("F8_E8M0", 8),
    st("F8_E4M3FNUZ", 8),
    st("F8_E5M2FNUZ", 8),
    both("I16", 16, 25),
    st("U16", 16),
    both("F16", 16, 1),
    both("BF16", 16, 30),
    both("I32", 32, 26),
    st("U32", 32),
    both("F32", 32, 0),
    st("C64", 64),
    both("F64", 64, 28),
    both("I64", 64, 27),
    st("U64", 64),
    gguf("Q4_0", 2, 32, 18),
    gguf("Q4_1", 3, 32, 20),
    gguf("Q5_0", 6, 32, 22),
    gguf("Q5_1", 7, 32, 24),
    gguf("Q8_0", 8, 32, 34),
    gguf("Q8_1", 9, 32, 40),
    gguf("Q2_K", 10, 256, 84),
    gguf("Q3_K", 11, 256, 110),
    gguf("Q4_K", 12, 256, 144),
    gguf("Q5_K", 13, 256, 176),
    gguf("Q6_K", 14, 256, 210),
    gguf("Q8_K", 15, 256, 292),
    gguf("IQ2_XXS", 16, 256, 66),
    gguf("IQ2_XS", 17, 256, 74),
    gguf("IQ3_XXS", 18, 256, 98),
    gguf("IQ1_S", 19, 256, 50),
    gguf("IQ4_NL", 20, 32, 18),
    gguf("IQ3_S", 21, 256, 110),
    gguf("IQ2_S", 22, 256, 82),
    gguf("IQ4_XS", 23, 256, 136),
    gguf("IQ1_M", 29, 256, 56),
    gguf("TQ1_0", 34, 256, 54),
    gguf("TQ2_0", 35, 256, 66),
    gguf("MXFP4", 39, 32, 17),
    gguf("NVFP4", 40, 64, 36),
    gguf("Q1_0", 41, 128, 18),
    gguf("Q2_0", 42, 64, 18),
];

impl Dtype {
    /// The type of that name, `None` for an unknown one.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|e| e.name == name).map(Self)
    }

    /// The type with that number in GGUF tensor infos, `None` for an unknown or removed one.
    pub fn from_gguf_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|e| e.gguf_id == Some(id)).map(Self)
    }

    /// Its name, as safetensors or ggml write it.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Its number in GGUF, `None` for a type that only safetensors has.
    pub fn gguf_id(self) -> Option<u32> {
        self.0.gguf_id
    }

    /// Whether safetensors files can hold it.
    pub fn in_safetensors(self) -> bool {
        self.0.safetensors
    }

    /// Elements of one block (1 for plain types).
    pub fn block_elements(self) -> u64 {
        u64::from(self.0.block_elements)
    }

    /// Bits of one block.
    pub fn block_bits(self) -> u64 {
        u64::from(self.0.block_bits)
    }

    /// Bytes of a tensor of that shape (outermost dimension first).
    ///
    /// `None` where the product overflows, a row is not whole blocks, or the sum of bits is not
    /// whole bytes.
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
        if self.block_elements() > 1
            && shape.last().copied().unwrap_or(1) % self.block_elements() != 0
        {
            return None;
        }
        let bits = (elements / self.block_elements()).checked_mul(self.block_bits())?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

impl serde::Serialize for Dtype {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.0.name)
    }
}

impl<'de> serde::Deserialize<'de> for Dtype {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let name = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        Self::from_name(&name)
            .ok_or_else(|| serde::de::Error::custom(format!("unknown element type {name:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_gguf_numbers_are_unique() {
        for (i, a) in TABLE.iter().enumerate() {
            for b in &TABLE[i + 1..] {
                assert_ne!(a.name, b.name);
                assert!(a.gguf_id.is_none() || a.gguf_id != b.gguf_id, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn sizes_follow_blocks_and_refuse_what_is_not_whole() {
        let size = |name: &str, shape: &[u64]| Dtype::from_name(name).unwrap().tensor_bytes(shape);
        assert_eq!(size("BF16", &[768, 2048]), Some(3_145_728));
        assert_eq!(size("F32", &[]), Some(4));
        assert_eq!(size("F4", &[3, 2]), Some(3));
        assert_eq!(size("F4", &[3, 3]), None);
        assert_eq!(size("Q4_K", &[2, 256]), Some(288));
        assert_eq!(size("Q4_K", &[2, 128]), None);
        assert_eq!(size("MXFP4", &[2880, 2880]), Some(2880 * 2880 / 32 * 17));
        assert_eq!(size("U8", &[u64::MAX, 2]), None);
        assert_eq!(size("U8", &[0, 5]), Some(0));
    }
}
