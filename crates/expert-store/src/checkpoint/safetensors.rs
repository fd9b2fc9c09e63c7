//! safetensors files: reads and checks one header at a time.
//!
//! Element types, the fields of a tensor and their sizes come from the `safetensors` crate. The
//! checks of its reader are repeated here, because that one needs the whole file in memory and
//! keeps only the last of two equal names; the tests hold the two against each other.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use xxhash_rust::xxh3::xxh3_128;

use super::gather::Gathered;
use super::{TextKey, open_regular};
use crate::stamp::FileStamp;
use crate::{Dtype, StoreError};

/// Largest header, bytes: the bound of the format's reference reader.
pub(crate) const HEADER_MAX_BYTES: u64 = 100_000_000;
/// Start of a pointer file that `git clone` without LFS leaves in place of a large file.
pub(crate) const LFS_MAGIC: &[u8] = b"version https://git-lfs";

const PREFIX_BYTES: u64 = 8;

/// A sound header.
#[derive(Debug)]
pub(crate) struct Header<'a> {
    /// In order of offset.
    pub(crate) tensors: Vec<Tensor<'a>>,
}

/// One tensor of a header; offsets count from the start of the data.
#[derive(Debug)]
pub(crate) struct Tensor<'a> {
    /// Its name.
    pub(crate) name: Cow<'a, str>,
    /// Type, shape and offsets.
    pub(crate) info: TensorInfo,
}

/// Reads one file's header, adds its expert tensors to `out` and returns the file's stamp and the
/// hashes of all names in it, ascending.
pub(crate) fn gather(
    path: &Path,
    file_index: u32,
    out: &mut Gathered,
) -> Result<(FileStamp, Vec<u128>), StoreError> {
    let (file, stamp) = open_regular(path)?;
    let text = read_header(path, &file, stamp.bytes)?;
    let data_start = PREFIX_BYTES + text.len() as u64;
    let wrong = |why: String| StoreError::checkpoint(path, why);
    let header = parse(&text, stamp.bytes - data_start).map_err(wrong)?;
    let hashes = name_hashes(&header).map_err(wrong)?;
    let mut types: Vec<(safetensors::Dtype, Dtype)> = Vec::new();
    let mut shape = Vec::new();
    for Tensor { name, info } in &header.tensors {
        let dtype = match types.iter().find(|(theirs, _)| *theirs == info.dtype) {
            Some(&(_, ours)) => ours,
            None => {
                let ours = Dtype::from_name(&info.dtype.to_string())
                    .filter(|d| d.in_safetensors())
                    .ok_or_else(|| wrong(format!("unknown element type {}", info.dtype)))?;
                types.push((info.dtype, ours));
                ours
            }
        };
        shape.clear();
        shape.extend(info.shape.iter().map(|&d| d as u64));
        let offset = data_start + info.data_offsets.0 as u64;
        out.add(name, dtype, &shape, file_index, offset)
            .map_err(wrong)?;
    }
    Ok((stamp, hashes))
}

/// The header's JSON, bounded by the format's limit and by the file before memory is reserved.
fn read_header(path: &Path, file: &File, file_bytes: u64) -> Result<Vec<u8>, StoreError> {
    let wrong = |why: String| StoreError::checkpoint(path, why);
    let mut start = [0u8; 32];
    let start = &mut start[..file_bytes.min(32) as usize];
    file.read_exact_at(start, 0)
        .map_err(StoreError::io("reading", path))?;
    if start.starts_with(LFS_MAGIC) {
        return Err(wrong(lfs_pointer()));
    }
    let Some(prefix) = start.first_chunk::<8>() else {
        return Err(wrong(format!(
            "{file_bytes} bytes are too few for a safetensors file; finish the download"
        )));
    };
    let header_bytes = u64::from_le_bytes(*prefix);
    if header_bytes > HEADER_MAX_BYTES {
        return Err(wrong(format!(
            "header of {header_bytes} bytes, the limit is {HEADER_MAX_BYTES}: not a safetensors file, or damaged"
        )));
    }
    if header_bytes > file_bytes - PREFIX_BYTES {
        return Err(wrong(format!(
            "header of {header_bytes} bytes in a file of {file_bytes}: the file is cut off; finish the download"
        )));
    }
    let mut text = vec![0u8; header_bytes as usize];
    file.read_exact_at(&mut text, PREFIX_BYTES)
        .map_err(StoreError::io("reading", path))?;
    Ok(text)
}

/// What to tell about an LFS pointer file.
pub(crate) fn lfs_pointer() -> String {
    "this is a Git LFS pointer, not the file itself; run 'git lfs pull' in the checkpoint's folder"
        .into()
}

/// Parses and checks a header for a file with that many bytes of data.
///
/// *Errors*: text for people. What the reference reader refuses is refused, and equal names, too.
pub(crate) fn parse(text: &[u8], data_bytes: u64) -> Result<Header<'_>, String> {
    if text.first() != Some(&b'{') {
        return Err("the header is not a JSON object: not a safetensors file, or damaged".into());
    }
    let text = std::str::from_utf8(text).map_err(|e| format!("the header is not UTF-8: {e}"))?;
    let Raw { mut tensors } =
        serde_json::from_str(text).map_err(|e| format!("the header cannot be read: {e}"))?;
    tensors.sort_by_key(|t| t.info.data_offsets);
    let mut at = 0usize;
    for Tensor { name, info } in &tensors {
        let (begin, end) = info.data_offsets;
        if begin != at || end < begin {
            let what = match begin {
                _ if end < begin => "ends before it begins",
                b if b > at => "leaves a gap before it",
                _ => "overlaps the tensor before it",
            };
            return Err(format!(
                "tensor {name:?} at {begin}..{end} {what}; the data before it ends at {at}"
            ));
        }
        let bytes = info
            .shape
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .and_then(|n| n.checked_mul(info.dtype.bitsize()))
            .filter(|bits| bits % 8 == 0)
            .map(|bits| bits / 8);
        if bytes != Some(end - begin) {
            return Err(format!(
                "tensor {name:?} of type {} and shape {:?} does not make the {} bytes of its range",
                info.dtype,
                info.shape,
                end - begin
            ));
        }
        at = end;
    }
    match (at as u64).cmp(&data_bytes) {
        std::cmp::Ordering::Equal => Ok(Header { tensors }),
        std::cmp::Ordering::Greater => Err(format!(
            "the tensors need {at} bytes of data, the file has {data_bytes}: it is cut off; finish the download"
        )),
        std::cmp::Ordering::Less => Err(format!(
            "the file has {data_bytes} bytes of data, its tensors only {at}: damaged"
        )),
    }
}

/// Hashes of all names, ascending.
///
/// *Errors*: names the tensor that is there twice.
fn name_hashes(header: &Header<'_>) -> Result<Vec<u128>, String> {
    let mut hashes: Vec<u128> = header
        .tensors
        .iter()
        .map(|t| xxh3_128(t.name.as_bytes()))
        .collect();
    hashes.sort_unstable();
    if let Some(pair) = hashes.windows(2).find(|w| w[0] == w[1]) {
        let name = header
            .tensors
            .iter()
            .find(|t| xxh3_128(t.name.as_bytes()) == pair[0]);
        return Err(format!(
            "tensor {:?} is in the header twice",
            name.map_or("", |t| &t.name)
        ));
    }
    Ok(hashes)
}

/// The name of the tensor with that hash, if the file has one; for messages.
pub(crate) fn find_name(path: &Path, hash: u128) -> Option<String> {
    let (file, stamp) = open_regular(path).ok()?;
    let text = read_header(path, &file, stamp.bytes).ok()?;
    let header = parse(&text, stamp.bytes - PREFIX_BYTES - text.len() as u64).ok()?;
    let found = header
        .tensors
        .into_iter()
        .find(|t| xxh3_128(t.name.as_bytes()) == hash)?;
    Some(found.name.into_owned())
}

struct Raw<'a> {
    tensors: Vec<Tensor<'a>>,
}

/// `__metadata__`: text to text; looked at only to refuse what the reference refuses.
struct TextMap;

impl<'de> Deserialize<'de> for TextMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = TextMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of text to text")
            }
            fn visit_unit<E>(self) -> Result<TextMap, E> {
                Ok(TextMap)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TextMap, A::Error> {
                while map.next_entry::<TextKey<'_>, TextKey<'_>>()?.is_some() {}
                Ok(TextMap)
            }
        }
        d.deserialize_any(V)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Raw<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Raw<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw<'de>, A::Error> {
                let mut tensors = Vec::new();
                let mut metadata = false;
                while let Some(TextKey(name)) = map.next_key::<TextKey<'de>>()? {
                    if name == "__metadata__" {
                        if std::mem::replace(&mut metadata, true) {
                            return Err(serde::de::Error::custom("__metadata__ is there twice"));
                        }
                        map.next_value::<TextMap>()?;
                    } else {
                        let info = map.next_value().map_err(|e| {
                            serde::de::Error::custom(format!("tensor {name:?}: {e}"))
                        })?;
                        tensors.push(Tensor { name, info });
                    }
                }
                Ok(Raw { tensors })
            }
        }
        d.deserialize_map(V)
    }
}

#[cfg(test)]
#[path = "tests/safetensors.rs"]
mod tests;
