//! What the peer needs of a machine's rails: behind traits, so that the order of things can be
//! tested where there is no device.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use atlas_rdma::Path;
use atlas_rdma::attributes::{LinkLayer, Mtu};
use expert_wire::verbs::{QpEndpoint, RailInfo, Region};

use crate::PeerError;

/// The rails of a machine, open for as long as the peer lives.
pub(crate) trait Fabric: Send + Sync {
    /// Their names, in the order that clients see.
    fn names(&self) -> Vec<String>;

    /// A rail as it is now: links come and go, and indexes of GIDs move.
    fn state(&self, rail: usize) -> Result<RailState, PeerError>;

    /// Registers files on all rails, for all clients; all or nothing.
    fn publish(&self, request: &PublishRequest<'_>) -> Result<Box<dyn Published>, PeerError>;

    /// A queue pair that answers READs once it is connected.
    fn responder(&self, rail: usize, pkey_index: u16) -> Result<Box<dyn Responder>, PeerError>;
}

/// A rail at one moment.
#[derive(Debug, Clone)]
pub(crate) struct RailState {
    /// What clients are told.
    pub(crate) info: RailInfo,
    pub(crate) port: u8,
    pub(crate) link_layer: LinkLayer,
    pub(crate) mtu: Mtu,
    pub(crate) gid_index: u32,
    /// READs that a queue pair answers at once, as far as the device says.
    pub(crate) reads_in_max: u8,
    /// READs that a queue pair has under way at once.
    pub(crate) reads_out_max: u8,
}

/// A file to register parts of.
pub(crate) struct PublishFile {
    /// Index among the source's files.
    pub(crate) index: u32,
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<File>,
    /// Offsets and bytes, ascending and disjoint.
    pub(crate) extents: Vec<(u64, u64)>,
}

/// What to register and how.
pub(crate) struct PublishRequest<'a> {
    pub(crate) files: &'a [PublishFile],
    pub(crate) allow_rw_map: bool,
    /// Bytes that may be copied where file mappings cannot be registered.
    pub(crate) copy_bytes_max: Option<u64>,
    pub(crate) threads: usize,
    pub(crate) cancel: &'a Arc<AtomicBool>,
    /// Told what is being done, bytes done and bytes of all, from any thread.
    pub(crate) progress: &'a (dyn Fn(&str, u64, u64) + Sync),
}

/// Registered memory. Dropping it deregisters what still is, then unmaps.
pub(crate) trait Published: Send {
    /// One rail's regions, ascending by file (as the source numbers them) and offset.
    fn regions(&self, rail: usize) -> Vec<Region>;

    /// How the memory was made registrable, one line for people.
    fn mapping(&self) -> String;

    /// Whether the files' pages in the page cache are what is read, none of them a copy.
    fn is_mapped(&self) -> bool;

    /// Whether registering has set the times of a file anew.
    fn touches(&self, file: u32) -> bool;

    /// Deregisters one file on all rails.
    fn revoke(&mut self, file: u32);

    /// Deregisters everything on all rails. The memory stays until this is dropped.
    fn deregister(&mut self);
}

/// A queue pair that answers READs; dropping it destroys it.
pub(crate) trait Responder: Send {
    fn local(&self) -> QpEndpoint;

    /// Connects it to the other end of `path`, whose local PSN it fills in itself.
    fn connect(&mut self, path: &Path) -> Result<(), PeerError>;
}
