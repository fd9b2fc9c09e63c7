//! Flags of reads of this machine's disk.

use expert_tier::TierBuilder;

/// Flags for `--expert-backend uma`.
#[derive(Debug, clap::Args)]
pub(super) struct UmaArgs {
    /// Reads of files under way at once; default 16 (uma)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    io_depth: Option<u32>,
    /// Read files through the page cache (uma)
    #[arg(long)]
    buffered: bool,
}

impl UmaArgs {
    /// The first flag that was given, for backends that have no use for any.
    pub(super) fn given(&self) -> Option<&'static str> {
        match (self.io_depth, self.buffered) {
            (Some(_), _) => Some("--io-depth"),
            (None, true) => Some("--buffered"),
            (None, false) => None,
        }
    }

    /// Flags over defaults.
    pub(super) fn apply(&self, builder: TierBuilder) -> TierBuilder {
        let builder = builder.uma_direct(!self.buffered);
        match self.io_depth {
            Some(depth) => builder.uma_depth(depth),
            None => builder,
        }
    }
}
