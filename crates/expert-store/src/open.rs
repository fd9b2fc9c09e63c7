//! The ways to open a store, with their audits.

use std::path::{Path, PathBuf};

use crate::catalogue::{Catalogue, Layer, LeafSource, Records, StackClass};
use crate::checkpoint::{self, Checkpoint, Stack};
use crate::codec;
use crate::info::{StoreKind, hex128, parse_hex128};
use crate::manifest::{self, CATALOGUE, CHECKSUMS, Found, Manifest};
use crate::open_files::make_room;
use crate::packed;
use crate::stamp::FileStamp;
use crate::store::{OpenOptions, Parts, Store, StoreFile};
use crate::whole::{self, NameWhole};
use crate::work::{Reader, Scan};
use crate::{StoreError, inline, v1};
use expert_wire::limits;

pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Store, StoreError> {
    let path = std::path::absolute(path).map_err(StoreError::io("resolving", path))?;
    if path.is_dir() {
        match manifest::read(&path)? {
            Found::V1(value) => return v1::open(&path, &value, options),
            Found::V2(manifest) => return open_v2(&path, *manifest, options),
            Found::None if path.join(CATALOGUE).exists() => {
                return Err(StoreError::store(
                    &path,
                    "has a catalogue but no manifest.json: its build did not finish; build it again",
                ));
            }
            Found::None => {}
        }
    }
    open_checkpoint(&path, options)
}

/// Indexes a checkpoint in memory.
fn open_checkpoint(path: &Path, options: &OpenOptions) -> Result<Store, StoreError> {
    let checkpoint = checkpoint::open(path)?;
    let stack = choose_stack(path, &checkpoint, options)?.clone();
    let mut catalogue = Catalogue {
        stack: stack.prefix,
        class: stack.class,
        container: checkpoint.container,
        layers: stack.layers,
    };
    let selection = options.selection.as_ref().filter(|s| !s.is_all());
    let is_named = options.name_whole == NameWhole::Always;
    if let Some(selection) = selection.filter(|_| !is_named) {
        selection.apply(&mut catalogue)?;
    }
    let used = keep_used_files(&mut catalogue, checkpoint.files.len())
        .map_err(|why| StoreError::checkpoint(path, why))?;
    // Readers open them once more.
    make_room(path, 2 * used.len())?;
    let mut files = Vec::new();
    let mut names = Vec::new();
    for i in used {
        let source = &checkpoint.files[i];
        let file = StoreFile::open(checkpoint.root.join(&source.name))?;
        if let Some(why) = source.stamp.change(&file.stamp) {
            return Err(StoreError::ChangedInUse {
                path: file.path,
                why,
            });
        }
        files.push(file);
        names.push(source.name.clone());
    }
    check_segments(path, &catalogue, &files)?;
    let mut left_out = None;
    if let Some(selection) = selection.filter(|_| is_named) {
        left_out = whole::select_and_hash(selection, &mut catalogue, &files, &options.work())?;
        retain_used(&mut catalogue, &mut files, &mut names)
            .map_err(|why| StoreError::checkpoint(path, why))?;
    }
    let reader = Reader::open(&files)?;
    inline::fill(&mut catalogue, &reader)?;
    if options.checksums {
        let work = options.work();
        let scan = Scan {
            catalogue: &catalogue,
            reader,
            options: &work,
        };
        let sums = collect_sums(&scan, |_, _| ())?;
        set_sums(&mut catalogue, sums).map_err(|why| StoreError::checkpoint(path, why))?;
    }
    let store = Store::from_parts(Parts {
        path: path.to_owned(),
        root: checkpoint.root,
        on_the_fly: true,
        kind: StoreKind::InPlace,
        generation: 1,
        catalogue,
        files,
        names,
        metadata: checkpoint.metadata,
        payload_digest: None,
        header_content_id: None,
        v1: None,
        warnings: checkpoint.warnings,
        left_out,
    });
    if options.checksums {
        store.check_unchanged()?;
    }
    Ok(store)
}

/// Hashes all records; `each` sees every block in order. One list of sums per layer.
pub(crate) fn collect_sums(
    scan: &Scan<'_>,
    mut each: impl FnMut(&crate::work::Block<'_>, &[u8]) + Send,
) -> Result<Vec<Vec<u64>>, StoreError> {
    let mut sums: Vec<Vec<u64>> = vec![Vec::new(); scan.catalogue.layers.len()];
    scan.checked("hashing records", |block, bytes, chunk_sums| {
        sums[block.layer_index].extend_from_slice(chunk_sums);
        each(block, bytes);
        Ok(())
    })?;
    Ok(sums)
}

pub(crate) fn set_sums(catalogue: &mut Catalogue, sums: Vec<Vec<u64>>) -> Result<(), String> {
    for (layer, sums) in catalogue.layers.iter_mut().zip(sums) {
        layer.set_checksums(sums)?;
    }
    Ok(())
}

fn choose_stack<'c>(
    path: &Path,
    checkpoint: &'c Checkpoint,
    options: &OpenOptions,
) -> Result<&'c Stack, StoreError> {
    let wanted = if options.mtp {
        StackClass::Mtp
    } else {
        StackClass::Trunk
    };
    let word = |class| match class {
        StackClass::Trunk => "trunk",
        StackClass::Mtp => "mtp",
    };
    let list = |stacks: &[&Stack]| {
        let words: Vec<String> = stacks
            .iter()
            .map(|s| {
                format!(
                    "{} ({}, {} layers)",
                    s.prefix,
                    word(s.class),
                    s.layers.len()
                )
            })
            .collect();
        words.join(", ")
    };
    let all: Vec<&Stack> = checkpoint.stacks.iter().collect();
    let of_class: Vec<&Stack> = all.iter().copied().filter(|s| s.class == wanted).collect();
    match &options.stack {
        Some(prefix) => of_class
            .iter()
            .chain(&all)
            .find(|s| &s.prefix == prefix && (!options.mtp || s.class == wanted))
            .copied()
            .ok_or_else(|| {
                StoreError::Usage(format!(
                    "{} has no {} stack {prefix:?}; there are: {}",
                    path.display(),
                    word(wanted),
                    list(&all)
                ))
            }),
        None => match of_class.as_slice() {
            [one] => Ok(one),
            [] if all.is_empty() => Err(StoreError::NoExperts {
                path: path.to_owned(),
                why: "no stack of MoE layers".into(),
            }),
            [] => Err(StoreError::Usage(format!(
                "{} has no {} stack; there are: {}",
                path.display(),
                word(wanted),
                list(&all)
            ))),
            several => Err(StoreError::Usage(format!(
                "{} has several stacks, choose one with --stack: {}",
                path.display(),
                list(several)
            ))),
        },
    }
}

/// Renumbers the files of an in-place catalogue so that only those with records remain; returns
/// their old numbers, ascending.
fn keep_used_files(catalogue: &mut Catalogue, count: usize) -> Result<Vec<usize>, String> {
    let mut used = vec![false; count];
    let mut visit = |file: u32| match used.get_mut(file as usize) {
        Some(u) => {
            *u = true;
            Ok(())
        }
        None => Err(format!("file {file} of {count}")),
    };
    each_file(catalogue, |f| visit(*f))?;
    let kept: Vec<usize> = (0..count).filter(|&i| used[i]).collect();
    let mut renumbered = vec![0u32; count];
    for (new, &old) in kept.iter().enumerate() {
        renumbered[old] = new as u32;
    }
    each_file(catalogue, |f| {
        *f = renumbered[*f as usize];
        Ok(())
    })?;
    Ok(kept)
}

/// Drops the files that no record lies in any more.
fn retain_used(
    catalogue: &mut Catalogue,
    files: &mut Vec<StoreFile>,
    names: &mut Vec<String>,
) -> Result<(), String> {
    let used = keep_used_files(catalogue, files.len())?;
    let mut index = 0;
    files.retain(|_| {
        index += 1;
        used.binary_search(&(index - 1)).is_ok()
    });
    *names = used.iter().map(|&i| names[i].clone()).collect();
    Ok(())
}

fn each_file(
    catalogue: &mut Catalogue,
    mut f: impl FnMut(&mut u32) -> Result<(), String>,
) -> Result<(), String> {
    for layer in &mut catalogue.layers {
        match &mut layer.records {
            Records::Remote => {}
            Records::Packed { file, .. } => f(file)?,
            Records::InPlace { sources } => {
                for source in sources.iter_mut().flatten() {
                    match source {
                        LeafSource::Strided { file, .. } => f(file)?,
                        LeafSource::Column { files, .. } => {
                            files.iter_mut().try_for_each(&mut f)?;
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Checks that every byte of every record lies in its file.
fn check_segments(
    path: &Path,
    catalogue: &Catalogue,
    files: &[StoreFile],
) -> Result<(), StoreError> {
    for layer in &catalogue.layers {
        for position in 0..layer.experts.len() {
            let mut bad = None;
            layer.for_each_segment(position, |s| {
                let end = s.file_offset.checked_add(s.bytes);
                let file = files.get(s.file as usize);
                if !matches!((end, file), (Some(end), Some(f)) if end <= f.stamp.bytes) {
                    bad = Some(match file {
                        Some(f) => format!(
                            "bytes {} to {} of {}, which has {}",
                            s.file_offset,
                            s.file_offset.saturating_add(s.bytes),
                            f.path.display(),
                            f.stamp.bytes
                        ),
                        None => format!("file {} of {}", s.file, files.len()),
                    });
                }
            });
            if let Some(what) = bad {
                return Err(StoreError::store(
                    path,
                    format!(
                        "layer {} expert {} refers to {what}",
                        layer.layer, layer.experts[position]
                    ),
                ));
            }
        }
    }
    Ok(())
}

fn open_v2(dir: &Path, manifest: Manifest, options: &OpenOptions) -> Result<Store, StoreError> {
    let bad = |why: String| StoreError::store(dir, why);
    if let Some(stack) = options.stack.as_ref().filter(|s| **s != manifest.stack) {
        return Err(StoreError::Usage(format!(
            "{} holds the stack {:?}, not {stack:?}",
            dir.display(),
            manifest.stack
        )));
    }
    if options.mtp && manifest.class != StackClass::Mtp {
        return Err(StoreError::Usage(format!(
            "{} holds the trunk, not the mtp stack",
            dir.display()
        )));
    }
    if manifest.files.len() > manifest::FILES_MAX {
        return Err(bad(format!(
            "{} files, the limit is {}",
            manifest.files.len(),
            manifest::FILES_MAX
        )));
    }
    for file in &manifest.files {
        manifest::check_name(&file.name).map_err(bad)?;
    }
    let mut warnings = Vec::new();
    let mut catalogue = Catalogue {
        layers: read_layers(dir, &manifest)?,
        stack: manifest.stack.clone(),
        class: manifest.class,
        container: manifest.container,
    };
    let (root, mut files) = match manifest.kind {
        StoreKind::Packed => {
            let files = packed::open_files(dir, &manifest, &catalogue)?;
            (dir.to_owned(), files)
        }
        StoreKind::InPlace => open_sources(dir, &manifest, options, &mut warnings)?,
        StoreKind::V1 => return Err(bad("kind v1 with version 2".into())),
    };
    check_segments(dir, &catalogue, &files)?;
    check_ids(dir, &manifest, &catalogue)?;
    if manifest.kind == StoreKind::Packed {
        let content_id = parse_id(dir, manifest.content_id.as_deref())?;
        packed::audit_headers(dir, &catalogue, &files, content_id)?;
    }
    if manifest.content_id.is_none() {
        warnings.push(format!(
            "{} has no checksums: its bytes cannot be verified",
            dir.display()
        ));
    }
    let mut payload_digest = parse_id(dir, manifest.payload_digest.as_deref())?;
    let mut left_out = match manifest.whole {
        Some(named) => Some(whole::read(dir, named, &mut catalogue)?),
        None => None,
    };
    let mut names: Vec<String> = manifest.files.iter().map(|f| f.name.clone()).collect();
    if let Some(selection) = options.selection.as_ref().filter(|s| !s.is_all()) {
        let is_hashed = manifest.content_id.is_some();
        left_out = match options.name_whole {
            NameWhole::Always if !is_hashed => {
                whole::select_and_hash(selection, &mut catalogue, &files, &options.work())?
            }
            _ => whole::select(selection, &mut catalogue, left_out)?,
        };
        payload_digest = None;
        retain_used(&mut catalogue, &mut files, &mut names).map_err(bad)?;
    }
    if options.name_whole == NameWhole::Never {
        left_out = None;
    }
    Ok(Store::from_parts(Parts {
        path: dir.to_owned(),
        root,
        on_the_fly: false,
        kind: manifest.kind,
        generation: manifest.generation,
        catalogue,
        files,
        names,
        metadata: manifest.metadata,
        payload_digest,
        header_content_id: parse_id(dir, manifest.content_id.as_deref())?,
        v1: None,
        warnings,
        left_out,
    }))
}

/// The layers from `catalogue.bin` with their checksums from `checksums.xxh3`.
fn read_layers(dir: &Path, manifest: &Manifest) -> Result<Vec<Layer>, StoreError> {
    let bad = |why: String| StoreError::store(dir, why);
    if manifest.layers.is_empty() || manifest.layers.len() > limits::LAYERS_MAX as usize {
        return Err(bad(format!(
            "{} layers, the limit is 1 to {}",
            manifest.layers.len(),
            limits::LAYERS_MAX
        )));
    }
    let blobs = manifest::read_table(dir, CATALOGUE, &manifest.catalogue)?;
    let mut layers: Vec<Layer> = Vec::new();
    let mut at = 0u64;
    for range in &manifest.layers {
        let end = range.blob_offset.checked_add(range.blob_bytes);
        let blob = end
            .filter(|_| range.blob_offset == at)
            .and_then(|end| blobs.get(at as usize..end as usize))
            .ok_or_else(|| {
                bad(format!(
                    "layer {}: its blob at {} of {} bytes does not fit catalogue.bin of {}",
                    range.layer,
                    range.blob_offset,
                    range.blob_bytes,
                    blobs.len()
                ))
            })?;
        at += range.blob_bytes;
        let layer = codec::decode_layer(blob)
            .map_err(|why| bad(format!("layer {}: {why}", range.layer)))?;
        let fits = match (&layer.records, manifest.kind) {
            (Records::Packed { header_bytes, .. }, StoreKind::Packed) => {
                *header_bytes == packed::HEADER_BYTES
            }
            (Records::InPlace { .. }, StoreKind::InPlace) => true,
            _ => false,
        };
        if layer.layer != range.layer
            || layers.last().is_some_and(|l| l.layer >= layer.layer)
            || !fits
        {
            return Err(bad(format!(
                "the blob of layer {} is that of layer {}, out of order, or of another kind of store",
                range.layer, layer.layer
            )));
        }
        layers.push(layer);
    }
    if at != blobs.len() as u64 {
        return Err(bad(format!(
            "catalogue.bin has {} bytes, its layers take {at}",
            blobs.len()
        )));
    }
    drop(blobs);
    let Some(table) = &manifest.checksums else {
        return Ok(layers);
    };
    let chunks = layers
        .iter()
        .map(Layer::total_chunks)
        .fold(0u64, u64::saturating_add);
    if table.bytes != chunks.saturating_mul(8) {
        return Err(bad(format!(
            "{CHECKSUMS} of {} bytes for {chunks} chunks of 8",
            table.bytes
        )));
    }
    let sums = manifest::read_table(dir, CHECKSUMS, table)?;
    set_sums_from_bytes(&mut layers, &sums).map_err(bad)?;
    Ok(layers)
}

pub(crate) fn set_sums_from_bytes(layers: &mut [Layer], bytes: &[u8]) -> Result<(), String> {
    let mut sums = bytes
        .chunks_exact(8)
        .map(|b| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]));
    for layer in layers {
        let n = layer.total_chunks() as usize;
        layer.set_checksums(sums.by_ref().take(n).collect())?;
    }
    Ok(())
}

pub(crate) fn parse_id(dir: &Path, text: Option<&str>) -> Result<Option<u128>, StoreError> {
    text.map(|t| parse_hex128(t).map_err(|e| StoreError::store(dir, e)))
        .transpose()
}

fn check_ids(dir: &Path, manifest: &Manifest, catalogue: &Catalogue) -> Result<(), StoreError> {
    let show = |id: Option<u128>| id.map_or("none".to_owned(), hex128);
    let differs = |what: &str, got: Option<u128>, want: Option<u128>| {
        StoreError::store(
            dir,
            format!(
                "{what} {}, the manifest says {}: checksums, names or shapes were altered after the build; build the store again",
                show(got),
                show(want)
            ),
        )
    };
    let want = parse_id(dir, manifest.content_id.as_deref())?;
    let got = catalogue.content_id();
    if got != want {
        return Err(differs("content id", got, want));
    }
    let want = parse_id(dir, Some(&manifest.layout_id))?;
    let got = Some(catalogue.layout_id());
    if got != want {
        return Err(differs("layout id", got, want));
    }
    Ok(())
}

/// Opens the checkpoint's files of an in-place store and compares them with their stamps.
fn open_sources(
    dir: &Path,
    manifest: &Manifest,
    options: &OpenOptions,
    warnings: &mut Vec<String>,
) -> Result<(PathBuf, Vec<StoreFile>), StoreError> {
    let root = match (&options.checkpoint_override, &manifest.checkpoint) {
        (Some(path), _) if path.is_file() => path.parent().map(Path::to_owned).unwrap_or_default(),
        (Some(path), _) => path.clone(),
        (None, Some(path)) if Path::new(path).is_absolute() => PathBuf::from(path),
        (None, path) => {
            return Err(StoreError::store(
                dir,
                format!("checkpoint {path:?} is not an absolute path"),
            ));
        }
    };
    let root = std::path::absolute(&root).map_err(StoreError::io("resolving", &root))?;
    make_room(dir, 2 * manifest.files.len())?;
    let mut files = Vec::new();
    for file in &manifest.files {
        let open = StoreFile::open(root.join(&file.name))?;
        let want = FileStamp {
            bytes: file.bytes,
            device: file.device.unwrap_or(0),
            inode: file.inode.unwrap_or(0),
            mtime_ns: file.mtime_ns.unwrap_or(0),
            ctime_ns: file.ctime_ns.unwrap_or(0),
        };
        if let Some(why) = want.content_change(&open.stamp) {
            return Err(StoreError::SourceChanged {
                path: open.path,
                why,
            });
        }
        let now = &open.stamp;
        if (now.device, now.inode, now.ctime_ns) != (want.device, want.inode, want.ctime_ns) {
            warnings.push(format!(
                "{} has the recorded size and modification time but another inode, device or change time: it was copied or its attributes were changed",
                open.path.display()
            ));
        }
        files.push(open);
    }
    Ok((root, files))
}
