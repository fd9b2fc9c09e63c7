//! What the headers hold of routed experts, compactly: names are kept once per layer and leaf, and a
//! tensor is 24 bytes.

use std::collections::HashMap;

use super::recognise::{
    Form, Projection, impossible_expert, is_adapter, is_weight, looks_like_expert, recognise,
};
use crate::Dtype;

/// A tensor name with the expert's index left out.
#[derive(Debug, Clone)]
pub(crate) struct Template {
    /// Source name, `{}` in place of the expert's index.
    pub(crate) name: String,
    stack_bytes: usize,
    module_bytes: usize,
    /// Layer number in the name.
    pub(crate) layer: u32,
    /// Which projection.
    pub(crate) projection: Projection,
    /// Canonical leaf name.
    pub(crate) leaf: String,
    /// How the tensor holds the experts.
    pub(crate) form: Form,
}

impl Template {
    /// Stack prefix, e.g. `model.layers`.
    pub(crate) fn stack(&self) -> &str {
        &self.name[..self.stack_bytes]
    }

    /// The name up to where experts or projections begin.
    pub(crate) fn module(&self) -> &str {
        &self.name[..self.module_bytes]
    }

    /// Whether the leaf holds weights.
    pub(crate) fn is_weight(&self) -> bool {
        is_weight(&self.leaf)
    }

    /// The source name of one expert's tensor.
    pub(crate) fn of_expert(&self, expert: u32) -> String {
        self.name.replace("{}", &expert.to_string())
    }
}

/// Element type and shape, which many tensors share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Spec {
    /// Element type.
    pub(crate) dtype: Dtype,
    /// Outermost dimension first.
    pub(crate) shape: Box<[u64]>,
}

/// One tensor: what it is and where its bytes start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// Index of its template.
    pub(crate) template: u32,
    /// Expert index, 0 where the tensor is not one expert's.
    pub(crate) expert: u32,
    /// Index into the checkpoint's files.
    pub(crate) file: u32,
    /// Index of its spec.
    pub(crate) spec: u32,
    /// First byte, from the start of the file.
    pub(crate) offset: u64,
}

/// What was found in a number of headers.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    /// Names.
    pub(crate) templates: Vec<Template>,
    /// Element types and shapes.
    pub(crate) specs: Vec<Spec>,
    /// Tensors of experts.
    pub(crate) places: Vec<Place>,
    /// All tensors, experts or not.
    pub(crate) tensors: u64,
    /// Tensors of adapters.
    pub(crate) adapters: u64,
    /// Tensors below a module of experts that were not recognised.
    pub(crate) unknown: u64,
    /// The bytewise first of them.
    pub(crate) unknown_name: Option<String>,
    by_name: HashMap<String, u32>,
    by_spec: HashMap<Spec, u32>,
    /// Spec of the last tensor of each template: nearly always that of the next.
    last_spec: Vec<u32>,
    key: String,
}

impl Gathered {
    /// Takes note of one tensor.
    ///
    /// *Errors*: text for people where the name cannot be kept.
    pub(crate) fn add(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        file: u32,
        offset: u64,
    ) -> Result<(), String> {
        self.tensors += 1;
        let Some(found) = recognise(name) else {
            if is_adapter(name) {
                self.adapters += 1;
            } else if looks_like_expert(name) {
                if let Some(index) = impossible_expert(name) {
                    return Err(format!(
                        "tensor {name:?} has the expert index {index}; indices are plain numbers below {}",
                        expert_wire::limits::EXPERTS_MAX
                    ));
                }
                self.unknown += 1;
                if self.unknown_name.as_deref().is_none_or(|n| name < n) {
                    self.unknown_name = Some(name.to_owned());
                }
            }
            return Ok(());
        };
        if name.contains("{}") {
            return Err(format!(
                "tensor {name:?} has '{{}}' in its name, which marks the expert's place; rename it"
            ));
        }
        let (expert, key) = match &found.expert {
            Some((expert, digits)) => {
                self.key.clear();
                self.key.push_str(&name[..digits.start]);
                self.key.push_str("{}");
                self.key.push_str(&name[digits.end..]);
                (*expert, self.key.as_str())
            }
            None => (0, name),
        };
        let template = match self.by_name.get(key) {
            Some(&t) => t,
            None => {
                let t = self.templates.len() as u32;
                self.templates.push(Template {
                    name: key.to_owned(),
                    stack_bytes: found.stack.len(),
                    module_bytes: found.module.len(),
                    layer: found.layer,
                    projection: found.projection,
                    leaf: found.leaf.to_owned(),
                    form: found.form,
                });
                self.by_name.insert(key.to_owned(), t);
                self.last_spec.push(u32::MAX);
                t
            }
        };
        let last = self.last_spec[template as usize];
        let spec = match self.specs.get(last as usize) {
            Some(s) if s.dtype == dtype && *s.shape == *shape => last,
            _ => self.spec(Spec {
                dtype,
                shape: shape.into(),
            }),
        };
        self.last_spec[template as usize] = spec;
        self.places.push(Place {
            template,
            expert,
            file,
            spec,
            offset,
        });
        Ok(())
    }

    fn spec(&mut self, spec: Spec) -> u32 {
        if let Some(&s) = self.by_spec.get(&spec) {
            return s;
        }
        let s = self.specs.len() as u32;
        self.specs.push(spec.clone());
        self.by_spec.insert(spec, s);
        s
    }

    /// Adds what another thread found.
    pub(crate) fn merge(&mut self, other: Self) {
        let templates: Vec<u32> = other
            .templates
            .into_iter()
            .map(|t| match self.by_name.get(&t.name) {
                Some(&known) => known,
                None => {
                    let new = self.templates.len() as u32;
                    self.by_name.insert(t.name.clone(), new);
                    self.templates.push(t);
                    self.last_spec.push(u32::MAX);
                    new
                }
            })
            .collect();
        let specs: Vec<u32> = other.specs.into_iter().map(|s| self.spec(s)).collect();
        self.places
            .extend(other.places.into_iter().map(|place| Place {
                template: templates[place.template as usize],
                spec: specs[place.spec as usize],
                ..place
            }));
        self.tensors += other.tensors;
        self.adapters += other.adapters;
        self.unknown += other.unknown;
        self.unknown_name = match (self.unknown_name.take(), other.unknown_name) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }

    /// Tensors sorted by template, then expert, and where each template's begin; one more entry ends the last.
    pub(crate) fn by_template(&self) -> (Vec<Place>, Vec<usize>) {
        let mut starts = vec![0usize; self.templates.len() + 1];
        for place in &self.places {
            starts[place.template as usize + 1] += 1;
        }
        for i in 1..starts.len() {
            starts[i] += starts[i - 1];
        }
        let mut next = starts.clone();
        let mut sorted = vec![
            Place {
                template: 0,
                expert: 0,
                file: 0,
                spec: 0,
                offset: 0
            };
            self.places.len()
        ];
        for place in &self.places {
            let at = &mut next[place.template as usize];
            sorted[*at] = *place;
            *at += 1;
        }
        for pair in starts.windows(2) {
            sorted[pair[0]..pair[1]].sort_unstable_by_key(|p| (p.expert, p.file, p.offset));
        }
        (sorted, starts)
    }
}
