//! `ib_read_bw`, the yardstick: READs between two devices by someone else's program.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::{Agent, GuestError};
use crate::binary;

/// A guest under emulation takes seconds to load and connect.
const START: Duration = Duration::from_secs(30);

/// Reads `reads` times `read_bytes` on one rail from a server that `agent` starts, and gives MB/s (10^6 bytes).
///
/// The server is the other guest's device of the same rail, or in one guest the device itself.
///
/// # Errors
/// The server did not start, the client did not end within `timeout` or failed, or it printed no figure.
pub fn ib_read_bw(
    agent: &Agent,
    rail: usize,
    read_bytes: usize,
    reads: usize,
    timeout: Duration,
) -> Result<f64, GuestError> {
    let arguments = format!("-d rxe{rail} -x 1 -s {read_bytes} -n {reads} -F --report_gbits");
    let name = format!("ib_read_bw-{rail}");
    // Line by line: its first words would otherwise stay in its buffer until it ends.
    agent.spawn(&name, &format!("exec stdbuf -oL ib_read_bw {arguments}"))?;
    agent.wait_line(&name, "Waiting for client", START)?;
    let seconds = timeout.as_secs().max(1).to_string();
    let client = binary::run(
        Command::new("timeout")
            .args(["-k", "2", &seconds, "ib_read_bw"])
            .args(arguments.split(' '))
            .arg(format!("10.77.{rail}.1"))
            .stdin(Stdio::null()),
    );
    if client.code != Some(0) {
        let _ = agent.kill(&name, super::Signal::Kill);
        return Err(GuestError::Refused(format!("ib_read_bw: {client:?}")));
    }
    agent.wait(&name, START)?;
    // "bytes iterations peak average message-rate", in Gbit/s.
    let size = read_bytes.to_string();
    let mut rows = client
        .stdout
        .lines()
        .map(|l| l.split_whitespace().collect::<Vec<_>>());
    let row = rows.find(|words| words.first() == Some(&size.as_str()));
    let average = row.and_then(|words| words.get(3)?.parse::<f64>().ok());
    average
        .map(|gbit_per_s| gbit_per_s * 125.0)
        .ok_or_else(|| GuestError::Refused(format!("ib_read_bw printed no figure: {client:?}")))
}
