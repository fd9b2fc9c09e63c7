//! Flags that several subcommands share.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use clap::Args;
use expert_store::build::BuildOptions;
use expert_store::select::{self, Selection};
use expert_store::token_file;
use expert_store::{NameWhole, OpenOptions, Store, WorkOptions};
use expert_tier::env;
use expert_wire::auth::Token;

use super::{bar, output, signals};

/// The token of a peer.
#[derive(Debug, Clone, Args)]
pub struct TokenArgs {
    /// File with the peer's token, readable by this user alone; default: ATLAS_EXPERT_TOKEN_FILE
    #[arg(long, value_name = "FILE")]
    auth_token_file: Option<PathBuf>,
}

impl TokenArgs {
    /// Whether the flag was given.
    pub fn is_given(&self) -> bool {
        self.auth_token_file.is_some()
    }

    /// The token of the flag, or of the environment.
    ///
    /// *Errors*: the file cannot be used.
    pub fn token(&self) -> anyhow::Result<Option<Token>> {
        Ok(match &self.auth_token_file {
            Some(path) => Some(token_file::read(path)?),
            None => env::auth_token()?,
        })
    }
}

/// How to work and how to report.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Threads that read and hash; default: one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
    /// No progress bar
    #[arg(short, long)]
    pub quiet: bool,
}

impl RunArgs {
    /// The same, as the library takes it: with a bar where a person watches, and stopped by SIGINT and SIGTERM.
    ///
    /// *Errors*: the signal handlers cannot be installed.
    pub fn work_options(&self) -> anyhow::Result<WorkOptions> {
        Ok(WorkOptions {
            threads: self.threads.map_or(0, usize::from),
            progress: bar::progress(self.quiet),
            cancel: Some(cancel_flag()?),
        })
    }

    /// The same for building a store.
    ///
    /// *Errors*: the signal handlers cannot be installed.
    pub fn build_options(&self, replace: bool) -> anyhow::Result<BuildOptions> {
        let work = self.work_options()?;
        Ok(BuildOptions {
            threads: work.threads,
            replace,
            progress: work.progress,
            cancel: work.cancel,
            ..BuildOptions::default()
        })
    }
}

/// Which stack of a model that has several.
#[derive(Debug, Clone, Args)]
pub struct StackArgs {
    /// Stack of layers by the prefix of its tensors' names, e.g. `thinker.model.layers`
    #[arg(long, value_name = "PREFIX")]
    pub stack: Option<String>,
    /// The experts of the multi-token-prediction layers instead of the trunk's
    #[arg(long)]
    pub mtp: bool,
}

/// Which part of a stack.
#[derive(Debug, Clone, Default, Args)]
pub struct SelectArgs {
    /// MoE layers by dense index, counted from 0 (the end is not included): `0..4` or `0,2,8..12`
    #[arg(long, value_name = "RANGES")]
    pub layers: Option<String>,
    /// Experts of every layer: `0..64` or `0,2,8..12`
    #[arg(long, value_name = "RANGES")]
    pub experts: Option<String>,
    /// The I-th of N equal ranges of the experts of every layer, counted from 1: `1/2`
    #[arg(long, value_name = "I/N")]
    pub shard: Option<String>,
}

impl SelectArgs {
    /// The same, read.
    ///
    /// *Errors*: wrong usage, with what was expected.
    pub fn selection(&self) -> anyhow::Result<Selection> {
        let ranges = |flag: &str, text: &Option<String>| {
            text.as_deref()
                .map(select::parse_ranges)
                .transpose()
                .with_context(|| format!("--{flag}"))
        };
        Ok(Selection {
            layers: ranges("layers", &self.layers)?,
            experts: ranges("experts", &self.experts)?,
            shard: self
                .shard
                .as_deref()
                .map(select::parse_shard)
                .transpose()
                .context("--shard")?,
        })
    }
}

/// What a part of a model says of the whole.
#[derive(Debug, Clone, Args)]
pub struct WholeArgs {
    /// With --shard, --experts or --layers: do not name the whole that this is a part of. Naming it lets clients put
    /// parts together; from a bare checkpoint the records that are left out are read and hashed for that
    #[arg(long)]
    no_whole: bool,
}

impl WholeArgs {
    /// The same, as the library takes it.
    pub fn name_whole(&self) -> NameWhole {
        match self.no_whole {
            true => NameWhole::Never,
            false => NameWhole::Always,
        }
    }
}

impl StackArgs {
    /// How to open what the arguments name; without hashing a checkpoint's records.
    ///
    /// *Errors*: wrong usage in the selection.
    pub fn open_options(&self, select: &SelectArgs) -> anyhow::Result<OpenOptions> {
        let selection = select.selection()?;
        Ok(OpenOptions {
            stack: self.stack.clone(),
            mtp: self.mtp,
            checksums: false,
            selection: (!selection.is_all()).then_some(selection),
            cancel: Some(cancel_flag()?),
            ..OpenOptions::default()
        })
    }
}

/// Where the checkpoint of an in-place store lies.
#[derive(Debug, Clone, Args)]
pub struct MovedArgs {
    /// Where the checkpoint of an in-place store lies now, if it was moved
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
}

/// Opens a store or a checkpoint and passes on what was noticed.
///
/// *Errors*: as [`Store::open`].
pub fn open(path: &Path, options: &OpenOptions) -> anyhow::Result<Store> {
    let store = Store::open(path, options)?;
    output::print_warnings(store.warnings());
    Ok(store)
}

fn cancel_flag() -> anyhow::Result<Arc<AtomicBool>> {
    signals::cancel_flag().context("installing signal handlers")
}

/// Reads a rate in MB/s.
pub(super) fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.001..=1e6).contains(&rate) => Ok(rate),
        _ => Err("a rate is a number from 0.001 to 1000000, in MB/s".into()),
    }
}

/// Reads a size in bytes, with or without a binary unit.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let unit = units.iter().find(|(name, _)| text.ends_with(name));
    let (digits, shift) = match unit {
        Some((name, shift)) => (&text[..text.len() - name.len()], *shift),
        None => (text, 0),
    };
    let number: Option<u64> = digits.trim().parse().ok();
    number
        .and_then(|n| n.checked_mul(1 << shift))
        .filter(|n| (1..=1 << 34).contains(n))
        .ok_or_else(|| "a size is 1 byte to 16 GiB: digits, and KiB, MiB or GiB if wanted".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("1000"), Ok(1000));
        for bad in ["", "0", "64MB", "-1", "999999GiB", "1.5MiB"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_are_finite_and_above_nothing() {
        assert_eq!(parse_rate("12.5"), Ok(12.5));
        for bad in ["", "0", "-1", "nan", "inf", "1e9"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
    }
}
