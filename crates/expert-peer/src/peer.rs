//! The peer: what its threads share, start and shutdown.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use crate::connection::Connection;
use crate::epoch::Epoch;
use crate::net::{self, Wake};
use crate::shares::Shares;
use crate::stats::{Counters, add};
use crate::status::Monitor;
use crate::verbs::{Served, Verbs};
use crate::{PeerConfig, PeerError, PeerStats, VerbsOptions, accept, populate, watch};

/// How long dropping a [`Peer`] may take.
const DROP_DEADLINE: Duration = Duration::from_secs(2);

/// A running peer: serves until it is shut down or dropped.
pub struct Peer {
    pub(crate) shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    down: bool,
}

/// What the threads of a peer share.
pub(crate) struct Shared {
    pub(crate) config: PeerConfig,
    pub(crate) instance_id: u64,
    pub(crate) counters: Counters,
    pub(crate) stopping: AtomicBool,
    /// Wakes acceptor and watcher for the last time.
    pub(crate) stop_wake: Wake,
    /// A client reported bad bytes.
    pub(crate) report_wake: Wake,
    pub(crate) next_connection: AtomicU64,
    pub(crate) busy_log: LogRate,
    pub(crate) refusal_log: LogRate,
    pub(crate) report_log: LogRate,
    /// Whether a connection looks for its next request.
    pub(crate) looking: AtomicBool,
    pub(crate) auth_log: LogRate,
    pub(crate) shares: Shares,
    /// Notified, under the lock of `connections`, when a thread has ended.
    pub(crate) ended: Condvar,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    /// Acceptor and watcher.
    service_threads: AtomicU32,
    pub(crate) watched: Heartbeat,
    // Field order is drop order: the store's memory and its queue pairs, then the rails.
    epoch: Mutex<Arc<Epoch>>,
    epoch_number: AtomicU32,
    reload: Mutex<()>,
    /// The rails; none without verbs.
    pub(crate) verbs: Option<Verbs>,
}

impl Peer {
    /// Binds, reads the store into memory and registers it where that is asked for, and serves.
    ///
    /// *Errors*: [`PeerError::Anonymous`] for an address beyond loopback without
    /// `allow_anonymous` or a token, [`PeerError::Listen`] (for a port in use: stop who has it, or choose
    /// another), [`PeerError::Interrupted`] when the population was cancelled. Where verbs are
    /// required, also what keeps them from being served: [`PeerError::Rdma`], [`PeerError::Rails`],
    /// [`PeerError::Publish`], [`PeerError::BladeTooLarge`], [`PeerError::MemoryShort`].
    pub fn start(config: PeerConfig) -> Result<Self, PeerError> {
        Self::start_with(config, Verbs::start)
    }

    /// `rails` opens the rails where the configuration wants some.
    pub(crate) fn start_with(
        config: PeerConfig,
        rails: impl FnOnce(&VerbsOptions) -> Result<Option<Verbs>, PeerError>,
    ) -> Result<Self, PeerError> {
        let open = config.allow_anonymous || config.auth_token.is_some();
        let names = net::resolve(&config.listen, open)?;
        // Bound before the long part, so that a port in use shows at once.
        let bound = net::bind(&names)?;
        let instance_id = rand::random();
        let mut epoch = Epoch::new(1, instance_id, config.store.clone())?;
        // Before the long part, too.
        let mut verbs = match &config.verbs {
            Some(options) => rails(options)?,
            None => None,
        };
        if let Some(rails) = &verbs {
            if let Err(e) = rails.check_fits(&*config.store, 0) {
                rails.go_without(e)?;
                verbs = None;
            }
        }
        let counters = Counters::default();
        if let Some(rails) = &verbs {
            match rails.publish(&*config.store, 0) {
                Ok(served) => {
                    epoch = epoch.with_verbs(served.into(), rails.rail_count());
                    // What changed while it was registered.
                    epoch.check_files(&counters);
                }
                Err(e) => {
                    rails.go_without(e)?;
                    verbs = None;
                }
            }
        }
        // Registering has filled the page cache, unless it copied: then TCP clients need it.
        let is_mapped = epoch.served().is_some_and(|served| served.is_mapped());
        if let (Some(options), false) = (&config.populate, is_mapped) {
            populate::populate(&*config.store, options)?;
        }
        let system = |what| move |source| PeerError::System { what, source };
        let wake = || Wake::new().map_err(system("creating an eventfd"));
        let shared = Arc::new(Shared {
            instance_id,
            counters,
            stopping: AtomicBool::new(false),
            stop_wake: wake()?,
            report_wake: wake()?,
            next_connection: AtomicU64::new(1),
            busy_log: LogRate::default(),
            refusal_log: LogRate::default(),
            report_log: LogRate::default(),
            looking: AtomicBool::new(false),
            auth_log: LogRate::default(),
            shares: Shares::new(config.limits.client_bytes_max),
            ended: Condvar::new(),
            connections: Mutex::new(HashMap::new()),
            service_threads: AtomicU32::new(0),
            watched: Heartbeat::new(),
            epoch_number: AtomicU32::new(epoch.number),
            epoch: Mutex::new(Arc::new(epoch)),
            reload: Mutex::new(()),
            verbs,
            config,
        });
        let listeners = net::listen(bound)?;
        let addresses = listeners
            .iter()
            .map(|l| l.local_addr())
            .collect::<Result<_, _>>()
            .map_err(system("asking for the address of a socket"))?;
        // From here on dropping the peer ends the threads.
        let peer = Self {
            shared,
            addresses,
            down: false,
        };
        peer.spawn("peer-watch", watch::run)
            .map_err(system("starting a thread"))?;
        peer.spawn("peer-accept", move |shared| {
            accept::run(shared, &listeners);
        })
        .map_err(system("starting a thread"))?;
        Ok(peer)
    }

    /// The first address that is listened on, with the port that the system chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// All addresses that are listened on.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Random number of this run, as clients see it.
    pub fn instance_id(&self) -> u64 {
        self.shared.instance_id
    }

    /// Number of the store served now: 1 at the start, one more with each [`Self::reload`].
    pub fn epoch(&self) -> u32 {
        self.shared.epoch_number()
    }

    /// Counters since the start.
    pub fn stats(&self) -> PeerStats {
        self.shared.stats()
    }

    /// A handle to ask how the peer does; it does not keep the peer alive.
    pub fn monitor(&self) -> Monitor {
        Monitor::new(Arc::downgrade(&self.shared))
    }

    /// Counts a store that could not even be opened, so that [`Self::reload`] was not called.
    pub fn note_failed_reload(&self) {
        let counters = &self.shared.counters;
        add(&counters.reloads_failed, 1);
        counters.last_reload_failed.store(true, Ordering::Relaxed);
    }

    /// Stops listening, lets answers on their way finish for half of `deadline`, cuts what is
    /// left, and waits for all threads. Registered memory is taken away as with [`Self::reload`].
    ///
    /// *Errors*: [`PeerError::ShutdownTimeout`] when threads still run at the deadline (a file
    /// system that does not answer); they end on their own when it does.
    pub fn shutdown(mut self, deadline: Duration) -> Result<(), PeerError> {
        self.stop(deadline)
    }

    fn stop(&mut self, deadline: Duration) -> Result<(), PeerError> {
        if std::mem::replace(&mut self.down, true) {
            return Ok(());
        }
        let shared = &self.shared;
        let start = Instant::now();
        let served = shared.epoch().served();
        if let Some(served) = &served {
            // Before the connections end: their queue pairs stay until the memory is gone.
            served.close();
        }
        shared.stopping.store(true, Ordering::SeqCst);
        shared.stop_wake.wake();
        shared.wake_connections();
        if let Some(served) = served {
            self.withdraw(served, deadline);
        }
        let shared = &self.shared;
        if shared.wait_for_threads(start + deadline / 2) > 0 {
            for connection in shared.connections().values() {
                connection.cut();
            }
        }
        match shared.wait_for_threads(start + deadline) {
            0 => Ok(()),
            threads => Err(PeerError::ShutdownTimeout {
                threads,
                deadline_ms: deadline.as_millis(),
            }),
        }
    }

    /// Takes registered memory away, in a thread of its own that the deadline waits for: giving
    /// back hundreds of gigabytes takes a while.
    fn withdraw(&self, served: Arc<Served>, deadline: Duration) {
        let grace = match (&self.shared.verbs, served.clients()) {
            (Some(verbs), (_, 1..)) => verbs.options.reload_grace.min(deadline / 4),
            _ => Duration::ZERO,
        };
        let again = served.clone();
        let spawned = self.spawn("peer-withdraw", move |_| {
            // Clients have just been told; what they have posted may still arrive.
            thread::sleep(grace);
            served.withdraw();
        });
        if let Err(e) = spawned {
            warn!("starting a thread: {e}");
            again.withdraw();
        }
    }

    fn spawn(
        &self,
        name: &str,
        run: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> std::io::Result<()> {
        let guard = ServiceThread::new(self.shared.clone());
        thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&guard.0))?;
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Err(e) = self.stop(DROP_DEADLINE) {
            warn!("{e}");
        }
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("addresses", &self.addresses)
            .field("epoch", &self.epoch())
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn stats(&self) -> PeerStats {
        let active = self.connections().len() as u64;
        let epoch = self.epoch();
        let mut stats = self.counters.snapshot(active);
        stats.files_refused = epoch.refused_files() as u64;
        stats.epoch = epoch.number;
        stats.turns_waited = self.shares.waited();
        if let Some(verbs) = &self.verbs {
            let served = epoch.served();
            stats.rails = verbs.stats(served.as_deref());
            stats.mapping = served.map(|s| s.mapping().to_owned());
        }
        stats
    }

    /// Whether [`Peer::reload`] runs now.
    pub(crate) fn is_reloading(&self) -> bool {
        matches!(self.reload.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Acceptor and watcher, while they run.
    pub(crate) fn service_threads(&self) -> u32 {
        self.service_threads.load(Ordering::SeqCst)
    }

    pub(crate) fn epoch(&self) -> Arc<Epoch> {
        self.lock_epoch().clone()
    }

    pub(crate) fn epoch_number(&self) -> u32 {
        self.epoch_number.load(Ordering::SeqCst)
    }

    pub(crate) fn connections(&self) -> MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves an epoch from here on.
    pub(crate) fn take_up(&self, epoch: Epoch) {
        let mut current = self.lock_epoch();
        let number = epoch.number;
        *current = Arc::new(epoch);
        self.epoch_number.store(number, Ordering::SeqCst);
    }

    pub(crate) fn lock_reload(&self) -> MutexGuard<'_, ()> {
        self.reload.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_epoch(&self) -> MutexGuard<'_, Arc<Epoch>> {
        self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wake_connections(&self) -> usize {
        let connections = self.connections();
        for connection in connections.values() {
            connection.wake.wake();
        }
        connections.len()
    }

    /// Waits until all threads have ended, and says how many have not.
    fn wait_for_threads(&self, deadline: Instant) -> usize {
        let mut connections = self.connections();
        loop {
            let threads = connections.len() + self.service_threads.load(Ordering::SeqCst) as usize;
            let left = deadline.saturating_duration_since(Instant::now());
            if threads == 0 || left.is_zero() {
                return threads;
            }
            connections = self
                .ended
                .wait_timeout(connections, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// Counts acceptor or watcher as long as it runs, however that ends.
struct ServiceThread(Arc<Shared>);

impl ServiceThread {
    fn new(shared: Arc<Shared>) -> Self {
        shared.service_threads.fetch_add(1, Ordering::SeqCst);
        Self(shared)
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        debug!("{} ended", thread::current().name().unwrap_or("thread"));
        let _connections = self.0.connections();
        self.0.service_threads.fetch_sub(1, Ordering::SeqCst);
        self.0.ended.notify_all();
    }
}

/// When a thread last showed that it runs.
pub(crate) struct Heartbeat {
    start: Instant,
    beat_ms: AtomicU64,
}

impl Heartbeat {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            beat_ms: AtomicU64::new(0),
        }
    }

    pub(crate) fn beat(&self) {
        let now_ms = self.start.elapsed().as_millis() as u64;
        self.beat_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Time since the last beat.
    pub(crate) fn age(&self) -> Duration {
        let last = Duration::from_millis(self.beat_ms.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last)
    }
}

/// Lets one line per second into the log: strangers must not be able to fill it.
#[derive(Default)]
pub(crate) struct LogRate(Mutex<Option<Instant>>);

impl LogRate {
    pub(crate) fn allows(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let allowed = last.is_none_or(|last| now - last >= Duration::from_secs(1));
        if allowed {
            *last = Some(now);
        }
        allowed
    }
}
