//! More rails are faster. Each link is shaped on the peer's side, so that links are what limits and
//! not an emulated processor.

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

/// Rates of one, two and four rails, and what more rails gain.
fn compare(rates: [f64; 3]) -> (f64, f64) {
    for (rails, rate) in [1, 2, 4].iter().zip(rates) {
        guest::figure(&format!("{rails}_rails_mb_per_s"), rate);
    }
    let (two, four) = (rates[1] / rates[0], rates[2] / rates[0]);
    guest::figure("2_rails_ratio", two);
    guest::figure("4_rails_ratio", four);
    (two, four)
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn random_batches_of_eight_gain_by_more_rails() -> Result<()> {
    let _there = shaped()?;
    let mut rates = [0.0; 3];
    // Fewer where each takes longer: the rate is what counts.
    for (rate, (rails, batches)) in rates.iter_mut().zip([(1, 6), (2, 20), (4, 60)]) {
        let records = (batches * 8).to_string();
        *rate = mb_per_s(
            rails,
            &["--random", &records, "--batch", "8", "--depth", "1"],
        )?;
    }
    let (two, four) = compare(rates);
    ensure!(two >= 1.8, "two rails: {two:.2} times one");
    ensure!(four >= 3.2, "four rails: {four:.2} times one");
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn whole_layer_in_order_gains_by_more_rails() -> Result<()> {
    let _there = shaped()?;
    let rates = [
        mb_per_s(1, &["--experts", "0..48"])?,
        mb_per_s(2, &[])?,
        mb_per_s(4, &[])?,
    ];
    let (two, four) = compare(rates);
    ensure!(two >= 1.9, "two rails: {two:.2} times one");
    ensure!(four >= 3.6, "four rails: {four:.2} times one");
    Ok(())
}
