//! Back to the checkpoint's tensors: the same names, types, shapes and bytes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::catalogue::{Container, Layer, Leaf, Stacking};
use crate::containers::{
    self, GgufValue, Header, TensorOut, gguf_header, safetensors_header, shard_name,
};
use crate::digest::for_each_leaf_part;
use crate::open_files::make_room;
use crate::select::describe;
use crate::staging::Staging;
use crate::work::{Block, Scan, WorkOptions};
use crate::writeback::{OutFile, check_space};
use crate::{Store, StoreError};

/// Smaller parts are left to the kernel: writing them back one by one would be all overhead.
const RELEASE_MIN_BYTES: usize = 64 << 10;

/// How a store is unpacked.
#[derive(Debug, Clone)]
pub struct UnpackOptions {
    /// Threads, progress and interruption.
    pub work: WorkOptions,
    /// Largest safetensors file, bytes of data; a larger tensor gets a file of its own.
    pub shard_bytes: u64,
}

impl Default for UnpackOptions {
    fn default() -> Self {
        Self {
            work: WorkOptions::default(),
            shard_bytes: 5_000_000_000,
        }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnpackReport {
    /// The directory or file.
    pub path: PathBuf,
    /// Files with tensors.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of tensor data.
    pub bytes: u64,
}

/// Where a leaf goes.
enum Place {
    /// One tensor per record of the class.
    Each(Vec<u32>),
    /// Expert `e` at `e` times the leaf's bytes of one tensor.
    Slice(u32),
    /// The whole tensor, from the first record.
    Once(u32),
}

struct Plan {
    tensors: Vec<TensorOut>,
    /// Per layer, class and leaf.
    places: Vec<Vec<Vec<Place>>>,
}

/// Writes the tensors of a store as safetensors (`out` is a new directory, or a file whose name ends
/// in `.safetensors`) or, where the checkpoint was GGUF, as GGUF version 3 (`out` a directory or
/// `.gguf`). Nothing is converted. Checksums are verified on the way where there are some.
///
/// *Errors*: [`StoreError::OutputExists`]; [`StoreError::Usage`] for a v1 store for a name with the
/// other container's extension, and for a partial store whose tensors hold all experts (names those that are missing); [`StoreError::Full`];
/// [`StoreError::Checksum`]; [`StoreError::Interrupted`]. Nothing is left behind then.
pub fn unpack(
    store: &Store,
    out: &Path,
    options: &UnpackOptions,
) -> Result<UnpackReport, StoreError> {
    let container = store.catalogue.container;
    if container == Container::V1 {
        return Err(StoreError::Usage(format!(
            "{} is a v1 store: its leaves are transposed and its scales inverted, so the checkpoint cannot be restored from it",
            store.path().display()
        )));
    }
    let refuse = |why: String| {
        StoreError::Usage(format!(
            "{} cannot be unpacked: {why}",
            store.path().display()
        ))
    };
    let plan = plan(store).map_err(refuse)?;
    let extension = match container {
        Container::Gguf => "gguf",
        _ => "safetensors",
    };
    let other = match container {
        Container::Gguf => "safetensors",
        _ => "gguf",
    };
    let ends_in = |word: &str| {
        out.extension()
            .is_some_and(|e| e.eq_ignore_ascii_case(word))
    };
    if ends_in(other) {
        return Err(refuse(format!(
            "its tensors are those of a {extension} checkpoint and nothing is converted, so {} cannot be a .{other} file; give a directory or a name that ends in .{extension}",
            out.display()
        )));
    }
    let single = out.extension().is_some_and(|e| e == extension);
    let shards = if single || container == Container::Gguf {
        vec![order(&plan.tensors, container)]
    } else {
        containers::shards(&plan.tensors, options.shard_bytes.max(1))
    };
    let headers: Vec<Header> = shards
        .iter()
        .map(|shard| {
            let tensors: Vec<&TensorOut> = shard.iter().map(|&i| &plan.tensors[i]).collect();
            match container {
                Container::Gguf => {
                    let (metadata, alignment) = gguf_metadata(store)?;
                    gguf_header(&metadata, &tensors, alignment)
                }
                _ => safetensors_header(&tensors, false),
            }
        })
        .collect::<Result<_, _>>()
        .map_err(refuse)?;
    let staging = if single {
        Staging::file(out)?
    } else {
        Staging::directory(out, false)?
    };
    let need = headers
        .iter()
        .fold(0u64, |n, h| n.saturating_add(h.file_bytes));
    check_space(staging.dir(), need)?;
    make_room(staging.out(), shards.len())?;
    let mut files = Vec::new();
    let mut at = vec![(0u32, 0u64); plan.tensors.len()];
    for (s, (shard, header)) in shards.iter().zip(&headers).enumerate() {
        let name = shard_name(s, shards.len(), extension);
        let file = OutFile::create(staging.dir().join(name), header.file_bytes)?;
        file.write_at(&header.bytes, 0)?;
        files.push(file);
        for (&i, &offset) in shard.iter().zip(&header.offsets) {
            at[i] = (s as u32, offset);
        }
    }
    copy(store, &plan, &at, &files, &options.work)?;
    for file in &files {
        options.work.check_cancel()?;
        file.finish()?;
    }
    if shards.len() > 1 {
        let json = containers::index_json(&plan.tensors, &shards)
            .map_err(|e| StoreError::store(staging.out(), format!("index: {e}")))?;
        staging.write_file("model.safetensors.index.json", std::iter::once(json))?;
    }
    store.check_unchanged()?;
    let path = if single {
        staging.commit_file(&shard_name(0, 1, extension))?
    } else {
        staging.commit()?.path
    };
    Ok(UnpackReport {
        path,
        files: files.len(),
        tensors: plan.tensors.len(),
        bytes: plan.tensors.iter().map(|t| t.bytes).sum(),
    })
}

fn order(tensors: &[TensorOut], container: Container) -> Vec<usize> {
    match container {
        Container::Gguf => (0..tensors.len()).collect(),
        _ => containers::shards(tensors, u64::MAX)
            .into_iter()
            .next()
            .unwrap_or_default(),
    }
}

/// Metadata and alignment of the GGUF file.
fn gguf_metadata(store: &Store) -> Result<(Vec<(String, GgufValue)>, u32), String> {
    let mut out = Vec::new();
    let known = store.metadata();
    if let Some(arch) = known.get("general.architecture") {
        out.push((
            "general.architecture".to_owned(),
            GgufValue::Text(arch.clone()),
        ));
    }
    let alignment = match known.get("general.alignment") {
        Some(text) => {
            let n: u32 = text
                .parse()
                .map_err(|_| format!("general.alignment is {text:?}"))?;
            out.push(("general.alignment".to_owned(), GgufValue::U32(n)));
            n
        }
        None => 32,
    };
    Ok((out, alignment))
}

fn plan(store: &Store) -> Result<Plan, String> {
    let mut tensors = Vec::new();
    let mut places = Vec::new();
    for layer in &store.catalogue.layers {
        places.push(plan_layer(layer, &mut tensors)?);
    }
    Ok(Plan { tensors, places })
}

fn plan_layer(layer: &Layer, tensors: &mut Vec<TensorOut>) -> Result<Vec<Vec<Place>>, String> {
    let mut places: Vec<Vec<Place>> = Vec::new();
    let mut shared: HashMap<&str, u32> = HashMap::new();
    for class in &layer.classes {
        let mut of_class = Vec::new();
        for leaf in &class.leaves {
            of_class.push(match leaf.stacking {
                Stacking::PerExpert => Place::Each(Vec::new()),
                stacking => {
                    let tensor = match shared.get(leaf.name.as_str()) {
                        Some(&t) => t,
                        None => {
                            let t = tensors.len() as u32;
                            tensors.push(whole_tensor(layer, leaf)?);
                            shared.insert(&leaf.name, t);
                            t
                        }
                    };
                    match stacking {
                        Stacking::Common => Place::Once(tensor),
                        _ => Place::Slice(tensor),
                    }
                }
            });
        }
        places.push(of_class);
    }
    for (position, expert) in layer.experts.iter().enumerate() {
        let class = layer.class_index(position);
        for (leaf, place) in layer.classes[class].leaves.iter().zip(&mut places[class]) {
            if let Place::Each(list) = place {
                list.push(tensors.len() as u32);
                tensors.push(TensorOut {
                    name: leaf.name.replacen("{}", &expert.to_string(), 1),
                    dtype: leaf.dtype,
                    shape: leaf.shape.clone(),
                    bytes: leaf.bytes,
                });
            }
        }
    }
    Ok(places)
}

/// The source tensor of a leaf that is not per expert.
fn whole_tensor(layer: &Layer, leaf: &Leaf) -> Result<TensorOut, String> {
    let tensor = |shape, bytes| TensorOut {
        name: leaf.name.clone(),
        dtype: leaf.dtype,
        shape,
        bytes,
    };
    if leaf.stacking == Stacking::Common {
        return Ok(tensor(leaf.shape.clone(), leaf.bytes));
    }
    let has = |position: usize| {
        layer
            .class(position)
            .leaves
            .iter()
            .any(|l| l.name == leaf.name)
    };
    let held: Vec<u32> = (0..layer.experts.len())
        .filter(|&p| has(p))
        .map(|p| layer.experts[p])
        .collect();
    if held.len() != layer.num_experts as usize {
        let missing = (0..layer.num_experts).filter(|e| held.binary_search(e).is_err());
        return Err(format!(
            "tensor {:?} holds all {} experts of layer {}, but experts {} are not in this store",
            leaf.name,
            layer.num_experts,
            layer.layer,
            describe(missing)
        ));
    }
    let n = u64::from(layer.num_experts);
    let (shape, dim0) = match leaf.stacking {
        Stacking::Flattened => {
            let rows = leaf.shape.first().copied().unwrap_or(1);
            let mut shape = leaf.shape.clone();
            let dim0 = rows.checked_mul(n).ok_or("a tensor overflows")?;
            match shape.first_mut() {
                Some(first) => *first = dim0,
                None => shape.push(dim0),
            }
            (shape, dim0)
        }
        _ => {
            let mut shape = vec![n];
            shape.extend_from_slice(&leaf.shape);
            (shape, n)
        }
    };
    if leaf.source_dim0 != dim0 {
        return Err(format!(
            "tensor {:?} has {} in its first dimension, the {n} experts of layer {} make {dim0}: the rest is in no record",
            leaf.name, leaf.source_dim0, layer.layer
        ));
    }
    let bytes = leaf.bytes.checked_mul(n).ok_or("a tensor overflows")?;
    Ok(tensor(shape, bytes))
}

fn copy(
    store: &Store,
    plan: &Plan,
    at: &[(u32, u64)],
    files: &[OutFile],
    work: &WorkOptions,
) -> Result<(), StoreError> {
    let scan = Scan::of(store, work)?;
    // Where the part of a leaf that starts `within` bytes into it goes, if it goes anywhere.
    let target = |block: &Block<'_>, leaf: usize, within: u64| {
        let class = block.layer.class_index(block.position);
        let rank = block.layer.class_rank(block.position);
        let bytes = block.class().leaves[leaf].bytes;
        let (tensor, base) = match &plan.places[block.layer_index][class][leaf] {
            Place::Each(tensors) => (tensors[rank], 0),
            Place::Slice(tensor) => (*tensor, u64::from(block.key().expert) * bytes),
            Place::Once(tensor) if rank == 0 => (*tensor, 0),
            Place::Once(_) => return None,
        };
        let (file, offset) = at[tensor as usize];
        Some((&files[file as usize], offset + base + within))
    };
    let each = |block: &Block<'_>, bytes: &[u8], write: bool| {
        let mut result = Ok(());
        for_each_leaf_part(block.class(), block.offset, bytes, |leaf, within, part| {
            if let (true, Some((file, offset))) = (result.is_ok(), target(block, leaf, within)) {
                if write {
                    result = file.write_at(part, offset);
                } else if part.len() >= RELEASE_MIN_BYTES {
                    file.release(offset, part.len() as u64);
                }
            }
        });
        result
    };
    scan.run(
        "unpacking records",
        |block, buf| {
            scan.reader
                .read_image(block.layer, block.position, block.offset, buf)
                .map(|()| true)
        },
        |block, bytes, sums| {
            block.check(sums)?;
            each(block, bytes, true)
        },
        // Starts writeback early, so that dirty memory stays bounded.
        |block, bytes, _| each(block, bytes, false),
    )
}
