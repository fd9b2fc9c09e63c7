//! The tensors of a made-up checkpoint and its config.

use serde_json::{Map, Value, json};

use super::families::{Family, Layout, Projection, Scheme};
use super::payload::Fill;
use crate::Dtype;
use crate::containers::TensorOut;

/// Sizes of the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    pub(super) layers: u32,
    pub(super) experts: u32,
    pub(super) hidden: u32,
    pub(super) inter: u32,
}

pub(super) struct Tensor {
    pub(super) out: TensorOut,
    pub(super) fill: Fill,
}

/// One leaf of a projection of one expert.
struct LeafPart {
    name: &'static str,
    dtype: &'static str,
    shape: Vec<u64>,
    kind: Kind,
}

enum Kind {
    Weight,
    Scale,
    /// Little-endian I64.
    Numbers(Vec<i64>),
}

fn tensor(name: String, dtype: &str, shape: Vec<u64>, kind: &Kind) -> Result<Tensor, String> {
    let dtype = Dtype::from_name(dtype).ok_or_else(|| format!("no type {dtype}"))?;
    let bytes = dtype.tensor_bytes(&shape).ok_or_else(|| {
        format!("{name}: shape {shape:?} does not fit type {dtype}; choose other sizes")
    })?;
    let fill = match kind {
        Kind::Weight => Fill::weight(dtype),
        Kind::Scale => Fill::scale(dtype),
        Kind::Numbers(list) => Fill::Given(list.iter().flat_map(|n| n.to_le_bytes()).collect()),
    };
    Ok(Tensor {
        out: TensorOut {
            name,
            dtype,
            shape,
            bytes,
        },
        fill,
    })
}

/// Number of the layer, in the file, that is the `i`-th MoE layer.
fn number(family: &Family, i: u32) -> u32 {
    family.dense + i * family.every + family.every - 1
}

/// All tensors, experts and others, in the order of a model's modules.
pub(super) fn list(family: &Family, g: &Geometry) -> Result<Vec<Tensor>, String> {
    let mut out = Vec::new();
    let plain = if family.layout == Layout::Gguf {
        "F32"
    } else {
        "BF16"
    };
    let hidden = u64::from(g.hidden);
    let embedding = match family.layout {
        Layout::Gguf => "token_embd.weight",
        _ => "model.embed_tokens.weight",
    };
    out.push(tensor(
        embedding.into(),
        plain,
        vec![64, hidden],
        &Kind::Weight,
    )?);
    let trunk = number(family, g.layers.saturating_sub(1)).saturating_add(1);
    let numbers: Vec<u32> = (0..g.layers)
        .map(|i| number(family, i))
        .chain((0..family.mtp).map(|i| trunk.saturating_add(i)))
        .collect();
    for (i, &n) in numbers.iter().enumerate() {
        for &(decoy, large) in family.decoys {
            let shape = match (large, decoy.ends_with("bias")) {
                (true, _) => vec![u64::from(g.inter), hidden],
                (false, true) => vec![u64::from(g.experts)],
                (false, false) if decoy.contains("norm") => vec![hidden],
                (false, false) => vec![u64::from(g.experts), hidden],
            };
            let name = format!("{}.{n}.{decoy}", family.stack);
            out.push(tensor(name, plain, shape, &Kind::Weight)?);
        }
        if n >= trunk {
            let name = format!("{}.{n}.eh_proj.weight", family.stack);
            out.push(tensor(
                name,
                plain,
                vec![hidden, 2 * hidden],
                &Kind::Weight,
            )?);
        }
        experts(family, g, i, n, &mut out)?;
    }
    Ok(out)
}

fn experts(
    family: &Family,
    g: &Geometry,
    index: usize,
    number: u32,
    out: &mut Vec<Tensor>,
) -> Result<(), String> {
    let module = match family.module {
        "" => format!("{}.{number}", family.stack),
        m => format!("{}.{number}.{m}", family.stack),
    };
    let e = u64::from(g.experts);
    let stacked = |shape: &[u64]| {
        let mut all = vec![e];
        all.extend_from_slice(shape);
        all
    };
    if family.layout == Layout::PerExpert {
        for expert in 0..g.experts {
            for &(name, projection) in family.projections {
                for part in parts(family, g, projection, index) {
                    let full = format!("{module}.{expert}.{name}.{}", part.name);
                    out.push(tensor(full, part.dtype, part.shape, &part.kind)?);
                }
            }
        }
        return Ok(());
    }
    for &(name, projection) in family.projections {
        for part in parts(family, g, projection, index) {
            let (full, shape) = match family.layout {
                Layout::Flattened => {
                    let mut shape = part.shape;
                    if projection == Projection::Down {
                        shape.reverse();
                    }
                    shape[0] = shape[0].checked_mul(e).ok_or("a tensor overflows")?;
                    (format!("{module}.{name}"), shape)
                }
                Layout::Stacked {
                    separator,
                    named,
                    transposed,
                } => {
                    let mut shape = part.shape;
                    if transposed {
                        shape.reverse();
                    }
                    let full = match (part.name, named) {
                        ("weight", false) => format!("{module}.{name}"),
                        (leaf, _) => format!("{module}.{name}{separator}{leaf}"),
                    };
                    (full, stacked(&shape))
                }
                Layout::Gguf | Layout::PerExpert => (
                    format!("{module}.{name}.{}", part.name),
                    stacked(&part.shape),
                ),
            };
            out.push(tensor(full, part.dtype, shape, &part.kind)?);
        }
    }
    Ok(())
}

/// The leaves of one projection of one expert.
fn parts(family: &Family, g: &Geometry, projection: Projection, layer: usize) -> Vec<LeafPart> {
    let (h, i) = (u64::from(g.hidden), u64::from(g.inter));
    let (rows, columns) = match projection {
        Projection::Gate | Projection::Up => (i, h),
        Projection::GateUp => (2 * i, h),
        Projection::Down => (h, i),
    };
    let leaf = |name, dtype, shape: &[u64], kind| LeafPart {
        name,
        dtype,
        shape: shape.to_vec(),
        kind,
    };
    let weight = |name, dtype, shape: &[u64]| leaf(name, dtype, shape, Kind::Weight);
    let scale = |name, dtype, shape: &[u64]| leaf(name, dtype, shape, Kind::Scale);
    match family.scheme {
        Scheme::Plain => vec![weight("weight", "BF16", &[rows, columns])],
        Scheme::Fp8Block(dtype) => vec![
            weight("weight", "F8_E4M3", &[rows, columns]),
            scale(
                "weight_scale_inv",
                dtype,
                &[rows.div_ceil(128), columns.div_ceil(128)],
            ),
        ],
        Scheme::Nvfp4ModelOpt => vec![
            weight("weight", "U8", &[rows, columns / 2]),
            scale("weight_scale", "F8_E4M3", &[rows, columns / 16]),
            scale("weight_scale_2", "F32", &[]),
            scale("input_scale", "F32", &[]),
        ],
        Scheme::Nvfp4CompressedTensors => vec![
            weight("weight_packed", "U8", &[rows, columns / 2]),
            scale("weight_scale", "F8_E4M3", &[rows, columns / 16]),
            scale("weight_global_scale", "F32", &[1]),
            scale("input_global_scale", "F32", &[1]),
        ],
        Scheme::Int4 => vec![
            weight("weight_packed", "I32", &[rows, columns.div_ceil(8)]),
            scale("weight_scale", "BF16", &[rows, columns / 32]),
            leaf(
                "weight_shape",
                "I64",
                &[2],
                Kind::Numbers(vec![rows as i64, columns as i64]),
            ),
        ],
        Scheme::Mxfp4CompressedTensors => vec![
            weight("weight_packed", "U8", &[rows, columns / 2]),
            scale("weight_scale", "U8", &[rows, columns / 32]),
        ],
        Scheme::Mxfp4DeepSeek => vec![
            weight("weight", "I8", &[rows, columns / 2]),
            scale("scale", "F8_E8M0", &[rows, columns / 32]),
        ],
        Scheme::Mxfp4GptOss => vec![
            weight("blocks", "U8", &[rows, columns / 32, 16]),
            scale("scales", "U8", &[rows, columns / 32]),
            weight("bias", "BF16", &[rows]),
        ],
        Scheme::Mlx => vec![
            weight("weight", "U32", &[rows, columns / 8]),
            scale("scales", "BF16", &[rows, columns / 64]),
            weight("biases", "BF16", &[rows, columns / 64]),
        ],
        Scheme::Gptq => vec![
            weight("qweight", "I32", &[columns / 8, rows]),
            weight("qzeros", "I32", &[columns / 128, rows / 8]),
            scale("scales", "F16", &[columns / 128, rows]),
            weight("g_idx", "I32", &[columns]),
        ],
        Scheme::Ggml {
            wide,
            down,
            bias,
            scale: scaled,
        } => {
            let dtype = match projection {
                Projection::Down if layer % 2 == 0 => down,
                _ => wide,
            };
            let mut out = vec![weight("weight", dtype, &[rows, columns])];
            if bias {
                out.push(weight("bias", "F32", &[rows]));
            }
            if scaled {
                out.push(scale("scale", "F32", &[]));
            }
            out
        }
    }
}

/// `config.json`.
pub(super) fn config(family: &Family, g: &Geometry) -> Value {
    let trunk = number(family, g.layers.saturating_sub(1)).saturating_add(1);
    let mut moe = Map::new();
    let values = [g.experts, g.experts.min(4), g.inter];
    for (key, value) in family.keys.into_iter().zip(values) {
        moe.insert(key.into(), json!(value));
    }
    let mut rest = Map::new();
    rest.insert(family.layers_key.into(), json!(trunk));
    rest.insert(family.hidden_key.into(), json!(g.hidden));
    if family.mtp > 0 {
        rest.insert("num_nextn_predict_layers".into(), json!(family.mtp));
    }
    if family.every > 1 {
        let kind = |n: u32| {
            if n % family.every == family.every - 1 {
                "moe"
            } else {
                "mamba"
            }
        };
        let kinds: Vec<&str> = (0..trunk).map(kind).collect();
        rest.insert("layers_block_type".into(), json!(kinds));
    }
    for &(key, value) in family.extra {
        rest.insert(key.into(), json!(value));
    }
    let mut config = match family.nested {
        Some("ffn_config") => {
            rest.insert("ffn_config".into(), Value::Object(moe));
            rest
        }
        Some(key) => {
            rest.extend(moe);
            Map::from_iter([(key.to_owned(), Value::Object(rest))])
        }
        None => {
            rest.extend(moe);
            rest
        }
    };
    config.insert("model_type".into(), json!(family.model_type));
    config.insert("architectures".into(), json!([family.architecture]));
    Value::Object(config)
}
