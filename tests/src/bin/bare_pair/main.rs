//! The plainest way to move records between two processes over TCP: what `make bench` compares a fetch with.
//!
//! ```text
//! bare_pair serve FILE [--transfer sendfile|copy]     prints one line of JSON, serves until standard input ends
//! bare_pair read ADDR FILE [--streams N] [WORK]       prints JSON; the records of the last round are compared with FILE
//! bare_pair copy FILE [--from memory|file] [--threads N] [WORK]     the floor: the same records without a network
//!
//! WORK: --record-bytes 9437184 --among 110 --records 220 --batch 8 --seed 1
//! ```
//!
//! A request is 16 bytes, offset and length; its answer is those bytes of FILE. There are no checksums, no catalogue,
//! no deadlines but those of the sockets, nothing for the case that one side fails. With `--batch 1 --streams 1` it
//! asks for one record, waits for it, and asks for the next: its percentiles are the latency of that.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

mod copy;
mod pair;
mod work;

use work::Work;

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    match act(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bare_pair: {error}");
            ExitCode::from(2)
        }
    }
}

fn act(mut arguments: Vec<String>) -> Result<(), Error> {
    let transfer = option(&mut arguments, "--transfer")?.unwrap_or_else(|| "sendfile".into());
    let from = option(&mut arguments, "--from")?.unwrap_or_else(|| "memory".into());
    let streams = number(&mut arguments, "--streams", 1)? as usize;
    let threads = number(&mut arguments, "--threads", 1)? as usize;
    let work = Work {
        record_bytes: number(&mut arguments, "--record-bytes", 9_437_184)?,
        among: number(&mut arguments, "--among", 110)?,
        records: number(&mut arguments, "--records", 220)? as usize,
        batch: number(&mut arguments, "--batch", 8)? as usize,
        seed: number(&mut arguments, "--seed", 1)?,
    };
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match (&arguments[..], transfer.as_str(), from.as_str()) {
        (["serve", file], "sendfile" | "copy", _) => pair::serve(PathBuf::from(file), transfer == "copy"),
        (["read", addr, file], ..) => {
            work.check(streams)?;
            pair::read(addr.parse()?, file.as_ref(), &work, streams)
        }
        (["copy", file], _, "memory" | "file") => {
            work.check(threads)?;
            copy::copy(file.as_ref(), &work, threads, from == "file")
        }
        _ => Err("usage: serve FILE | read ADDR FILE | copy FILE, and the options that its source begins with".into()),
    }
}

/// Takes `name VALUE` out of the arguments.
fn option(arguments: &mut Vec<String>, name: &str) -> Result<Option<String>, Error> {
    let Some(at) = arguments.iter().position(|a| a == name) else {
        return Ok(None);
    };
    if at + 1 == arguments.len() {
        return Err(format!("{name} needs a value").into());
    }
    Ok(arguments.drain(at..at + 2).nth(1))
}

fn number(arguments: &mut Vec<String>, name: &str, default: u64) -> Result<u64, Error> {
    match option(arguments, name)? {
        Some(text) => text
            .parse()
            .map_err(|_| format!("{name} {text}: not a number").into()),
        None => Ok(default),
    }
}
