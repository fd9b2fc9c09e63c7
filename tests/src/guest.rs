//! For tests that `make kernel-test` runs inside guests: the other guest, the rails, the figures.
//!
//! * [`Agent`] drives the peer's guest: shell commands, background programs, files.
//! * [`rail_counter`] and [`interface_counter`] read what the kernel counted on a rail of this guest.
//! * [`ib_read_bw`] measures a rail with someone else's program.
//! * [`figure`] adds a measurement to the run's report.
//!
//! The environment of a guest: `KERNEL_TEST_RIG` (`one`, `two`), `KERNEL_TEST_KERNEL` (`6.1`, …),
//! `KERNEL_TEST_RAILS` (a count), `KERNEL_TEST_RESULTS` (a folder that both guests and the host
//! share), `KERNEL_TEST_AGENT` (the agent's address), `TMPDIR` (a tmpfs). Rail `i` is `rxe<i>` on
//! `eth<i>` with 10.77.`i`.1, in the client of two guests 10.77.`i`.2.
//!
//! Outside a guest everything here panics or errs: such a test is `#[ignore]`d, never skipped.

mod agent;
mod perftest;
mod protocol;
mod serve;

pub use agent::{Agent, GuestError};
pub use perftest::ib_read_bw;
pub use protocol::{Ended, Signal};
pub use serve::serve;

use std::io::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

/// How many rails the guest has.
///
/// Panics outside a guest.
pub fn rails() -> usize {
    let text = variable("KERNEL_TEST_RAILS");
    text.parse()
        .unwrap_or_else(|e| panic!("KERNEL_TEST_RAILS is '{text}': {e}"))
}

/// The folder that both guests and the host share.
///
/// Panics outside a guest.
pub fn results() -> PathBuf {
    PathBuf::from(variable("KERNEL_TEST_RESULTS"))
}

/// Adds a measurement to the report, under the name of the test that runs. Units go last in `name`.
///
/// Panics outside a guest, and where the report cannot be written.
pub fn figure(name: &str, value: impl Into<Value>) {
    let test = std::env::var("KERNEL_TEST_NAME").unwrap_or_default();
    let line = json!({ "test": test, "name": name, "value": value.into() });
    println!("figure: {line}");
    let path = results().join("figures.jsonl");
    std::fs::File::options()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|mut f| f.write_all(format!("{line}\n").as_bytes()))
        .unwrap_or_else(|e| panic!("adding a figure to {}: {e}", path.display()));
}

/// One of soft-RoCE's counters of a rail of this guest: `sent_pkts`, `rcvd_pkts`, `retry_exceeded_err`, ….
///
/// Panics where there is no such rail or counter.
pub fn rail_counter(rail: usize, counter: &str) -> u64 {
    number(&format!(
        "/sys/class/infiniband/rxe{rail}/ports/1/hw_counters/{counter}"
    ))
}

/// A counter of the interface below a rail of this guest: `rx_bytes`, `tx_packets`, ….
///
/// What one device sends to itself never reaches the interface. Panics where there is no such rail or counter.
pub fn interface_counter(rail: usize, counter: &str) -> u64 {
    number(&format!("/sys/class/net/eth{rail}/statistics/{counter}"))
}

fn number(path: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("reading {path}: {e}"));
    text.trim()
        .parse()
        .unwrap_or_else(|e| panic!("{path} holds {text:?}: {e}"))
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: this runs inside a guest of `make kernel-test`")
    })
}
