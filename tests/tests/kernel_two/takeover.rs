//! TCP over the rails' addresses while no rail carries a READ, and back.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::binary;
use atlas_expert_tests::guest;
use atlas_expert_tests::net::rig::{assert_all_right, patient};
use expert_tier::rail::RailKind;
use expert_tier::stats::TierStats;
use expert_tier::{ExpertTier, VerbsOptions};

use crate::peer::{ADDR, Host, SIXTEEN, records_of, tier_with, verbs};

/// Bytes by READs, by TCP on the rails' addresses, and by TCP elsewhere.
fn by_path(stats: &TierStats) -> [u64; 3] {
    let mut bytes = [0; 3];
    for rail in &stats.rails {
        let path = match rail.kind {
            RailKind::Verbs => 0,
            _ if rail.name.contains("10.77.") => 1,
            _ => 2,
        };
        bytes[path] += rail.bytes;
    }
    bytes
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn tcp_over_the_rails_takes_over_when_no_read_passes_and_hands_back() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let _peer = there.serve(&store, 2)?;
    let options = VerbsOptions {
        require: false,
        stall: Duration::from_secs(1),
        ..verbs(2)
    };
    let tier = tier_with(patient(), options, &records, 16)?;
    assert_all_right(&tier, &records, 16);
    let [reads, on_rails, elsewhere] = by_path(&tier.stats());
    ensure!(reads > 0 && on_rails == 0 && elsewhere == 0);
    ensure!(tier.stats().takeovers == 0);

    for rail in [0, 1] {
        there.drop_roce(rail)?;
    }
    let start = Instant::now();
    assert_all_right(&tier, &records, 16);
    guest::figure("batch_across_the_takeover_s", start.elapsed().as_secs_f64());
    assert_all_right(&tier, &records, 16);
    let stats = tier.stats();
    let [_, on_rails, elsewhere] = by_path(&stats);
    ensure!(stats.takeovers == 1, "{stats:#?}");
    ensure!(on_rails > 0, "{stats:#?}");
    ensure!(elsewhere == 0, "over the management link: {stats:#?}");

    for rail in [0, 1] {
        there.heal(rail)?;
    }
    let start = Instant::now();
    let [before, ..] = by_path(&tier.stats());
    while by_path(&tier.stats())[0] == before {
        assert_all_right(&tier, &records, 16);
        ensure!(
            start.elapsed() < Duration::from_secs(30),
            "{:#?}",
            tier.stats()
        );
    }
    guest::figure("handed_back_after_s", start.elapsed().as_secs_f64());
    // From now on no byte takes the other way.
    let [_, on_rails, elsewhere] = by_path(&tier.stats());
    assert_all_right(&tier, &records, 16);
    let after = by_path(&tier.stats());
    ensure!(after[1..] == [on_rails, elsewhere], "{after:?}");
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn peer_whose_reads_do_not_pass_from_the_start_is_used_by_tcp_and_it_is_said() -> Result<()> {
    let there = Host::new()?;
    let store = there.synth("store", SIXTEEN)?;
    let _peer = there.serve(&store, 1)?;
    there.drop_roce(0)?;
    let fetch = |more: &[&str]| {
        let mut args = vec!["fetch", "--expert-backend", "rdma-verbs", "--rail", "rxe0"];
        args.extend(["--expert-peer", ADDR, "--json", "-q"]);
        args.extend(["--deadline-ms", "30000"]);
        args.extend(more);
        let args: Vec<&dyn AsRef<std::ffi::OsStr>> = args
            .iter()
            .map(|a| a as &dyn AsRef<std::ffi::OsStr>)
            .collect();
        binary::expert(&args)
    };
    let output = fetch(&[]);
    let report = output.json();
    ensure!(report["verified"] == true, "{report:#}");
    ensure!(
        output
            .stderr
            .contains("records go over others until one does"),
        "{}",
        output.stderr
    );
    ensure!(
        report["takeovers"].as_u64().context("a count")? >= 1,
        "{report:#}"
    );

    let output = fetch(&["--require-rdma"]);
    let error = output.error(1);
    println!("{error}");
    ensure!(error.contains("READ"), "{error}");
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn peer_without_verbs_is_used_by_tcp_unless_rdma_is_required() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let _peer = there.serve_with(&store, "--rdma off")?;
    let options = VerbsOptions {
        require: false,
        ..verbs(1)
    };
    let tier = tier_with(patient(), options, &records, 16)?;
    assert_all_right(&tier, &records, 16);
    let stats = tier.stats();
    ensure!(by_path(&stats)[0] == 0, "{stats:#?}");
    ensure!(stats.takeovers >= 1, "{stats:#?}");
    drop(tier);

    let start = Instant::now();
    let Err(error) = tier_with(patient(), verbs(1), &records, 16) else {
        anyhow::bail!("a tier that needs verbs, at a peer without");
    };
    let text = format!("{error:#}");
    println!("after {:?}: {text}", start.elapsed());
    ensure!(text.contains("the peer serves no verbs"), "{text}");
    Ok(())
}
