//! What can be tuned, with the reason of each default.

use std::time::Duration;

use expert_store::catalogue::CHUNK_BYTES;

/// How READs are spread over rails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Home rail `expert % n`, idle rails take READs that are not yet posted.
    #[default]
    HomeSteal,
    /// Home rail only, as long as it works.
    ExpertMod,
    /// Every rail takes from one queue, so that a single record uses all of them.
    Split,
}

/// How urgent a request is. What is waiting in a more urgent class is posted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Somebody waits for these records.
    #[default]
    Demand,
    /// A whole layer passes by: somebody waits for it, but in sequence.
    Stream,
    /// A guess. It takes at most half of each rail's window, so that a demand that comes now waits
    /// for no more than that.
    Prefetch,
}

impl Class {
    /// All, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Demand, Self::Stream, Self::Prefetch];
}

/// What the failure of one rail means for the requests that use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFailure {
    /// Other rails, or the same one once it works again, finish the work before the deadline.
    #[default]
    Failover,
    /// The request fails at once; nothing of it is returned.
    FailFast,
}

/// When chunk checksums are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// At each fetch.
    #[default]
    Always,
    /// At the first fetch of each record of one content, and again in requests made after any rail
    /// was away or changed its content: the same id may then stand for bytes that went bad
    /// meanwhile. What goes wrong with later fetches, on the way or at the peer, is not noticed.
    First,
    /// Never.
    Off,
}

/// Settings of the fetch engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Spread over rails.
    pub policy: Policy,
    /// Meaning of a rail's failure.
    pub on_failure: OnFailure,
    /// Bytes in flight per lane (TCP stream or queue pair): posted READs cannot be recalled, so
    /// little is posted at a time. 4 MiB is a millisecond at 4 GB/s, several round trips.
    pub window_bytes: u64,
    /// Whether less is posted on a slow rail: what it carries in 20 ms, but two READs at least.
    /// Otherwise a few slow rails would take all there is at once, and none could help another.
    pub adapt_window: bool,
    /// Bytes of one READ; rounded down to chunks of 256 KiB, at least one.
    pub read_bytes: u64,
    /// Bytes of all requests that are admitted and not done; more is refused with back-pressure.
    pub inflight_max_bytes: u64,
    /// Wait before the first attempt to bring a failed rail back; doubles up to `backoff_max`.
    pub backoff_first: Duration,
    /// Longest such wait.
    pub backoff_max: Duration,
    /// How often READs of one record are repeated after a checksum failure or a refusal that may pass.
    pub retries: u32,
    /// How long who waits for 256 KiB or less looks before it sleeps, and lets others run meanwhile; 0 is
    /// never. Waking up takes longer than such a record needs to come.
    pub spin: Duration,
}

impl EngineConfig {
    /// Bytes of the largest READ that is posted on a rail that takes `rail_max_bytes`.
    pub(crate) fn posted_bytes(&self, rail_max_bytes: u64) -> u64 {
        let bytes = self.read_bytes.min(rail_max_bytes);
        (bytes / CHUNK_BYTES).max(1) * CHUNK_BYTES
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            on_failure: OnFailure::default(),
            window_bytes: 4 << 20,
            adapt_window: true,
            read_bytes: 1 << 20,
            inflight_max_bytes: 4 << 30,
            backoff_first: Duration::from_millis(50),
            // With its jitter well below the shortest deadline of a request, so that one made just
            // after a peer came back does not end before the rail was tried again.
            backoff_max: Duration::from_secs(1),
            retries: 1,
            // Twice what 64 KiB take where nobody sleeps.
            spin: Duration::from_micros(50),
        }
    }
}

/// How long a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// Fixed part.
    pub base: Duration,
    /// Slowest rate that is still acceptable, bytes per second: a batch of large experts gets
    /// time in proportion. 0 leaves the fixed part alone.
    pub floor_bytes_per_s: u64,
}

impl Deadline {
    /// Time allowed for that many bytes.
    pub fn for_bytes(&self, bytes: u64) -> Duration {
        match self.floor_bytes_per_s {
            0 => self.base,
            rate => self
                .base
                .saturating_add(Duration::from_millis(bytes.saturating_mul(1000) / rate)),
        }
    }
}

impl Default for Deadline {
    fn default() -> Self {
        // 10 MB/s is what a tenth of gigabit Ethernet carries: slower is not worth waiting for.
        Self {
            base: Duration::from_secs(2),
            floor_bytes_per_s: 10_000_000,
        }
    }
}
