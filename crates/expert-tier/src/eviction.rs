//! Which cached record to give up when room is needed.
//!
//! A cache numbers its places `0..capacity` and tells a policy what lands, what is used again and
//! what goes; asked for a victim, the policy offers places in its order of preference, and the
//! cache refuses those that are leased or on their way. [`Eviction`] names a policy and builds it.
//!
//! *Threads*: a policy is `Send` and has one owner. Nothing is allocated after it was built, and
//! inserting, touching and removing take the same short time however many places there are.

mod list;
mod lru;
mod segmented;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use crate::error::TierError;

/// Which cached entry to give up. Entries are small dense indices `0..capacity`.
pub trait EvictionPolicy: Send + fmt::Debug {
    /// The entry has just landed: it is the most recently used. One that is there already counts
    /// as touched.
    ///
    /// *Panics* where the entry is not below the capacity.
    fn insert(&mut self, entry: u32);

    /// The entry was used again; an unknown one is ignored.
    fn touch(&mut self, entry: u32);

    /// The entry is gone; an unknown one is ignored.
    fn remove(&mut self, entry: u32);

    /// The best entry to give up among those that `may` accepts. It is not removed.
    ///
    /// Entries are offered in order of preference until one is accepted; `None` where all are
    /// refused.
    fn victim(&mut self, may: &mut dyn FnMut(u32) -> bool) -> Option<u32>;
}

/// The policies there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Eviction {
    /// Least recently used.
    #[default]
    Lru,
    /// Segmented LRU: what was used once goes before what was used again.
    ///
    /// A new entry is on probation; used again, it is protected. A share of the capacity is for
    /// protected entries: beyond it, the least recently used of them is on probation again, as the
    /// newest there. *Source*: Karedla, Love, Wherry, "Caching strategies to improve disk system
    /// performance", IEEE Computer 27(3), 1994.
    SegmentedLru {
        /// Share of the capacity that protected entries may take, 1 to 99.
        protected_percent: u8,
    },
}

/// Probation is where new entries prove themselves: with less than a fifth they would be gone
/// before their second use, with much more the protected ones have no room.
const PROTECTED_PERCENT: u8 = 80;

impl Eviction {
    /// Segmented LRU with the usual share, 80 %.
    pub const SEGMENTED: Self = Self::SegmentedLru {
        protected_percent: PROTECTED_PERCENT,
    };

    /// The policy for entries `0..capacity`, none of them there yet.
    pub fn build(self, capacity: u32) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(lru::Lru::new(capacity)),
            Self::SegmentedLru { protected_percent } => Box::new(segmented::SegmentedLru::new(
                capacity,
                share(capacity, protected_percent),
            )),
        }
    }
}

/// Rounded down, so that at least one entry is left for probation below 100 %.
fn share(capacity: u32, percent: u8) -> u32 {
    (u64::from(capacity) * u64::from(percent.min(100)) / 100) as u32
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Lru => f.write_str("lru"),
            Self::SEGMENTED => f.write_str("slru"),
            Self::SegmentedLru { protected_percent } => write!(f, "slru:{protected_percent}"),
        }
    }
}

impl FromStr for Eviction {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self, TierError> {
        let known = match text.split_once(':') {
            None if text == "lru" => Some(Self::Lru),
            None if text == "slru" => Some(Self::SEGMENTED),
            Some(("slru", percent)) => match percent.parse() {
                Ok(protected_percent @ 1..=99) => Some(Self::SegmentedLru { protected_percent }),
                _ => None,
            },
            _ => None,
        };
        known.ok_or_else(|| {
            TierError::Config(format!(
                "there is no eviction policy '{text}'; use lru, slru, or slru:PERCENT with 1 to 99 percent protected"
            ))
        })
    }
}
