//! How a peer does, for those who watch it: metrics, health and readiness.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use expert_metrics::CONTENT_TYPE;
use expert_metrics::http::Reply;

use crate::peer::Shared;
use crate::{Peer, PeerStats, metrics};

/// How late the watcher may be: a disk that is busy makes a look at files slow, one that hangs
/// makes it endless.
const WATCHER_LATE: Duration = Duration::from_secs(30);

/// Acceptor and watcher.
const SERVICE_THREADS: u32 = 2;

/// Asks a peer how it does; does not keep it alive.
#[derive(Debug, Clone)]
pub struct Monitor(Weak<Shared>);

impl Monitor {
    pub(crate) fn new(shared: Weak<Shared>) -> Self {
        Self(shared)
    }

    /// Whether the peer's threads do their work; what is wrong where they do not.
    pub fn health(&self) -> Result<(), String> {
        let Some(shared) = self.0.upgrade() else {
            return Err("the peer has ended".into());
        };
        if is_stopping(&shared) {
            return Ok(());
        }
        if shared.service_threads() < SERVICE_THREADS {
            return Err("a thread of the peer ended; the log says why".into());
        }
        match is_late(shared.watched.age(), shared.config.restat_interval) {
            true => Err(
                "the store's files are not looked at any more: does their file system answer?"
                    .into(),
            ),
            false => Ok(()),
        }
    }

    /// Whether clients are served as they should be; why not where they are not.
    pub fn readiness(&self) -> Result<(), &'static str> {
        match self.0.upgrade() {
            None => Err("the peer has ended"),
            Some(shared) if is_stopping(&shared) => Err("draining: the peer goes down"),
            Some(shared) if shared.is_reloading() => Err("reloading: another store is taken up"),
            Some(_) => Ok(()),
        }
    }

    /// Whether a store is served because the next one could not be taken up.
    pub fn last_reload_failed(&self) -> bool {
        let shared = self.0.upgrade();
        shared.is_some_and(|s| s.counters.last_reload_failed.load(Ordering::Relaxed))
    }

    /// The peer's numbers; `None` once it has ended.
    pub fn stats(&self) -> Option<PeerStats> {
        Some(self.0.upgrade()?.stats())
    }
}

fn is_late(age: Duration, interval: Duration) -> bool {
    age > interval.saturating_add(WATCHER_LATE)
}

fn is_stopping(shared: &Shared) -> bool {
    shared.stopping.load(Ordering::SeqCst)
}

/// What `/metrics`, `/healthz` and `/readyz` show, from before a peer is there to after its end.
///
/// Nothing of it names files, layers or contents: whoever reaches the port may read it.
#[derive(Debug, Default)]
pub struct StatusPages {
    monitor: OnceLock<Monitor>,
}

impl StatusPages {
    /// Of a peer that is being started: healthy and not ready.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// From here on they tell of this peer. The first one stays.
    pub fn watch(&self, peer: &Peer) {
        let _ = self.monitor.set(peer.monitor());
    }

    /// The page of a path, for [`expert_metrics::http::Server`].
    pub fn get(&self, path: &str) -> Option<Reply> {
        match path {
            "/metrics" => Some(Reply {
                status: 200,
                content_type: CONTENT_TYPE,
                body: self.metrics(),
            }),
            "/healthz" => Some(match self.monitor.get().map(Monitor::health) {
                None | Some(Ok(())) => Reply::text(200, "ok"),
                Some(Err(why)) => Reply::text(503, &why),
            }),
            "/readyz" => Some(match self.readiness() {
                Ok(()) if self.last_reload_failed() => Reply::text(
                    200,
                    "ready, with the store before: the last reload failed, the log says why",
                ),
                Ok(()) => Reply::text(200, "ready"),
                Err(why) => Reply::text(503, why),
            }),
            _ => None,
        }
    }

    fn readiness(&self) -> Result<(), &'static str> {
        match self.monitor.get() {
            None => Err("starting: the store is opened, read and registered"),
            Some(monitor) => monitor.readiness(),
        }
    }

    fn last_reload_failed(&self) -> bool {
        let monitor = self.monitor.get();
        monitor.is_some_and(Monitor::last_reload_failed)
    }

    fn metrics(&self) -> String {
        let mut page = metrics::head(self.readiness().is_ok());
        if let Some(stats) = self.monitor.get().and_then(Monitor::stats) {
            metrics::add(&mut page, &stats);
        }
        page.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watcher_may_be_late_for_a_while_and_no_longer() {
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
        assert!(!is_late(second + WATCHER_LATE, second));
        assert!(is_late(second + WATCHER_LATE + second, second));
        assert!(!is_late(hour, hour));
        assert!(!is_late(hour, Duration::MAX));
    }
}
