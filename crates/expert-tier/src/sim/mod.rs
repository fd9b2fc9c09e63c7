//! Seeded fault simulation: one engine, a few mock rails to a few peers, a client that fetches,
//! cancels, holds and releases, and faults; on a virtual clock, so that a minute takes a
//! millisecond.
//!
//! ```text
//! seed ─► plan (rails, requests, faults) ─► world: faults, rails, engine, client ─► what was violated
//! ```
//!
//! Checked at every step: what is committed is exactly the record of the content asked for, what
//! is leased does not change, checksums are compared exactly when [`Verify`](crate::Verify) says so
//! and wrong bytes are found only where they were not (and a fault put them there), every request
//! ends by its deadline plus [`TICK`] and for a reason that exists, windows hold, no slot is leased
//! and landing at once. At the end, when faults are over: a last batch arrives whole, all rails can
//! be quiesced, no slot is left over, and the
//! engine's counters say what happened. One seed always gives the same run.
//!
//! With [`Guards`] one rule is switched off, to show that its absence would be seen.

mod contents;
mod plan;
#[cfg(test)]
mod tests;
mod trace;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use serde::Serialize;
use tracing::subscriber::NoSubscriber;

use crate::engine::Guards;
use world::World;

/// How much later than its deadline a request may end: what a driver takes to wake up.
pub const TICK: Duration = Duration::from_millis(1);

/// What is simulated besides the seed.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Rules in force.
    #[doc(hidden)]
    pub guards: Guards,
    /// Whether the trace is kept: one line per event.
    pub trace: bool,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            guards: Guards::ON,
            trace: false,
        }
    }
}

/// What happened in runs that violated nothing; of one run, or added up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SimReport {
    /// Virtual time.
    #[serde(skip)]
    pub simulated: Duration,
    /// Requests that ended.
    pub requests: u64,
    /// Requests that were refused with back-pressure.
    pub refused: u64,
    /// Records committed and compared.
    pub records: u64,
    /// Records that failed, with a reason.
    pub failed: u64,
    /// Bytes committed and compared.
    pub bytes: u64,
    /// Records committed without a look at their checksums, as the policy of the run has it.
    pub unverified: u64,
    /// Those of them with wrong bytes, each of which a fault put there.
    pub damaged: u64,
    /// READs that came back.
    pub reads: u64,
    /// READs that came back without their bytes while someone waited for them.
    pub retries: u64,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Hash of the trace: equal for equal runs.
    #[serde(skip)]
    pub trace_hash: u64,
    /// The trace, when asked for.
    #[serde(skip)]
    pub trace: Vec<String>,
}

impl SimReport {
    /// Adds another run's numbers; traces are not numbers.
    pub fn add(&mut self, other: &Self) {
        self.simulated += other.simulated;
        self.requests += other.requests;
        self.refused += other.refused;
        self.records += other.records;
        self.failed += other.failed;
        self.bytes += other.bytes;
        self.unverified += other.unverified;
        self.damaged += other.damaged;
        self.reads += other.reads;
        self.retries += other.retries;
        for (kind, count) in &other.faults {
            *self.faults.entry(kind).or_default() += count;
        }
    }
}

/// A rule was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimFailure {
    /// Replays it.
    pub seed: u64,
    /// Virtual time of it.
    pub at: Duration,
    /// What was violated.
    pub violation: String,
    /// The trace up to there, when asked for.
    pub trace: Vec<String>,
}

impl fmt::Display for SimFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.at.as_secs_f64();
        write!(
            f,
            "seed {} at {seconds:.6} s: {}",
            self.seed, self.violation
        )
    }
}

impl std::error::Error for SimFailure {}

/// Runs one seed.
///
/// *Errors*: the first rule that was broken; a panic counts as one.
pub fn run(seed: u64, config: &SimConfig) -> Result<SimReport, SimFailure> {
    let mut world = World::new(seed, config);
    // Thousands of rails fail here; nobody wants to read about each.
    let outcome = tracing::subscriber::with_default(NoSubscriber::new(), || {
        catch_unwind(AssertUnwindSafe(|| world.run()))
    });
    let violation = match outcome {
        Ok(Ok(())) => return Ok(world.into_report()),
        Ok(Err(violation)) => violation,
        Err(panic) => format!("panic: {}", panic_text(&*panic)),
    };
    let at = world.elapsed();
    Err(SimFailure {
        seed,
        at,
        violation,
        trace: world.into_report().trace,
    })
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("of another kind")
}
