//! How much faster more rails are. Each link is shaped on the peer's side, so that links are what limits
//! and not an emulated processor.
//!
//! These measure and do not judge: a rate depends on what else the machine does. The goals are in the
//! names of the figures, and `unshaped_4_rails_mb_per_s` says whether this machine could fill the links
//! at all (30 MB/s).

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::guest;

use crate::peer::{Host, fetch};

/// One layer of 128 experts of exactly 1 MiB: up and down of 512 x 512 in BF16.
const MODEL: &str = "--family nemotron --layers 1 --experts 128 --hidden 512 --inter 512";
const LINKS: usize = 4;

/// The peer with its links shaped.
fn shaped() -> Result<Host> {
    ensure!(guest::rails() >= LINKS, "needs {LINKS} links");
    let there = Host::new()?;
    let store = there.synth_as("store", MODEL, 3)?;
    there.serve(&store, LINKS)?;
    // Beside the others: whether this machine can fill the links at all, or is too busy.
    let unshaped = mb_per_s(LINKS, &["--experts", "0..16"])?;
    guest::figure("unshaped_4_rails_mb_per_s", unshaped);
    there.shape(LINKS)?;
    Ok(there)
}

/// MB/s of a fetch whose records are verified.
fn mb_per_s(rails: usize, more: &[&str]) -> Result<f64> {
    let always = ["--no-digest", "--qps-per-rail", "1"];
    let report = fetch(rails, &[more, &always].concat())?;
    ensure!(report["verified"] == true, "{report:#}");
    println!("{rails} rails: {report:#}");
    let bytes = report["bytes"].as_f64().context("bytes")?;
    Ok(bytes / 1e6 / report["seconds"].as_f64().context("seconds")?)
}

/// Notes the rates of one, two and four rails, and what more rails gain beside the goals.
fn compare(rates: [f64; 3], goals: [f64; 2]) -> Result<()> {
    for (rails, rate) in [1, 2, 4].iter().zip(rates) {
        ensure!(rate > 0.0, "{rails} rails carried nothing");
        guest::figure(&format!("{rails}_rails_mb_per_s"), rate);
    }
    let (two, four) = (rates[1] / rates[0], rates[2] / rates[0]);
    guest::figure(&format!("2_rails_ratio_goal_{}", goals[0]), two);
    guest::figure(&format!("4_rails_ratio_goal_{}", goals[1]), four);
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn random_batches_of_eight_are_timed_over_one_two_and_four_rails() -> Result<()> {
    let _there = shaped()?;
    let mut rates = [0.0; 3];
    // Fewer where each takes longer: the rate is what counts.
    for (rate, (rails, batches)) in rates.iter_mut().zip([(1, 5), (2, 12), (4, 24)]) {
        let records = (batches * 8).to_string();
        *rate = mb_per_s(
            rails,
            &["--random", &records, "--batch", "8", "--depth", "1"],
        )?;
    }
    compare(rates, [1.8, 3.2])
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn whole_layer_in_order_is_timed_over_one_two_and_four_rails() -> Result<()> {
    let _there = shaped()?;
    let rates = [
        mb_per_s(1, &["--experts", "0..40"])?,
        mb_per_s(2, &[])?,
        mb_per_s(4, &[])?,
    ];
    compare(rates, [1.9, 3.6])
}
