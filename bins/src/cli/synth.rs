//! `synth`: made-up checkpoints.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::builder::PossibleValuesParser;
use expert_store::WorkOptions;
use expert_store::synth::{self, FAMILIES, SynthSpec};
use serde::Serialize;

use super::args::RunArgs;
use super::output::{self, gb_per_s, grouped, human_bytes};

/// Make up a checkpoint in the shape of a known model, at any size, for tests and measurements
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shape of names, layout and quantisation; --list tells what they are
    #[arg(long, value_name = "NAME", required_unless_present = "list", value_parser = families())]
    family: Option<String>,
    /// New directory of the checkpoint
    #[arg(short, long, value_name = "DIR", required_unless_present = "list")]
    output: Option<PathBuf>,
    /// MoE layers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    layers: Option<u32>,
    /// Routed experts of each layer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    experts: Option<u32>,
    /// Hidden size
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    hidden: Option<u32>,
    /// Intermediate size of an expert
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    inter: Option<u32>,
    /// Files; experts may straddle them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    shards: u32,
    /// Another seed gives other bytes, the same seed the same
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// List the families
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Serialize)]
struct Made {
    path: String,
    files: usize,
    tensors: usize,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
}

#[derive(Serialize)]
struct Known {
    family: &'static str,
    about: &'static str,
}

/// Runs it.
///
/// *Errors*: those of [`synth::synth`].
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.list {
        list(args.run.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    let work: WorkOptions = args.run.work_options()?;
    let spec = SynthSpec {
        family: args.family.clone().context("--family is missing")?,
        layers: args.layers,
        experts: args.experts,
        hidden: args.hidden,
        inter: args.inter,
        shards: args.shards,
        seed: args.seed,
        work,
    };
    let out = args.output.as_ref().context("--output is missing")?;
    let done = synth::synth(&spec, out)?;
    let seconds = began.elapsed().as_secs_f64();
    let made = Made {
        path: done.path.display().to_string(),
        files: done.files,
        tensors: done.tensors,
        bytes: done.bytes,
        seconds,
        gb_per_s: gb_per_s(done.bytes, seconds),
    };
    if args.run.json {
        output::print_json(&made)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&output::pairs(&[
        ("checkpoint", made.path),
        ("files", grouped(made.files as u64)),
        ("tensors", grouped(made.tensors as u64)),
        ("bytes", human_bytes(made.bytes)),
        ("took", format!("{seconds:.2} s, {:.2} GB/s", made.gb_per_s)),
    ]))?;
    Ok(ExitCode::SUCCESS)
}

fn list(json: bool) -> anyhow::Result<()> {
    let known = FAMILIES.iter().map(|f| Known {
        family: f.name,
        about: f.about,
    });
    if json {
        return output::print_json(&known.collect::<Vec<_>>());
    }
    let rows: Vec<Vec<String>> = known
        .map(|k| vec![k.family.to_owned(), k.about.to_owned()])
        .collect();
    output::print(&output::table(&["family", "what"], &rows))
}

fn families() -> PossibleValuesParser {
    PossibleValuesParser::new(FAMILIES.iter().map(|f| f.name))
}
