//! From recognised tensors to stacks of layers.

use std::collections::BTreeMap;

use super::Stack;
use super::config::{Config, Experts, Facts};
use super::gather::{Gathered, Place, Template};
use super::layer::{Input, build};
use crate::catalogue::{Container, Layer, StackClass};
use expert_wire::limits;

/// What assembling needs to know besides the tensors.
pub(crate) struct Context<'a> {
    /// Container of the tensors.
    pub(crate) container: Container,
    /// The model's description.
    pub(crate) config: &'a Config,
    /// File names, for messages.
    pub(crate) files: &'a [String],
}

/// Groups tensors into stacks and layers.
///
/// *Errors*: text for people: a tensor that is there twice, experts that are missing, shapes that
/// cannot be told apart by expert.
pub(crate) fn assemble(
    gathered: &Gathered,
    context: &Context<'_>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Stack>, String> {
    let (places, starts) = gathered.by_template();
    let of_template = |t: u32| &places[starts[t as usize]..starts[t as usize + 1]];
    let mut layers: BTreeMap<(&str, u32), Vec<u32>> = BTreeMap::new();
    for (i, template) in gathered.templates.iter().enumerate() {
        let i = i as u32;
        refuse_repeats(template, of_template(i), context.files)?;
        layers
            .entry((template.stack(), template.layer))
            .or_default()
            .push(i);
    }

    let mut facts_of: BTreeMap<&str, Facts> = BTreeMap::new();
    let mut stacks: BTreeMap<(u8, &str), Stack> = BTreeMap::new();
    let mut notes = Notes::default();
    for ((prefix, number), mut templates) in layers {
        templates.sort_unstable_by(|a, b| {
            let name = |t: &u32| &gathered.templates[*t as usize].name;
            name(a).cmp(name(b))
        });
        let facts = facts_of
            .entry(prefix)
            .or_insert_with(|| context.config.facts(prefix));
        let class = class_of(prefix, number, facts);
        let key = (u8::from(class == StackClass::Mtp), prefix);
        let dense = stacks.get(&key).map_or(0, |s| s.layers.len());
        if dense >= limits::LAYERS_MAX as usize {
            return Err(format!(
                "stack {prefix} has more than {} MoE layers",
                limits::LAYERS_MAX
            ));
        }
        let input = Input {
            leaves: templates
                .iter()
                .map(|&t| (&gathered.templates[t as usize], of_template(t)))
                .collect(),
            specs: &gathered.specs,
            experts_said: match &facts.experts {
                Some(Experts::All(n)) => Some(*n),
                Some(Experts::List(list)) => list.get(number as usize).copied().flatten(),
                None => None,
            },
            zero_experts: facts.zero_experts,
            container: context.container,
        };
        let built = build(&input, dense as u32, number, &mut notes)
            .map_err(|why| format!("layer {number} of {prefix}: {why}"))?;
        if let Some(layer) = built {
            let stack = stacks.entry(key).or_insert_with(|| Stack {
                prefix: prefix.to_owned(),
                class,
                layers: Vec::<Layer>::new(),
            });
            stack.layers.push(layer);
        }
    }
    notes.finish(warnings);
    Ok(stacks.into_values().collect())
}

/// Trunk or MTP; the trunk's number of layers is the only thing that tells them apart in some models.
fn class_of(prefix: &str, layer: u32, facts: &Facts) -> StackClass {
    let named = prefix.split('.').any(|s| s == "mtp");
    let beyond = facts.layers.is_some_and(|n| n > 0 && u64::from(layer) >= n);
    if named || beyond {
        StackClass::Mtp
    } else {
        StackClass::Trunk
    }
}

fn refuse_repeats(template: &Template, places: &[Place], files: &[String]) -> Result<(), String> {
    if let Some(pair) = places.windows(2).find(|w| w[0].expert == w[1].expert) {
        let file = |p: &Place| files.get(p.file as usize).map_or("", String::as_str);
        return Err(repeated(
            &template.of_expert(pair[0].expert),
            file(&pair[0]),
            file(&pair[1]),
        ));
    }
    Ok(())
}

/// What to tell where two files hold the same tensor.
pub(crate) fn repeated(tensor: &str, a: &str, b: &str) -> String {
    format!(
        "tensor {tensor:?} is in {a} and in {b}; checkpoints that were split for tensor parallelism, \
         or folders that mix two of them, are not read: use the original checkpoint"
    )
}

/// Things worth a warning that many layers may share; told once, with the first layer.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    told: BTreeMap<String, (String, usize)>,
}

impl Notes {
    /// Takes note of `what` (the same text for all layers it happens in) at `place`.
    pub(crate) fn add(&mut self, what: &str, place: impl FnOnce() -> String) {
        match self.told.get_mut(what) {
            Some((_, count)) => *count += 1,
            None => {
                self.told.insert(what.to_owned(), (place(), 1));
            }
        }
    }

    fn finish(self, warnings: &mut Vec<String>) {
        for (what, (place, count)) in self.told {
            let more = match count {
                1 => String::new(),
                n => format!(", and {} more", n - 1),
            };
            warnings.push(format!("{what} ({place}{more})"));
        }
    }
}

#[cfg(test)]
#[path = "tests/assemble.rs"]
mod tests;
