//! Made-up checkpoints of any known family at any size: for tests, measurements and demonstrations.

mod families;
mod payload;
mod tensors;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::containers::{
    self, GgufValue, Header, TensorOut, gguf_header, safetensors_header, shard_name,
};
use crate::open_files::make_room;
use crate::staging::Staging;
use crate::work::WorkOptions;
use crate::writeback::{OutFile, check_space};
use crate::{Container, StoreError};

pub use families::{FAMILIES, Family};
use payload::Fill;
use tensors::{Geometry, Tensor};

/// What to make; a number left out is the family's own.
#[derive(Debug, Clone, Default)]
pub struct SynthSpec {
    /// A name of [`FAMILIES`].
    pub family: String,
    /// MoE layers of the trunk.
    pub layers: Option<u32>,
    /// Routed experts of each layer.
    pub experts: Option<u32>,
    /// Hidden size.
    pub hidden: Option<u32>,
    /// Expert intermediate size.
    pub inter: Option<u32>,
    /// Files; 0 and 1 make one. Experts may straddle them.
    pub shards: u32,
    /// Another seed gives other bytes.
    pub seed: u64,
    /// Threads, progress and interruption.
    pub work: WorkOptions,
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthReport {
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// Its files with tensors.
    pub files: usize,
    /// Tensors, with those that are not experts.
    pub tensors: usize,
    /// Bytes of tensor data.
    pub bytes: u64,
}

/// Bytes that are made and written at once.
const PIECE_BYTES: usize = 1 << 20;
/// Enough for the largest known model.
const TENSORS_MAX: u64 = 4 << 20;

/// The family of that name.
///
/// *Errors*: [`StoreError::Usage`] that lists the names.
pub fn family(name: &str) -> Result<&'static Family, StoreError> {
    FAMILIES.iter().find(|f| f.name == name).ok_or_else(|| {
        let names: Vec<&str> = FAMILIES.iter().map(|f| f.name).collect();
        StoreError::Usage(format!(
            "no family {name:?}; there are {}",
            names.join(", ")
        ))
    })
}

/// Makes a checkpoint in the new directory `out`. The bytes are a function of the specification.
///
/// *Errors*: [`StoreError::Usage`] for an unknown family, sizes that its types cannot hold, or an
/// existing `out`; [`StoreError::Full`]; [`StoreError::Interrupted`].
pub fn synth(spec: &SynthSpec, out: &Path) -> Result<SynthReport, StoreError> {
    let family = family(&spec.family)?;
    let refuse = |why: String| StoreError::Usage(format!("synth {}: {why}", family.name));
    let geometry = Geometry {
        layers: spec.layers.unwrap_or(family.layers),
        experts: spec.experts.unwrap_or(family.experts),
        hidden: spec.hidden.unwrap_or(family.hidden),
        inter: spec.inter.unwrap_or(family.inter),
    };
    let count = u64::from(geometry.layers) * u64::from(geometry.experts) * 12;
    if geometry.layers == 0 || geometry.experts == 0 || count > 3 * TENSORS_MAX {
        return Err(refuse(format!(
            "{} layers of {} experts",
            geometry.layers, geometry.experts
        )));
    }
    let all = tensors::list(family, &geometry).map_err(refuse)?;
    let (outs, fills): (Vec<TensorOut>, Vec<Fill>) =
        all.into_iter().map(|t: Tensor| (t.out, t.fill)).unzip();
    let total = outs.iter().fold(0u64, |n, t| n.saturating_add(t.bytes));
    let shards = cut(&outs, spec.shards.max(1), family.container());
    let extension = match family.container() {
        Container::Gguf => "gguf",
        _ => "safetensors",
    };
    let headers: Vec<Header> = shards
        .iter()
        .enumerate()
        .map(|(s, shard)| {
            let tensors: Vec<&TensorOut> = shard.iter().map(|&i| &outs[i]).collect();
            match family.container() {
                Container::Gguf => {
                    let metadata = gguf_metadata(family, &geometry, s, shards.len(), outs.len());
                    gguf_header(&metadata, &tensors, 32)
                }
                _ => safetensors_header(&tensors, !family.padded),
            }
        })
        .collect::<Result<_, _>>()
        .map_err(refuse)?;
    let staging = Staging::directory(out, false)?;
    check_space(staging.dir(), total)?;
    make_room(staging.out(), shards.len())?;
    let mut files = Vec::new();
    let mut at = vec![(0, 0); outs.len()];
    for (s, (shard, header)) in shards.iter().zip(&headers).enumerate() {
        let name = shard_name(s, shards.len(), extension);
        let file = OutFile::create(staging.dir().join(name), header.file_bytes)?;
        file.write_at(&header.bytes, 0)?;
        files.push(file);
        for (&i, &offset) in shard.iter().zip(&header.offsets) {
            at[i] = (s, offset);
        }
    }
    spec.work.progress().start("making tensors", total);
    let result = fill(spec, &outs, &fills, &files, &at);
    spec.work.progress().finish();
    result?;
    if family.container() == Container::Safetensors {
        let json = |e: serde_json::Error| StoreError::store(staging.out(), e.to_string());
        let once =
            |name, bytes: Vec<u8>| staging.write_file(name, std::iter::once(bytes)).map(|_| ());
        let config = tensors::config(family, &geometry);
        once(
            "config.json",
            serde_json::to_vec_pretty(&config).map_err(json)?,
        )?;
        if shards.len() > 1 {
            let index = containers::index_json(&outs, &shards).map_err(json)?;
            once("model.safetensors.index.json", index)?;
        }
    }
    spec.work.check_cancel()?;
    Ok(SynthReport {
        path: staging.commit()?.path,
        files: files.len(),
        tensors: outs.len(),
        bytes: total,
    })
}

/// Contiguous runs of about equal bytes, so that experts straddle files.
fn cut(outs: &[TensorOut], count: u32, container: Container) -> Vec<Vec<usize>> {
    let total: u64 = outs.iter().map(|t| t.bytes).sum();
    let count = (count as usize).min(outs.len()).max(1);
    let mut shards = vec![Vec::new(); count];
    let mut before = 0u64;
    for (i, t) in outs.iter().enumerate() {
        let s = u128::from(before) * count as u128 / u128::from(total.max(1));
        shards[(s as usize).min(count - 1)].push(i);
        before += t.bytes;
    }
    shards.retain(|s| !s.is_empty());
    if container == Container::Safetensors {
        for shard in &mut shards {
            shard.sort_by(|&a, &b| {
                let (a, b) = (&outs[a], &outs[b]);
                (b.dtype.block_bits(), &a.name).cmp(&(a.dtype.block_bits(), &b.name))
            });
        }
    }
    shards
}

fn gguf_metadata(
    family: &Family,
    geometry: &Geometry,
    shard: usize,
    shards: usize,
    tensors: usize,
) -> Vec<(String, GgufValue)> {
    let mut out = Vec::new();
    if shard == 0 {
        let arch = family.model_type;
        let mut number = |key: &str, value: u32| {
            out.push((format!("{arch}.{key}"), GgufValue::U32(value)));
        };
        number("block_count", geometry.layers);
        number("embedding_length", geometry.hidden);
        number("expert_count", geometry.experts);
        number("expert_used_count", geometry.experts.min(4));
        number("expert_feed_forward_length", geometry.inter);
        out.insert(
            0,
            (
                "general.architecture".into(),
                GgufValue::Text(arch.to_owned()),
            ),
        );
        out.insert(
            1,
            (
                "general.name".into(),
                GgufValue::Text(format!("synth {}", family.name)),
            ),
        );
    }
    if shards > 1 {
        out.push(("split.no".into(), GgufValue::U16(shard as u16)));
        out.push(("split.count".into(), GgufValue::U16(shards as u16)));
        out.push(("split.tensors.count".into(), GgufValue::I32(tensors as i32)));
    }
    out
}

/// Makes all payload, pieces handed out to threads.
fn fill(
    spec: &SynthSpec,
    outs: &[TensorOut],
    fills: &[Fill],
    files: &[OutFile],
    at: &[(usize, u64)],
) -> Result<(), StoreError> {
    let cursor = Mutex::new((0usize, 0u64));
    let stop = AtomicBool::new(false);
    let error: Mutex<Option<StoreError>> = Mutex::new(None);
    let next = || {
        let mut c = cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let (tensor, from) = *c;
        let out = outs.get(tensor)?;
        let unit = fills[tensor].unit();
        let piece = (PIECE_BYTES / unit).max(1) * unit;
        let n = (out.bytes - from).min(piece as u64);
        *c = match from + n < out.bytes {
            true => (tensor, from + n),
            false => (tensor + 1, 0),
        };
        Some((tensor, from, n as usize))
    };
    let work = || -> Result<(), StoreError> {
        let mut buf = Vec::new();
        while let Some((tensor, from, n)) = next() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            spec.work.check_cancel()?;
            buf.resize(n, 0);
            let stream = payload::stream(spec.seed, &outs[tensor].name);
            fills[tensor].write(stream, from, &mut buf);
            let (file, offset) = at[tensor];
            files[file].write_at(&buf, offset + from)?;
            spec.work.progress().advance(n as u64);
        }
        Ok(())
    };
    let worker = || {
        if let Err(e) = work() {
            stop.store(true, Ordering::Relaxed);
            error
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(e);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..spec.work.workers() {
            // A thread that cannot be had is missed, not fatal: the others do its share.
            let _ = std::thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
    match error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(()),
    }
}
