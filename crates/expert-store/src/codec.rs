//! The blob of one layer, as it lies in `catalogue.bin` and crosses the wire: `u32` length of a
//! JSON head, the head, then binary columns in the order that the head implies. `docs/store.md`,
//! "Layer blob".

use serde::{Deserialize, Serialize};

use crate::catalogue::{Class, Layer, LeafSource, Records, Rest, Stacking};
use expert_wire::limits;

/// Which optional columns a blob holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sections {
    /// Where each leaf lies in the files.
    pub segments: bool,
    /// Chunk checksums.
    pub checksums: bool,
    /// Identities of the layer's records that are not held, where they are known.
    pub rest: bool,
}

impl Sections {
    /// Everything.
    pub const ALL: Self = Self {
        segments: true,
        checksums: true,
        rest: true,
    };

    /// From the bits of a catalogue request.
    pub fn from_bits(bits: u32) -> Self {
        Self {
            segments: bits & expert_wire::message::SECTION_SEGMENTS != 0,
            checksums: bits & expert_wire::message::SECTION_CHECKSUMS != 0,
            rest: bits & expert_wire::message::SECTION_REST != 0,
        }
    }
}

/// Largest head of a blob, bytes: 256 classes of a few leaves each fit many times over.
pub const HEAD_MAX_BYTES: usize = 8 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    layer: u32,
    model_layer: u32,
    num_experts: u32,
    #[serde(default)]
    identity_experts: u32,
    classes: Vec<Class>,
    /// Experts held, as `[first, end)` ranges, ascending.
    experts: Vec<[u32; 2]>,
    records: HeadRecords,
    /// Whether the checksum column is there.
    checksums: bool,
    /// Per class, the leaves whose values are there.
    inline: Vec<Vec<u32>>,
    /// Records that are not held; only where they were asked for, so that older readers never see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rest: Option<HeadRest>,
}

/// The identities (`u128` each) follow after all other columns.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeadRest {
    experts: Vec<[u32; 2]>,
    image_bytes_max: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum HeadRecords {
    Remote,
    Packed {
        file: u32,
        stride: u64,
        header_bytes: u64,
    },
    InPlace(Vec<Vec<HeadSource>>),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum HeadSource {
    Strided {
        file: u32,
        base: u64,
        step: u64,
    },
    /// A file column (`u32` each), then an offset column (`u64` each) follow among the columns.
    Column,
}

/// Ascending numbers as `[first, end)` ranges.
pub fn to_ranges(numbers: &[u32]) -> Vec<[u32; 2]> {
    let mut ranges: Vec<[u32; 2]> = Vec::new();
    for &n in numbers {
        match ranges.last_mut() {
            Some(last) if last[1] == n => last[1] = n + 1,
            _ => ranges.push([n, n + 1]),
        }
    }
    ranges
}

/// The numbers of `[first, end)` ranges, bounded by `limit` and required to ascend.
pub fn from_ranges(ranges: &[[u32; 2]], limit: u32) -> Result<Vec<u32>, String> {
    let mut numbers = Vec::new();
    let mut at = 0;
    for &[first, end] in ranges {
        if first < at || end <= first || end > limit {
            return Err(format!(
                "range {first}..{end} does not ascend below {limit}"
            ));
        }
        numbers.extend(first..end);
        at = end;
    }
    Ok(numbers)
}

/// A layer as a blob with the sections asked for.
pub fn encode_layer(layer: &Layer, sections: Sections) -> Vec<u8> {
    let mut columns = Vec::new();
    columns.extend_from_slice(&layer.class_of);
    let records = match &layer.records {
        _ if !sections.segments => HeadRecords::Remote,
        Records::Remote => HeadRecords::Remote,
        &Records::Packed {
            file,
            stride,
            header_bytes,
        } => HeadRecords::Packed {
            file,
            stride,
            header_bytes,
        },
        Records::InPlace { sources } => HeadRecords::InPlace(
            sources
                .iter()
                .map(|class| {
                    class
                        .iter()
                        .map(|s| encode_source(s, &mut columns))
                        .collect()
                })
                .collect(),
        ),
    };
    let sums = layer.checksums.as_deref().filter(|_| sections.checksums);
    for sum in sums.unwrap_or(&[]) {
        columns.extend_from_slice(&sum.to_le_bytes());
    }
    let mut inline = Vec::new();
    for class in &layer.inline {
        let mut present = Vec::new();
        for (i, values) in class.iter().enumerate() {
            if !values.is_empty() {
                present.push(i as u32);
                columns.extend_from_slice(values);
            }
        }
        inline.push(present);
    }
    let rest = layer.rest().filter(|_| sections.rest);
    for id in rest.iter().flat_map(|r| &r.record_ids) {
        columns.extend_from_slice(&id.to_le_bytes());
    }
    let head = Head {
        layer: layer.layer,
        model_layer: layer.model_layer,
        num_experts: layer.num_experts,
        identity_experts: layer.identity_experts,
        classes: layer.classes.clone(),
        experts: to_ranges(&layer.experts),
        records,
        checksums: sums.is_some(),
        inline,
        rest: rest.map(|r| HeadRest {
            experts: to_ranges(&r.experts),
            image_bytes_max: r.image_bytes_max,
        }),
    };
    let head = serde_json::to_vec(&head).expect("a head is plain data");
    let mut out = Vec::with_capacity(4 + head.len() + columns.len());
    out.extend_from_slice(&(head.len() as u32).to_le_bytes());
    out.extend_from_slice(&head);
    out.extend_from_slice(&columns);
    out
}

fn encode_source(source: &LeafSource, columns: &mut Vec<u8>) -> HeadSource {
    match source {
        &LeafSource::Strided { file, base, step } => HeadSource::Strided { file, base, step },
        LeafSource::Column { files, offsets } => {
            for f in files {
                columns.extend_from_slice(&f.to_le_bytes());
            }
            for o in offsets {
                columns.extend_from_slice(&o.to_le_bytes());
            }
            HeadSource::Column
        }
    }
}

/// Reads a blob from outside and checks it as a whole.
///
/// *Errors*: text for people that says what does not fit; memory used is bounded by the blob's size.
pub fn decode_layer(blob: &[u8]) -> Result<Layer, String> {
    let mut columns = Columns { rest: blob };
    let head_bytes = u32::from_le_bytes(columns.array("head length")?) as usize;
    if head_bytes > HEAD_MAX_BYTES {
        return Err(format!(
            "layer head of {head_bytes} bytes, the limit is {HEAD_MAX_BYTES}"
        ));
    }
    let head: Head = serde_json::from_slice(columns.take("head", head_bytes)?)
        .map_err(|e| format!("layer head cannot be read: {e}"))?;
    if head.num_experts > limits::EXPERTS_MAX || head.classes.len() > 256 {
        return Err(format!(
            "{} experts in {} shape classes, the limits are {} and 256",
            head.num_experts,
            head.classes.len(),
            limits::EXPERTS_MAX
        ));
    }
    let experts = from_ranges(&head.experts, head.num_experts)?;
    let class_of = match head.classes.len() {
        0 | 1 => Vec::new(),
        _ => columns.take("class column", experts.len())?.to_vec(),
    };
    let mut population = vec![0usize; head.classes.len()];
    match head.classes.len() {
        0 => {}
        1 => population[0] = experts.len(),
        n => {
            for &c in &class_of {
                if usize::from(c) >= n {
                    return Err(format!("shape class {c} of {n}"));
                }
                population[usize::from(c)] += 1;
            }
        }
    }
    let records = match head.records {
        HeadRecords::Remote => Records::Remote,
        HeadRecords::Packed {
            file,
            stride,
            header_bytes,
        } => Records::Packed {
            file,
            stride,
            header_bytes,
        },
        HeadRecords::InPlace(classes) => {
            if classes.len() != head.classes.len() {
                return Err("sources do not fit the shape classes".into());
            }
            let mut sources = Vec::new();
            for (class, &n) in classes.into_iter().zip(&population) {
                let decoded: Result<Vec<_>, String> = class
                    .into_iter()
                    .map(|s| decode_source(s, n, &mut columns))
                    .collect();
                sources.push(decoded?);
            }
            Records::InPlace { sources }
        }
    };
    let checksums = if head.checksums {
        let n: u64 = head
            .classes
            .iter()
            .zip(&population)
            .map(|(c, &n)| crate::catalogue::chunk_count(c.image_bytes).saturating_mul(n as u64))
            .fold(0, u64::saturating_add);
        Some(columns.u64s("checksums", n)?)
    } else {
        None
    };
    let mut inline = Vec::new();
    if !head.inline.is_empty() && head.inline.len() != head.classes.len() {
        return Err("small leaves do not fit the shape classes".into());
    }
    for ((present, class), &n) in head.inline.iter().zip(&head.classes).zip(&population) {
        let mut values = vec![Vec::new(); class.leaves.len()];
        for &i in present {
            let leaf = class
                .leaves
                .get(i as usize)
                .filter(|l| l.bytes <= crate::catalogue::INLINE_MAX_BYTES)
                .ok_or_else(|| format!("small leaf {i} is not one"))?;
            let copies = if leaf.stacking == Stacking::Common {
                1
            } else {
                n
            };
            values[i as usize] = columns
                .take("small leaves", leaf.bytes as usize * copies)?
                .to_vec();
        }
        inline.push(values);
    }
    let rest = match head.rest {
        None => None,
        Some(rest) => {
            let experts = from_ranges(&rest.experts, head.num_experts)?;
            let ids = columns.take("records not held", experts.len() * 16)?;
            Some(Rest {
                record_ids: ids.chunks_exact(16).map(u128_of).collect(),
                experts,
                image_bytes_max: rest.image_bytes_max,
            })
        }
    };
    if !columns.rest.is_empty() {
        return Err(format!(
            "{} bytes after the last column",
            columns.rest.len()
        ));
    }
    let mut layer = Layer::new(
        head.layer,
        head.model_layer,
        head.num_experts,
        head.identity_experts,
        head.classes,
        experts,
        class_of,
        records,
        checksums,
        inline,
    )?;
    layer.set_rest(rest)?;
    Ok(layer)
}

/// Of exactly 16 bytes.
pub(crate) fn u128_of(bytes: &[u8]) -> u128 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u128::from(b))
}

fn decode_source(
    source: HeadSource,
    n: usize,
    columns: &mut Columns<'_>,
) -> Result<LeafSource, String> {
    Ok(match source {
        HeadSource::Strided { file, base, step } => LeafSource::Strided { file, base, step },
        HeadSource::Column => LeafSource::Column {
            files: columns
                .take("file column", n * 4)?
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            offsets: columns.u64s("offset column", n as u64)?,
        },
    })
}

struct Columns<'a> {
    rest: &'a [u8],
}

impl<'a> Columns<'a> {
    fn take(&mut self, what: &str, bytes: usize) -> Result<&'a [u8], String> {
        if bytes > self.rest.len() {
            return Err(format!(
                "{what}: {bytes} bytes needed, {} there",
                self.rest.len()
            ));
        }
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        Ok(self
            .take(what, N)?
            .try_into()
            .expect("length was asked for"))
    }

    fn u64s(&mut self, what: &str, n: u64) -> Result<Vec<u64>, String> {
        let bytes = n
            .checked_mul(8)
            .and_then(|b| usize::try_from(b).ok())
            .ok_or_else(|| format!("{what}: {n} entries"))?;
        Ok(self
            .take(what, bytes)?
            .chunks_exact(8)
            .map(|b| u64::from_le_bytes(b.try_into().expect("chunks of eight")))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;
    use crate::catalogue::{Leaf, Role};
    use proptest::prelude::*;

    fn leaf(role: Role, leaf: &str, dtype: &str, shape: &[u64], stacking: Stacking) -> Leaf {
        let dtype = Dtype::from_name(dtype).unwrap();
        Leaf {
            role,
            leaf: leaf.into(),
            name: match stacking {
                Stacking::PerExpert => format!("m.layers.4.experts.{{}}.{role:?}.{leaf}"),
                _ => format!("m.layers.4.experts.{role:?}.{leaf}"),
            },
            stacking,
            dtype,
            shape: shape.to_vec(),
            source_dim0: 0,
            image_offset: 0,
            bytes: dtype.tensor_bytes(shape).unwrap(),
            transform: Default::default(),
        }
    }

    fn sample() -> Layer {
        let wide = Class::layout(vec![
            leaf(
                Role::Down,
                "weight",
                "BF16",
                &[100, 700],
                Stacking::PerExpert,
            ),
            leaf(
                Role::Gate,
                "weight",
                "BF16",
                &[700, 100],
                Stacking::PerExpert,
            ),
            leaf(Role::Gate, "input_scale", "F32", &[], Stacking::Common),
        ])
        .unwrap();
        let narrow = Class::layout(vec![leaf(
            Role::Gate,
            "weight",
            "U8",
            &[64],
            Stacking::PerExpert,
        )])
        .unwrap();
        let column = |n: u64| LeafSource::Column {
            files: (0..n as u32).collect(),
            offsets: (0..n).map(|i| i * 1_000_000 + 17).collect(),
        };
        let chunks = 2 * chunks_of(&wide) + chunks_of(&narrow);
        Layer::new(
            1,
            4,
            9,
            2,
            vec![wide, narrow],
            vec![2, 3, 7],
            vec![0, 1, 0],
            Records::InPlace {
                sources: vec![
                    vec![
                        LeafSource::Strided {
                            file: 1,
                            base: 8,
                            step: 0,
                        },
                        column(2),
                        column(2),
                    ],
                    vec![column(1)],
                ],
            },
            Some((0..chunks).collect()),
            vec![
                vec![vec![1, 2, 3, 4], vec![], vec![]],
                vec![(0..64).collect()],
            ],
        )
        .unwrap()
    }

    fn chunks_of(class: &Class) -> u64 {
        crate::catalogue::chunk_count(class.image_bytes)
    }

    #[test]
    fn layer_survives_the_round_trip_with_and_without_sections() {
        let layer = sample();
        assert_eq!(
            decode_layer(&encode_layer(&layer, Sections::ALL)).unwrap(),
            layer
        );
        let lean = decode_layer(&encode_layer(
            &layer,
            Sections {
                segments: false,
                checksums: false,
                rest: false,
            },
        ))
        .unwrap();
        assert_eq!(lean.records, Records::Remote);
        assert_eq!(lean.checksums, None);
        assert_eq!(lean.id(false), layer.id(false));
        assert_ne!(layer.id(true), layer.id(false));
    }

    #[test]
    fn records_not_held_travel_where_they_are_asked_for() {
        let mut layer = sample();
        let rest = Rest {
            experts: vec![0, 1, 8],
            record_ids: vec![1, u128::MAX, 7 << 64],
            image_bytes_max: 512,
        };
        layer.set_rest(Some(rest)).unwrap();
        let all = encode_layer(&layer, Sections::ALL);
        assert_eq!(decode_layer(&all).unwrap(), layer);
        let lean = Sections {
            rest: false,
            ..Sections::ALL
        };
        assert_eq!(encode_layer(&layer, lean), encode_layer(&sample(), lean));
        assert_ne!(layer.whole_id(), sample().whole_id());
        let held = Rest {
            experts: vec![3],
            record_ids: vec![1],
            image_bytes_max: 512,
        };
        assert!(layer.set_rest(Some(held)).is_err());
    }

    #[test]
    fn header_that_overflows_the_stride_is_refused() {
        let layer = |header_bytes| {
            let leaf = leaf(Role::Gate, "weight", "U8", &[64], Stacking::PerExpert);
            let packed = Records::Packed {
                file: 0,
                stride: 4096,
                header_bytes,
            };
            let class = Class::layout(vec![leaf])?;
            Layer::new(
                0,
                0,
                1,
                0,
                vec![class],
                vec![0],
                vec![],
                packed,
                None,
                vec![],
            )
        };
        assert!(layer(256).is_ok());
        for header_bytes in [4096, u64::MAX] {
            let why = layer(header_bytes).unwrap_err();
            assert!(why.contains(&header_bytes.to_string()), "{why}");
        }
    }

    #[test]
    fn segments_cover_the_leaves_and_merge_where_both_sides_touch() {
        let class = Class::layout(vec![
            leaf(Role::Gate, "weight", "U8", &[512], Stacking::PerExpert),
            leaf(Role::Up, "weight", "U8", &[256], Stacking::PerExpert),
            leaf(Role::Down, "weight", "U8", &[300], Stacking::PerExpert),
        ])
        .unwrap();
        let at = |offset| LeafSource::Column {
            files: vec![0],
            offsets: vec![offset],
        };
        let layer = Layer::new(
            0,
            0,
            1,
            0,
            vec![class],
            vec![0],
            vec![],
            Records::InPlace {
                sources: vec![vec![at(1000), at(1512), at(9)]],
            },
            None,
            vec![],
        )
        .unwrap();
        let mut got = Vec::new();
        layer.for_each_segment(0, |s| got.push((s.file_offset, s.image_offset, s.bytes)));
        assert_eq!(got, [(1000, 0, 768), (9, 768, 300)]);
    }

    proptest! {
        #[test]
        fn damaged_blob_is_an_error_or_a_sound_layer_and_never_a_panic(
            cut in 0usize..4000, at in 0usize..4000, value: u8,
        ) {
            let mut blob = encode_layer(&sample(), Sections::ALL);
            let n = blob.len();
            blob[at % n] ^= value;
            blob.truncate(n - cut % n);
            if let Ok(layer) = decode_layer(&blob) {
                for position in 0..layer.experts.len() {
                    layer.for_each_segment(position, |_| ());
                    layer.record_checksums(position);
                    for leaf in 0..layer.class(position).leaves.len() {
                        layer.inline_value(position, leaf);
                    }
                }
                layer.id(true);
            }
        }
    }
}
