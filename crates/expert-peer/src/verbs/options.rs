//! How a peer offers verbs.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use atlas_rdma::choose::Wanted;

/// Whether and how a store is made readable over verbs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VerbsOptions {
    /// The rails. Default `None`: every active port, at most 8.
    pub rails: Option<Wanted>,
    /// Without rails as wanted, or without the memory to register the store, the start fails.
    /// Default no: a warning says why, and TCP alone is served.
    pub required: bool,
    /// Where a kernel refuses read-only file mappings, files are mapped read-write instead of
    /// copied. Registering such a mapping makes the kernel write every page of the file back.
    /// Default no.
    pub allow_rw_map: bool,
    /// Memory that may be pinned for a store, counted once for all rails; default no limit but
    /// [`Self::reserve_bytes`].
    pub max_blade_bytes: Option<u64>,
    /// Memory that must stay available. Default `None`: the larger of 8 GB and 8 %, for stores
    /// below 1 GiB at most a quarter of the memory.
    pub reserve_bytes: Option<u64>,
    /// Queue pairs that one connection may have. Default 8.
    pub qps_per_rail_max: u8,
    /// Queue pairs that one address may have, over all its connections. Default 256: two clients with
    /// 16 rails of 8.
    pub qps_per_client_max: u32,
    /// READs under way at once on one queue pair, where the device can do more. Default 16.
    pub reads_per_qp_max: u8,
    /// How long clients may go on reading from a store that was replaced, after they were told.
    /// Default 500 ms.
    pub reload_grace: Duration,
    /// Index in the ports' tables of partition keys; v1 clients always get 0. Default 0.
    pub pkey_index: u16,
    /// Threads that register; 0 (default) lets the system decide.
    pub threads: usize,
    /// Set it to stop a registration that takes long, with
    /// [`PeerError::Interrupted`](crate::PeerError::Interrupted).
    pub cancel: Arc<AtomicBool>,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
            rails: None,
            required: false,
            allow_rw_map: false,
            max_blade_bytes: None,
            reserve_bytes: None,
            qps_per_rail_max: 8,
            qps_per_client_max: 256,
            reads_per_qp_max: 16,
            reload_grace: Duration::from_millis(500),
            pkey_index: 0,
            threads: 0,
            cancel: Arc::default(),
        }
    }
}
