//! Everything about a run that is drawn before it begins.

use std::time::Duration;

use super::contents::{LEAF_BYTES, VERSIONS};
use crate::config::{EngineConfig, OnFailure, Policy, Verify};
use crate::mock::rng::SplitMix;
use crate::mock::{MockSpec, ReadFault, Verifies};
use crate::rail::Capabilities;

/// Rails and peers, what is asked of them, and what goes wrong.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) engine: EngineConfig,
    pub(super) rails: Vec<MockSpec>,
    /// Peer of each rail.
    pub(super) peer_of: Vec<usize>,
    /// Version that each peer serves first.
    pub(super) versions: Vec<usize>,
    /// Layers that are asked for.
    pub(super) layers: Vec<u32>,
    pub(super) slots: u32,
    pub(super) verify: Verify,
    /// From the start of the run.
    pub(super) submits: Vec<Duration>,
    pub(super) faults: Vec<(Duration, Fault)>,
}

/// Something that goes wrong.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    Disconnect {
        rail: usize,
        for_: Duration,
    },
    Stall {
        rail: usize,
        for_: Duration,
    },
    Read {
        rail: usize,
        fault: ReadFault,
    },
    SlowPeer {
        peer: usize,
        factor: u32,
        for_: Duration,
    },
    Content {
        peer: usize,
        version: usize,
    },
}

impl Fault {
    /// When its effect is over, counted from its begin.
    pub(super) fn lasts(&self) -> Duration {
        match self {
            Self::Disconnect { for_, .. }
            | Self::Stall { for_, .. }
            | Self::SlowPeer { for_, .. } => *for_,
            Self::Read { fault, .. } => match fault {
                ReadFault::Late(by) => *by,
                _ => Duration::ZERO,
            },
            Self::Content { .. } => Duration::ZERO,
        }
    }

    /// For the report.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Disconnect { .. } => "disconnect",
            Self::Stall { .. } => "stall",
            Self::Read { fault, .. } => match fault {
                ReadFault::Corrupt => "corrupt-chunk",
                ReadFault::Short => "under-delivery",
                ReadFault::Late(_) => "late-landing",
                ReadFault::Unavailable => "unavailable",
            },
            Self::SlowPeer { .. } => "slow-peer",
            Self::Content { .. } => "content-change",
        }
    }
}

/// Longest time that requests are made for.
const BUSY_MAX_US: u64 = 60_000_000;

impl Plan {
    pub(super) fn draw(rng: &mut SplitMix) -> Self {
        let rails = rng.between(1, 4) as usize;
        let peers = rng.between(1, rails.min(3) as u64) as usize;
        // Each peer has a rail; the rest is dealt out.
        let peer_of = (0..rails)
            .map(|rail| if rail < peers { rail } else { rng.index(peers) })
            .collect();
        let mixed = rng.percent(20);
        let versions = (0..peers)
            .map(|_| if mixed { rng.index(VERSIONS) } else { 0 })
            .collect();
        let mut plan = Self {
            engine: draw_engine(rng),
            rails: (0..rails).map(|_| draw_rail(rng)).collect(),
            peer_of,
            versions,
            layers: (0..rng.between(1, 3))
                .map(|_| rng.index(LEAF_BYTES.len()) as u32)
                .collect(),
            slots: rng.between(2, 10) as u32,
            verify: match rng.below(10) {
                0..=5 => Verify::Always,
                6 | 7 => Verify::First,
                _ => Verify::Off,
            },
            submits: Vec::new(),
            faults: Vec::new(),
        };
        let mut at = 0;
        let gap_max_us = *rng.pick(&[2_000, 50_000, 1_000_000, 5_000_000]);
        for _ in 0..rng.between(4, 60) {
            plan.submits.push(Duration::from_micros(at));
            at = (at + rng.magnitude(200, gap_max_us)).min(BUSY_MAX_US);
        }
        for _ in 0..rng.below(12) {
            let when = Duration::from_micros(rng.below(at.max(1)));
            plan.draw_fault(rng, when);
        }
        plan.faults.sort_by_key(|(at, _)| *at);
        plan
    }

    fn draw_fault(&mut self, rng: &mut SplitMix, at: Duration) {
        let rail = rng.index(self.rails.len());
        let peer = self.peer_of[rail];
        let fault = match rng.below(9) {
            0 => Fault::Disconnect {
                rail,
                for_: rng.duration(1_000, 5_000_000),
            },
            1 | 2 => Fault::Stall {
                rail,
                for_: rng.duration(20_000, 8_000_000),
            },
            3 => {
                // It flaps: several short cuts in a row.
                let mut at = at;
                for _ in 0..rng.between(2, 5) {
                    let for_ = rng.duration(1_000, 300_000);
                    self.faults.push((at, Fault::Disconnect { rail, for_ }));
                    at += for_ + rng.duration(1_000, 300_000);
                }
                return;
            }
            4 => Fault::SlowPeer {
                peer,
                factor: rng.between(2, 50) as u32,
                for_: rng.duration(10_000, 5_000_000),
            },
            5 => Fault::Content {
                peer,
                version: rng.index(VERSIONS),
            },
            6 => Fault::Read {
                rail,
                fault: ReadFault::Late(rng.duration(1_000, 2_000_000)),
            },
            7 => Fault::Read {
                rail,
                fault: ReadFault::Unavailable,
            },
            _ => {
                let fault = *rng.pick(&[ReadFault::Corrupt, ReadFault::Short]);
                for _ in 0..rng.between(1, 3) {
                    self.faults.push((at, Fault::Read { rail, fault }));
                }
                return;
            }
        };
        self.faults.push((at, fault));
    }
}

fn draw_engine(rng: &mut SplitMix) -> EngineConfig {
    EngineConfig {
        policy: *rng.pick(&[Policy::HomeSteal, Policy::ExpertMod, Policy::Split]),
        on_failure: match rng.percent(25) {
            true => OnFailure::FailFast,
            false => OnFailure::Failover,
        },
        window_bytes: *rng.pick(&[1, 256 << 10, 1 << 20, 4 << 20]),
        read_bytes: *rng.pick(&[1, 256 << 10, 512 << 10, 1 << 20]),
        inflight_max_bytes: *rng.pick(&[1, 2 << 20, 4 << 30]),
        retries: rng.below(3) as u32,
        ..EngineConfig::default()
    }
}

fn draw_rail(rng: &mut SplitMix) -> MockSpec {
    let mut spec = MockSpec {
        bytes_per_s: rng.magnitude(2_000_000, 12_000_000_000),
        latency: rng.duration(2, 20_000),
        jitter: rng.duration(1, 2_000),
        reorder: match rng.percent(50) {
            true => rng.duration(1, 5_000),
            false => Duration::ZERO,
        },
        depth: *rng.pick(&[1, 4, 128]),
        connect: rng.duration(100, 50_000),
        flush: rng.duration(10, 2_000),
        verifies: Verifies::Engine,
        capabilities: Capabilities {
            read_max_bytes: *rng.pick(&[256 << 10, 1 << 20, 1 << 30]),
            whole_records: rng.percent(10),
            lanes: rng.between(1, 2) as u32,
            pieces: 1,
            stall: Duration::from_millis(200),
            rank: u8::from(rng.percent(15)),
        },
    };
    // As verbs rails have it.
    if spec.capabilities.lanes > 1 {
        spec.capabilities.pieces = 2 * spec.capabilities.lanes;
    }
    spec
}
