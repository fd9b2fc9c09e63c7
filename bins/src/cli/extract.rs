//! `extract`: one record as the checkpoint has it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use expert_store::{Key, OpenOptions, Store, StoreError, extract};
use serde::Serialize;

use super::args::{self, MovedArgs, StackArgs};
use super::new_file::{self, Cancellable};
use super::output::{self, grouped};
use super::signals;

/// Write one expert's tensors to a file: their bytes as in the checkpoint, gate, up, down, without padding
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Store, checkpoint folder or GGUF file
    path: PathBuf,
    /// MoE layer by dense index, counted from 0
    #[arg(long, value_name = "L")]
    layer: u32,
    /// Expert of that layer
    #[arg(long, value_name = "E")]
    expert: u32,
    /// File to write, or - for standard output; must not exist
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    moved: MovedArgs,
    /// Print JSON, for programs (to standard error where the record goes to standard output)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Extracted {
    layer: u32,
    expert: u32,
    bytes: u64,
    verified: bool,
    tensors: Vec<Tensor>,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    offset: u64,
    bytes: u64,
}

/// Runs it.
///
/// *Errors*: there is no such record, its bytes are not those of its checksums, or writing fails.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let options = OpenOptions {
        checkpoint_override: args.moved.checkpoint.clone(),
        ..args.stack.open_options(&args::SelectArgs::default())?
    };
    let store = args::open(&args.path, &options)?;
    let key = Key::new(args.layer, args.expert);
    let cancel = signals::cancel_flag().context("installing signal handlers")?;
    let to_stdout = args.output == Path::new("-");
    let bytes = match to_stdout {
        true => {
            let mut out = Cancellable::new(io::stdout().lock(), cancel);
            let written = extract::extract(&store, key, &mut out);
            match written.and_then(|n| out.flush().map(|()| n).map_err(stdout_error)) {
                // Whoever read it has seen enough.
                Err(StoreError::Io { source, .. })
                    if source.kind() == io::ErrorKind::BrokenPipe =>
                {
                    return Ok(ExitCode::SUCCESS);
                }
                other => other?,
            }
        }
        false => new_file::write(&args.output, args.replace, cancel, |out| {
            Ok(extract::extract(&store, key, out)?)
        })?,
    };
    let extracted = describe(&store, key, bytes)?;
    let text = match args.json {
        true => format!("{}\n", serde_json::to_string_pretty(&extracted)?),
        false => summary(&extracted),
    };
    match to_stdout {
        // Nothing but the record goes to standard output.
        true => {
            let _ = io::stderr().write_all(text.as_bytes());
        }
        false => output::print(&text)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn stdout_error(source: io::Error) -> StoreError {
    StoreError::Io {
        action: "writing",
        path: "standard output".into(),
        source,
    }
}

fn describe(store: &Store, key: Key, bytes: u64) -> anyhow::Result<Extracted> {
    let (layer, position) = store.locate(key)?;
    let mut offset = 0;
    let mut tensors = Vec::new();
    for leaf in &layer.class(position).leaves {
        tensors.push(Tensor {
            name: leaf.name.replace("{}", &key.expert.to_string()),
            dtype: leaf.dtype.to_string(),
            shape: leaf.shape.clone(),
            offset,
            bytes: leaf.bytes,
        });
        offset += leaf.bytes;
    }
    Ok(Extracted {
        layer: key.layer,
        expert: key.expert,
        bytes,
        verified: layer.checksums.is_some(),
        tensors,
    })
}

fn summary(extracted: &Extracted) -> String {
    let rows: Vec<Vec<String>> = extracted
        .tensors
        .iter()
        .map(|t| {
            let shape: Vec<String> = t.shape.iter().map(u64::to_string).collect();
            vec![
                grouped(t.offset),
                grouped(t.bytes),
                t.dtype.clone(),
                format!("[{}]", shape.join(", ")),
                t.name.clone(),
            ]
        })
        .collect();
    let mut out = output::table(&["offset", "bytes", "dtype", "shape", "tensor"], &rows);
    out.push_str(&format!(
        "{} bytes written, {}\n",
        grouped(extracted.bytes),
        match extracted.verified {
            true => "verified",
            false => "not verified: there are no checksums",
        }
    ));
    out
}
