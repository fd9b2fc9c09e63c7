//! GGUF files, versions 2 and 3: reads and checks metadata and tensor infos.
//!
//! The file is streamed through a small buffer; what is not needed is skipped and never kept, so a
//! header cannot make the reader hold more than its tensor infos. What llama.cpp refuses is refused.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::xxh3_128;

use super::gather::Gathered;
use super::open_regular;
use super::safetensors::{LFS_MAGIC, lfs_pointer};
use crate::stamp::FileStamp;
use crate::{Dtype, StoreError};

/// Longest tensor name, bytes, terminator included (`GGML_MAX_NAME`).
const NAME_MAX_BYTES: u64 = 64;
/// Longest key, bytes: the format's own bound.
const KEY_MAX_BYTES: u64 = 65_535;
/// Strings and arrays longer than this are refused, as llama.cpp does.
const LENGTH_MAX: u64 = 1 << 30;
/// Longest text value that is kept; longer ones are skipped.
const KEPT_MAX_BYTES: u64 = 4096;
const DIMENSIONS_MAX: u32 = 4;
/// Most tensors of one file; the largest known models have a few thousand.
const TENSORS_MAX: u64 = 1_000_000;
/// Most metadata entries of one file; real ones have less than a hundred.
const METADATA_MAX: u64 = 100_000;
/// Longest header, bytes: the vocabulary of the largest known tokenizer takes a tenth of it.
const HEADER_MAX_BYTES: u64 = 256 << 20;
const ALIGNMENT_DEFAULT: u64 = 32;

/// A metadata value that is worth keeping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    /// Any unsigned or non-negative integer, or a bool.
    Number(u64),
    /// A short text.
    Text(String),
}

/// Metadata of one file: small scalars and short texts by key.
pub(crate) type Metadata = BTreeMap<String, Value>;

/// One file's header.
#[derive(Debug)]
pub(crate) struct GgufFile {
    /// State of the file when it was read.
    pub(crate) stamp: FileStamp,
    /// Metadata.
    pub(crate) metadata: Metadata,
    /// Number of tensors.
    pub(crate) tensors: u64,
    /// Hashes of all tensor names, ascending.
    pub(crate) names: Vec<u128>,
    /// What a person should know.
    pub(crate) warning: Option<String>,
}

/// Reads one file and adds its expert tensors to `out`.
pub(crate) fn gather(
    path: &Path,
    file_index: u32,
    out: &mut Gathered,
) -> Result<GgufFile, StoreError> {
    let (file, stamp) = open_regular(path)?;
    let mut reader = Reader {
        path,
        file: &file,
        at: 0,
        end: stamp.bytes,
        buffer: Vec::new(),
        buffer_at: 0,
    };
    read(&mut reader, stamp, file_index, out).map_err(|e| match e {
        Fault::Io(source) => StoreError::io("reading", path)(source),
        Fault::Wrong(why) => StoreError::checkpoint(path, why),
    })
}

enum Fault {
    Io(io::Error),
    Wrong(String),
}

impl From<String> for Fault {
    fn from(why: String) -> Self {
        Self::Wrong(why)
    }
}

fn wrong<T>(why: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Wrong(why.into()))
}

fn read(
    r: &mut Reader<'_>,
    stamp: FileStamp,
    file_index: u32,
    out: &mut Gathered,
) -> Result<GgufFile, Fault> {
    let mut start = [0u8; 32];
    let start = &mut start[..r.end.min(32) as usize];
    r.file.read_exact_at(start, 0).map_err(Fault::Io)?;
    if start.starts_with(LFS_MAGIC) {
        return wrong(lfs_pointer());
    }
    if !start.starts_with(b"GGUF") {
        return wrong("the file does not start with \"GGUF\": not a GGUF file, or damaged");
    }
    r.at = 4;
    let version = r.u32("version")?;
    if version & 0xffff == 0 {
        return wrong(
            "this GGUF file is big-endian; convert it with gguf_convert_endian.py from llama.cpp",
        );
    }
    match version {
        1 => return wrong("GGUF version 1 is no longer in use; convert the model again"),
        2 | 3 => {}
        v => {
            return wrong(format!(
                "GGUF version {v}; versions 2 and 3 are read, a newer one needs a newer build"
            ));
        }
    }
    let tensor_count = r.u64("tensor count")?;
    let kv_count = r.u64("metadata count")?;
    for (what, count, max) in [
        ("tensors", tensor_count, TENSORS_MAX),
        ("metadata entries", kv_count, METADATA_MAX),
    ] {
        if count > max {
            return wrong(format!(
                "the header says {count} {what}, the limit is {max}; damaged"
            ));
        }
    }
    // An entry has at least this many bytes, so a count beyond the file is a lie.
    r.count("tensors", tensor_count, 8 + 4 + 4 + 8)?;
    r.count("metadata entries", kv_count, 8 + 4 + 1)?;
    let metadata = read_metadata(r, kv_count)?;
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT_DEFAULT,
        Some(Value::Number(n)) if n.is_power_of_two() && *n <= u64::from(u32::MAX) => *n,
        Some(other) => {
            return wrong(format!(
                "general.alignment is {other:?}, it must be a power of two"
            ));
        }
    };

    let mut infos = Vec::new();
    let mut seen = HashSet::new();
    for _ in 0..tensor_count {
        let info = read_tensor(r)?;
        if !seen.insert(xxh3_128(info.name.as_bytes())) {
            return wrong(format!("tensor {:?} is in the file twice", info.name));
        }
        infos.push(info);
    }
    let mut names: Vec<u128> = seen.into_iter().collect();
    names.sort_unstable();

    let overflow = || Fault::Wrong("tensor offsets overflow 64 bits".into());
    let data_start =
        r.at.checked_next_multiple_of(alignment)
            .ok_or_else(overflow)?;
    let mut expected = 0u64;
    let mut end = 0u64;
    for info in &infos {
        let TensorInfo {
            name,
            dtype,
            shape,
            offset,
        } = info;
        if *offset != expected {
            return wrong(format!(
                "tensor {name:?} is said to lie at {offset}, the tensors before it end at {expected}; damaged"
            ));
        }
        let Some(bytes) = dtype.tensor_bytes(shape) else {
            return wrong(format!(
                "tensor {name:?} of type {dtype} and shape {shape:?}: rows are not whole blocks of {}, or too large",
                dtype.block_elements()
            ));
        };
        end = expected.checked_add(bytes).ok_or_else(overflow)?;
        expected = end
            .checked_next_multiple_of(alignment)
            .ok_or_else(overflow)?;
        let absolute = data_start.checked_add(*offset).ok_or_else(overflow)?;
        out.add(name, *dtype, shape, file_index, absolute)?;
    }
    let mut warning = None;
    // A first part without tensors ends before its data would begin.
    if tensor_count > 0 {
        let need = data_start.checked_add(end).ok_or_else(overflow)?;
        let padded = data_start.checked_add(expected).ok_or_else(overflow)?;
        if r.end < need {
            return wrong(format!(
                "the tensors need {need} bytes, the file has {}: it is cut off; finish the download",
                r.end
            ));
        }
        if r.end > padded {
            warning = Some(format!(
                "{}: {} bytes after the last tensor are not used",
                r.path.display(),
                r.end - padded
            ));
        }
    }
    Ok(GgufFile {
        stamp,
        metadata,
        tensors: tensor_count,
        names,
        warning,
    })
}

struct TensorInfo {
    name: String,
    dtype: Dtype,
    /// Outermost dimension first.
    shape: Vec<u64>,
    offset: u64,
}

fn read_tensor(r: &mut Reader<'_>) -> Result<TensorInfo, Fault> {
    let bytes = r.u64("length of a tensor's name")?;
    if bytes >= NAME_MAX_BYTES {
        return wrong(format!(
            "a tensor's name of {bytes} bytes, the limit is {}",
            NAME_MAX_BYTES - 1
        ));
    }
    if bytes == 0 {
        return wrong(format!("a tensor without a name before {}; damaged", r.at));
    }
    let name = r.text("tensor name", bytes)?;
    let dimensions = r.u32("number of dimensions")?;
    if dimensions > DIMENSIONS_MAX {
        return wrong(format!(
            "tensor {name:?} has {dimensions} dimensions, the limit is {DIMENSIONS_MAX}"
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let d = r.u64("dimension")?;
        if d > i64::MAX as u64 {
            return wrong(format!("tensor {name:?} has a dimension of {d}"));
        }
        shape.push(d);
    }
    shape.reverse();
    let id = r.u32("element type")?;
    let Some(dtype) = Dtype::from_gguf_id(id) else {
        return wrong(format!(
            "tensor {name:?} has element type {id}, which is removed or newer than this build"
        ));
    };
    let offset = r.u64("tensor offset")?;
    Ok(TensorInfo {
        name,
        dtype,
        shape,
        offset,
    })
}

fn read_metadata(r: &mut Reader<'_>, count: u64) -> Result<Metadata, Fault> {
    let mut kept = Metadata::new();
    let mut seen = HashSet::new();
    for _ in 0..count {
        let bytes = r.u64("length of a key")?;
        if bytes > KEY_MAX_BYTES {
            return wrong(format!(
                "a metadata key of {bytes} bytes, the limit is {KEY_MAX_BYTES}"
            ));
        }
        let key = r.text("metadata key", bytes)?;
        if !seen.insert(xxh3_128(key.as_bytes())) {
            return wrong(format!("metadata key {key:?} is there twice"));
        }
        let kind = r.u32("type of a metadata value")?;
        if let Some(value) = read_value(r, &key, kind)? {
            // Tokenizers' values are of no use here, and a header may have any number of keys.
            if bytes <= 128 && kept.len() < 4096 {
                kept.insert(key, value);
            }
        }
    }
    Ok(kept)
}

/// Bytes of a scalar of that type, `None` for strings, arrays and unknown types.
fn scalar_bytes(kind: u32) -> Option<u64> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

fn read_value(r: &mut Reader<'_>, key: &str, kind: u32) -> Result<Option<Value>, Fault> {
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    if let Some(bytes) = scalar_bytes(kind) {
        let mut raw = [0u8; 8];
        r.fill("metadata value", &mut raw[..bytes as usize])?;
        let unsigned = u64::from_le_bytes(raw);
        let signed = match kind {
            1 => i64::from(raw[0] as i8),
            3 => i64::from(i16::from_le_bytes([raw[0], raw[1]])),
            5 => i64::from(i32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]])),
            11 => unsigned as i64,
            _ => 0,
        };
        return Ok(match kind {
            6 | 12 => None,
            _ if signed < 0 => None,
            _ => Some(Value::Number(unsigned)),
        });
    }
    match kind {
        STRING => {
            let bytes = r.length(key)?;
            if bytes > KEPT_MAX_BYTES {
                r.skip("text", bytes)?;
                return Ok(None);
            }
            Ok(Some(Value::Text(r.text("text", bytes)?)))
        }
        ARRAY => {
            let element = r.u32("type of an array")?;
            let count = r.length(key)?;
            if let Some(bytes) = scalar_bytes(element) {
                r.count("array elements", count, bytes)?;
                r.skip("array", count * bytes)?;
            } else if element == STRING {
                r.count("array elements", count, 8)?;
                for _ in 0..count {
                    let bytes = r.length(key)?;
                    r.skip("text", bytes)?;
                }
            } else if element == ARRAY {
                return wrong(format!("metadata {key:?} is an array of arrays"));
            } else {
                return wrong(format!(
                    "metadata {key:?} is an array of unknown type {element}"
                ));
            }
            Ok(None)
        }
        _ => wrong(format!("metadata {key:?} has unknown type {kind}")),
    }
}

/// Reads forward through a file, bounded by its size.
struct Reader<'a> {
    path: &'a Path,
    file: &'a File,
    at: u64,
    end: u64,
    buffer: Vec<u8>,
    buffer_at: u64,
}

impl Reader<'_> {
    const BUFFER_BYTES: u64 = 256 << 10;

    fn need(&self, what: &str, bytes: u64) -> Result<(), Fault> {
        if bytes > self.end - self.at {
            return wrong(format!(
                "{what} of {bytes} bytes at {}, the file ends at {}: it is cut off or damaged",
                self.at, self.end
            ));
        }
        if bytes > HEADER_MAX_BYTES.saturating_sub(self.at) {
            return wrong(format!(
                "{what} of {bytes} bytes at {}: the header is longer than {HEADER_MAX_BYTES} bytes; damaged",
                self.at
            ));
        }
        Ok(())
    }

    fn count(&self, what: &str, count: u64, bytes_each: u64) -> Result<(), Fault> {
        if count > (self.end - self.at) / bytes_each {
            return wrong(format!(
                "{count} {what} at {} do not fit in a file of {} bytes; damaged",
                self.at, self.end
            ));
        }
        Ok(())
    }

    /// The next bytes, from the buffer.
    fn fill(&mut self, what: &str, mut out: &mut [u8]) -> Result<(), Fault> {
        self.need(what, out.len() as u64)?;
        while !out.is_empty() {
            let offset = self.at.wrapping_sub(self.buffer_at);
            if self.at < self.buffer_at || offset >= self.buffer.len() as u64 {
                let n = (self.end - self.at).min(Self::BUFFER_BYTES);
                self.buffer.resize(n as usize, 0);
                self.buffer_at = self.at;
                self.file
                    .read_exact_at(&mut self.buffer, self.at)
                    .map_err(Fault::Io)?;
                continue;
            }
            let there = &self.buffer[offset as usize..];
            let n = there.len().min(out.len());
            let (now, later) = out.split_at_mut(n);
            now.copy_from_slice(&there[..n]);
            self.at += n as u64;
            out = later;
        }
        Ok(())
    }

    fn skip(&mut self, what: &str, bytes: u64) -> Result<(), Fault> {
        self.need(what, bytes)?;
        self.at += bytes;
        Ok(())
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        let mut raw = [0u8; 4];
        self.fill(what, &mut raw)?;
        Ok(u32::from_le_bytes(raw))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        let mut raw = [0u8; 8];
        self.fill(what, &mut raw)?;
        Ok(u64::from_le_bytes(raw))
    }

    fn length(&mut self, key: &str) -> Result<u64, Fault> {
        let n = self.u64("length")?;
        if n > LENGTH_MAX {
            return wrong(format!(
                "metadata {key:?} has a length of {n}, the limit is {LENGTH_MAX}"
            ));
        }
        Ok(n)
    }

    /// A text of a length that the caller has bounded.
    fn text(&mut self, what: &str, bytes: u64) -> Result<String, Fault> {
        self.need(what, bytes)?;
        let mut raw = vec![0u8; bytes as usize];
        self.fill(what, &mut raw)?;
        String::from_utf8(raw).or_else(|_| wrong(format!("a {what} is not UTF-8")))
    }
}

/// Whether the parts of a split are what their names say; `files` in order of part number.
///
/// *Errors*: says which part is not.
pub(crate) fn check_parts(names: &[String], parts: &[GgufFile]) -> Result<(), String> {
    let number = |part: &GgufFile, key: &str| match part.metadata.get(key) {
        Some(Value::Number(n)) => Some(*n),
        _ => None,
    };
    let total = parts.len() as u64;
    for (i, (name, part)) in names.iter().zip(parts).enumerate() {
        let count = number(part, "split.count");
        let no = number(part, "split.no");
        if total == 1 {
            if let Some(count) = count.filter(|&c| c > 1) {
                return Err(format!(
                    "{name} is part {} of {count} but is not named so; \
                     give the parts their names back (<model>-00001-of-{count:05}.gguf)",
                    no.map_or(0, |n| n.saturating_add(1))
                ));
            }
            continue;
        }
        if count != Some(total) {
            return Err(match count {
                Some(c) => format!("{name} says it is of {c} parts, its name says {total}"),
                None => format!("{name} says nothing of being a part (no split.count)"),
            });
        }
        if no != Some(i as u64) {
            return Err(format!(
                "{name} says it is part {}: the files were renamed or mixed up",
                no.map_or("nothing".to_owned(), |n| n.saturating_add(1).to_string())
            ));
        }
    }
    let first = parts
        .first()
        .and_then(|p| number(p, "split.tensors.count"))
        .filter(|_| total > 1);
    let sum: u64 = parts.iter().map(|p| p.tensors).sum();
    if let Some(want) = first.filter(|&want| want != sum) {
        return Err(format!(
            "the parts hold {sum} tensors, the first says {want}"
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "tests/gguf.rs"]
mod tests;
