//! `bench`: measurements, of the tier alone and of a backend.

use std::process::ExitCode;

use clap::Subcommand;

mod fetch;
mod plot;
mod rails;

/// Measure parts of the tier on this machine
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Fetch(Box<fetch::Args>),
    Rails(rails::Args),
}

/// Runs it; exit code 1 where bytes are wrong.
///
/// *Errors*: wrong usage, or a measurement that could not be made.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.what {
        What::Fetch(args) => fetch::run(args),
        What::Rails(args) => rails::run(args),
    }
}
