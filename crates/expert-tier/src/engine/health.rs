//! The state of one rail as the engine sees it.
//!
//! ```text
//!           probe                 Ready
//! Quarantined ────► Probing ─────────────► Up
//!    ▲  (after back-off) │ ProbeFailed      │ Down, stall
//!    │◄──────────────────┘                  ▼
//!    └───────────────── quiesced ───── Suspect (quiescing)
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use expert_wire::Key;

use super::account::RailTime;
use super::later;
use super::pace::Pace;
use super::share::Load;
use super::table::Handle;
use crate::config::{Class, EngineConfig};
use crate::coverage::Holding;
use crate::rail::{Capabilities, ContentTag, RailKind};
use crate::stats::{Histogram, RailErrors, RailStats};

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RailState {
    /// Takes READs.
    Up,
    /// Being quiesced after a failure.
    Suspect,
    /// Waits until it may be tried again.
    Quarantined {
        /// When.
        retry_at: Instant,
    },
    /// Being connected or rebuilt.
    Probing,
}

impl RailState {
    fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Suspect => "suspect",
            Self::Quarantined { .. } => "quarantined",
            Self::Probing => "probing",
        }
    }
}

/// The stall time grows to so many times what the rail asks for.
const STALL_PATIENCE_MAX: u32 = 8;

/// One rail in the engine's books.
#[derive(Debug)]
pub(super) struct RailBook {
    pub(super) name: String,
    pub(super) kind: RailKind,
    pub(super) capabilities: Capabilities,
    pub(super) state: RailState,
    /// What it serves; known from the first `Ready` on.
    pub(super) content: Option<ContentTag>,
    pub(super) outstanding_bytes: u64,
    pub(super) outstanding_reads: u64,
    /// Those of them that are guesses.
    prefetch_bytes: u64,
    prefetch_reads: u64,
    /// Records whose home this is and that have bytes not yet posted, by class. A record whose
    /// class changed may still be named by the queue of the old one.
    pub(super) queues: [VecDeque<Handle>; Class::ALL.len()],
    /// What `content` is part of, and which of its records it has.
    holding: Holding,
    /// Grows with each stall that followed another without a READ between them: a path that is slow,
    /// and not dead, must not be torn down for ever.
    stall_patience: u32,
    /// Last sign of life, for the stall detector.
    progress: u64,
    progress_at: Instant,
    backoff: Duration,
    /// Why it is not up; for people.
    pub(super) trouble: String,
    /// Reason of the last failure, and the bytes carried until then: for logging each once.
    last_down: String,
    bytes_when_down: Option<u64>,
    pub(super) bytes: u64,
    pub(super) reads: u64,
    pub(super) errors: RailErrors,
    pub(super) state_changes: u64,
    content_changes: u64,
    pub(super) latency: Histogram,
    pace: Pace,
    pub(super) time: RailTime,
}

impl RailBook {
    pub(super) fn new(
        name: String,
        kind: RailKind,
        capabilities: Capabilities,
        config: &EngineConfig,
        now: Instant,
    ) -> Self {
        Self {
            name,
            kind,
            capabilities,
            // The first connection is a probe like any other, without a wait.
            state: RailState::Quarantined { retry_at: now },
            content: None,
            outstanding_bytes: 0,
            outstanding_reads: 0,
            prefetch_bytes: 0,
            prefetch_reads: 0,
            queues: Default::default(),
            holding: Holding::default(),
            progress: 0,
            progress_at: now,
            stall_patience: 1,
            backoff: config.backoff_first,
            trouble: "not connected yet".into(),
            last_down: String::new(),
            bytes_when_down: None,
            bytes: 0,
            reads: 0,
            errors: RailErrors::default(),
            state_changes: 0,
            content_changes: 0,
            latency: Histogram::default(),
            pace: Pace::default(),
            time: RailTime::default(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.state == RailState::Up
    }

    pub(super) fn window_bytes(&self, config: &EngineConfig) -> u64 {
        let most = config
            .window_bytes
            .saturating_mul(u64::from(self.capabilities.lanes.max(1)));
        if !config.adapt_window {
            return most;
        }
        let read_bytes = config.posted_bytes(self.capabilities.read_max_bytes);
        match self.pace.horizon_bytes() {
            Some(bytes) => most.min(bytes.max(2 * read_bytes)),
            None => most.min(4 * read_bytes),
        }
    }

    /// As a place to put more work; `None` while its rate is not known.
    pub(super) fn load(&self, now: Instant) -> Option<Load> {
        let rate = self.pace.rate(now, self.outstanding_reads == 0)?;
        Some(self.load_at(rate, now))
    }

    /// The same at a rate that is assumed.
    pub(super) fn load_at(&self, bytes_per_s: f64, now: Instant) -> Load {
        let posted_s = self.outstanding_bytes as f64 / bytes_per_s;
        let waited = match self.outstanding_reads {
            0 => Duration::ZERO,
            _ => self.pace.quiet_for(now),
        };
        Load {
            bytes_per_s,
            // One that is late by some time is expected to be so by as much again.
            busy_s: (posted_s - waited.as_secs_f64()).abs(),
        }
    }

    pub(super) fn best_bytes_per_s(&self) -> u64 {
        self.pace.best_sustained_bytes_per_s()
    }

    /// Changes with state and content.
    pub(super) fn revision(&self) -> u64 {
        self.state_changes + self.content_changes + self.errors.probes_failed
    }

    pub(super) fn set_state(&mut self, state: RailState) {
        if std::mem::discriminant(&self.state) != std::mem::discriminant(&state) {
            self.state_changes += 1;
        }
        self.state = state;
    }

    /// How many bytes more may be posted for requests of a class; `u64::MAX` where one READ may be,
    /// whatever its size.
    pub(super) fn room_bytes(&self, class: Class, config: &EngineConfig) -> u64 {
        let window = self.window_bytes(config);
        let always = match self.capabilities.whole_records {
            // A record may be larger than the window: two per lane keep each lane busy.
            true => 2 * u64::from(self.capabilities.lanes.max(1)),
            false => 1, // one READ may always be out, however small the window
        };
        let room = |limit: u64, bytes: u64, always: u64, reads: u64| match reads < always {
            true => u64::MAX,
            false => limit.saturating_sub(bytes),
        };
        let all = room(
            window,
            self.outstanding_bytes,
            always,
            self.outstanding_reads,
        );
        match class {
            Class::Demand | Class::Stream => all,
            Class::Prefetch => all.min(room(
                window / 2,
                self.prefetch_bytes,
                (always / 2).max(1),
                self.prefetch_reads,
            )),
        }
    }

    /// What it serves: the whole that its own content is part of.
    pub(super) fn serves(&self) -> Option<ContentTag> {
        let own = self.content?;
        Some(self.holding.whole.unwrap_or(own))
    }

    /// Whether its content has a record, as far as is known.
    pub(super) fn holds(&self, key: Key) -> bool {
        self.holding
            .held
            .as_ref()
            .is_none_or(|held| held.covers(key))
    }

    /// Whether it works, with the same content as another, and is preferred to it.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        let is_before = self.capabilities.rank < other.capabilities.rank;
        is_before && self.is_up() && self.serves() == other.serves()
    }

    /// Whether it may lack records.
    pub(super) fn is_partial(&self) -> bool {
        self.holding.held.is_some()
    }

    pub(super) fn set_holding(&mut self, holding: Holding) {
        if self.holding != holding {
            self.content_changes += 1;
            self.holding = holding;
        }
    }

    pub(super) fn queued(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }

    pub(super) fn ready(&mut self, content: ContentTag) {
        if !self.is_up() {
            // One that never carried a byte since it went down last is no news.
            match self.bytes_when_down == Some(self.bytes) {
                true => tracing::debug!(rail = %self.name, "rail is up again"),
                false => tracing::info!(rail = %self.name, "rail is up"),
            }
        }
        if self.content.replace(content) != Some(content) {
            self.content_changes += 1;
        }
        self.trouble.clear();
        self.set_state(RailState::Up);
    }

    /// Notes a failure; true where the rail has to be quiesced because of it.
    pub(super) fn down(&mut self, why: String) -> bool {
        match self.state {
            RailState::Up | RailState::Probing => {
                // A rail that fails again in the same way before it did any work says it once.
                match self.bytes_when_down == Some(self.bytes) && self.last_down == why {
                    true => tracing::debug!(rail = %self.name, "rail is down again: {why}"),
                    false => tracing::warn!(rail = %self.name, "rail is down: {why}"),
                }
                self.bytes_when_down = Some(self.bytes);
                self.last_down.clone_from(&why);
                self.errors.downs += 1;
                self.trouble = why;
                self.set_state(RailState::Suspect);
                true
            }
            RailState::Suspect | RailState::Quarantined { .. } => false,
        }
    }

    /// The next try is a back-off away, with up to a quarter of jitter so that many clients of one
    /// peer do not come back at the same moment.
    pub(super) fn quarantine(&mut self, now: Instant, config: &EngineConfig, jitter: f64) {
        let wait = self.backoff.mul_f64(1.0 + jitter.clamp(0.0, 1.0) / 4.0);
        self.backoff = (self.backoff * 2).min(config.backoff_max);
        self.set_state(RailState::Quarantined {
            retry_at: later(now, wait),
        });
    }

    pub(super) fn posted(&mut self, bytes: u64, class: Class, now: Instant) {
        if self.outstanding_reads == 0 {
            self.progress_at = now;
        }
        self.pace.posted(self.outstanding_reads == 0, now);
        self.outstanding_bytes += bytes;
        self.outstanding_reads += 1;
        if class == Class::Prefetch {
            self.prefetch_bytes += bytes;
            self.prefetch_reads += 1;
        }
    }

    pub(super) fn unposted(&mut self, bytes: u64, class: Class) {
        self.outstanding_bytes -= bytes;
        self.outstanding_reads -= 1;
        if class == Class::Prefetch {
            self.prefetch_bytes -= bytes;
            self.prefetch_reads -= 1;
        }
    }

    /// A READ did its work: the rail is worth its full trust again.
    pub(super) fn landed(
        &mut self,
        bytes: u64,
        latency: Duration,
        now: Instant,
        config: &EngineConfig,
    ) {
        self.pace.landed(bytes, now);
        self.bytes += bytes;
        self.reads += 1;
        self.latency.record(latency);
        self.stall_patience = 1;
        self.backoff = config.backoff_first;
    }

    /// Takes note of the bytes seen so far; true when nothing moved for too long.
    pub(super) fn is_stalled(&mut self, progress: u64, now: Instant) -> bool {
        if progress != self.progress || self.outstanding_reads == 0 {
            self.progress = progress;
            self.progress_at = now;
        }
        self.is_up() && now.duration_since(self.progress_at) >= self.stall_time()
    }

    /// How long no byte may come while READs are posted.
    fn stall_time(&self) -> Duration {
        self.capabilities.stall.saturating_mul(self.stall_patience)
    }

    /// Notes that it stood still.
    pub(super) fn stalled(&mut self) {
        self.errors.stalls += 1;
        self.stall_patience = (self.stall_patience * 2).min(STALL_PATIENCE_MAX);
    }

    /// When the stall detector has to look again.
    pub(super) fn stall_at(&self) -> Option<Instant> {
        (self.is_up() && self.outstanding_reads > 0)
            .then(|| later(self.progress_at, self.stall_time()))
    }

    pub(super) fn stats(&self) -> RailStats {
        RailStats {
            name: self.name.clone(),
            kind: self.kind,
            state: self.state.name(),
            bytes: self.bytes,
            reads: self.reads,
            errors: self.errors.total(),
            errors_by_cause: self.errors,
            state_changes: self.state_changes,
            in_flight_bytes: self.outstanding_bytes,
            latency_p50_us: self.latency.percentile_us(0.5),
            latency_p99_us: self.latency.percentile_us(0.99),
            latency: self.latency.clone(),
            cpu_us: self.time.cpu_us(),
            registered_bytes: 0, // the rail knows, and the next one
            io: None,
        }
    }
}
