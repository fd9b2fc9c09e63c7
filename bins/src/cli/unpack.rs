//! `unpack`: back to the checkpoint's tensors.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use expert_store::OpenOptions;
use expert_store::unpack::{self, UnpackOptions};
use serde::Serialize;

use super::args::{self, MovedArgs, RunArgs, SelectArgs, StackArgs};
use super::output::{self, gb_per_s, grouped, human_bytes};

/// Write a store's tensors as the checkpoint had them: same container, names, dtypes, shapes and bytes
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Store; a v1 store cannot be unpacked
    store: PathBuf,
    /// Directory, or a file that ends in .safetensors or .gguf; must not exist
    #[arg(short, long, value_name = "PATH")]
    output: PathBuf,
    /// Largest safetensors file in megabytes; a tensor that is larger gets a file of its own
    #[arg(long, value_name = "MB", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    shard_mb: u64,
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    moved: MovedArgs,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Serialize)]
struct Unpacked {
    path: String,
    files: usize,
    tensors: usize,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
}

/// Runs it.
///
/// *Errors*: those of [`unpack::unpack`].
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let open = OpenOptions {
        checkpoint_override: args.moved.checkpoint.clone(),
        ..args.stack.open_options(&args.select)?
    };
    let store = args::open(&args.store, &open)?;
    let options = UnpackOptions {
        work: args.run.work_options()?,
        shard_bytes: args.shard_mb * 1_000_000,
    };
    let done = unpack::unpack(&store, &args.output, &options)?;
    let seconds = began.elapsed().as_secs_f64();
    let unpacked = Unpacked {
        path: done.path.display().to_string(),
        files: done.files,
        tensors: done.tensors,
        bytes: done.bytes,
        seconds,
        gb_per_s: gb_per_s(done.bytes, seconds),
    };
    if args.run.json {
        output::print_json(&unpacked)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&output::pairs(&[
        ("written", unpacked.path),
        ("files", grouped(unpacked.files as u64)),
        ("tensors", grouped(unpacked.tensors as u64)),
        ("bytes", human_bytes(unpacked.bytes)),
        (
            "took",
            format!("{seconds:.2} s, {:.2} GB/s", unpacked.gb_per_s),
        ),
    ]))?;
    Ok(ExitCode::SUCCESS)
}
