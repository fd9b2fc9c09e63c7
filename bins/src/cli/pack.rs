//! `pack`: a store that holds the records themselves.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::ValueEnum;
use expert_store::{BuildOptions, NameWhole, OpenOptions, pack, v1};

use super::args::{self, MovedArgs, RunArgs, SelectArgs, StackArgs, WholeArgs};
use super::{bar, report};

/// Write a store that holds the records themselves: one contiguous piece per expert
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder, GGUF file or store; it is read, never written
    source: PathBuf,
    /// Directory of the store; must not exist
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Layout of the records
    #[arg(long, value_enum, default_value_t = Format::V2)]
    format: Format,
    /// Put a new generation in the place of the store that is there
    #[arg(long)]
    replace: bool,
    /// Leave the store to the page cache, as cp leaves a copy, and do not wait for the disk: quicker, but a power loss soon after may damage it
    ///
    /// What was written stays in memory, and the kernel writes it within about half a minute. A power loss before that may leave a damaged
    /// store, and with --replace the old one is gone, too. When a store is opened, manifest, catalogue, checksums, the lengths of its files and the headers
    /// of its records (all of them up to 1024 records, three of each layer beyond) are checked, the bytes of records are not: `atlas-expert
    /// verify` reads them all, and so does each fetch that checks them as it goes, which is the default.
    #[arg(long)]
    no_sync: bool,
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    whole: WholeArgs,
    #[command(flatten)]
    moved: MovedArgs,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Any model, every byte as in the checkpoint
    V2,
    /// What existing Atlas servers read; NVFP4 models with gate, up and down only, weights transposed
    V1,
}

/// Runs it.
///
/// *Errors*: the source is no sound checkpoint or store, the output exists, the disk is full, or an interrupt.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let open = OpenOptions {
        checkpoint_override: args.moved.checkpoint.clone(),
        name_whole: match args.format {
            Format::V2 => args.whole.name_whole(),
            Format::V1 => NameWhole::Never,
        },
        progress: bar::progress(args.run.quiet),
        ..args.stack.open_options(&args.select)?
    };
    let source = args::open(&args.source, &open)?;
    let build = BuildOptions {
        sync: !args.no_sync,
        ..args.run.build_options(args.replace)?
    };
    let done = match args.format {
        Format::V2 => pack::pack(&source, &args.output, &build)?,
        Format::V1 => v1::pack_v1(&source, &args.output, &build)?,
    };
    report::print(&done, began, true, args.run.json)?;
    Ok(ExitCode::SUCCESS)
}
