//! Flags of verbs rails; what they leave open the environment says.

use std::time::Duration;

use atlas_rdma::attributes::Mtu;
use atlas_rdma::choose::RailSpec;
use expert_tier::{RailsWanted, TierError, VerbsOptions, env};

/// Flags for `--expert-backend rdma-verbs`.
#[derive(Debug, clap::Args)]
pub(super) struct VerbsArgs {
    /// Port to use as a rail, once per rail; default: ATLAS_EXPERT_RAILS and its companions, else one that fits (rdma-verbs)
    #[arg(long = "rail", value_name = "DEV[:PORT[:GID]]")]
    rails: Vec<RailSpec>,
    /// Fail instead of falling back to TCP (rdma-verbs)
    #[arg(long)]
    require_rdma: bool,
    /// Queue pairs per rail; default: ATLAS_EXPERT_QPS_PER_RAIL, else 2 (rdma-verbs)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    qps_per_rail: Option<u32>,
    /// Largest path MTU, bytes; default: ATLAS_EXPERT_MTU, else the port's (rdma-verbs)
    #[arg(long, value_name = "256|512|1024|2048|4096")]
    mtu: Option<u32>,
    /// READs under way at once on a queue pair; default 16, or less where a card says so (rdma-verbs)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    read_depth: Option<u8>,
    /// Bytes of one work request, KiB; default 256 (rdma-verbs)
    #[arg(long, value_name = "KIB", value_parser = clap::value_parser!(u64).range(4..=1 << 20))]
    request_kib: Option<u64>,
    /// Pause of a rail with READs posted after which it is torn down, milliseconds; default 200 (rdma-verbs)
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(10..=600_000))]
    stall_ms: Option<u64>,
}

impl VerbsArgs {
    /// The first flag that was given, for backends that have no use for any.
    pub(super) fn given(&self) -> Option<&'static str> {
        [
            (!self.rails.is_empty(), "--rail"),
            (self.require_rdma, "--require-rdma"),
            (self.qps_per_rail.is_some(), "--qps-per-rail"),
            (self.mtu.is_some(), "--mtu"),
            (self.read_depth.is_some(), "--read-depth"),
            (self.request_kib.is_some(), "--request-kib"),
            (self.stall_ms.is_some(), "--stall-ms"),
        ]
        .into_iter()
        .find_map(|(given, name)| given.then_some(name))
    }

    /// Whether a flag says that nothing else will do.
    pub(super) fn wanted(&self) -> bool {
        self.require_rdma || !self.rails.is_empty()
    }

    /// Flags over environment over defaults.
    pub(super) fn options(&self) -> Result<VerbsOptions, TierError> {
        let mut options = env::verbs()?;
        if !self.rails.is_empty() {
            options.rails = RailsWanted::List(self.rails.clone());
        }
        options.require = self.require_rdma;
        if let Some(n) = self.qps_per_rail {
            options.qps_per_rail = n;
        }
        if let Some(bytes) = self.mtu {
            options.mtu = Some(Mtu::from_bytes(bytes).ok_or_else(|| {
                TierError::Config(format!(
                    "--mtu {bytes}: it is none of 256, 512, 1024, 2048, 4096"
                ))
            })?);
        }
        if let Some(depth) = self.read_depth {
            options.read_depth = depth;
        }
        if let Some(kib) = self.request_kib {
            options.request_bytes = kib << 10;
        }
        if let Some(ms) = self.stall_ms {
            options.stall = Duration::from_millis(ms);
        }
        Ok(options)
    }
}
