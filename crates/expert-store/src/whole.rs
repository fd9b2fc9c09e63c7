//! What a part of a model knows of the whole: which layers are left out, and the identities of the
//! records that are. With these a part names its whole, and several parts can be seen to belong
//! together (`docs/store.md`, "Parts").

use crate::catalogue::{Catalogue, Layer, Rest};
use crate::codec;
use crate::info::{LayerInfo, StoreInfo, Whole, hex128, parse_hex128};
use crate::manifest::{ManifestWhole, Table, WHOLE};
use crate::select::Selection;
use crate::staging::Staging;
use crate::store::StoreFile;
use crate::work::{Reader, Scan};
use crate::{StoreError, WorkOptions, open};

/// Whether a part of a model names the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NameWhole {
    /// Where it costs nothing: the source has checksums of all its records.
    #[default]
    IfFree,
    /// Also where the records that are left out have to be read and hashed for it.
    Always,
    /// The part stands alone.
    Never,
}

/// What a part knows beyond its own layers.
#[derive(Debug, Clone)]
pub(crate) struct LeftOut {
    /// Layers of the whole of which nothing is held.
    pub(crate) layers: Vec<LayerInfo>,
    pub(crate) layout_id: u128,
}

impl LeftOut {
    /// The whole that these layers, and those left out, are; `None` without checksums.
    pub(crate) fn whole(&self, stack: &str, held: &[Layer]) -> Option<Whole> {
        let held: Option<Vec<LayerInfo>> = held.iter().map(LayerInfo::of_whole).collect();
        let mut layers = [held?, self.layers.clone()].concat();
        layers.sort_unstable_by_key(|l| l.layer);
        let ids: Vec<(u32, u128)> = layers
            .iter()
            .map(|l| Some((l.layer, parse_hex128(&l.id).ok()?)))
            .collect::<Option<_>>()?;
        Some(Whole {
            content_id: hex128(crate::catalogue::stack_id(stack, ids.into_iter())),
            layout_id: hex128(self.layout_id),
            layers,
        })
    }
}

/// Drops what is not selected, and keeps what is needed to name the whole: that of a store which is
/// itself a part (`before`) stays the whole.
pub(crate) fn select(
    selection: &Selection,
    catalogue: &mut Catalogue,
    before: Option<LeftOut>,
) -> Result<Option<LeftOut>, StoreError> {
    let has_checksums = catalogue.layers.iter().all(|l| l.checksums.is_some());
    let count = catalogue.record_count();
    let layout_id = match &before {
        Some(before) => before.layout_id,
        None => catalogue.layout_id(),
    };
    let chosen = |l: &Layer| match &selection.layers {
        Some(ranges) => ranges.iter().any(|r| r.contains(&l.layer)),
        None => true,
    };
    let dropped: Vec<LayerInfo> = match has_checksums {
        true => {
            let unchosen = catalogue.layers.iter().filter(|l| !chosen(l));
            unchosen.filter_map(LayerInfo::of_whole).collect()
        }
        false => Vec::new(),
    };
    selection.apply(catalogue)?;
    if !has_checksums || (before.is_none() && count == catalogue.record_count()) {
        return Ok(None);
    }
    let layers = [before.map_or_else(Vec::new, |b| b.layers), dropped].concat();
    Ok(Some(LeftOut { layers, layout_id }))
}

/// The same for a catalogue without checksums: reads and hashes the records that are left out.
pub(crate) fn select_and_hash(
    selection: &Selection,
    catalogue: &mut Catalogue,
    files: &[StoreFile],
    work: &WorkOptions,
) -> Result<Option<LeftOut>, StoreError> {
    let all = catalogue.clone();
    selection.apply(catalogue)?;
    let mut others = Catalogue {
        layers: Vec::new(),
        ..all.clone()
    };
    for layer in &all.layers {
        let kept = catalogue.layer(layer.layer);
        let is_left = |e: &&u32| kept.is_none_or(|kept| kept.position(**e).is_none());
        let left: Vec<u32> = layer.experts.iter().filter(is_left).copied().collect();
        if !left.is_empty() {
            let other = layer.with_experts(&left);
            others.layers.push(other.map_err(StoreError::Usage)?);
        }
    }
    if others.layers.is_empty() {
        return Ok(None);
    }
    let scan = Scan {
        catalogue: &others,
        reader: Reader::open(files)?,
        options: work,
    };
    let mut sums: Vec<Vec<u64>> = vec![Vec::new(); others.layers.len()];
    scan.checked("hashing the records left out", |block, _, chunk_sums| {
        sums[block.layer_index].extend_from_slice(chunk_sums);
        Ok(())
    })?;
    drop(scan);
    if let Some((path, why)) = files.iter().find_map(|f| Some((&f.path, f.changed_now()?))) {
        return Err(StoreError::ChangedInUse {
            path: path.clone(),
            why,
        });
    }
    open::set_sums(&mut others, sums).map_err(StoreError::Usage)?;
    let mut layers = Vec::new();
    for other in &others.layers {
        let mut held = catalogue.layers.iter_mut();
        match held.find(|l| l.layer == other.layer) {
            None => layers.push(LayerInfo::of(other)),
            Some(kept) => kept
                .set_rest(other.rest_without(&[]).map(|rest| Rest {
                    image_bytes_max: other.image_bytes_max(),
                    ..rest
                }))
                .map_err(StoreError::Usage)?,
        }
    }
    Ok(Some(LeftOut {
        layers,
        layout_id: all.layout_id(),
    }))
}

/// Writes the identities of the records that held layers lack, and describes them for the manifest.
pub(crate) fn write(
    staging: &Staging,
    whole: Whole,
    held: &[Layer],
) -> Result<ManifestWhole, StoreError> {
    let ids = held.iter().filter_map(Layer::rest);
    let bytes = ids.flat_map(|r| &r.record_ids).map(|id| id.to_le_bytes());
    Ok(ManifestWhole {
        records: staging.write_file(WHOLE, bytes)?,
        content_id: whole.content_id,
        layout_id: whole.layout_id,
        layers: whole.layers,
    })
}

/// Reads them back into the layers, and proves that these belong to the whole that is named.
pub(crate) fn read(
    dir: &std::path::Path,
    manifest: ManifestWhole,
    catalogue: &mut Catalogue,
) -> Result<LeftOut, StoreError> {
    let bad = |why: String| StoreError::store(dir, why);
    let altered = || {
        bad(format!(
            "it is not a part of content {}, as its manifest says: whole, checksums, names or shapes were altered after the build; build the store again",
            manifest.content_id
        ))
    };
    let table: &Table = &manifest.records;
    let bytes = crate::manifest::read_table(dir, WHOLE, table)?;
    let mut ids = bytes.chunks_exact(16).map(codec::u128_of);
    let mut left_out = Vec::new();
    for of_whole in &manifest.layers {
        let held = catalogue.layers.iter_mut();
        let Some(layer) = held.into_iter().find(|l| l.layer == of_whole.layer) else {
            left_out.push(of_whole.clone());
            continue;
        };
        let all = codec::from_ranges(&of_whole.experts, layer.num_experts).map_err(bad)?;
        let experts: Vec<u32> = all
            .into_iter()
            .filter(|&e| layer.position(e).is_none())
            .collect();
        if experts.is_empty() {
            continue;
        }
        let record_ids: Vec<u128> = ids.by_ref().take(experts.len()).collect();
        layer
            .set_rest(Some(Rest {
                experts,
                record_ids,
                image_bytes_max: of_whole.image_bytes_max,
            }))
            .map_err(|why| bad(format!("layer {}: {why}", of_whole.layer)))?;
    }
    if ids.next().is_some() || bytes.len() % 16 != 0 {
        return Err(bad(format!("{WHOLE} is longer than the records left out")));
    }
    let left_out = LeftOut {
        layers: left_out,
        layout_id: parse_hex128(&manifest.layout_id).map_err(bad)?,
    };
    let whole = left_out.whole(&catalogue.stack, &catalogue.layers);
    let is_named = whole.is_some_and(|w| {
        w.content_id == manifest.content_id
            && w.layout_id == manifest.layout_id
            && w.layers == manifest.layers
    });
    match is_named {
        true => Ok(left_out),
        false => Err(altered()),
    }
}

impl StoreInfo {
    /// The content that counts when stores are put together: that of the whole, where it names one.
    pub fn group_id(&self) -> Option<&str> {
        match &self.whole {
            Some(whole) => Some(&whole.content_id),
            None => self.content_id.as_deref(),
        }
    }
}
