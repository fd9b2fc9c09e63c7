//! `synth-trace`: made-up routing traces.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use expert_tier::replay::{SynthTrace, write_header, write_row};
use serde::Serialize;

use super::output::{self, grouped, human_bytes};
use super::{new_file, signals};

/// Make up a routing trace: which experts each layer of each step uses, for `replay`
///
/// Popularity follows Zipf's law, with an order and an exponent of its own for each layer; a step keeps some of the
/// experts of the step before. Real routers differ: where you can, record a trace of your model (docs/sizing.md).
/// The same seed gives the same trace on every machine.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// MoE layers
    #[arg(long, value_name = "N")]
    layers: u32,
    /// Routed experts of each layer
    #[arg(long, value_name = "N")]
    experts: u32,
    /// Experts that each layer uses in a step
    #[arg(long, value_name = "N")]
    top_k: u32,
    /// Steps: tokens that are generated one after the other
    #[arg(long, value_name = "N", default_value_t = 1000)]
    steps: u32,
    /// Another seed gives another trace
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Exponent of popularity: 0 makes all experts equal, 1 makes the tenth a tenth as popular as the first; at most 4
    #[arg(long, value_name = "X", default_value_t = 0.7)]
    zipf: f64,
    /// How far a layer's exponent lies from --zipf at most, either way
    #[arg(long, value_name = "X", default_value_t = 0.2)]
    skew: f64,
    /// Probability that an expert of the step before is used again, besides what popularity makes of it
    #[arg(long, value_name = "P", default_value_t = 0.2)]
    reuse: f64,
    /// File to write; must not exist
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    replace: bool,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Made {
    path: String,
    rows: u64,
    uses: u64,
    bytes: u64,
}

/// Runs it.
///
/// *Errors*: numbers that make no trace, a file that is there or cannot be written.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let spec = SynthTrace {
        layers: args.layers,
        experts: args.experts,
        top_k: args.top_k,
        steps: args.steps,
        seed: args.seed,
        zipf: args.zipf,
        skew: args.skew,
        reuse: args.reuse,
    };
    let rows = spec.rows()?;
    let failed = || format!("writing {}", args.output.display());
    let cancel = signals::cancel_flag().context("installing signal handlers")?;
    new_file::write(&args.output, args.replace, cancel, |out| {
        write_header(out, &spec.header()).with_context(failed)?;
        for row in rows {
            write_row(out, &row).with_context(failed)?;
        }
        Ok(())
    })?;
    let rows = u64::from(args.layers) * u64::from(args.steps);
    let made = Made {
        path: args.output.display().to_string(),
        rows,
        uses: rows * u64::from(args.top_k),
        bytes: std::fs::metadata(&args.output).map_or(0, |m| m.len()),
    };
    if args.json {
        output::print_json(&made)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&output::pairs(&[
        ("trace", made.path),
        ("rows", grouped(made.rows)),
        ("expert uses", grouped(made.uses)),
        ("bytes", human_bytes(made.bytes)),
    ]))?;
    Ok(ExitCode::SUCCESS)
}
