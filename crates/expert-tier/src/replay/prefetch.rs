//! What to fetch before it is asked for.

use std::fmt;
use std::str::FromStr;

use crate::error::TierError;

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
