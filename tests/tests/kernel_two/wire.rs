//! It was the wire: where the bytes went, and whose time it took.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::binary;
use atlas_expert_tests::guest;
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::rig::assert_all_right;

use crate::peer::{Host, SIXTEEN, fetch, records_of, tier};

/// 16 MiB: one per cent of it is more than catalogue and handshakes take.
const MODEL: Sizes = Sizes {
    layers: 2,
    experts: 8,
    hidden: 512,
    inter: 341,
    seed: 7,
};
/// Largest payload of a soft-RoCE packet on these links.
const MTU_BYTES: u64 = 4096;

/// The digest of a model's records by plain reads. The model is gone when this returns.
fn digest_by_plain_reads(sizes: Sizes) -> Result<String> {
    let model = Model::bf16(sizes);
    let output = binary::expert(&[
        &"fetch",
        &"--expert-backend",
        &"posix",
        &"--store",
        &model.checkpoint,
        &"--json",
        &"-q",
    ]);
    let digest = output.json()["payload_digest"].as_str().map(str::to_owned);
    let path = model.checkpoint.clone();
    drop(model);
    ensure!(!path.exists(), "the store is still here");
    digest.context("a digest")
}

/// Bytes of the management link both ways, where the control connections are.
fn control_bytes() -> Result<u64> {
    ["rx_bytes", "tx_bytes"]
        .iter()
        .map(|name| {
            let path = format!("/sys/class/net/mgmt/statistics/{name}");
            Ok(std::fs::read_to_string(path)?.trim().parse::<u64>()?)
        })
        .sum()
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn every_byte_comes_by_reads_over_each_rail_that_was_asked_for() -> Result<()> {
    let there = Host::new()?;
    let digest = digest_by_plain_reads(MODEL)?;
    let store = there.synth("store", MODEL)?;
    let all = guest::rails();
    let _peer = there.serve(&store, all)?;
    for count in [1, 2, 4].into_iter().filter(|n| *n <= all) {
        let before: Vec<u64> = (0..all)
            .map(|r| guest::rail_counter(r, "rcvd_pkts"))
            .collect();
        let control_before = control_bytes()?;
        let report = fetch(count, &[])?;
        let control = control_bytes()? - control_before;
        let packets: Vec<u64> = (0..all)
            .map(|r| guest::rail_counter(r, "rcvd_pkts") - before[r])
            .collect();

        ensure!(report["payload_digest"] == digest.as_str(), "{report:#}");
        ensure!(report["verified"] == true, "{report:#}");
        ensure!(report["takeovers"] == 0, "{report:#}");
        let payload = report["bytes"].as_u64().context("bytes")?;
        ensure!(
            control * 100 < payload,
            "{control} control bytes beside {payload} of payload"
        );
        let rails = report["rails"].as_array().context("rails")?;
        ensure!(rails.len() == count, "{report:#}");
        let mut carried = 0;
        for (rail, stats) in rails.iter().enumerate() {
            let bytes = stats["bytes"].as_u64().context("bytes")?;
            ensure!(bytes > 0, "rail {rail} carried nothing: {report:#}");
            ensure!(
                packets[rail] >= bytes.div_ceil(MTU_BYTES),
                "rail {rail}: {} packets for {bytes} bytes",
                packets[rail]
            );
            carried += bytes;
        }
        ensure!(carried >= payload, "{carried} of {payload} bytes");
        ensure!(
            packets[count..].iter().all(|&n| n < 100),
            "rails that were not asked for: {packets:?}"
        );
        let label = |what: &str| format!("{count}_rails_{what}");
        guest::figure(&label("control_bytes_per_mille"), control * 1000 / payload);
        guest::figure(&label("packets"), packets[..count].iter().sum::<u64>());
        let rate = payload as f64 / 1e6 / report["seconds"].as_f64().context("seconds")?;
        guest::figure(&label("mb_per_s"), rate);
    }
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn peer_process_uses_no_processor_time_while_its_memory_is_read() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let peer = there.serve(&store, 2)?;
    let tier = tier(&records, 8, 2)?;
    // Handshakes and the catalogue are over with this.
    assert_all_right(&tier, &records, 8);

    let cpu_before = peer.cpu_seconds()?;
    let start = Instant::now();
    let mut passes = 0u64;
    while start.elapsed() < Duration::from_secs(4) {
        assert_all_right(&tier, &records, 8);
        passes += 1;
    }
    let wall = start.elapsed().as_secs_f64();
    let cpu = peer.cpu_seconds()? - cpu_before;
    guest::figure("passes", passes);
    guest::figure("peer_cpu_per_cent_of_wall", 100.0 * cpu / wall);
    ensure!(
        cpu < 0.05 * wall,
        "the peer's process used {cpu} s of {wall} s"
    );
    Ok(())
}
