//! How a peer serves.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use expert_wire::auth::Token;

use crate::{PopulateOptions, Source, VerbsOptions};

/// Bounds on what clients can take from a peer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Connections at once. Default 256: each takes a thread, two descriptors and about 100 KB, or
    /// 160 KB where answers are copied.
    pub connections_max: usize,
    /// Connections at once from one address. Default 128: one client with all its 64 streams, twice.
    pub connections_per_address_max: usize,
    /// Connections at once whose handshake is not done. Default 128: silent strangers can hold
    /// half of the connections, for [`Self::handshake_timeout`] each. One address gets three quarters of
    /// them at most.
    pub handshakes_max: usize,
    /// Bytes of answers under way to one client, over all its connections, as long as another client
    /// wants some, too; one answer at least. Default 8 MiB: eight READs of default size.
    pub client_bytes_max: u64,
    /// From accept to the end of the handshake. Default 5 s.
    pub handshake_timeout: Duration,
    /// From the first byte of a request to its last, after the handshake. Default 10 s.
    pub frame_timeout: Duration,
    /// Without progress while an answer is sent; also `TCP_USER_TIMEOUT`, so it is the time after
    /// which a client that vanished is noticed. Default 30 s.
    pub send_timeout: Duration,
    /// Between keep-alive probes on a connection without traffic; three unanswered ones and the
    /// end of [`Self::send_timeout`] end it. Default 5 s.
    pub keepalive_interval: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 256,
            connections_per_address_max: 128,
            handshakes_max: 128,
            client_bytes_max: 8 << 20,
            handshake_timeout: Duration::from_secs(5),
            frame_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(30),
            keepalive_interval: Duration::from_secs(5),
        }
    }
}

/// How bytes get from a file into a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transfer {
    /// [`Self::Copy`] to clients on this machine, [`Self::Sendfile`] to others. Through loopback
    /// the receiver's copy is the limit, and it is faster from a buffer in the cache than from the
    /// page cache; through a network card `sendfile` saves a copy.
    #[default]
    Auto,
    /// `sendfile`: no copy through this process. [`Self::Copy`] all the same where a file system
    /// refuses it, for v1 clients, and for stores without checksums: pages that wait in the socket
    /// change with the file, and those clients could not tell.
    Sendfile,
    /// `pread` and `send`.
    Copy,
}

impl Transfer {
    /// What it means for one client: never [`Self::Auto`].
    pub(crate) fn resolve(self, client: IpAddr, own: Option<SocketAddr>) -> Self {
        // A client that reached us from the address that it reached us at is on this machine.
        let is_local =
            client.to_canonical().is_loopback() || own.is_some_and(|own| own.ip() == client);
        match (self, is_local) {
            (Self::Auto, true) => Self::Copy,
            (Self::Auto, false) => Self::Sendfile,
            (chosen, _) => chosen,
        }
    }
}

/// What a peer serves and how.
#[derive(Clone)]
#[non_exhaustive]
pub struct PeerConfig {
    /// The store.
    pub store: Arc<dyn Source>,
    /// Addresses to listen on, `HOST:PORT`; port 0 lets the system choose. Default `127.0.0.1:9909`.
    pub listen: Vec<String>,
    /// Bounds.
    pub limits: Limits,
    /// Between looks at the store's files. Default 1 s.
    pub restat_interval: Duration,
    /// Whether an address that is not a loopback one may be listened on. Default no.
    pub allow_anonymous: bool,
    /// What clients have to know: they get nothing about the store before they have proven that they
    /// do, and v1 clients nothing at all. With it any address may be listened on. Default none.
    pub auth_token: Option<Token>,
    /// Read the store into the page cache before listening. Default no.
    pub populate: Option<PopulateOptions>,
    /// Offer the store over verbs, too. Default no.
    pub verbs: Option<VerbsOptions>,
    /// How bytes are sent.
    pub transfer: Transfer,
    /// Socket send buffer; `None` (default) leaves it to the system's autotuning, but for clients on this
    /// machine, to whom bytes are copied: 128 KiB.
    pub send_buffer_bytes: Option<usize>,
    /// How long a connection looks for the next request after an answer of 256 KiB or less before it sleeps,
    /// one connection at a time; 0 is never. Default 50 µs.
    pub spin: Duration,
}

impl PeerConfig {
    /// The defaults for a store.
    pub fn new(store: Arc<dyn Source>) -> Self {
        Self {
            store,
            listen: vec![format!("127.0.0.1:{}", expert_wire::limits::CONTROL_PORT)],
            limits: Limits::default(),
            restat_interval: Duration::from_secs(1),
            allow_anonymous: false,
            auth_token: None,
            populate: None,
            verbs: None,
            transfer: Transfer::default(),
            send_buffer_bytes: None,
            spin: Duration::from_micros(50),
        }
    }
}

impl fmt::Debug for PeerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerConfig")
            .field("listen", &self.listen)
            .field("limits", &self.limits)
            .field("restat_interval", &self.restat_interval)
            .field("allow_anonymous", &self.allow_anonymous)
            .field("auth_token", &self.auth_token)
            .field("populate", &self.populate)
            .field("verbs", &self.verbs)
            .field("transfer", &self.transfer)
            .finish_non_exhaustive()
    }
}
