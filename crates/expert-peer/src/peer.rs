//! The peer: what its threads share, start, reload and shutdown.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use crate::connection::Connection;
use crate::epoch::Epoch;
use crate::net::{self, Wake};
use crate::stats::{Counters, add};
use crate::{PeerConfig, PeerError, PeerStats, Source, accept, populate, watch};

/// How long dropping a [`Peer`] may take.
const DROP_DEADLINE: Duration = Duration::from_secs(2);

/// A running peer: serves until it is shut down or dropped.
pub struct Peer {
    shared: Arc<Shared>,
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
    /// Notified, under the lock of `connections`, when a thread has ended.
    pub(crate) ended: Condvar,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    /// Acceptor and watcher.
    service_threads: AtomicU32,
    epoch: Mutex<Arc<Epoch>>,
    epoch_number: AtomicU32,
}

impl Peer {
    /// Binds, reads the store into memory where that is asked for, and serves.
    ///
    /// *Errors*: [`PeerError::Anonymous`] for an address beyond loopback without
    /// `allow_anonymous`, [`PeerError::Listen`] (for a port in use: stop who has it, or choose
    /// another), [`PeerError::Interrupted`] when the population was cancelled.
    pub fn start(config: PeerConfig) -> Result<Self, PeerError> {
        let names = net::resolve(&config.listen, config.allow_anonymous)?;
        // Bound before the long part, so that a port in use shows at once.
        let bound = net::bind(&names)?;
        let instance_id = rand::random();
        let epoch = Epoch::new(1, instance_id, config.store.clone())?;
        if let Some(options) = &config.populate {
            populate::populate(&*config.store, options)?;
        }
        let system = |what| move |source| PeerError::System { what, source };
        let wake = || Wake::new().map_err(system("creating an eventfd"));
        let shared = Arc::new(Shared {
            instance_id,
            counters: Counters::default(),
            stopping: AtomicBool::new(false),
            stop_wake: wake()?,
            report_wake: wake()?,
            next_connection: AtomicU64::new(1),
            busy_log: LogRate::default(),
            refusal_log: LogRate::default(),
            report_log: LogRate::default(),
            ended: Condvar::new(),
            connections: Mutex::new(HashMap::new()),
            service_threads: AtomicU32::new(0),
            epoch_number: AtomicU32::new(epoch.number),
            epoch: Mutex::new(Arc::new(epoch)),
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
        let active = self.shared.connections().len() as u64;
        self.shared.counters.snapshot(active)
    }

    /// Takes up another store, or another state of the same one, and gives back its epoch.
    ///
    /// v2 clients are told between two answers, and their READs with the old epoch are refused;
    /// v1 clients, which cannot be told, are hung up. Answers that are on their way are finished
    /// from the old store, whose files stay open until then.
    ///
    /// *Errors*: [`PeerError::Store`] when it cannot be served; the old one stays.
    pub fn reload(&self, store: Arc<dyn Source>) -> Result<u32, PeerError> {
        let number = {
            let mut epoch = self.shared.lock_epoch();
            // 0 is the value that no client was ever told.
            let number = epoch.number.checked_add(1).unwrap_or(1);
            *epoch = Arc::new(Epoch::new(number, self.shared.instance_id, store)?);
            self.shared.epoch_number.store(number, Ordering::SeqCst);
            number
        };
        add(&self.shared.counters.reloads, 1);
        let connections = self.shared.wake_connections();
        info!("serving epoch {number}; {connections} connections are told");
        Ok(number)
    }

    /// Stops listening, lets answers on their way finish for half of `deadline`, cuts what is
    /// left, and waits for all threads.
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
        shared.stopping.store(true, Ordering::SeqCst);
        shared.stop_wake.wake();
        shared.wake_connections();
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

    fn lock_epoch(&self) -> MutexGuard<'_, Arc<Epoch>> {
        self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_connections(&self) -> usize {
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
