//! Writing a v1 store from the NVFP4 leaves of a checkpoint.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{Extra, Geometry, PARTS, STACK, catalogue, file_name};
use crate::build::{BuildOptions, Report};
use crate::catalogue::{CHUNK_BYTES, Class, Layer, Leaf, Role};
use crate::info::hex128;
use crate::manifest::{CHECKSUMS, MANIFEST};
use crate::open_files::make_room;
use crate::staging::Staging;
use crate::work::{OnPanic, Reader};
use crate::writeback::{Flusher, OutFile, check_space, write_behind};
use crate::{Key, Store, StoreError};
use expert_wire::v1::{Manifest, RECORD_HEADER_BYTES, RECORD_MAGIC};

/// Memory for records of all threads: image and record are in memory at once, because parts are
/// transposed. The largest known NVFP4 expert takes less than all of it.
const MEMORY_BYTES: u64 = 256 << 20;
const FILE_TEMPLATE: &str = "experts_{:05}.xpr";

/// Where the leaves of a v1 record are among those of a class.
struct Leaves {
    /// `packed` and `scale` of gate, up, down.
    matrix: [[usize; 2]; 3],
    scale2: [usize; 3],
    input_scale: [Option<usize>; 3],
    /// compressed-tensors keeps the reciprocal of what v1 wants.
    invert: bool,
}

/// Writes a v1 store from compressed-tensors or ModelOpt NVFP4 leaves.
///
/// *Errors*: [`StoreError::Usage`] with the reason for anything that does not fit v1 (other leaves,
/// layers of different shape, missing experts); otherwise as [`crate::pack()`].
pub fn pack_v1(source: &Store, out: &Path, options: &BuildOptions) -> Result<Report, StoreError> {
    let refuse = |why: String| {
        StoreError::Usage(format!(
            "{} cannot be packed as v1: {why}; pack it as v2",
            source.path().display()
        ))
    };
    let work = options.work();
    let (geometry, leaves) = plan(source).map_err(refuse)?;
    let (parts, raw) = geometry.layout().map_err(refuse)?;
    let (_, stride) = geometry.record_bytes().map_err(refuse)?;
    let image_max = source.catalogue.layers.iter().map(Layer::image_bytes_max);
    let each = stride.saturating_add(image_max.max().unwrap_or(0));
    if each > MEMORY_BYTES {
        return Err(refuse(format!(
            "a record of {stride} bytes and its image are made in memory, which is limited to {MEMORY_BYTES}"
        )));
    }
    let layers = &source.catalogue.layers;
    let m = Manifest {
        version: 1,
        num_moe_layers: layers.len() as u32,
        num_experts: layers[0].num_experts,
        inter: geometry.inter,
        hidden: geometry.hidden,
        group_size: geometry.group_size,
        sub_align: 256,
        fs_block_size: 4096,
        record_stride: stride,
        record_raw_bytes: raw,
        file_template: FILE_TEMPLATE.into(),
        moe_layer_to_model_layer: layers.iter().map(|l| l.model_layer).collect(),
    };
    m.check().map_err(|e| refuse(e.to_string()))?;
    let mut target = catalogue(&m).map_err(refuse)?;

    let staging = Staging::directory(out, options.replace)?.synced(options.sync);
    let file_bytes = u64::from(m.num_experts) * stride;
    check_space(
        staging.dir(),
        file_bytes.saturating_mul(layers.len() as u64),
    )?;
    make_room(staging.out(), target.layers.len())?;
    let mut files = Vec::new();
    for layer in &target.layers {
        work.check_cancel()?;
        let name = file_name(FILE_TEMPLATE, layer.layer).map_err(refuse)?;
        files.push(OutFile::create(staging.dir().join(name), file_bytes)?);
    }
    let job = Job {
        source,
        reader: Reader::open(source.files())?,
        geometry,
        parts,
        leaves,
        files: &files,
        stride,
    };
    let payload_bytes = (layers.len() as u64).saturating_mul(file_bytes);
    let progress = work.progress();
    progress.start("packing v1 records", payload_bytes);
    let threads = work.workers().min((MEMORY_BYTES / each) as usize);
    let result = write_behind(&files, options.sync, |flusher| {
        job.run(threads, options, flusher)
    });
    progress.finish();
    let (sums, digest) = result?;
    for (layer, sums) in target.layers.iter_mut().zip(sums) {
        layer
            .set_checksums(sums)
            .map_err(|why| StoreError::store(source.path(), why))?;
    }
    for file in &files {
        work.check_cancel()?;
        if options.sync {
            file.finish()?;
        }
    }
    let sums = target
        .layers
        .iter()
        .flat_map(|l| l.checksums.as_deref().unwrap_or(&[]))
        .map(|s| s.to_le_bytes());
    let table = staging.write_file(CHECKSUMS, sums)?;
    let content_id = target.content_id();
    let extra = Extra {
        generation: Some(staging.generation()),
        content_id: content_id.map(hex128),
        payload_digest: digest.map(hex128),
        checksums: Some(table.clone()),
    };
    let json = merge(&m, &extra)
        .map_err(|e| StoreError::store(staging.out(), format!("manifest: {e}")))?;
    source.check_unchanged()?;
    work.check_cancel()?;
    staging.write_file(MANIFEST, std::iter::once(json))?;
    let generation = staging.generation();
    let done = staging.commit()?;
    Ok(Report {
        path: done.path,
        records: target.record_count(),
        image_bytes: target.image_bytes(),
        store_bytes: payload_bytes + table.bytes,
        generation,
        content_id,
        whole_content_id: None,
        layout_id: target.layout_id(),
        payload_digest: digest,
        warnings: [source.warnings(), &done.warnings].concat(),
    })
}

fn merge(m: &Manifest, extra: &Extra) -> Result<Vec<u8>, serde_json::Error> {
    let mut value = serde_json::to_value(m)?;
    if let (Some(all), serde_json::Value::Object(more)) =
        (value.as_object_mut(), serde_json::to_value(extra)?)
    {
        all.extend(more);
    }
    serde_json::to_vec_pretty(&value)
}

/// Checks that each record fits v1 and finds the leaves of each class of each layer; classes may
/// differ in which `input_scale` they have.
fn plan(source: &Store) -> Result<(Geometry, Vec<Vec<Leaves>>), String> {
    if source.catalogue.stack == STACK {
        return Err("it is a v1 store already".into());
    }
    let first = source.catalogue.layers.first().ok_or("no layers")?;
    let mut geometry = None;
    let mut all = Vec::new();
    for (i, layer) in source.catalogue.layers.iter().enumerate() {
        let at = |why: String| format!("layer {}: {why}", layer.layer);
        if layer.layer != i as u32 {
            return Err(at(format!("layer {i} is missing")));
        }
        if layer.num_experts != first.num_experts || layer.identity_experts != 0 {
            return Err(at(format!(
                "{} experts and {} zero experts, v1 needs {} in each layer",
                layer.num_experts, layer.identity_experts, first.num_experts
            )));
        }
        if layer.experts.len() != layer.num_experts as usize {
            return Err(at(format!(
                "{} of {} experts are here, v1 needs all",
                layer.experts.len(),
                layer.num_experts
            )));
        }
        let mut of_layer = Vec::with_capacity(layer.classes.len());
        for class in &layer.classes {
            let (g, leaves) = find(class).map_err(at)?;
            match geometry.get_or_insert(g) {
                have if *have == g => of_layer.push(leaves),
                have => {
                    return Err(at(format!("{g:?}, the experts before have {have:?}")));
                }
            }
        }
        all.push(of_layer);
    }
    Ok((geometry.ok_or("no layers")?, all))
}

fn find(class: &Class) -> Result<(Geometry, Leaves), String> {
    let names = || {
        let names: Vec<String> = class
            .leaves
            .iter()
            .map(|l| format!("{:?}.{} {}", l.role, l.leaf, l.dtype))
            .collect();
        names.join(", ")
    };
    let get = |role, name: &str| {
        class
            .leaves
            .iter()
            .position(|l| l.role == role && l.leaf == name)
    };
    let roles = [Role::Gate, Role::Up, Role::Down];
    let compressed = get(Role::Gate, "weight_packed").is_some();
    let (packed, scale2, input) = if compressed {
        ("weight_packed", "weight_global_scale", "input_global_scale")
    } else {
        ("weight", "weight_scale_2", "input_scale")
    };
    let mut leaves = Leaves {
        matrix: [[0; 2]; 3],
        scale2: [0; 3],
        input_scale: [None; 3],
        invert: compressed,
    };
    let mut used = 0;
    for (i, &role) in roles.iter().enumerate() {
        let need = |name: &str| {
            get(role, name).ok_or_else(|| {
                format!(
                    "no {role:?} {name}: only NVFP4 gate, up and down fit; there are {}",
                    names()
                )
            })
        };
        leaves.matrix[i] = [need(packed)?, need("weight_scale")?];
        leaves.scale2[i] = need(scale2)?;
        leaves.input_scale[i] = get(role, input);
        used += 3 + usize::from(leaves.input_scale[i].is_some());
    }
    if used != class.leaves.len() {
        return Err(format!("leaves that v1 has no place for: {}", names()));
    }
    let matrix = |l: &Leaf, dtype: &str| match l.shape.as_slice() {
        &[rows, columns] if l.dtype.name() == dtype => Ok((rows, columns)),
        _ => Err(format!(
            "{:?} is {} {:?}, expected a matrix of {dtype}",
            l.name, l.dtype, l.shape
        )),
    };
    let (inter, half) = matrix(&class.leaves[leaves.matrix[0][0]], "U8")?;
    let (_, groups) = matrix(&class.leaves[leaves.matrix[0][1]], "F8_E4M3")?;
    let small = |n: u64| u32::try_from(n).map_err(|_| format!("a dimension of {n}"));
    let hidden = small(half.saturating_mul(2))?;
    let geometry = Geometry {
        inter: small(inter)?,
        hidden,
        group_size: small(u64::from(hidden).checked_div(groups).unwrap_or(0))?,
    };
    for (projection, is_scale) in PARTS {
        let leaf = &class.leaves[leaves.matrix[projection][usize::from(is_scale)]];
        let have = matrix(leaf, if is_scale { "F8_E4M3" } else { "U8" })?;
        let want = geometry.matrix(projection, is_scale)?;
        if have != want {
            return Err(format!("{:?} is {have:?}, expected {want:?}", leaf.name));
        }
    }
    for &i in leaves
        .scale2
        .iter()
        .chain(leaves.input_scale.iter().flatten())
    {
        let leaf = &class.leaves[i];
        if leaf.dtype.name() != "F32" || leaf.bytes != 4 {
            return Err(format!(
                "{:?} is {} {:?}, expected one F32",
                leaf.name, leaf.dtype, leaf.shape
            ));
        }
    }
    Ok((geometry, leaves))
}

struct Job<'a> {
    source: &'a Store,
    reader: Reader,
    geometry: Geometry,
    parts: [(u64, u64); 6],
    /// Per layer and class.
    leaves: Vec<Vec<Leaves>>,
    files: &'a [OutFile],
    stride: u64,
}

type Sums = (Vec<Vec<u64>>, Option<u128>);

/// The sequential hash and whose turn it is.
struct Turn<'a, 'f> {
    next: usize,
    hash: Xxh3,
    stop: bool,
    error: Option<StoreError>,
    sums: Vec<Vec<u64>>,
    flusher: &'a mut Flusher<'f>,
}

impl Job<'_> {
    /// Writes all records. Each worker makes a whole record; they take turns, in order of key, to
    /// feed the payload digest, which runs over the records as stored.
    fn run(
        &self,
        threads: usize,
        options: &BuildOptions,
        flusher: &mut Flusher<'_>,
    ) -> Result<Sums, StoreError> {
        let work = options.work();
        let layers = &self.source.catalogue.layers;
        let experts = layers[0].experts.len();
        let next = AtomicUsize::new(0);
        let turn = Mutex::new(Turn {
            next: 0,
            hash: Xxh3::new(),
            stop: false,
            error: None,
            sums: vec![Vec::new(); layers.len()],
            flusher,
        });
        let moved = Condvar::new();
        let lock = || turn.lock().unwrap_or_else(PoisonError::into_inner);
        let worker = || {
            let _guard = OnPanic(|| {
                lock().stop = true;
                moved.notify_all();
            });
            let mut buffers = (vec![0; self.stride as usize], Vec::new());
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= layers.len() * experts {
                    return;
                }
                let (l, e) = (i / experts, i % experts);
                let at = e as u64 * self.stride;
                let result = work.check_cancel().and_then(|()| {
                    self.record(&layers[l], l, e, &mut buffers)?;
                    self.files[l].write_at(&buffers.0, at)
                });
                let sums = buffers.0.chunks(CHUNK_BYTES as usize).map(xxh3_64);
                let sums: Vec<u64> = sums.collect();
                let mut t = lock();
                while result.is_ok() && !t.stop && t.next != i {
                    t = moved.wait(t).unwrap_or_else(PoisonError::into_inner);
                }
                if t.stop {
                    return;
                }
                let result = result.and_then(|()| t.flusher.done(l, at, self.stride));
                if let Err(error) = result {
                    t.stop = true;
                    t.error = Some(error);
                    moved.notify_all();
                    return;
                }
                t.sums[l].extend(sums);
                if options.payload_digest {
                    t.hash.update(&buffers.0);
                }
                t.next += 1;
                moved.notify_all();
                drop(t);
                work.progress().advance(self.stride);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // A thread that cannot be had is missed, not fatal: the others do its share.
                let _ = std::thread::Builder::new().spawn_scoped(scope, worker);
            }
            worker();
        });
        let turn = turn.into_inner().unwrap_or_else(PoisonError::into_inner);
        match turn.error {
            Some(e) => Err(e),
            None => Ok((
                turn.sums,
                options.payload_digest.then(|| turn.hash.digest128()),
            )),
        }
    }

    /// Makes one record in the first buffer, from its image in the second: that is read once, and
    /// its bytes are those that are proven.
    fn record(
        &self,
        layer: &Layer,
        index: usize,
        position: usize,
        (record, image): &mut (Vec<u8>, Vec<u8>),
    ) -> Result<(), StoreError> {
        let class = layer.class(position);
        image.resize(class.image_bytes as usize, 0);
        self.reader.read_image(layer, position, 0, image)?;
        if let Some(want) = layer.record_checksums(position) {
            let key = Key::new(layer.layer, layer.experts[position]);
            let got = image.chunks(CHUNK_BYTES as usize).map(xxh3_64);
            for (chunk, (got, &want)) in got.zip(want).enumerate() {
                if got != want {
                    return Err(StoreError::Checksum {
                        key,
                        chunk: chunk as u32,
                        got,
                        want,
                    });
                }
            }
        }
        let leaves = &self.leaves[index][layer.class_index(position)];
        record.fill(0);
        let header = self.header(layer, index, position, image);
        record[..RECORD_HEADER_BYTES].copy_from_slice(&header);
        for ((projection, is_scale), (offset, bytes)) in PARTS.into_iter().zip(self.parts) {
            let leaf = &class.leaves[leaves.matrix[projection][usize::from(is_scale)]];
            let at = leaf.image_offset as usize;
            let (rows, columns) = self
                .geometry
                .matrix(projection, is_scale)
                .map_err(StoreError::Usage)?;
            let to = &mut record[offset as usize..(offset + bytes) as usize];
            transpose(
                &image[at..at + bytes as usize],
                to,
                rows as usize,
                columns as usize,
            );
        }
        Ok(())
    }

    fn header(
        &self,
        layer: &Layer,
        index: usize,
        position: usize,
        image: &[u8],
    ) -> [u8; RECORD_HEADER_BYTES] {
        let leaves = &self.leaves[index][layer.class_index(position)];
        let class = layer.class(position);
        let scalar = |leaf: usize| {
            let at = class.leaves[leaf].image_offset as usize;
            f32::from_le_bytes([image[at], image[at + 1], image[at + 2], image[at + 3]])
        };
        let mut out = [0; RECORD_HEADER_BYTES];
        let mut put = |at: usize, bytes: [u8; 4]| out[at..at + 4].copy_from_slice(&bytes);
        let mut presence = 0u32;
        for i in 0..3 {
            let scale2 = scalar(leaves.scale2[i]);
            let scale2 = if leaves.invert { 1.0 / scale2 } else { scale2 };
            put(32 + 4 * i, scale2.to_le_bytes());
            if let Some(leaf) = leaves.input_scale[i] {
                presence |= 1 << i;
                put(44 + 4 * i, scalar(leaf).to_le_bytes());
            }
        }
        let words = [
            RECORD_MAGIC,
            1,
            layer.layer,
            layer.experts[position],
            self.geometry.inter,
            self.geometry.hidden,
            self.geometry.group_size,
            presence,
        ];
        for (i, word) in words.into_iter().enumerate() {
            put(4 * i, word.to_le_bytes());
        }
        out
    }
}

/// `[rows, columns]` bytes to `[columns, rows]`, in squares that fit the first-level cache.
pub(crate) fn transpose(from: &[u8], to: &mut [u8], rows: usize, columns: usize) {
    const SIDE: usize = 64;
    for r0 in (0..rows).step_by(SIDE) {
        let r1 = rows.min(r0 + SIDE);
        for c0 in (0..columns).step_by(SIDE) {
            let c1 = columns.min(c0 + SIDE);
            for c in c0..c1 {
                let out = &mut to[c * rows + r0..c * rows + r1];
                for (r, byte) in (r0..r1).zip(out) {
                    *byte = from[r * columns + c];
                }
            }
        }
    }
}
