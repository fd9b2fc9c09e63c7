//! Made-up routing: popularity by Zipf's law, and experts that come again in the next step.

use std::fmt;

use expert_wire::limits::{EXPERTS_MAX, LAYERS_MAX};

use super::trace::{Header, RECORDS_MAX, ROWS_MAX, Row, USES_MAX};
use super::zipf::Zipf;
use crate::error::TierError;
use crate::mock::rng::SplitMix;

/// Most experts that fit a line.
const TOP_K_MAX: u32 = 8192;
/// Steeper than any router: beyond it, nearly all draws are the first expert.
const EXPONENT_MAX: f64 = 4.0;

/// What the made-up routing is like.
///
/// Each layer has its own order of popularity and its own exponent. A step keeps each expert of the
/// step before with probability `reuse`, and draws the others by popularity. Layers do not know of
/// each other, and the rows of a seed with fewer steps are the first ones of the same with more.
#[derive(Debug, Clone, PartialEq)]
pub struct SynthTrace {
    /// MoE layers.
    pub layers: u32,
    /// Routed experts of a layer.
    pub experts: u32,
    /// Experts of a row.
    pub top_k: u32,
    /// Steps.
    pub steps: u32,
    /// Another seed gives another trace, the same seed the same on every machine.
    pub seed: u64,
    /// Exponent of Zipf's law: 0 makes all experts equally popular, 1 makes the tenth of them a
    /// tenth as popular as the first.
    pub zipf: f64,
    /// How far the exponent of a layer lies from `zipf` at most, either way.
    pub skew: f64,
    /// Probability that an expert of the step before is used again.
    pub reuse: f64,
}

impl SynthTrace {
    /// The first line of the trace.
    pub fn header(&self) -> Header {
        Header {
            layers: Some(self.layers),
            experts: Some(self.experts),
            top_k: Some(self.top_k),
            source: Some(format!("made up: {self}")),
        }
    }

    /// The rows, one after the other.
    ///
    /// *Errors*: [`TierError::Config`] where the numbers do not fit each other or a trace.
    pub fn rows(&self) -> Result<impl Iterator<Item = Row> + use<>, TierError> {
        if let Some(why) = self.why_not() {
            return Err(TierError::Config(why));
        }
        let mut layers: Vec<LayerRouter> = (0..self.layers)
            .map(|layer| LayerRouter::new(self, layer))
            .collect();
        let (count, reuse) = (self.layers, chance(self.reuse));
        let rows = (0..u64::from(self.steps))
            .flat_map(move |step| (0..count).map(move |layer| (step, layer)));
        Ok(rows.map(move |(step, layer)| Row {
            step,
            layer,
            experts: layers[layer as usize].next(reuse),
        }))
    }

    fn why_not(&self) -> Option<String> {
        let counts = [
            ("layers", self.layers, LAYERS_MAX),
            ("experts", self.experts, EXPERTS_MAX),
            ("experts per token", self.top_k, self.experts.min(TOP_K_MAX)),
            ("steps", self.steps, u32::MAX),
        ];
        let mut counts = counts.into_iter();
        if let Some((name, n, max)) = counts.find(|&(_, n, max)| n == 0 || n > max) {
            return Some(format!("{n} {name}: it is 1 to {max}"));
        }
        let shares = [
            ("zipf", self.zipf, EXPONENT_MAX),
            ("skew", self.skew, EXPONENT_MAX),
            ("reuse", self.reuse, 1.0),
        ];
        let mut shares = shares.into_iter();
        if let Some((name, x, max)) = shares.find(|&(_, x, max)| !(0.0..=max).contains(&x)) {
            return Some(format!("{name} {x}: it is a number from 0 to {max}"));
        }
        let rows = u64::from(self.layers) * u64::from(self.steps);
        let sizes = [
            ("rows", u128::from(rows), ROWS_MAX as u128),
            (
                "expert uses",
                u128::from(rows) * u128::from(self.top_k),
                USES_MAX as u128,
            ),
            (
                "records",
                u128::from(self.layers) * u128::from(self.experts),
                u128::from(RECORDS_MAX),
            ),
        ];
        let mut sizes = sizes.into_iter();
        let (name, n, max) = sizes.find(|&(_, n, max)| n > max)?;
        Some(format!("{n} {name}: a trace has at most {max}"))
    }
}

impl fmt::Display for SynthTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}, zipf {}, skew {}, reuse {}",
            self.seed, self.zipf, self.skew, self.reuse
        )
    }
}

/// A probability as a share of 2^53, which a `f64` holds exactly.
fn chance(probability: f64) -> u64 {
    (probability * CHANCES as f64) as u64
}

const CHANCES: u64 = 1 << 53;

/// The router of one layer.
#[derive(Debug)]
struct LayerRouter {
    rng: SplitMix,
    zipf: Zipf,
    /// Experts by popularity.
    by_rank: Vec<u32>,
    /// Ranks of the step before.
    last: Vec<usize>,
    /// By rank, whether the step at hand has it.
    taken: Vec<bool>,
    top_k: usize,
}

impl LayerRouter {
    fn new(spec: &SynthTrace, layer: u32) -> Self {
        // A generator of its own for each layer, so that layers do not depend on their number.
        let mut seeds = SplitMix::new(spec.seed);
        let layer_seed = seeds.next() ^ SplitMix::new(u64::from(layer)).next();
        let mut rng = SplitMix::new(layer_seed);
        let share = rng.below(CHANCES + 1) as f64 / CHANCES as f64;
        let exponent = (spec.zipf + spec.skew * (2.0 * share - 1.0)).clamp(0.0, EXPONENT_MAX);
        let mut by_rank: Vec<u32> = (0..spec.experts).collect();
        for i in (1..by_rank.len()).rev() {
            by_rank.swap(i, rng.index(i + 1));
        }
        Self {
            rng,
            zipf: Zipf::new(spec.experts, exponent),
            by_rank,
            last: Vec::new(),
            taken: vec![false; spec.experts as usize],
            top_k: spec.top_k as usize,
        }
    }

    fn next(&mut self, reuse: u64) -> Vec<u32> {
        let Self {
            rng, last, taken, ..
        } = self;
        last.retain(|&rank| {
            taken[rank] = rng.below(CHANCES) < reuse;
            taken[rank]
        });
        while last.len() < self.top_k {
            let Some(rank) = self.zipf.draw(rng, |rank| taken[rank]) else {
                break;
            };
            taken[rank] = true;
            last.push(rank);
        }
        for &rank in &*last {
            taken[rank] = false;
        }
        last.iter().map(|&rank| self.by_rank[rank]).collect()
    }
}
