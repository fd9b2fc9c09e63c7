//! One-sided READs: rails, registered stores, and queue pairs for clients.
//!
//! * [`VerbsOptions`]: what the caller wants. `Verbs`: the rails of this peer, open as long as it lives.
//! * `served`: one store's registered memory and the queue pairs that lead there, and the order in
//!   which they end.
//! * `open`: a client opens a rail, v2 and v1.
//! * `fabric`: the traits behind which the devices are; `device` has them.
//!
//! All of this is control traffic: a READ never reaches this process. No lock that connections
//! share is held while a device is asked for something.

mod device;
mod fabric;
#[cfg(test)]
mod fake;
mod open;
mod options;
mod publish;
mod quota;
mod served;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use expert_wire::verbs::RailInfo;
use tracing::{debug, info, warn};

use crate::{PeerError, RailStats};
use quota::QpQuota;

pub(crate) use fabric::Fabric;
pub(crate) use open::{V1Offer, open_rail, v1_connect, v1_layers, v1_offer, withdrawn};
pub use options::VerbsOptions;
pub(crate) use quota::QpShare;
pub(crate) use served::{OpenedRail, Served};

/// The rails of a peer.
pub(crate) struct Verbs {
    fabric: Box<dyn Fabric>,
    pub(crate) options: VerbsOptions,
    pub(crate) quota: Arc<QpQuota>,
    rails: Vec<Rail>,
}

struct Rail {
    name: String,
    /// As clients were told last: what stands for a rail that does not answer, so that the
    /// indexes of the others stay.
    info: Mutex<RailInfo>,
    opens: AtomicU64,
    qps_open: Arc<AtomicU64>,
}

impl Verbs {
    /// Opens the machine's devices; `None` where there is nothing to offer and nothing was demanded.
    pub(crate) fn start(options: &VerbsOptions) -> Result<Option<Self>, PeerError> {
        match device::Devices::open(options) {
            Ok(devices) => Self::new(Box::new(devices), options.clone()).map(Some),
            Err(e) if options.required => Err(e),
            Err(e) if device::is_absent() => {
                info!("no verbs, TCP alone: {e}");
                Ok(None)
            }
            Err(e) => {
                warn!("no verbs, TCP alone: {e}");
                Ok(None)
            }
        }
    }

    pub(crate) fn new(fabric: Box<dyn Fabric>, options: VerbsOptions) -> Result<Self, PeerError> {
        let rails = fabric
            .names()
            .into_iter()
            .enumerate()
            .map(|(rail, name)| {
                Ok(Rail {
                    name,
                    info: Mutex::new(fabric.state(rail)?.info),
                    opens: AtomicU64::new(0),
                    qps_open: Arc::default(),
                })
            })
            .collect::<Result<_, PeerError>>()?;
        Ok(Self {
            quota: QpQuota::new(options.qps_per_client_max),
            fabric,
            options,
            rails,
        })
    }

    /// What the start does about a store that cannot be registered: an error where verbs are
    /// required or the caller wants to stop, else a warning.
    pub(crate) fn go_without(&self, error: PeerError) -> Result<(), PeerError> {
        if self.options.required || matches!(error, PeerError::Interrupted) {
            return Err(error);
        }
        warn!("no verbs although there are rails, TCP alone: {error}");
        Ok(())
    }

    pub(crate) fn rail_count(&self) -> usize {
        self.rails.len()
    }

    /// The rails as they are now.
    pub(crate) fn infos(&self) -> Vec<RailInfo> {
        (0..self.rails.len())
            .map(|rail| {
                let last = &self.rails[rail].info;
                let fresh = self.state(rail).map(|s| s.info);
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                match fresh {
                    Ok(info) => last.clone_from(&info),
                    Err(e) => debug!("rail {}: {e}", self.rails[rail].name),
                }
                last.clone()
            })
            .collect()
    }

    /// A rail's state, with this peer's limits.
    fn state(&self, rail: usize) -> Result<fabric::RailState, PeerError> {
        let mut state = self.fabric.state(rail)?;
        state.info.qps_max = self.options.qps_per_rail_max.max(1);
        let reads_max = self.options.reads_per_qp_max.max(1);
        state.reads_in_max = state.reads_in_max.min(reads_max);
        state.info.reads_max = state.info.reads_max.min(reads_max);
        Ok(state)
    }

    pub(crate) fn stats(&self, served: Option<&Served>) -> Vec<RailStats> {
        self.rails
            .iter()
            .enumerate()
            .map(|(i, rail)| {
                let regions = served.map(|s| s.regions(i)).unwrap_or_default();
                RailStats {
                    name: rail.name.clone(),
                    registered_bytes: regions.iter().map(|r| r.bytes).sum(),
                    regions: regions.len() as u64,
                    qps_open: rail.qps_open.load(Ordering::Relaxed),
                    opens: rail.opens.load(Ordering::Relaxed),
                }
            })
            .collect()
    }
}
