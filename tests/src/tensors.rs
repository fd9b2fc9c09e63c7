//! Tensors of a checkpoint, read without the store's code.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use expert_store::Dtype;
use safetensors::SafeTensors;
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_128;

use crate::tree;

/// A tensor, its bytes as their hash.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Tensor {
    /// Name of the element type.
    pub dtype: String,
    /// Outermost dimension first.
    pub shape: Vec<u64>,
    /// Length of the data.
    pub bytes: u64,
    /// 32 hexadecimal digits.
    pub xxh3_128: String,
}

impl Tensor {
    fn new(dtype: String, shape: Vec<u64>, data: &[u8]) -> Self {
        Self {
            dtype,
            shape,
            bytes: data.len() as u64,
            xxh3_128: format!("{:032x}", xxh3_128(data)),
        }
    }
}

/// All tensors of the safetensors and GGUF files of a folder, or of one file.
///
/// Panics on a name that occurs twice and on files that are not sound.
pub fn read(path: &Path) -> BTreeMap<String, Tensor> {
    let mut out = BTreeMap::new();
    if path.is_dir() {
        for name in tree::names(path) {
            if name.ends_with(".safetensors") || name.ends_with(".gguf") {
                add(&mut out, &path.join(name));
            }
        }
    } else {
        add(&mut out, path);
    }
    out
}

fn add(out: &mut BTreeMap<String, Tensor>, path: &Path) {
    let bytes = fs::read(path).expect("a readable file");
    let found = match path.extension() {
        Some(e) if e == "gguf" => gguf(&bytes),
        _ => safetensors(&bytes),
    };
    for (name, tensor) in found {
        let twice = out.insert(name.clone(), tensor);
        assert!(twice.is_none(), "{name} occurs twice");
    }
}

fn safetensors(bytes: &[u8]) -> Vec<(String, Tensor)> {
    let file = SafeTensors::deserialize(bytes).expect("a sound safetensors file");
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let shape = view.shape().iter().map(|&d| d as u64).collect();
        let dtype = format!("{:?}", view.dtype());
        (name, Tensor::new(dtype, shape, view.data()))
    };
    file.tensors().into_iter().map(tensor).collect()
}

/// The tensors of a GGUF file whose metadata are numbers and text.
fn gguf(bytes: &[u8]) -> Vec<(String, Tensor)> {
    let mut at = Cursor { bytes, at: 0 };
    assert_eq!(at.take(4), b"GGUF");
    assert_eq!(at.u32(), 3, "version");
    let (tensors, pairs) = (at.u64(), at.u64());
    let mut alignment = 32;
    for _ in 0..pairs {
        let key = at.text();
        let kind = at.u32();
        let value = match kind {
            2 => u64::from(u16::from_le_bytes(at.take(2).try_into().expect("2 bytes"))),
            4 | 5 => u64::from(at.u32()),
            8 => {
                at.text();
                0
            }
            _ => panic!("{key} has a value of type {kind}, which only other writers use"),
        };
        if key == "general.alignment" {
            alignment = value;
        }
    }
    let mut infos = Vec::new();
    for _ in 0..tensors {
        let name = at.text();
        let mut shape: Vec<u64> = (0..at.u32()).map(|_| at.u64()).collect();
        shape.reverse();
        let dtype = Dtype::from_gguf_id(at.u32()).expect("a known type");
        infos.push((name, dtype, shape, at.u64()));
    }
    let start = (at.at as u64).next_multiple_of(alignment);
    let tensor = |(name, dtype, shape, offset): (String, Dtype, Vec<u64>, u64)| {
        assert_eq!(offset % alignment, 0, "{name} is not aligned");
        let n = dtype.tensor_bytes(&shape).expect("whole blocks");
        let data = &bytes[(start + offset) as usize..][..n as usize];
        (name, Tensor::new(dtype.name().to_owned(), shape, data))
    };
    infos.into_iter().map(tensor).collect()
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let part = &self.bytes[self.at..][..n];
        self.at += n;
        part
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("4 bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("8 bytes"))
    }

    fn text(&mut self) -> String {
        let n = self.u64() as usize;
        String::from_utf8(self.take(n).to_vec()).expect("UTF-8")
    }
}
