//! `atlas-expert doctor`: what stands in the way on this machine and at the peer, and the line that mends it.

mod text;

use std::net::SocketAddr;
use std::process::ExitCode;

use expert_doctor::{Level, Options, examine};

use super::output;
use super::source::SourceArgs;

/// Examine this machine, a store and the peer: each finding says what it means and which line mends it.
///
/// With --expert-peer (or ATLAS_EXPERT_PEER) both ends are compared, one record is fetched and proven, and each rail is
/// measured for a second. What stands in the way of one-sided READs is a failure with --expert-backend rdma-verbs,
/// --require-rdma or --rail, and a warning without. Nothing is changed. Exit code 1 where there is a failure.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Size of the arena that is planned, GB: compared with available memory and the limit on locked memory
    #[arg(long, value_name = "GB", value_parser = parse_gb)]
    arena_gb: Option<u64>,
    /// Address that a peer on this machine is to listen on; default: look at 127.0.0.1:9909
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// *Errors*: flags or variables that cannot be read. Whatever is found is in the report.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let report = examine(&Options {
        arena_bytes: args.arena_gb,
        listen: args.listen,
        ..args.source.examination()?
    });
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&text::report(&report))?,
    }
    Ok(ExitCode::from(u8::from(report.level == Level::Failure)))
}

/// Bytes of a number of gigabytes.
fn parse_gb(text: &str) -> Result<u64, String> {
    match text.parse::<f64>() {
        Ok(gb) if (0.0..=1e6).contains(&gb) => Ok((gb * 1e9) as u64),
        _ => Err("a size is a number from 0 to 1000000, in GB".into()),
    }
}
