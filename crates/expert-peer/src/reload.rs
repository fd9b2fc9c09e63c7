//! Another store for a running peer, and the end of the one before.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use crate::epoch::Epoch;
use crate::peer::Shared;
use crate::stats::add;
use crate::verbs::{Served, Verbs};
use crate::{Peer, PeerError, Source};

/// Between looks at whether the clients of a replaced store are gone.
const GRACE_STEP: Duration = Duration::from_millis(10);

impl Peer {
    /// Takes up another store, or another state of the same one, and gives back its epoch.
    ///
    /// v2 clients are told between two answers, and their READs with the old epoch are refused;
    /// v1 clients, which cannot be told, are hung up. Answers that are on their way are finished
    /// from the old store, whose files stay open until then.
    ///
    /// With verbs, the new store is registered before anybody is told, beside the old one where
    /// memory allows that, else in its place. Clients may read the old one for
    /// [`VerbsOptions::reload_grace`](crate::VerbsOptions::reload_grace) more; then v1 verbs
    /// clients are hung up, and the call returns when the old memory is given back.
    ///
    /// *Errors*: [`PeerError::Store`] when it cannot be served, and all that registering can end
    /// with; the old one stays.
    pub fn reload(&self, store: Arc<dyn Source>) -> Result<u32, PeerError> {
        let _one_at_a_time = self.shared.lock_reload();
        self.reload_alone(store)
            .inspect_err(|_| self.note_failed_reload())
    }

    fn reload_alone(&self, store: Arc<dyn Source>) -> Result<u32, PeerError> {
        let old = self.shared.epoch();
        // 0 is the value that no client was ever told.
        let number = old.number.checked_add(1).unwrap_or(1);
        let mut epoch = Epoch::new(number, self.shared.instance_id, store)?;
        if let Some(verbs) = &self.shared.verbs {
            let served = replace(&self.shared, verbs, &old, &*epoch.source)?;
            epoch = epoch.with_verbs(served.into(), verbs.rail_count());
            // What changed while it was registered.
            epoch.check_files(&self.shared.counters);
        }
        self.shared.take_up(epoch);
        let counters = &self.shared.counters;
        add(&counters.reloads, 1);
        counters.last_reload_failed.store(false, Ordering::Relaxed);
        let connections = self.shared.wake_connections();
        info!("serving epoch {number}; {connections} connections are told");
        if let (Some(verbs), Some(served)) = (&self.shared.verbs, old.serve(None)) {
            end_of(&self.shared, &served, verbs.options.reload_grace);
        }
        Ok(number)
    }
}

/// Registers the next store: beside the old one, or where that is too much, in its place.
fn replace(
    shared: &Shared,
    verbs: &Verbs,
    old: &Epoch,
    source: &dyn Source,
) -> Result<Served, PeerError> {
    let beside = old.served().map_or(0, |s| s.bytes());
    let too_much = match verbs.publish(source, beside) {
        Err(e @ (PeerError::BladeTooLarge { .. } | PeerError::MemoryShort { .. }))
            if beside > 0 =>
        {
            e
        }
        other => return other,
    };
    // Giving up the old one must at least be worth a try.
    verbs.check_limit(source)?;
    warn!("{too_much}: the old store's memory is given back first, clients do without meanwhile");
    if let Some(served) = old.serve(None) {
        end_of(shared, &served, Duration::ZERO);
    }
    verbs
        .publish(source, 0)
        .inspect_err(|_| match verbs.publish(&*old.source, 0) {
            Ok(again) => drop(old.serve(Some(again.into()))),
            Err(e) => error!("the old store is served over TCP alone: {e}"),
        })
}

/// The end of a store's registered memory: a grace time, v1 clients hung up, and then, whatever
/// threads of connections do, the memory first and the queue pairs after it.
fn end_of(shared: &Shared, served: &Served, grace: Duration) {
    let until = Instant::now() + grace;
    while served.clients().1 > 0
        && Instant::now() < until
        && !shared.stopping.load(Ordering::SeqCst)
    {
        thread::sleep(GRACE_STEP.min(grace));
    }
    served.close();
    let (v1, all) = served.clients();
    // They see it as they wake up, and go.
    shared.wake_connections();
    let start = Instant::now();
    served.withdraw();
    info!(
        "{} bytes deregistered in {:.1} s; {all} clients had them open, {v1} of them v1 ones, which are hung up",
        served.bytes(),
        start.elapsed().as_secs_f64()
    );
}
