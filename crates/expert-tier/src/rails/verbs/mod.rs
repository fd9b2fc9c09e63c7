//! The verbs rail: one port of this machine, paired with one of the peer, and one-sided READs.
//!
//! ```text
//! driver ── post ─► lane's queue pair ══ READ ══► peer's memory      (no CPU of the peer)
//!    ▲                  │ completion
//!    └── events ◄── lane thread: padding, checksums
//! control thread ── TCP ── peer: handshake, where layers lie, notices, hang-up
//! ```
//!
//! Soft-RoCE may carry a READ out in the system call that posts it (Linux 6.1 does), and lanes would
//! take turns: where that is seen, the driver hands READs to the lanes' threads, which post them.
//!
//! An [`Attempt`](attempt::Attempt) is one life of the rail: a control connection, the queue pairs
//! that live as long as it does, and their threads. When any part of it fails all queue pairs go to
//! the error state, every READ is given back, and the next attempt starts from nothing: the GID is
//! looked up again, the peer's regions are asked for again, and a READ on each queue pair must have
//! worked before the rail is ready.
//!
//! *Memory rule*: a posted READ is owned by its queue until its last completion was polled or its
//! queue pair destroyed; `atlas_rdma::ReadQueue` sees to it.
//!
//! Files: `options` what a caller chooses, `local` ports of this machine, `plan` READs as work
//! requests, `session` the handshakes, `attempt` threads and states.

mod attempt;
mod local;
mod options;
mod plan;
mod session;

use std::sync::Arc;
use std::time::Duration;

use expert_wire::auth::Token;
use expert_wire::limits;

use crate::notify::Notifier;
use crate::rail::{Capabilities, Rail, RailEvent, RailKind, Read};
use attempt::{Attempt, RailShared};
pub(crate) use local::{OwnRail, find_rails};
pub use options::{RailSlot, RailsWanted, VerbsOptions};
pub(crate) use session::{V1Run, endpoint, rails_of_peer};

/// READs in flight on one queue pair: a window of records of 4 KiB.
const POSTS_MAX: u32 = 1024;
/// Work requests in flight on one queue pair.
const WORK_REQUESTS_MAX: u32 = 4096;
/// Local parts of one work request: an NVFP4 record has twelve leaves.
const PARTS_MAX: u32 = 16;

/// How a verbs rail is set up.
#[derive(Clone)]
pub(crate) struct VerbsConfig {
    pub(crate) addr: String,
    /// The peer on this rail's own path, where it has an address there.
    pub(crate) addr_on_rail: Option<String>,
    pub(crate) client_id: u64,
    pub(crate) token: Option<Token>,
    pub(crate) options: VerbsOptions,
    /// All rails of the tier, this one at `index`: they are paired with the peer's together.
    pub(crate) rails: Arc<Vec<OwnRail>>,
    pub(crate) index: usize,
    /// Whether its name has the peer in it, because there are several.
    pub(crate) name_peer: bool,
    /// Set where the peer speaks v1.
    pub(crate) v1: Option<Arc<V1Run>>,
    pub(crate) connect_timeout: Duration,
}

impl VerbsConfig {
    fn local(&self) -> &OwnRail {
        &self.rails[self.index]
    }
}

/// See the module. *Drop order*: queue pairs (in the attempt) before registrations (in the config's
/// local rails) before the arena.
pub(crate) struct VerbsRail {
    name: String,
    shared: Arc<RailShared>,
    attempt: Option<Arc<Attempt>>,
    /// How long a lane may stand still: grows like the engine's, so that a slow path is not torn
    /// down for ever.
    lane_stall: Duration,
    /// Bytes landed when a lane stood still last.
    landed_at_stall: u64,
    config: VerbsConfig,
}

impl VerbsRail {
    pub(crate) fn new(config: VerbsConfig, notifier: Arc<Notifier>) -> Self {
        Self {
            name: match config.name_peer {
                true => format!("verbs:{}:{}", config.local().name(), config.addr),
                false => format!("verbs:{}", config.local().name()),
            },
            shared: Arc::new(RailShared::new(notifier)),
            attempt: None,
            lane_stall: config.options.stall,
            landed_at_stall: 0,
            config,
        }
    }
}

impl Rail for VerbsRail {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> RailKind {
        match self.config.v1 {
            Some(_) => RailKind::VerbsV1,
            None => RailKind::Verbs,
        }
    }

    fn capabilities(&self) -> Capabilities {
        // Half the queue for one READ, so that the next one can be posted behind it.
        let requests = self.config.local().queue_options(&self.config.options);
        let requests = u64::from(requests.work_requests_max / 2).max(1);
        let most = requests.saturating_mul(self.config.options.request_bytes);
        // v1 has one queue pair per rail.
        let lanes = match self.config.v1 {
            Some(_) => 1,
            None => self.config.options.qps_per_rail,
        };
        Capabilities {
            read_max_bytes: most.min(u64::from(limits::READ_MAX_BYTES)),
            whole_records: self.config.v1.is_some(),
            lanes,
            // Two for each: one is compared while the next one arrives.
            pieces: 2 * lanes,
            stall: self.config.options.stall,
            rank: 0,
        }
    }

    fn post(&mut self, read: Read) -> Result<(), Box<Read>> {
        match &self.attempt {
            Some(attempt) => attempt.post(read),
            None => Err(Box::new(read)),
        }
    }

    fn poll(&mut self, sink: &mut Vec<RailEvent>) {
        self.shared.take_events(sink);
        if let Some(attempt) = &self.attempt {
            attempt.post_backlog();
            let landed = self.shared.landed_bytes();
            if landed > self.landed_at_stall {
                self.lane_stall = self.config.options.stall;
            }
            if let Some(why) = attempt.stalled_lane(self.lane_stall) {
                self.lane_stall = (self.lane_stall * 2).min(self.config.options.stall * 8);
                self.landed_at_stall = landed;
                sink.push(RailEvent::Stalled(why));
            }
        }
    }

    fn registered_bytes(&self) -> u64 {
        self.config.local().landing().registered_bytes()
    }

    fn progress_bytes(&self) -> u64 {
        let posted = self.attempt.as_ref().map_or(0, |a| a.progress_bytes());
        self.shared.landed_bytes() + posted
    }

    fn begin_probe(&mut self) {
        // The old attempt has ended; nothing of it may outlive it.
        self.attempt = None;
        match Attempt::start(self.shared.clone(), self.config.clone()) {
            Ok(attempt) => self.attempt = Some(attempt),
            Err(e) => {
                let why = format!("no descriptor for a rail: {e}");
                self.shared.push(RailEvent::ProbeFailed(why));
            }
        }
    }

    fn begin_quiesce(&mut self) {
        if let Some(attempt) = &self.attempt {
            attempt.fail("stopped".into());
        }
    }

    fn is_quiesced(&self) -> bool {
        self.attempt.as_ref().is_none_or(|a| a.is_quiesced())
    }
}

impl Drop for VerbsRail {
    /// Threads that still run own their READs and give them back to nobody; the arena frees the
    /// slots when the queue pairs are gone.
    fn drop(&mut self) {
        self.begin_quiesce();
    }
}
