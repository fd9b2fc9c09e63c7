//! `extract`: one record as the checkpoint has it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use expert_store::{Key, OpenOptions, Store, StoreError, extract};
use serde::Serialize;

use super::args::{self, MovedArgs, StackArgs};
use super::output::{self, grouped};
use super::{UsageError, signals};

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
            let mut out = Cancellable(io::stdout().lock(), cancel);
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
        false => write_file(&store, key, args, cancel)?,
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

/// Writes beside the file and renames, so that it is whole or not there.
fn write_file(
    store: &Store,
    key: Key,
    args: &Args,
    cancel: Arc<AtomicBool>,
) -> anyhow::Result<u64> {
    let path = &args.output;
    let name = path
        .file_name()
        .ok_or_else(|| UsageError(format!("{} is not the name of a file", path.display())))?;
    let there = || {
        anyhow::anyhow!(
            "{} exists already; choose another name, or --replace",
            path.display()
        )
    };
    match fs::symlink_metadata(path) {
        Ok(_) if !args.replace => return Err(there()),
        Ok(m) if !m.is_file() => {
            anyhow::bail!("{} is no regular file and is not replaced", path.display());
        }
        _ => {}
    }
    let temporary = path.with_file_name(format!(
        ".{}.tmp-{}",
        name.to_string_lossy(),
        std::process::id()
    ));
    let write = || -> anyhow::Result<u64> {
        let file = File::create_new(&temporary)
            .with_context(|| format!("creating {}", temporary.display()))?;
        let mut out = Cancellable(BufWriter::with_capacity(1 << 20, file), cancel);
        let bytes = extract::extract(store, key, &mut out)?;
        let failed = || format!("writing {}", path.display());
        out.flush().with_context(failed)?;
        out.0.get_ref().sync_all().with_context(failed)?;
        if args.replace {
            fs::rename(&temporary, path).with_context(failed)?;
        } else {
            // A link, unlike a rename, never takes the place of what appeared meanwhile.
            match fs::hard_link(&temporary, path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(there()),
                linked => linked.with_context(failed)?,
            }
            fs::remove_file(&temporary).with_context(failed)?;
        }
        Ok(bytes)
    };
    write().inspect_err(|_| {
        // It may not exist yet; the first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    })
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

/// A writer that gives up once an interrupt was asked for.
struct Cancellable<W>(W, Arc<AtomicBool>);

impl<W: Write> Write for Cancellable<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.1.load(Ordering::Relaxed) {
            // Not `Interrupted`, which `write_all` tries again.
            true => Err(io::Error::other("interrupted; nothing was left behind")),
            false => self.0.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
