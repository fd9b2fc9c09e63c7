//! The forward pass: several tokens through the MoE blocks of all layers, several times.

use expert_store::Key;
use expert_store::info::LayerInfo;
use xxhash_rust::xxh3::Xxh3;

use crate::MoeError;
use crate::experts::{Expert, Experts};
use crate::math::{dot, rms_norm, silu, top_k};
use crate::projections::Layout;
use crate::random::Random;

/// Largest counts that make sense: hidden states of more tokens than that are no demonstration any more.
const TOKENS_MAX: usize = 4096;

// What numbers from the seed are for.
const EMBEDDING: u32 = 1;
const NORM: u32 = 2;
const ROUTER: u32 = 3;

/// What to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Tokens side by side, 1 to 4096.
    pub tokens: usize,
    /// Experts of each token in each layer, at least 1; all where a layer has fewer.
    pub top_k: usize,
    /// Where hidden states, norms and routers come from.
    pub seed: u64,
}

impl Spec {
    /// Most experts of one layer that one step can need.
    pub fn experts_at_once(&self, layer_experts: usize) -> usize {
        layer_experts.min(self.tokens.saturating_mul(self.top_k))
    }
}

/// The experts of one layer that one step needed, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// Pass through all layers, from 0.
    pub step: u32,
    /// Dense index of the layer.
    pub layer: u32,
    /// The experts.
    pub experts: Vec<u32>,
}

/// A forward pass under way.
///
/// *Shapes and units*: hidden states are `[tokens, hidden]`, row by row.
pub struct Forward<E> {
    experts: E,
    spec: Spec,
    hidden: usize,
    layers: Vec<LayerInfo>,
    state: Vec<f32>,
    hash: Xxh3,
    step: u32,
    uses: Vec<Use>,
}

/// One token's way through one expert: the token, and the weight of that expert's output.
type Route = (usize, f32);

impl<E: Experts> Forward<E> {
    /// A pass from the start.
    ///
    /// *Errors*: counts that cannot be; [`MoeError::Unsupported`] for experts that are not gate, up and down in BF16 or
    /// F32, or whose hidden size differs by layer.
    pub fn new(experts: E, spec: Spec) -> Result<Self, MoeError> {
        if !(1..=TOKENS_MAX).contains(&spec.tokens) || spec.top_k == 0 {
            return Err(MoeError::Spec(format!(
                "{} tokens, {} experts of each; the limits are 1 to {TOKENS_MAX} and at least 1",
                spec.tokens, spec.top_k
            )));
        }
        let layers = experts.info().layers;
        let mut hidden = None;
        for layer in &layers {
            let Some(&[first, _]) = layer.experts.first() else {
                continue;
            };
            let key = Key::new(layer.layer, first);
            let unsupported = |why| MoeError::Unsupported { key, why };
            let class = experts.class(key)?;
            let size = Layout::of(&class).map_err(unsupported)?.hidden();
            match hidden {
                Some(before) if before != size => {
                    return Err(unsupported(format!(
                        "hidden size {size}, layers before have {before}"
                    )));
                }
                _ => hidden = Some(size),
            }
        }
        let hidden = hidden.filter(|&size| size > 0).ok_or_else(|| {
            MoeError::Spec("the store holds no experts: nothing can be computed".into())
        })?;
        Ok(Self {
            experts,
            spec,
            hidden,
            layers,
            state: vec![0.0; spec.tokens * hidden],
            hash: Xxh3::new(),
            step: 0,
            uses: Vec::new(),
        })
    }

    /// One pass through all layers.
    ///
    /// *Errors*: experts that do not come, [`MoeError::NotFinite`]; the pass cannot go on then.
    pub fn step(&mut self) -> Result<(), MoeError> {
        let mut embedding = Random::new(self.spec.seed, [EMBEDDING, self.step, 0]);
        for row in self.state.chunks_exact_mut(self.hidden) {
            // Something of the step before, and something new: each step routes differently.
            rms_norm(row);
            for v in row {
                *v = 0.5 * *v + embedding.unit();
            }
        }
        for index in 0..self.layers.len() {
            self.layer(index)?;
        }
        self.step += 1;
        Ok(())
    }

    /// Hash of the hidden states after each layer of each step so far: XXH3, 128 bits.
    pub fn hash(&self) -> u128 {
        self.hash.digest128()
    }

    /// Which experts were needed, in order.
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    /// Where the experts come from.
    pub fn experts(&self) -> &E {
        &self.experts
    }

    fn layer(&mut self, index: usize) -> Result<(), MoeError> {
        let layer = &self.layers[index];
        let ids: Vec<u32> = layer.experts.iter().flat_map(|&[a, b]| a..b).collect();
        let layer = layer.layer;
        if ids.is_empty() {
            return Ok(());
        }
        let hidden = self.hidden;
        let mut normed = self.state.clone();
        let mut norm = vec![0.0; hidden];
        Random::new(self.spec.seed, [NORM, layer, 0]).fill(&mut norm);
        for row in normed.chunks_exact_mut(hidden) {
            rms_norm(row);
            for (v, n) in row.iter_mut().zip(&norm) {
                *v *= 1.0 + 0.1 * n;
            }
        }
        let routes = self.route(layer, &ids, &normed);
        let needed: Vec<u32> = routes.iter().map(|(expert, _)| *expert).collect();
        let state = &mut self.state;
        self.experts.hold(layer, &needed, &mut |held| {
            let keys = held.iter().map(|expert| expert.key);
            if !keys.eq(needed.iter().map(|&expert| Key::new(layer, expert))) {
                return Err(MoeError::Spec(format!(
                    "layer {layer}: other experts came than were asked for"
                )));
            }
            for (expert, (_, tokens)) in held.iter().zip(&routes) {
                add_expert(expert, tokens, hidden, &normed, state)?;
            }
            Ok(())
        })?;
        let step = self.step;
        for (token, row) in self.state.chunks_exact(hidden).enumerate() {
            if !row.iter().all(|v| v.is_finite()) {
                return Err(MoeError::NotFinite { step, layer, token });
            }
        }
        let bits = |v: &f32| v.to_bits().to_le_bytes();
        let bytes: Vec<u8> = self.state.iter().flat_map(bits).collect();
        self.hash.update(&bytes);
        self.uses.push(Use {
            step,
            layer,
            experts: needed,
        });
        Ok(())
    }

    /// The experts that tokens go to, ascending, each with its tokens in order.
    fn route(&self, layer: u32, ids: &[u32], normed: &[f32]) -> Vec<(u32, Vec<Route>)> {
        let tokens = self.spec.tokens;
        let mut logits = vec![vec![0.0; ids.len()]; tokens];
        let mut router = vec![0.0; self.hidden];
        let scale = 1.0 / (self.hidden as f32).sqrt();
        for (place, &expert) in ids.iter().enumerate() {
            Random::new(self.spec.seed, [ROUTER, layer, expert]).fill(&mut router);
            for (row, logits) in normed.chunks_exact(self.hidden).zip(&mut logits) {
                logits[place] = scale * dot(&router, row, |v| v);
            }
        }
        let mut routes: Vec<Vec<Route>> = vec![Vec::new(); ids.len()];
        for (token, logits) in logits.iter().enumerate() {
            for (place, share) in top_k(logits, self.spec.top_k) {
                routes[place].push((token, share));
            }
        }
        let all = ids.iter().copied().zip(routes);
        all.filter(|(_, tokens)| !tokens.is_empty()).collect()
    }
}

/// Adds one expert's output to the states of its tokens.
fn add_expert(
    expert: &Expert<'_>,
    tokens: &[Route],
    hidden: usize,
    normed: &[f32],
    state: &mut [f32],
) -> Result<(), MoeError> {
    let unsupported = |why| MoeError::Unsupported {
        key: expert.key,
        why,
    };
    let layout = Layout::of(expert.class).map_err(unsupported)?;
    if layout.hidden() != hidden {
        let size = layout.hidden();
        return Err(unsupported(format!(
            "hidden size {size}, others have {hidden}"
        )));
    }
    let matrices = layout.view(expert.image).map_err(unsupported)?;
    let mut inner = vec![0.0; matrices.gate.rows];
    for &(token, share) in tokens {
        let x = &normed[token * hidden..(token + 1) * hidden];
        for (row, v) in inner.iter_mut().enumerate() {
            *v = silu(matrices.gate.row_dot(row, x)) * matrices.up.row_dot(row, x);
        }
        let out = &mut state[token * hidden..(token + 1) * hidden];
        for (row, v) in out.iter_mut().enumerate() {
            *v += share * matrices.down.row_dot(row, &inner);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
