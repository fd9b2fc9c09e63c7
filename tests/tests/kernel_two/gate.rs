//! The bit-identity gate between two machines: the weights are on the other one alone.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::binary;
use atlas_expert_tests::net::gate::{FLAGS, SIZES_SMALL};
use serde_json::Value;

use crate::peer::{ADDR, Host};

/// The run with resident weights, where they are.
fn resident(there: &Host, store: &str, steps: u32) -> Result<Value> {
    let program = binary::path("atlas-expert");
    let text = there.run(&format!(
        "{} gate --resident {store} --steps {steps} --json -q {}",
        program.display(),
        FLAGS.join(" ")
    ))?;
    serde_json::from_str(&text).with_context(|| format!("a report: {text}"))
}

/// The run over the first `rails` rails of this guest.
fn over_verbs(rails: usize, steps: u32) -> Command {
    let (steps, names) = (
        steps.to_string(),
        (0..rails).map(|i| format!("rxe{i}")).collect::<Vec<_>>(),
    );
    let mut args: Vec<&dyn AsRef<OsStr>> = vec![&"gate", &"--json", &"--steps", &steps];
    for flag in [
        "--expert-backend",
        "rdma-verbs",
        "--require-rdma",
        "--expert-peer",
        ADDR,
        "--deadline-ms",
        "60000",
        "--stall-ms",
        "1000",
    ]
    .iter()
    .chain(&FLAGS)
    {
        args.push(flag);
    }
    for name in &names {
        args.extend([&"--rail" as &dyn AsRef<OsStr>, name]);
    }
    binary::command("atlas-expert", &args)
}

fn number(report: &Value, name: &str) -> Result<u64> {
    report[name]
        .as_u64()
        .with_context(|| format!("{name}: {report:#}"))
}

/// Whether each record was brought each time that it was needed, over rails that all took part.
fn check(report: &Value, want: &Value) -> Result<()> {
    ensure!(report["hash"] == want["hash"], "{want:#} {report:#}");
    let needed = number(want, "records_needed")?;
    ensure!(number(report, "misses")? == needed, "{report:#}");
    ensure!(number(report, "misses_certain")? == needed, "{report:#}");
    let record_bytes = 3 * u64::from(SIZES_SMALL.hidden) * u64::from(SIZES_SMALL.inter) * 2;
    let bytes = number(report, "transferred_bytes")?;
    ensure!(bytes == needed * record_bytes, "{report:#}");
    let rails = report["rails"].as_array().context("rails")?;
    for rail in rails {
        ensure!(rail["kind"] == "verbs", "{report:#}");
        ensure!(number(rail, "bytes")? > 0, "{report:#}");
    }
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn forward_pass_from_a_neighbours_memory_is_that_of_resident_weights() -> Result<()> {
    let there = Host::new()?;
    let store = there.synth("store", SIZES_SMALL)?;
    let want = resident(&there, &store, 3)?;
    let _peer = there.serve(&store, 2)?;
    for rails in [1, 2] {
        let output = binary::run(&mut over_verbs(rails, 3));
        ensure!(output.code == Some(0), "{output:?}");
        check(&output.json(), &want)?;
    }
    Ok(())
}

/// Ends with the test.
struct Consumer(Child);

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn neighbour_that_is_killed_and_restarted_under_a_forward_pass_changes_nothing() -> Result<()> {
    const STEPS: u32 = 12;
    let there = Host::new()?;
    let store = there.synth("store", SIZES_SMALL)?;
    let want = resident(&there, &store, STEPS)?;
    let mut peer = Some(there.serve(&store, 2)?);
    let mut consumer = Consumer(
        over_verbs(2, STEPS)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?,
    );
    let said = BufReader::new(consumer.0.stderr.take().context("a pipe")?);
    for line in said.lines() {
        let line = line?;
        println!("{line}");
        if line.starts_with("step 2 of") {
            peer.take().context("a peer that runs")?.kill()?;
            peer = Some(there.serve(&store, 2)?);
        }
    }
    let mut stdout = String::new();
    let mut pipe = consumer.0.stdout.take().context("a pipe")?;
    pipe.read_to_string(&mut stdout)?;
    ensure!(consumer.0.wait()?.success(), "{stdout}");
    let report: Value = serde_json::from_str(&stdout)?;
    check(&report, &want)?;
    let rails = report["rails"].as_array().context("rails")?;
    let downs = rails.iter().map(|r| number(&r["errors_by_cause"], "downs"));
    let downs = downs.sum::<Result<u64>>()?;
    ensure!(downs > 0, "the peer was not missed: {report:#}");
    Ok(())
}
