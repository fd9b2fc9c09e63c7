//! v1 stores: the layout that Atlas servers already use (`docs/store.md`, "v1 stores").

mod write;

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::catalogue::{
    Catalogue, Class, Container, Layer, Leaf, Records, Role, StackClass, Stacking, Transform,
};
use crate::info::{StoreKind, hex128};
use crate::manifest::{self, CHECKSUMS, Table};
use crate::open;
use crate::open_files::make_room;
use crate::packed::{open_exact, sampled};
use crate::store::{OpenOptions, Parts, Store};
use crate::work::Reader;
use crate::{Dtype, StoreError};
use expert_wire::v1::{Manifest, RECORD_HEADER_BYTES, RECORD_MAGIC};

pub use write::pack_v1;

/// Name prefix of the stack of a v1 store.
pub const STACK: &str = "v1";
const SUB_ALIGN_BYTES: u64 = 256;
const FS_BLOCK_BYTES: u64 = 4096;

/// What our writer adds to the twelve keys; older readers ignore it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Extra {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) generation: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) content_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) payload_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) checksums: Option<Table>,
}

/// Where the parts of a record lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Expert intermediate size.
    pub inter: u32,
    /// Hidden size.
    pub hidden: u32,
    /// Elements that share a scale.
    pub group_size: u32,
}

/// The six parts in order: which of gate, up, down, and whether it is the scale.
pub(crate) const PARTS: [(usize, bool); 6] = [
    (0, false),
    (0, true),
    (1, false),
    (1, true),
    (2, false),
    (2, true),
];

impl Geometry {
    /// Rows and bytes per row of a part as the checkpoint stores it, i.e. before transposition.
    ///
    /// *Errors*: text for people where the sizes are not whole bytes or groups.
    pub(crate) fn matrix(&self, projection: usize, is_scale: bool) -> Result<(u64, u64), String> {
        let (inter, hidden) = (u64::from(self.inter), u64::from(self.hidden));
        let (n, k) = if projection == 2 {
            (hidden, inter)
        } else {
            (inter, hidden)
        };
        let per_byte = if is_scale {
            u64::from(self.group_size)
        } else {
            2
        };
        if per_byte == 0 || n == 0 || k == 0 || k % per_byte != 0 {
            return Err(format!(
                "inter {inter}, hidden {hidden}, group size {} do not divide",
                self.group_size
            ));
        }
        Ok((n, k / per_byte))
    }

    /// Offset and bytes of the six parts, and the end of the last one rounded up.
    pub(crate) fn layout(&self) -> Result<([(u64, u64); 6], u64), String> {
        let mut at = RECORD_HEADER_BYTES as u64;
        let mut out = [(0, 0); 6];
        for (slot, (projection, is_scale)) in out.iter_mut().zip(PARTS) {
            let (rows, columns) = self.matrix(projection, is_scale)?;
            // Both below 2^32: the product fits.
            let bytes = rows * columns;
            *slot = (at, bytes);
            at = at
                .checked_add(bytes)
                .and_then(|n| n.checked_next_multiple_of(SUB_ALIGN_BYTES))
                .ok_or("record overflows")?;
        }
        Ok((out, at))
    }

    /// `record_raw_bytes` and `record_stride`.
    pub fn record_bytes(&self) -> Result<(u64, u64), String> {
        let (_, raw) = self.layout()?;
        let stride = raw
            .checked_next_multiple_of(FS_BLOCK_BYTES)
            .ok_or("record overflows")?;
        Ok((raw, stride))
    }
}

/// The file of a layer; `{:05}` (any width) or `{}` in the template is the dense index.
///
/// *Errors*: text for people.
pub fn file_name(template: &str, layer: u32) -> Result<String, String> {
    let bad = || format!("file_template {template:?}: one {{:05}} or {{}} is expected");
    let (before, rest) = template.split_once('{').ok_or_else(bad)?;
    let (format, after) = rest.split_once('}').ok_or_else(bad)?;
    let width = match format {
        "" => 0,
        f => f
            .strip_prefix(":0")
            .and_then(|w| w.parse::<usize>().ok())
            .filter(|&w| w <= 16)
            .ok_or_else(bad)?,
    };
    if before.contains('}') || after.contains(['{', '}']) {
        return Err(bad());
    }
    let name = format!("{before}{layer:0width$}{after}");
    manifest::check_name(&name)?;
    Ok(name)
}

/// The class of all records of a layer: one leaf that is the record.
fn class(model_layer: u32, stride: u64) -> Result<Class, String> {
    Class::layout(vec![Leaf {
        role: Role::Other,
        leaf: "v1-record".into(),
        name: format!("v1.layers.{model_layer}.experts.{{}}"),
        stacking: Stacking::PerExpert,
        dtype: Dtype::from_name("U8").ok_or("no type U8")?,
        shape: vec![stride],
        source_dim0: 0,
        image_offset: 0,
        bytes: stride,
        transform: Transform::None,
    }])
}

/// Catalogue of a v1 store, without checksums.
///
/// *Errors*: text for people where geometry and limits do not fit.
pub(crate) fn catalogue(m: &Manifest) -> Result<Catalogue, String> {
    let layers = m
        .moe_layer_to_model_layer
        .iter()
        .enumerate()
        .map(|(i, &model_layer)| {
            Layer::new(
                i as u32,
                model_layer,
                m.num_experts,
                0,
                vec![class(model_layer, m.record_stride)?],
                (0..m.num_experts).collect(),
                Vec::new(),
                Records::Packed {
                    file: i as u32,
                    stride: m.record_stride,
                    header_bytes: 0,
                },
                None,
                Vec::new(),
            )
        });
    Ok(Catalogue {
        stack: STACK.into(),
        class: StackClass::Trunk,
        container: Container::V1,
        layers: layers.collect::<Result<_, _>>()?,
    })
}

/// Opens a v1 store whose manifest was read.
pub(crate) fn open(
    dir: &Path,
    value: &serde_json::Value,
    options: &OpenOptions,
) -> Result<Store, StoreError> {
    let bad = |why: String| StoreError::store(dir, why);
    if options.mtp || options.stack.as_deref().is_some_and(|s| s != STACK) {
        return Err(StoreError::Usage(format!(
            "{} is a v1 store: it has one stack, {STACK:?}",
            dir.display()
        )));
    }
    let m = Manifest::deserialize(value).map_err(|e| bad(format!("manifest: {e}")))?;
    m.check().map_err(|e| bad(format!("manifest: {e}")))?;
    let extra = Extra::deserialize(value).map_err(|e| bad(format!("manifest: {e}")))?;
    let mut warnings = Vec::new();
    let geometry = Geometry {
        inter: m.inter,
        hidden: m.hidden,
        group_size: m.group_size,
    };
    match geometry.record_bytes() {
        Ok((raw, stride)) if (raw, stride) == (m.record_raw_bytes, m.record_stride) => {}
        Ok((raw, stride)) => warnings.push(format!(
            "record_raw_bytes {} and record_stride {}, its geometry makes {raw} and {stride}",
            m.record_raw_bytes, m.record_stride
        )),
        Err(why) => warnings.push(why),
    }
    let layer_count = m.moe_layer_to_model_layer.len();
    // Readers open them once more.
    make_room(dir, 2 * layer_count)?;
    let mut files = Vec::new();
    let mut names = Vec::new();
    for layer in 0..layer_count as u32 {
        let name = file_name(&m.file_template, layer).map_err(bad)?;
        let bytes = u64::from(m.num_experts) * m.record_stride;
        files.push(open_exact(
            dir.join(&name),
            bytes,
            &format!("layer {layer}"),
        )?);
        names.push(name);
    }
    // After the files: a manifest of 20 kB can claim a catalogue of 1 GB, its files have to be there.
    let mut catalogue = catalogue(&m).map_err(bad)?;
    let records = catalogue.record_count();
    let reader = Reader::open(&files)?;
    for (layer, file) in catalogue.layers.iter().zip(&files) {
        for position in sampled(layer, records) {
            check_header(&m, layer, position, &reader, &file.path)?;
        }
    }
    read_sums(dir, &extra, &mut catalogue, &mut warnings)?;
    let want = open::parse_id(dir, extra.content_id.as_deref())?;
    let got = catalogue.content_id();
    if let Some(want) = want.filter(|&w| got != Some(w)) {
        return Err(bad(format!(
            "content id {}, the manifest says {}: checksums or manifest were altered after the build; build the store again",
            got.map_or("none".to_owned(), hex128),
            hex128(want)
        )));
    }
    let mut payload_digest = open::parse_id(dir, extra.payload_digest.as_deref())?;
    let mut manifest = Some(m);
    if let Some(selection) = options.selection.as_ref().filter(|s| !s.is_all()) {
        // Files keep their numbers: one per layer, also of layers left out.
        selection.apply(&mut catalogue)?;
        payload_digest = None;
        manifest = None;
        warnings.push("a part of a v1 store cannot be served to v1 clients".into());
    }
    Ok(Store::from_parts(Parts {
        path: dir.to_owned(),
        root: dir.to_owned(),
        on_the_fly: false,
        kind: StoreKind::V1,
        generation: extra.generation.unwrap_or(1),
        catalogue,
        files,
        names,
        metadata: Default::default(),
        payload_digest,
        header_content_id: None,
        v1: manifest,
        warnings,
        left_out: None,
    }))
}

/// Checksums from `checksums.xxh3`, where there are some that fit.
fn read_sums(
    dir: &Path,
    extra: &Extra,
    catalogue: &mut Catalogue,
    warnings: &mut Vec<String>,
) -> Result<(), StoreError> {
    let path = dir.join(CHECKSUMS);
    let bytes = catalogue
        .layers
        .iter()
        .map(Layer::total_chunks)
        .fold(0u64, u64::saturating_add)
        .saturating_mul(8);
    let sums = match &extra.checksums {
        Some(table) => manifest::read_table(dir, CHECKSUMS, table)?,
        None if path.exists() && bytes <= manifest::TABLE_MAX_BYTES => {
            manifest::read_exact_file(&path, bytes)?
        }
        None => {
            warnings.push(format!(
                "{} has no checksums: its bytes cannot be verified",
                dir.display()
            ));
            return Ok(());
        }
    };
    if sums.len() as u64 != bytes {
        return Err(StoreError::store(
            &path,
            format!("{} bytes, {bytes} fit the manifest", sums.len()),
        ));
    }
    open::set_sums_from_bytes(&mut catalogue.layers, &sums)
        .map_err(|why| StoreError::store(&path, why))
}

/// Compares the header of one record with the manifest.
pub(crate) fn check_header(
    m: &Manifest,
    layer: &Layer,
    position: usize,
    reader: &Reader,
    path: &Path,
) -> Result<(), StoreError> {
    let Records::Packed { file, .. } = layer.records else {
        return Ok(());
    };
    let expert = layer.experts[position];
    let mut got = [0; 28];
    reader.read_file(file, position as u64 * m.record_stride, &mut got)?;
    let words = [
        ("magic", RECORD_MAGIC),
        ("version", 1),
        ("layer", layer.layer),
        ("expert", expert),
        ("inter", m.inter),
        ("hidden", m.hidden),
        ("group_size", m.group_size),
    ];
    for ((what, want), bytes) in words.into_iter().zip(got.chunks_exact(4)) {
        let have = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if have != want {
            return Err(StoreError::store(
                path,
                format!(
                    "layer {} expert {expert}: its header says {what} {have}, expected {want}",
                    layer.layer
                ),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_geometry_of_the_first_model() {
        let g = Geometry {
            inter: 512,
            hidden: 2048,
            group_size: 16,
        };
        assert_eq!(g.record_bytes().unwrap(), (1_769_728, 1_773_568));
        let (parts, raw) = g.layout().unwrap();
        let starts: Vec<u64> = parts.iter().map(|p| p.0).collect();
        assert_eq!(
            starts,
            [256, 524_544, 590_080, 1_114_368, 1_179_904, 1_704_192]
        );
        assert_eq!(raw, 1_769_728);
    }

    #[test]
    fn file_templates_are_filled_and_confined() {
        assert_eq!(
            file_name("experts_{:05}.xpr", 7).unwrap(),
            "experts_00007.xpr"
        );
        assert_eq!(file_name("{}.x", 12).unwrap(), "12.x");
        for bad in ["../{:05}", "/tmp/{}", "no", "{}{}", "{:5x}", "{:099}"] {
            assert!(file_name(bad, 0).is_err(), "{bad}");
        }
    }
}
