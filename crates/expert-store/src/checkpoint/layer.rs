//! One layer: how many experts it has, which leaves each of them has, and where those lie.

use std::collections::{BTreeMap, HashMap};

use super::assemble::Notes;
use super::gather::{Place, Spec, Template};
use super::recognise::{Form, Projection};
use crate::catalogue::{
    Class, Container, Layer, Leaf, LeafSource, Records, Role, Stacking, Transform,
};
use expert_wire::limits;

/// The tensors of one layer.
pub(crate) struct Input<'a> {
    /// Names with their tensors in order of expert, no expert twice; in bytewise order of name.
    pub(crate) leaves: Vec<(&'a Template, &'a [Place])>,
    /// Element types and shapes that the places refer to.
    pub(crate) specs: &'a [Spec],
    /// Number of experts that the model's description says.
    pub(crate) experts_said: Option<u64>,
    /// Zero experts that it says.
    pub(crate) zero_experts: u64,
    /// Container of the tensors.
    pub(crate) container: Container,
}

/// One leaf of the layer's records.
struct Column<'a> {
    role: Role,
    template: &'a Template,
    kind: Kind<'a>,
}

enum Kind<'a> {
    PerExpert(&'a [Place]),
    /// One tensor for the experts below `end`.
    Whole {
        place: Place,
        stacking: Stacking,
        shape: Vec<u64>,
        step: u64,
        dim0: u64,
        end: u32,
    },
}

/// Builds the layer, or nothing where the names turn out to be those of a dense one.
///
/// *Errors*: text for people.
pub(crate) fn build(
    input: &Input<'_>,
    layer: u32,
    model_layer: u32,
    notes: &mut Notes,
) -> Result<Option<Layer>, String> {
    let leaves = drop_dense(input, notes);
    let Some(module) = one_module(&leaves)? else {
        if let Some((template, _)) = leaves.first() {
            return Err(format!(
                "tensor {:?} belongs to experts, but their weights are missing",
                template.name
            ));
        }
        return Ok(None);
    };
    let Some(experts) = count_experts(input, &leaves, notes)? else {
        notes.add(
            "a layer whose experts hold no elements was left out",
            || module.to_owned(),
        );
        return Ok(None);
    };
    let roles = Roles::of(input, &leaves);
    let mut columns = Vec::with_capacity(leaves.len());
    for &(template, places) in &leaves {
        let kind = match template.form {
            Form::PerExpert => Kind::PerExpert(places),
            _ => whole(input, &leaves, template, places, experts)?,
        };
        columns.push(Column {
            role: roles.role(template),
            template,
            kind,
        });
    }
    // The order that `Class::layout` gives the leaves, so that the sources fit it.
    columns.sort_by(|a, b| {
        (a.role, &a.template.leaf, &a.template.name).cmp(&(
            b.role,
            &b.template.leaf,
            &b.template.name,
        ))
    });
    let (class_of, members) = classify(&columns, experts)?;
    let mut classes = Vec::with_capacity(members.len());
    let mut sources = Vec::with_capacity(members.len());
    for members in &members {
        let (class, source) = lay_out(input, &columns, members)?;
        classes.push(class);
        sources.push(source);
    }
    if classes.iter().all(|c| c.payload_bytes() == 0) {
        notes.add(
            "a layer whose experts hold no elements was left out",
            || module.to_owned(),
        );
        return Ok(None);
    }
    // Where the tensors have rows for zero experts (fused LongCat), those ids are counted already.
    let said = input.experts_said.unwrap_or(u64::from(experts));
    let identity = match input.zero_experts {
        zero if said < u64::from(experts) => {
            (said.saturating_add(zero)).saturating_sub(u64::from(experts))
        }
        zero => zero,
    };
    let identity = u32::try_from(identity).unwrap_or(u32::MAX);
    Layer::new(
        layer,
        model_layer,
        experts,
        identity,
        classes,
        (0..experts).collect(),
        class_of,
        Records::InPlace { sources },
        None,
        Vec::new(),
    )
    .map(Some)
}

type Leaves<'a> = Vec<(&'a Template, &'a [Place])>;

/// Leaves out modules whose name alone does not say that they hold experts and whose weights are matrices.
fn drop_dense<'a>(input: &Input<'a>, notes: &mut Notes) -> Leaves<'a> {
    let rank = |places: &[Place]| {
        places
            .first()
            .map_or(0, |p| input.specs[p.spec as usize].shape.len())
    };
    let deep = input
        .leaves
        .iter()
        .any(|(t, p)| t.form == Form::StackedIfDeep && t.is_weight() && rank(p) >= 3);
    let kept: Leaves<'a> = input
        .leaves
        .iter()
        .filter(|(t, _)| deep || t.form != Form::StackedIfDeep)
        .copied()
        .collect();
    if kept.len() < input.leaves.len() {
        notes.add(
            "a layer with matrices where stacked experts would be was taken for a dense one",
            || input.leaves[0].0.name.clone(),
        );
    }
    kept
}

/// The module that holds the experts, `None` where there are no weights.
fn one_module<'a>(leaves: &[(&'a Template, &'a [Place])]) -> Result<Option<&'a str>, String> {
    let mut modules = leaves
        .iter()
        .filter(|(t, _)| t.is_weight())
        .map(|(t, _)| (t.module(), t.form == Form::PerExpert));
    let Some(first) = modules.next() else {
        return Ok(None);
    };
    match modules.find(|m| *m != first) {
        None => Ok(Some(first.0)),
        Some(other) if other.0 == first.0 => Err(format!(
            "{} holds experts both one by one and stacked; use a checkpoint with one of the two",
            first.0
        )),
        Some(other) => Err(format!(
            "experts in two places, {} and {}; one layer has one set of routed experts",
            first.0, other.0
        )),
    }
}

/// The number of experts, `None` for a stack of none.
fn count_experts(
    input: &Input<'_>,
    leaves: &Leaves<'_>,
    notes: &mut Notes,
) -> Result<Option<u32>, String> {
    let single = leaves
        .iter()
        .any(|(t, _)| t.form == Form::PerExpert && t.is_weight());
    if single {
        let last = leaves
            .iter()
            .filter(|(t, _)| t.form == Form::PerExpert)
            .filter_map(|(_, p)| p.last())
            .map(|p| p.expert)
            .max();
        let experts = last.map_or(0, |e| e + 1);
        complete(leaves, experts)?;
        return Ok(Some(experts));
    }
    let mut counts = Vec::new();
    for &(template, places) in leaves.iter().filter(|(t, _)| t.is_weight()) {
        // A weight without elements says nothing, and its first dimension costs its writer nothing.
        let empty = places
            .iter()
            .all(|p| input.specs[p.spec as usize].shape.contains(&0));
        if !empty {
            counts.push((stacked_experts(input, template, places)?, template));
        }
    }
    let most = counts.iter().map(|c| c.0).max().unwrap_or(0);
    if let Some((fewer, template)) = counts.iter().find(|c| c.0 != most) {
        // Only where the model has zero experts may a weight have rows for them.
        if input.zero_experts == 0 {
            return Err(format!(
                "{} holds {fewer} experts, other weights of its layer {most}; the checkpoint is damaged",
                template.name
            ));
        }
        notes.add(
            "stacked weights of one layer hold different numbers of experts; those beyond the smaller lack that weight",
            || format!("{} has {fewer} of {most}", template.name),
        );
    }
    match u32::try_from(most) {
        Ok(0) => Ok(None),
        Ok(n) if n <= limits::EXPERTS_MAX => Ok(Some(n)),
        _ => Err(format!(
            "{} experts, the limit is {}",
            most,
            limits::EXPERTS_MAX
        )),
    }
}

/// Experts in one stacked weight.
fn stacked_experts(
    input: &Input<'_>,
    template: &Template,
    places: &[Place],
) -> Result<u64, String> {
    let Some(place) = places.first() else {
        return Ok(0);
    };
    let shape = &input.specs[place.spec as usize].shape;
    match (template.form, shape.len()) {
        (_, 3..) => Ok(shape[0]),
        (Form::Flattened, 2) => {
            let Some(experts) = input.experts_said.filter(|&n| n > 0) else {
                return Err(format!(
                    "{} holds the experts as blocks of rows, and only config.json can say how many there are \
                     (ffn_config.moe_num_experts or the like); put it beside the checkpoint",
                    template.name
                ));
            };
            if shape[0] % experts != 0 {
                return Err(format!(
                    "{} has {} rows, which {experts} experts (config.json) do not divide",
                    template.name, shape[0]
                ));
            }
            Ok(experts)
        }
        // ggml drops trailing dimensions of 1, so the only expert of a layer is a plain matrix.
        (_, 1 | 2)
            if input.container == Container::Gguf && input.experts_said.unwrap_or(1) <= 1 =>
        {
            Ok(1)
        }
        _ => Err(format!(
            "{} has shape {shape:?}; its experts cannot be told apart (stacked weights have the expert as the first of three dimensions)",
            template.name
        )),
    }
}

/// Whether each expert has each weight.
fn complete(leaves: &Leaves<'_>, experts: u32) -> Result<(), String> {
    // An expert may have its weight under another leaf than its neighbours (left unquantised), so
    // leaves beside each other fill each other's holes; parts of one weight (numa.0, numa.1) do not.
    let mut groups: BTreeMap<(Projection, &str), Leaves<'_>> = BTreeMap::new();
    for leaf in leaves {
        let (template, _) = leaf;
        if template.form == Form::PerExpert && template.is_weight() {
            let below = template.leaf.rsplit_once('.').map_or("", |(head, _)| head);
            groups
                .entry((template.projection, below))
                .or_default()
                .push(*leaf);
        }
    }
    for group in groups.values() {
        let mut at = vec![0usize; group.len()];
        for expert in 0..experts {
            let mut there = false;
            for (i, (_, places)) in group.iter().enumerate() {
                if places.get(at[i]).is_some_and(|p| p.expert == expert) {
                    at[i] += 1;
                    there = true;
                }
            }
            if !there {
                return Err(format!(
                    "tensor {:?} is missing (expert {expert} of {experts}); the checkpoint is incomplete",
                    group[0].0.of_expert(expert)
                ));
            }
        }
    }
    Ok(())
}

/// How a tensor that is not one expert's belongs to the experts.
fn whole<'a>(
    input: &Input<'_>,
    leaves: &Leaves<'_>,
    template: &Template,
    places: &[Place],
    experts: u32,
) -> Result<Kind<'a>, String> {
    let Some(&place) = places.first() else {
        return Err(format!("{} has no tensor", template.name));
    };
    let spec = &input.specs[place.spec as usize];
    let common = || {
        Ok(Kind::Whole {
            place,
            stacking: Stacking::Common,
            shape: spec.shape.to_vec(),
            step: 0,
            dim0: 0,
            end: experts,
        })
    };
    let Some((&dim0, rest)) = spec.shape.split_first() else {
        return common();
    };
    // Dimension 0 of the weight beside it: the two weights of a layer may differ.
    let beside = leaves
        .iter()
        .filter(|(t, _)| t.is_weight() && t.projection == template.projection)
        .filter_map(|(_, p)| p.first())
        .map(|p| &input.specs[p.spec as usize].shape)
        .find(|s| s.len() >= 2);
    let weight_dim0 = beside.map_or(0, |s| s[0]);
    let flattened = template.form == Form::Flattened && beside.is_some_and(|s| s.len() == 2);
    let all = u64::from(experts);
    let (stacking, count, shape) = if flattened {
        let rows = dim0 / all;
        let whole_rows = dim0 % all == 0 && dim0 > 0;
        if dim0 == all && spec.shape.len() == 1 {
            (Stacking::Stacked, all, rest.to_vec())
        } else if template.is_weight() || (whole_rows && (dim0 == weight_dim0 || !rest.is_empty()))
        {
            let mut shape = vec![rows];
            shape.extend_from_slice(rest);
            (Stacking::Flattened, all, shape)
        } else {
            return common();
        }
    } else if template.is_weight() {
        if spec.shape.len() < 3 {
            // The only expert of a GGUF layer, without its dimension of 1.
            return common();
        }
        (Stacking::Stacked, dim0, rest.to_vec())
    } else if dim0 > 0 && (dim0 == all || dim0 == weight_dim0) {
        (Stacking::Stacked, dim0, rest.to_vec())
    } else {
        return common();
    };
    let Some(step) = spec.dtype.tensor_bytes(&shape) else {
        return Err(format!(
            "{} of type {} and shape {:?}: the part of one expert is not whole bytes, it cannot be cut out",
            template.name, spec.dtype, spec.shape
        ));
    };
    Ok(Kind::Whole {
        place,
        stacking,
        shape,
        step,
        dim0,
        end: u32::try_from(count).unwrap_or(u32::MAX).min(experts),
    })
}

/// Roles of the layer's projections.
struct Roles {
    /// What `fc1` is here.
    fc1: Role,
}

impl Roles {
    /// `fc1`, `fc2`, `fc3` are gate, down and up where all are there. With two, `fc2` is down and
    /// `fc1` gate and up in one if it has twice the rows, else up alone.
    fn of(input: &Input<'_>, leaves: &Leaves<'_>) -> Self {
        let shape = |fc: u8| {
            leaves
                .iter()
                .find(|(t, _)| t.projection == Projection::Fc(fc) && t.is_weight())
                .and_then(|(_, p)| p.first())
                .and_then(|p| match *input.specs[p.spec as usize].shape {
                    [.., rows, cols] => Some((rows, cols)),
                    _ => None,
                })
        };
        let three = leaves
            .iter()
            .any(|(t, _)| t.projection == Projection::Fc(3));
        let switch = leaves
            .iter()
            .any(|(t, _)| t.module().ends_with("switch_mlp."));
        let fc1 = match (shape(1), shape(2)) {
            _ if three => Role::Gate,
            (Some((a, b)), Some((c, d))) if a == d && b == c => Role::Up,
            (Some((a, b)), Some((c, d)))
                if (b == c && d.checked_mul(2) == Some(a))
                    || (a == d && c.checked_mul(2) == Some(b)) =>
            {
                Role::GateUp
            }
            // Packed weights hide their width; MLX is the one that packs and writes `switch_mlp`.
            _ if switch => Role::Up,
            _ => Role::GateUp,
        };
        Self { fc1 }
    }

    fn role(&self, template: &Template) -> Role {
        match template.projection {
            Projection::Known(role) => role,
            Projection::Fc(1) => self.fc1,
            Projection::Fc(2) => Role::Down,
            Projection::Fc(_) => Role::Up,
        }
    }
}

/// Experts by shape class: the class of each (empty where there is one) and the members of each.
fn classify(columns: &[Column<'_>], experts: u32) -> Result<(Vec<u8>, Vec<Vec<u32>>), String> {
    let uniform = columns.iter().all(|c| match &c.kind {
        Kind::PerExpert(places) => {
            places.len() == experts as usize && places.windows(2).all(|w| w[0].spec == w[1].spec)
        }
        Kind::Whole { end, .. } => *end == experts,
    });
    if uniform {
        return Ok((Vec::new(), vec![(0..experts).collect()]));
    }
    // What tells an expert's leaves: how many whole tensors end before it, and its own tensors.
    let mut ends: Vec<u32> = columns
        .iter()
        .filter_map(|c| match &c.kind {
            Kind::Whole { end, .. } => Some(*end),
            Kind::PerExpert(_) => None,
        })
        .collect();
    ends.sort_unstable();
    let mut signatures: Vec<Vec<(u32, u32)>> = (0..experts)
        .map(|e| vec![(u32::MAX, ends.partition_point(|&end| end <= e) as u32)])
        .collect();
    for (i, column) in columns.iter().enumerate() {
        if let Kind::PerExpert(places) = &column.kind {
            for place in *places {
                if let Some(signature) = signatures.get_mut(place.expert as usize) {
                    signature.push((i as u32, place.spec));
                }
            }
        }
    }
    let mut known: HashMap<Vec<(u32, u32)>, u8> = HashMap::new();
    let mut members: Vec<Vec<u32>> = Vec::new();
    let mut class_of = Vec::with_capacity(experts as usize);
    for (expert, signature) in (0..experts).zip(signatures) {
        let class = match known.get(&signature) {
            Some(&c) => c,
            None => {
                let c = u8::try_from(members.len())
                    .map_err(|_| "its experts have more than 256 different shapes".to_owned())?;
                known.insert(signature, c);
                members.push(Vec::new());
                c
            }
        };
        class_of.push(class);
        members[usize::from(class)].push(expert);
    }
    if members.len() == 1 {
        class_of.clear();
    }
    Ok((class_of, members))
}

/// Leaves and sources of the experts of one class.
fn lay_out(
    input: &Input<'_>,
    columns: &[Column<'_>],
    members: &[u32],
) -> Result<(Class, Vec<LeafSource>), String> {
    let first = members.first().copied().unwrap_or(0);
    let mut leaves = Vec::new();
    let mut sources = Vec::new();
    for column in columns {
        let (stacking, dtype, shape, dim0, source) = match &column.kind {
            Kind::PerExpert(places) => {
                let Ok(at) = places.binary_search_by_key(&first, |p| p.expert) else {
                    continue;
                };
                let mut files = Vec::with_capacity(members.len());
                let mut offsets = Vec::with_capacity(members.len());
                let mut rest = places[at..].iter();
                for expert in members {
                    let place = rest
                        .find(|p| p.expert == *expert)
                        .ok_or("the experts of a shape class differ in their leaves")?;
                    files.push(place.file);
                    offsets.push(place.offset);
                }
                let spec = &input.specs[places[at].spec as usize];
                (
                    Stacking::PerExpert,
                    spec.dtype,
                    spec.shape.to_vec(),
                    0,
                    LeafSource::Column { files, offsets },
                )
            }
            Kind::Whole {
                place,
                stacking,
                shape,
                step,
                dim0,
                end,
            } => {
                if first >= *end {
                    continue;
                }
                let source = LeafSource::Strided {
                    file: place.file,
                    base: place.offset,
                    step: *step,
                };
                let dtype = input.specs[place.spec as usize].dtype;
                (*stacking, dtype, shape.clone(), *dim0, source)
            }
        };
        let bytes = dtype
            .tensor_bytes(&shape)
            .ok_or_else(|| format!("{} has a size that cannot be told", column.template.name))?;
        leaves.push(Leaf {
            role: column.role,
            leaf: column.template.leaf.clone(),
            name: column.template.name.clone(),
            stacking,
            dtype,
            shape,
            source_dim0: dim0,
            image_offset: 0,
            bytes,
            transform: Transform::None,
        });
        sources.push(source);
    }
    Ok((Class::layout(leaves)?, sources))
}
