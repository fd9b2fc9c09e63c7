//! Tensor names: which stack, layer, expert and projection a name means.
//!
//! A hand-written splitter, because a checkpoint has up to half a million names; the tests hold it
//! against the regular expressions of the layouts. It accepts a little more than they do: what
//! lies below an expert but is no known projection is kept as that expert's opaque bytes.

use std::ops::Range;

use crate::catalogue::Role;
use expert_wire::limits;

/// What a projection's name says about its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Projection {
    /// A role that the name alone tells.
    Known(Role),
    /// `fc1`, `fc2`, `fc3`: what they mean depends on which are there and on their shapes.
    Fc(u8),
}

/// How a tensor of that name holds the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Form {
    /// One tensor per expert.
    PerExpert,
    /// Experts are dimension 0, below a module whose name says so.
    Stacked,
    /// As [`Form::Stacked`], but dense layers use the same names: only a three-dimensional weight is meant.
    StackedIfDeep,
    /// Experts are blocks of rows (DBRX), or dimension 0 where the weight has three dimensions.
    Flattened,
}

/// A name that belongs to a routed expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recognised<'a> {
    /// Prefix including the unit, e.g. `model.layers`.
    pub(crate) stack: &'a str,
    /// Layer number in the name.
    pub(crate) layer: u32,
    /// The name up to where experts or projections begin: one per layer in a sound checkpoint.
    pub(crate) module: &'a str,
    /// Expert index and where its digits lie in the name.
    pub(crate) expert: Option<(u32, Range<usize>)>,
    /// Which projection.
    pub(crate) projection: Projection,
    /// Canonical leaf name.
    pub(crate) leaf: &'a str,
    /// How the tensor holds the experts.
    pub(crate) form: Form,
}

const GATE: Projection = Projection::Known(Role::Gate);
const GATE_UP: Projection = Projection::Known(Role::GateUp);
const UP: Projection = Projection::Known(Role::Up);
const DOWN: Projection = Projection::Known(Role::Down);
const OTHER: Projection = Projection::Known(Role::Other);

/// Projections of stacked modules; the first whose remainder is a leaf wins, so longer names come first.
const STACKED: &[(&str, Projection)] = &[
    ("gate_up_proj", GATE_UP),
    ("gate_and_up_projs", GATE_UP),
    ("gate_proj", GATE),
    ("up_proj", UP),
    ("down_projs", DOWN),
    ("down_proj", DOWN),
    ("w13_weight", GATE_UP),
    ("w2_weight", DOWN),
    ("w13", GATE_UP),
    ("w1", GATE),
    ("w2", DOWN),
    ("w3", UP),
    ("v1", UP),
    ("fc1", Projection::Fc(1)),
    ("fc2", Projection::Fc(2)),
    ("fc3", Projection::Fc(3)),
];

fn per_expert_projection(segment: &str) -> Option<Projection> {
    Some(match segment {
        "gate_proj" | "w1" | "gate" => GATE,
        "up_proj" | "w3" | "up" => UP,
        "down_proj" | "w2" | "down" => DOWN,
        "gate_up_proj" | "gate_and_up_proj" => GATE_UP,
        "fc1" => Projection::Fc(1),
        "fc2" => Projection::Fc(2),
        "fc3" => Projection::Fc(3),
        _ => return None,
    })
}

fn plural_projection(segment: &str) -> Option<Projection> {
    Some(match segment {
        "gate_up_projs" => GATE_UP,
        "gate_projs" => GATE,
        "up_projs" => UP,
        "down_projs" => DOWN,
        _ => return None,
    })
}

/// Leaves that hold an expert's weights, without which the expert is not there; the last segment counts.
pub(crate) fn is_weight(leaf: &str) -> bool {
    let last = leaf.rsplit('.').next().unwrap_or(leaf);
    matches!(
        last,
        "weight" | "weight_packed" | "packed" | "qweight" | "blocks" | "trellis"
    )
}

/// Whether a name belongs to an adapter (LoRA) instead of to a model.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.starts_with("lora_") || name.contains(".lora_")
}

/// Whether a name that was not recognised looks as if it should have been: worth a warning.
pub(crate) fn looks_like_expert(name: &str) -> bool {
    const KNOWN: [&str; 9] = [
        "e_score_correction_bias",
        "expert_bias",
        "per_expert_scale",
        "ffn_norm_exps",
        "shared_expert",
        "router",
        "latent_proj",
        "chunk_experts",
        "self_attention",
    ];
    (name.contains(".experts.") || name.contains("_exps."))
        && !KNOWN.iter().any(|k| name.contains(k))
}

/// The expert index of a name that no checkpoint of ours can hold: beyond the limit, or with a zero in front.
pub(crate) fn impossible_expert(name: &str) -> Option<&str> {
    let (_, rest) = name.split_once(".experts.")?;
    let (digits, _) = rest.split_once('.')?;
    let number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    (number && expert_number(rest, 0).is_none()).then_some(digits)
}

/// What a tensor name means, `None` where it is not a routed expert's.
///
/// Names that look alike (shared experts, routers, latent projections, adapters) are not experts.
///
/// *Source*: the modules of transformers, sglang, mlx-lm and llama.cpp; the tests list them by family.
pub(crate) fn recognise(name: &str) -> Option<Recognised<'_>> {
    if let Some(found) = ggml(name) {
        return Some(found);
    }
    let mut at = 0;
    loop {
        let (segment, next) = segment(name, at);
        let next = next?;
        if is_unit(segment) {
            if let Some((layer, Some(after))) = number(name, next) {
                let found = below_layer(name, &name[..next - 1], layer, after)?;
                return (!is_adapter(name)).then_some(found);
            }
        }
        if !is_identifier(segment) {
            return None;
        }
        at = next;
    }
}

fn is_unit(segment: &str) -> bool {
    matches!(segment, "layers" | "blocks" | "h" | "decoder_layer" | "mtp")
}

/// The segment that starts at `at` and where the next one starts, `None` after the last.
fn segment(name: &str, at: usize) -> (&str, Option<usize>) {
    let rest = &name[at..];
    match rest.as_bytes().iter().position(|&b| b == b'.') {
        Some(dot) => (&rest[..dot], Some(at + dot + 1)),
        None => (rest, None),
    }
}

/// The decimal number that fills the segment at `at`, and where the next segment starts.
fn number(name: &str, at: usize) -> Option<(u32, Option<usize>)> {
    let (digits, next) = segment(name, at);
    if digits.is_empty() || digits.len() > 9 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some((digits.parse().ok()?, next))
}

/// An expert index: a number in its only spelling (`07` could not be restored from `7`) and in bounds.
fn expert_number(name: &str, at: usize) -> Option<(u32, Range<usize>, Option<usize>)> {
    let (expert, next) = number(name, at)?;
    let end = next.map_or(name.len(), |n| n - 1);
    let canonical = end - at == 1 || name.as_bytes()[at] != b'0';
    (canonical && expert < limits::EXPERTS_MAX).then_some((expert, at..end, next))
}

fn is_identifier(segment: &str) -> bool {
    segment
        .as_bytes()
        .first()
        .is_some_and(|b| b.is_ascii_alphabetic() || *b == b'_')
}

/// What follows the layer's number: modules down to the experts.
fn below_layer<'a>(
    name: &'a str,
    stack: &'a str,
    layer: u32,
    start: usize,
) -> Option<Recognised<'a>> {
    let found = |module: usize, expert, projection, leaf, form| Recognised {
        stack,
        layer,
        module: &name[..module],
        expert,
        projection,
        leaf,
        form,
    };
    let mut at = start;
    loop {
        let (segment, next) = segment(name, at);
        let next = next?;
        let first = at == start;
        let stacked_at = |at: usize, form| {
            stacked(&name[at..]).map(|(projection, leaf)| found(next, None, projection, leaf, form))
        };
        let hit = match segment {
            "experts" => experts(name, next, &found, &stacked_at),
            "switch_mlp" => stacked_at(next, Form::Stacked),
            "moe" if first => grok(name, next, &found).or_else(|| {
                let (projection, leaf) = split_leaf(&name[next..])?;
                let projection = match projection {
                    "gate_proj" => GATE,
                    "up_proj" => UP,
                    "down_proj" => DOWN,
                    _ => return None,
                };
                Some(found(next, None, projection, leaf, Form::StackedIfDeep))
            }),
            "block_sparse_moe" | "mlp" if first => {
                split_leaf(&name[next..]).and_then(|(projection, leaf)| {
                    let projection = match projection {
                        "input_linear" => GATE_UP,
                        "output_linear" => DOWN,
                        _ => return None,
                    };
                    Some(found(next, None, projection, leaf, Form::StackedIfDeep))
                })
            }
            _ => None,
        };
        if hit.is_some() {
            return hit;
        }
        if !is_identifier(segment) {
            return None;
        }
        at = next;
    }
}

type Found<'a, 'f> =
    dyn Fn(usize, Option<(u32, Range<usize>)>, Projection, &'a str, Form) -> Recognised<'a> + 'f;

/// What follows an `experts.` segment that ends before `at`.
fn experts<'a>(
    name: &'a str,
    at: usize,
    found: &Found<'a, '_>,
    stacked_at: &dyn Fn(usize, Form) -> Option<Recognised<'a>>,
) -> Option<Recognised<'a>> {
    if let Some((expert, digits, next)) = expert_number(name, at) {
        let rest = &name[next?..];
        let (projection, leaf) = match split_leaf(rest) {
            Some((segment, leaf)) => match per_expert_projection(segment) {
                Some(projection) => (projection, leaf),
                None => (OTHER, rest),
            },
            None => return None,
        };
        return Some(found(
            at,
            Some((expert, digits)),
            projection,
            leaf,
            Form::PerExpert,
        ));
    }
    let (segment, next) = segment(name, at);
    if let (Some(projection), Some(next)) = (plural_projection(segment), next) {
        if let Some((expert, digits, after)) = expert_number(name, next) {
            let leaf = after.map_or("weight", |after| &name[after..]);
            return (!leaf.is_empty()).then(|| {
                found(
                    at,
                    Some((expert, digits)),
                    projection,
                    leaf,
                    Form::PerExpert,
                )
            });
        }
    }
    match (segment, next) {
        ("switch_glu", Some(next)) => stacked_at(next, Form::Stacked),
        ("mlp", Some(next)) => stacked_at(next, Form::Flattened),
        _ => stacked_at(at, Form::Stacked),
    }
}

/// Grok-1: experts lie directly below `moe`.
fn grok<'a>(name: &'a str, at: usize, found: &Found<'a, '_>) -> Option<Recognised<'a>> {
    let (expert, digits, next) = expert_number(name, at)?;
    let (projection, leaf) = split_leaf(&name[next?..])?;
    let projection = match projection {
        "linear" => GATE,
        "linear_v" => UP,
        "linear_1" => DOWN,
        _ => return None,
    };
    Some(found(
        at,
        Some((expert, digits)),
        projection,
        leaf,
        Form::PerExpert,
    ))
}

/// Splits at the first dot; where nothing follows, the leaf is the weight itself.
fn split_leaf(rest: &str) -> Option<(&str, &str)> {
    let (head, leaf) = match rest.split_once('.') {
        Some((head, leaf)) => (head, leaf),
        None => (rest, "weight"),
    };
    (!head.is_empty() && !leaf.is_empty()).then_some((head, leaf))
}

/// A stacked projection and its leaf, which follows after a dot or an underscore.
fn stacked(rest: &str) -> Option<(Projection, &str)> {
    for &(text, projection) in STACKED {
        let Some(after) = rest.strip_prefix(text) else {
            continue;
        };
        if after.is_empty() {
            return Some((projection, "weight"));
        }
        let leaf = match after.as_bytes() {
            [b'.' | b'_', first, ..] if first.is_ascii_alphabetic() || *first == b'_' => {
                &after[1..]
            }
            _ => continue,
        };
        return (!leaf.starts_with("latent_proj")).then_some((projection, leaf));
    }
    None
}

/// Names of ggml: GGUF files, and the safetensors of KTransformers that reuse them.
fn ggml(name: &str) -> Option<Recognised<'_>> {
    let after = "blk.".len();
    if !name.starts_with("blk.") {
        return None;
    }
    let (layer, next) = number(name, after)?;
    let module = next?;
    let (tensor, next) = segment(name, module);
    let next = next?;
    let (projection, exps) = match tensor {
        "ffn_gate_exps" => (GATE, true),
        "ffn_up_exps" => (UP, true),
        "ffn_down_exps" => (DOWN, true),
        "ffn_gate_up_exps" => (GATE_UP, true),
        "ffn_gate" => (GATE, false),
        "ffn_up" => (UP, false),
        "ffn_down" => (DOWN, false),
        _ => return None,
    };
    let (expert, leaf, form) = match expert_number(name, next) {
        Some((expert, digits, after)) => (
            Some((expert, digits)),
            after.map_or("weight", |a| &name[a..]),
            Form::PerExpert,
        ),
        None if exps => (None, &name[next..], Form::Stacked),
        None => return None,
    };
    (!leaf.is_empty() && !is_adapter(name)).then_some(Recognised {
        stack: "blk",
        layer,
        module: &name[..module],
        expert,
        projection,
        leaf,
        form,
    })
}

#[cfg(test)]
#[path = "tests/recognise.rs"]
mod tests;
