//! Headers of the containers that we write: safetensors and GGUF version 3.

use crate::Dtype;

/// A tensor to be written.
#[derive(Debug, Clone)]
pub(crate) struct TensorOut {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    /// Outermost dimension first.
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
}

/// A file's header and where the data of each tensor goes.
pub(crate) struct Header {
    pub(crate) bytes: Vec<u8>,
    /// Absolute offset of each tensor, in the order they were given.
    pub(crate) offsets: Vec<u64>,
    pub(crate) file_bytes: u64,
}

/// Largest header that readers accept.
const SAFETENSORS_HEADER_MAX_BYTES: usize = 100_000_000;

/// The header of a safetensors file; data lies in the order of `tensors`. Padded to 8 bytes by
/// spaces unless `unpadded` (as MLX writes it).
///
/// *Errors*: text for people.
pub(crate) fn safetensors_header(tensors: &[&TensorOut], unpadded: bool) -> Result<Header, String> {
    let mut text = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut at = 0u64;
    let mut offsets = Vec::with_capacity(tensors.len());
    for t in tensors {
        if !t.dtype.in_safetensors() {
            return Err(format!(
                "{:?} is {}, which safetensors cannot hold",
                t.name, t.dtype
            ));
        }
        let end = at.checked_add(t.bytes).ok_or("file overflows")?;
        let name = serde_json::to_string(&t.name).map_err(|e| e.to_string())?;
        let shape: Vec<String> = t.shape.iter().map(u64::to_string).collect();
        text.push_str(&format!(
            ",{name}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{at},{end}]}}",
            t.dtype,
            shape.join(",")
        ));
        offsets.push(at);
        at = end;
    }
    text.push('}');
    while !unpadded && text.len() % 8 != 0 {
        text.push(' ');
    }
    if text.len() > SAFETENSORS_HEADER_MAX_BYTES {
        return Err(format!(
            "a header of {} bytes, readers accept {SAFETENSORS_HEADER_MAX_BYTES}; use smaller shards",
            text.len()
        ));
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    let start = bytes.len() as u64;
    for offset in &mut offsets {
        *offset = offset.checked_add(start).ok_or("file overflows")?;
    }
    let file_bytes = at.checked_add(start).ok_or("file overflows")?;
    Ok(Header {
        bytes,
        offsets,
        file_bytes,
    })
}

/// A value of GGUF metadata, as far as we write them.
#[derive(Debug, Clone)]
pub(crate) enum GgufValue {
    U16(u16),
    U32(u32),
    I32(i32),
    Text(String),
}

/// The header of a GGUF file; data lies in the order of `tensors`, each at a multiple of `alignment`.
///
/// *Errors*: text for people.
pub(crate) fn gguf_header(
    metadata: &[(String, GgufValue)],
    tensors: &[&TensorOut],
    alignment: u32,
) -> Result<Header, String> {
    if !alignment.is_power_of_two() {
        return Err(format!("alignment {alignment} is not a power of two"));
    }
    let alignment = u64::from(alignment);
    let mut out = b"GGUF".to_vec();
    out.extend_from_slice(&3u32.to_le_bytes());
    out.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    out.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    let text = |out: &mut Vec<u8>, s: &str| {
        out.extend_from_slice(&(s.len() as u64).to_le_bytes());
        out.extend_from_slice(s.as_bytes());
    };
    for (key, value) in metadata {
        text(&mut out, key);
        match value {
            GgufValue::U16(v) => {
                out.extend_from_slice(&2u32.to_le_bytes());
                out.extend_from_slice(&v.to_le_bytes());
            }
            GgufValue::U32(v) => {
                out.extend_from_slice(&4u32.to_le_bytes());
                out.extend_from_slice(&v.to_le_bytes());
            }
            GgufValue::I32(v) => {
                out.extend_from_slice(&5u32.to_le_bytes());
                out.extend_from_slice(&v.to_le_bytes());
            }
            GgufValue::Text(v) => {
                out.extend_from_slice(&8u32.to_le_bytes());
                text(&mut out, v);
            }
        }
    }
    let mut at = 0u64;
    let mut end = 0u64;
    let mut offsets = Vec::with_capacity(tensors.len());
    for t in tensors {
        let id = t
            .dtype
            .gguf_id()
            .ok_or_else(|| format!("{:?} is {}, which GGUF cannot hold", t.name, t.dtype))?;
        if t.name.len() >= 64 || t.shape.len() > 4 {
            return Err(format!(
                "{:?} has {} dimensions; GGUF allows 63 bytes of name and 4 dimensions",
                t.name,
                t.shape.len()
            ));
        }
        text(&mut out, &t.name);
        out.extend_from_slice(&(t.shape.len() as u32).to_le_bytes());
        for d in t.shape.iter().rev() {
            out.extend_from_slice(&d.to_le_bytes());
        }
        out.extend_from_slice(&id.to_le_bytes());
        out.extend_from_slice(&at.to_le_bytes());
        offsets.push(at);
        end = at.checked_add(t.bytes).ok_or("file overflows")?;
        at = end
            .checked_next_multiple_of(alignment)
            .ok_or("file overflows")?;
    }
    let start = (out.len() as u64).next_multiple_of(alignment);
    out.resize(start as usize, 0);
    for offset in &mut offsets {
        *offset = offset.checked_add(start).ok_or("file overflows")?;
    }
    // The last tensor is padded as well: llama.cpp's own writer does so.
    let file_bytes = at.max(end).checked_add(start).ok_or("file overflows")?;
    Ok(Header {
        bytes: out,
        offsets,
        file_bytes,
    })
}

/// Groups tensors, in their order, into shards of at most `shard_bytes` (a larger tensor gets one
/// of its own); within a shard wide types come first, as the official writer does, so that data
/// are aligned to their elements.
pub(crate) fn shards(tensors: &[TensorOut], shard_bytes: u64) -> Vec<Vec<usize>> {
    let mut out: Vec<Vec<usize>> = Vec::new();
    let mut filled = u64::MAX;
    for (i, t) in tensors.iter().enumerate() {
        match out.last_mut() {
            Some(last) if filled.saturating_add(t.bytes) <= shard_bytes => last.push(i),
            _ => {
                out.push(vec![i]);
                filled = 0;
            }
        }
        filled = filled.saturating_add(t.bytes);
    }
    for shard in &mut out {
        shard.sort_by(|&a, &b| {
            let (a, b) = (&tensors[a], &tensors[b]);
            (b.dtype.block_bits(), &a.name).cmp(&(a.dtype.block_bits(), &b.name))
        });
    }
    out
}

/// Name of a shard.
pub(crate) fn shard_name(index: usize, count: usize, extension: &str) -> String {
    if count == 1 {
        format!("model.{extension}")
    } else {
        format!("model-{:05}-of-{count:05}.{extension}", index + 1)
    }
}

/// `model.safetensors.index.json`.
pub(crate) fn index_json(
    tensors: &[TensorOut],
    shards: &[Vec<usize>],
) -> Result<Vec<u8>, serde_json::Error> {
    let mut map = serde_json::Map::new();
    let mut total = 0u64;
    for (s, shard) in shards.iter().enumerate() {
        for &i in shard {
            total = total.saturating_add(tensors[i].bytes);
            map.insert(
                tensors[i].name.clone(),
                shard_name(s, shards.len(), "safetensors").into(),
            );
        }
    }
    serde_json::to_vec_pretty(&serde_json::json!({
        "metadata": { "total_size": total },
        "weight_map": map,
    }))
}
