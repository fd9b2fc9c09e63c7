//! The command line of `atlas-expert`: one module per subcommand, and what they share.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use expert_store::StoreError;
use expert_tier::TierError;

pub mod args;
pub mod bar;
pub mod bench;
pub mod doctor;
pub mod extract;
pub mod fetch;
pub mod gate;
pub mod index;
pub mod inspect;
pub mod manual;
mod measure;
mod new_file;
pub mod output;
pub mod pack;
pub mod peer_args;
pub mod replay;
pub mod report;
pub mod signals;
pub mod sim;
pub mod source;
mod svg;
pub mod synth;
pub mod synth_trace;
pub mod unpack;
pub mod verify;
pub mod version;

/// Tools for expert stores: the expert weights of Mixture-of-Experts checkpoints, served to another machine.
///
/// PATH may be a store, a checkpoint folder with safetensors files, or a GGUF file (of a split one: its first part).
#[derive(Debug, Parser)]
#[command(name = "atlas-expert", version, max_term_width = 110, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, interrupted or bad data, 2 wrong usage.\n\
    An interrupt (SIGINT, SIGTERM) stops cleanly: nothing half-written stays.";

#[derive(Debug, Subcommand)]
enum Command {
    Pack(pack::Args),
    Index(index::Args),
    Unpack(unpack::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Extract(extract::Args),
    Fetch(fetch::Args),
    Gate(gate::Args),
    Doctor(doctor::Args),
    Synth(synth::Args),
    Sim(sim::Args),
    Bench(bench::Args),
    Replay(replay::Args),
    SynthTrace(synth_trace::Args),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

/// An error of the person at the keyboard: exit code 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return no_command("atlas-expert", &e),
    };
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
    let result = match cli.command {
        Command::Pack(args) => pack::run(&args),
        Command::Index(args) => index::run(&args),
        Command::Unpack(args) => unpack::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Extract(args) => extract::run(&args),
        Command::Fetch(args) => fetch::run(&args),
        Command::Gate(args) => gate::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::SynthTrace(args) => synth_trace::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "error: {}", one_line(&e));
            ExitCode::from(exit_code(&e))
        }
    }
}

/// What a program does that was given no work: help, its version, or what was wrong.
pub fn no_command(program: &str, e: &clap::Error) -> ExitCode {
    // Help that nobody reads (`| head`) is no failure.
    let _ = match e.kind() {
        clap::error::ErrorKind::DisplayVersion => {
            io::stdout().write_all(version::text(program).as_bytes())
        }
        _ => e.print(),
    };
    ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2))
}

/// 2 where the command was wrong, 1 where the work failed.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let usage = error.chain().any(|cause| {
        cause.is::<UsageError>()
            || matches!(cause.downcast_ref(), Some(StoreError::Usage(_)))
            || matches!(cause.downcast_ref(), Some(TierError::Config(_)))
    });
    if usage { 2 } else { 1 }
}

/// An error and its causes in one line. Causes that the text before already ends with are left out:
/// many errors show their source themselves.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut out = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if out.is_empty() {
            out = text;
        } else if !out.ends_with(&text) {
            out = format!("{out}: {text}");
        }
    }
    out.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn causes_are_joined_without_repetition() {
        let io = || std::io::Error::other("no space");
        let error = anyhow::Error::new(io()).context("writing x: no space");
        assert_eq!(one_line(&error), "writing x: no space");
        let error = anyhow::Error::new(io()).context("packing");
        assert_eq!(one_line(&error), "packing: no space");
    }

    #[test]
    fn wrong_usage_exits_with_2() {
        let usage = Err::<(), _>(StoreError::Usage("x".into())).context("--layers");
        assert_eq!(usage.as_ref().map_err(exit_code), Err(2));
        let failed = Err::<(), _>(StoreError::Interrupted).context("packing");
        assert_eq!(failed.as_ref().map_err(exit_code), Err(1));
    }
}
