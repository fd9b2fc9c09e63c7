//! Examines a machine, a store and a peer, and says of each thing whether it is as it should be, what it means if not,
//! and which line mends it.
//!
//! Start at [`examine`]: [`Options`] in, a [`Report`] of [`Finding`]s out. [`Check`] lists what is looked at;
//! `docs/doctor.md` says the same for people.
//!
//! | file | concept |
//! |---|---|
//! | `finding` | findings, their levels and names |
//! | `system`, `verbs` | where facts come from: files below a root, and libibverbs behind a trait |
//! | `machine`, `device`, `port`, `memory`, `store`, `peer`, `measure` | checks: facts in, findings out |
//!
//! **Levels.** What stands in the way of one-sided READs is a warning, because TCP works, and a failure where
//! [`Options::verbs_required`] says that they are wanted. A port that nobody named may be down while another one works.
//!
//! *Boundary:* it changes nothing. It binds a port and lets it go, registers a megabyte and lets it go, opens files for
//! reading, and fetches for a bounded time from the peer that it was told of. It prints nothing.
#![forbid(unsafe_code)]

mod device;
mod finding;
mod machine;
mod measure;
mod memory;
mod peer;
mod port;
mod store;
mod system;
#[cfg(test)]
mod tests;
mod verbs;

pub use finding::{Area, Check, Finding, Level, Report};

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use atlas_rdma::choose::{PortView, RailSpec};
use expert_tier::{RailsWanted, TierBuilder, VerbsOptions};
use system::System;
use verbs::{Libibverbs, Verbs};

/// Longest time for which a rail is measured.
pub const MEASURE_MAX: Duration = Duration::from_secs(1);

/// What to examine, and what for.
#[derive(Debug, Clone)]
pub struct Options {
    /// One-sided READs are what is wanted: what stands in their way is a failure.
    pub verbs_required: bool,
    /// Rails and their settings, as a client would use them.
    pub verbs: VerbsOptions,
    /// Bytes that the client's arena is to have, where that is known.
    pub arena_bytes: Option<u64>,
    /// Bytes of memory that must stay free; default as arenas have it.
    pub reserve_bytes: Option<u64>,
    /// A store or checkpoint on this machine.
    pub store: Option<PathBuf>,
    /// Which stack of it.
    pub stack: Option<String>,
    /// Peers, `host:port` each.
    pub peers: Vec<String>,
    /// How to connect to them.
    pub tier: TierBuilder,
    /// The content to insist on.
    pub expect_content_id: Option<u128>,
    /// Where a peer is to listen on this machine; default: the usual port on loopback, where nothing more than a
    /// warning comes of it.
    pub listen: Option<SocketAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            verbs_required: false,
            verbs: VerbsOptions::default(),
            arena_bytes: None,
            reserve_bytes: None,
            store: None,
            stack: None,
            peers: Vec::new(),
            tier: TierBuilder::new(),
            expect_content_id: None,
            listen: None,
        }
    }
}

impl Options {
    /// The level of what stands in the way of one-sided READs.
    fn verbs_level(&self) -> Level {
        match self.verbs_required {
            true => Level::Failure,
            false => Level::Warning,
        }
    }

    /// The names under which rails were asked for, each with its GID index.
    fn named(&self) -> Vec<RailSpec> {
        match &self.verbs.rails {
            RailsWanted::List(specs) => specs.clone(),
            RailsWanted::Slots(slots) => slots
                .iter()
                .filter_map(|slot| {
                    Some(RailSpec {
                        device: slot.device.clone()?,
                        port: None,
                        gid_index: slot.gid_index,
                    })
                })
                .collect(),
        }
    }

    /// How this port was asked for by name, if it was.
    fn spec_of(&self, view: &PortView) -> Option<RailSpec> {
        let is_it =
            |s: &RailSpec| s.device == view.device && s.port.is_none_or(|port| port == view.port);
        self.named().into_iter().find(is_it)
    }
}

/// Looks at everything. Takes a few seconds where a peer is named, and no longer than its time-outs and
/// [`MEASURE_MAX`] for each rail where it does not answer.
pub fn examine(options: &Options) -> Report {
    examine_on(options, &System::here(), &Libibverbs)
}

fn examine_on(options: &Options, system: &System, verbs: &dyn Verbs) -> Report {
    let mut findings = Vec::new();
    let out = &mut findings;
    let devices = verbs.devices();
    machine::check(out, options, system, &devices);
    let devices = devices.unwrap_or_default();
    let (store, audit) = store::audit(options);
    device::check(out, options, system, verbs, &devices, store.as_ref());
    let rails = port::check(out, options, system, &devices);
    memory::check(out, options, system, &rails, store.as_ref());
    machine::check_io(out, options, system);
    out.extend(audit);
    if let Some(store) = &store {
        out.extend(memory::store_memory(options, system, store));
    }
    for addr in &options.peers {
        peer::check(out, options, system, addr, &rails);
    }
    findings.into()
}
