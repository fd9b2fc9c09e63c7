//! What to fetch before it is asked for.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use super::trace::Trace;
use crate::error::TierError;
use crate::mock::rng::SplitMix;

/// What is fetched for the next layer while this one computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Prefetch {
    /// Nothing.
    #[default]
    None,
    /// What the next layer of this step will use: as if it were known. The best that any predictor
    /// which looks one layer ahead could do.
    Oracle,
    /// What the next layer used in the step before.
    Repeat,
    /// Some experts of the next layer, by chance: what a predictor that knows nothing would do.
    Random {
        /// How many.
        count: u32,
    },
}

impl fmt::Display for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Oracle => f.write_str("oracle"),
            Self::Repeat => f.write_str("repeat"),
            Self::Random { count } => write!(f, "random:{count}"),
        }
    }
}

impl FromStr for Prefetch {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self, TierError> {
        let known = match text {
            "none" => Some(Self::None),
            "oracle" => Some(Self::Oracle),
            "repeat" => Some(Self::Repeat),
            _ => match text.strip_prefix("random:").map(str::parse) {
                Some(Ok(count @ 1..=65_535)) => Some(Self::Random { count }),
                _ => None,
            },
        };
        known.ok_or_else(|| {
            TierError::Config(format!(
                "there is no prefetch rule '{text}'; use none, oracle, repeat, or random:N with 1 to 65535 experts"
            ))
        })
    }
}

/// Applies a rule to a trace, row by row.
pub(super) struct Guesser {
    rule: Prefetch,
    /// By layer, its last row.
    last_row: Vec<Option<usize>>,
    /// Experts in some order, for [`Prefetch::Random`].
    shuffled: Vec<u32>,
    rng: SplitMix,
}

impl Guesser {
    pub(super) fn new(trace: &Trace, rule: Prefetch, seed: u64) -> Self {
        Self {
            rule,
            last_row: vec![None; trace.layers() as usize],
            shuffled: (0..trace.experts()).collect(),
            rng: SplitMix::new(seed),
        }
    }

    /// Lists the records to fetch for the next layer of this step, while the row at `index`
    /// computes.
    pub(super) fn guess(&mut self, trace: &Trace, index: usize, ahead: &mut VecDeque<u32>) {
        let row = trace.row(index);
        self.last_row[row.layer as usize] = Some(index);
        if index + 1 == trace.row_count() {
            return;
        }
        let next = trace.row(index + 1);
        if next.step != row.step {
            return;
        }
        match self.rule {
            Prefetch::None => {}
            Prefetch::Oracle => ahead.extend(next.records),
            Prefetch::Repeat => {
                if let Some(last) = self.last_row[next.layer as usize] {
                    ahead.extend(trace.row(last).records);
                }
            }
            Prefetch::Random { count } => {
                let experts = self.shuffled.len();
                for at in 0..experts.min(count as usize) {
                    let other = at + self.rng.index(experts - at);
                    self.shuffled.swap(at, other);
                    ahead.push_back(next.layer * trace.experts() + self.shuffled[at]);
                }
            }
        }
    }
}
