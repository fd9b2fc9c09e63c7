//! How many slots are enough.

use super::prefetch::Prefetch;
use super::run::{Report, Setup, replay};
use super::trace::Trace;
use crate::error::TierError;
use crate::eviction::Eviction;

/// What is wanted of an arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// At least that share of hits.
    HitRate(f64),
    /// At most that mean stall of a step, microseconds.
    StallUs(f64),
}

impl Target {
    /// Whether a replay reaches it.
    pub fn is_met(self, report: &Report) -> bool {
        match self {
            Self::HitRate(least) => report.hit_rate >= least,
            Self::StallUs(most) => report.stall_us.mean <= most,
        }
    }
}

/// The answer of [`smallest`].
#[derive(Debug, Clone)]
pub struct Sizing {
    /// Slots that are enough; `None` where even all records in the arena are not: first uses
    /// always miss.
    pub slots: Option<u32>,
    /// Whether no smaller arena does. It is proved for LRU without prefetch, where an arena with
    /// more slots always holds what a smaller one does; for others, one slot less does not do, and
    /// a still smaller one is not excluded.
    pub is_least: bool,
    /// The replay with that many slots, or with all records in the arena.
    pub report: Report,
}

/// Looks for the smallest arena that meets a target, by bisection; `setup.slots` is not used.
///
/// *Errors*: as [`replay`].
pub fn smallest(trace: &Trace, setup: &Setup, target: Target) -> Result<Sizing, TierError> {
    let with = |slots: u32| {
        let setup = Setup {
            slots,
            ..setup.clone()
        };
        replay(trace, &setup)
    };
    let least = trace.widest().max(1);
    let all = match setup.prefetch {
        Prefetch::Random { .. } => trace.records(),
        _ => trace.distinct_records(),
    };
    // `enough` meets the target, `short` does not; below `least` nothing does.
    let (mut enough, mut short) = (all.max(least), least - 1);
    let mut report = with(enough)?;
    if !target.is_met(&report) {
        return Ok(Sizing {
            slots: None,
            is_least: false,
            report,
        });
    }
    while enough - short > 1 {
        let middle = short + (enough - short) / 2;
        let tried = with(middle)?;
        match target.is_met(&tried) {
            true => (enough, report) = (middle, tried),
            false => short = middle,
        }
    }
    let is_monotone = setup.eviction == Eviction::Lru && setup.prefetch == Prefetch::None;
    Ok(Sizing {
        slots: Some(enough),
        is_least: is_monotone || enough == least,
        report,
    })
}
