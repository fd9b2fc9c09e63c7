//! `index`: a store that points into a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use expert_store::NameWhole;
use expert_store::index::{self, IndexOptions};

use super::args::{RunArgs, SelectArgs, StackArgs, WholeArgs};
use super::{output, report};

/// Write a store that points into a checkpoint: checksums, but no second copy of the weights
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder or GGUF file; it is read, never written
    checkpoint: PathBuf,
    /// Directory of the store; must not exist
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Put a new generation in the place of the store that is there
    #[arg(long)]
    replace: bool,
    /// Read headers only: quick, but what is fetched cannot be verified
    #[arg(long)]
    no_checksums: bool,
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    whole: WholeArgs,
    #[command(flatten)]
    run: RunArgs,
}

/// Runs it.
///
/// *Errors*: those of [`index::index`].
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let selection = args.select.selection()?;
    let options = IndexOptions {
        stack: args.stack.stack.clone(),
        mtp: args.stack.mtp,
        selection: (!selection.is_all()).then_some(selection),
        name_whole: match args.no_checksums {
            true => NameWhole::Never,
            false => args.whole.name_whole(),
        },
        checksums: !args.no_checksums,
        build: args.run.build_options(args.replace)?,
    };
    let done = index::index(&args.checkpoint, &args.output, &options)?;
    output::print_warnings(&done.warnings);
    report::print(&done, began, options.checksums, args.run.json)?;
    Ok(ExitCode::SUCCESS)
}
