//! What a caller chooses for verbs rails.

use std::time::Duration;

use atlas_rdma::attributes::Mtu;
use atlas_rdma::choose::RailSpec;

/// One rail as the classic pair of variables names it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RailSlot {
    /// Exact device name; `None`: `preferred` if it exists, else by link layer and reachability.
    pub device: Option<String>,
    /// GID index; `None`: by type and address, at each connect.
    pub gid_index: Option<u32>,
    /// Device that is taken when it exists.
    pub preferred: Option<String>,
}

/// Which ports of this machine become rails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RailsWanted {
    /// These.
    List(Vec<RailSpec>),
    /// One or several slots, each a device, or whatever fits.
    Slots(Vec<RailSlot>),
}

impl Default for RailsWanted {
    fn default() -> Self {
        Self::Slots(vec![RailSlot::default()])
    }
}

/// How one-sided READs are done.
#[derive(Debug, Clone, PartialEq)]
pub struct VerbsOptions {
    /// Rails; default one, chosen by what the ports say.
    pub rails: RailsWanted,
    /// Whether a tier without a working verbs rail is an error, instead of one over TCP. Default no.
    pub require: bool,
    /// Queue pairs of one rail; two beat one on real cards. Default 2.
    pub qps_per_rail: u32,
    /// Largest path MTU; default the port's.
    pub mtu: Option<Mtu>,
    /// READs under way at once on one queue pair; the device and the peer may lower it. Default 16.
    pub read_depth: u8,
    /// Index in the port's table of partition keys. Default 0.
    pub pkey_index: u16,
    /// Service level, 0 to 15. Default 0.
    pub service_level: u8,
    /// Traffic class. Default 0.
    pub traffic_class: u8,
    /// Bytes of one work request. Smaller ones lose less to a dropped packet and show progress
    /// sooner; a card needs far less than this to run at full rate. Default 256 KiB.
    pub request_bytes: u64,
    /// A queue pair without progress for this long with READs posted is torn down. Default 200 ms.
    pub stall: Duration,
    /// How long a lane polls before it sleeps. Default 20 us: about what a sleep costs.
    pub spin: Duration,
    /// Largest registered slice of the arena. Default 3.5 GiB.
    pub slice_max_bytes: u64,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
            rails: RailsWanted::default(),
            require: false,
            qps_per_rail: 2,
            mtu: None,
            read_depth: 16,
            pkey_index: 0,
            service_level: 0,
            traffic_class: 0,
            request_bytes: 256 << 10,
            stall: Duration::from_millis(200),
            spin: Duration::from_micros(20),
            slice_max_bytes: atlas_rdma::DEFAULT_SLICE_MAX_BYTES,
        }
    }
}

impl VerbsOptions {
    /// Says what cannot be.
    pub(crate) fn check(&self) -> Result<(), String> {
        let qps_max = u32::from(expert_wire::limits::QPS_PER_RAIL_MAX);
        if !(1..=qps_max).contains(&self.qps_per_rail) {
            return Err(format!(
                "{} queue pairs per rail, the limits are 1 and {qps_max}",
                self.qps_per_rail
            ));
        }
        if self.service_level > 15 {
            return Err(format!(
                "service level {}, the largest is 15",
                self.service_level
            ));
        }
        if self.read_depth == 0 {
            return Err("READ depth 0: at least one READ must be under way".into());
        }
        if !(4096..=1 << 30).contains(&self.request_bytes) {
            return Err(format!(
                "work requests of {} bytes, the limits are 4096 and {}",
                self.request_bytes,
                1 << 30
            ));
        }
        Ok(())
    }
}
