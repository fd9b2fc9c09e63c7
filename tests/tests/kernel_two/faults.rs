//! A peer that dies and links that fail in the middle of a batch.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::guest::{self, Signal};
use atlas_expert_tests::net::model::Records;
use atlas_expert_tests::net::rig::{assert_all_right, assert_right, batch, patient, unsettled};
use atlas_expert_tests::net::wait_until;
use expert_arena::SlotId;
use expert_store::Key;
use expert_tier::stats::TierStats;
use expert_tier::{ExpertTier, RdmaTier, TierBuilder, TierError, VerbsOptions};

use crate::peer::{Host, SIXTEEN, records_of, tier, tier_with, verbs};

/// Into a batch that takes longer, however soon the peer's guest does what it is told.
const MIDDLE: Duration = Duration::from_millis(250);

/// Queue pairs that are given up after a second: soon for a test, late for a host that is busy.
fn watchful(count: usize) -> VerbsOptions {
    VerbsOptions {
        stall: Duration::from_secs(1),
        ..verbs(count)
    }
}

fn keys(records: &Records) -> Vec<Key> {
    records.keys().copied().collect()
}

/// Each record three times, in slots of their own: more than two seconds of two shaped links.
fn long_batch(records: &Records) -> Vec<(Key, SlotId)> {
    batch(&keys(records).repeat(3))
}

/// How many of a batch are right. Panics where one is wrong, or failed by anything but time or its peer.
fn right_ones(results: Vec<Result<expert_tier::Record, TierError>>, records: &Records) -> usize {
    let mut right = 0;
    for result in results {
        match result {
            Ok(record) => {
                assert_right(&record, records);
                right += 1;
            }
            Err(e) => assert!(e.is_retryable(), "{e}"),
        }
    }
    right
}

fn rail_bytes(stats: &TierStats) -> Vec<u64> {
    stats.rails.iter().map(|r| r.bytes).collect()
}

/// Fetches a record of each of two rails until `rail` has carried bytes again, and gives the time that took.
fn until_carried(tier: &RdmaTier, records: &Records, rail: usize) -> Result<Duration> {
    let before = rail_bytes(&tier.stats())[rail];
    let start = Instant::now();
    let two = batch(&keys(records)[..2]);
    while rail_bytes(&tier.stats())[rail] == before {
        let (results, _) = tier.submit(&two, None)?.wait()?;
        ensure!(right_ones(results, records) == 2);
        ensure!(
            start.elapsed() < Duration::from_secs(30),
            "rail {rail} carries nothing: {:#?}",
            tier.stats().rails
        );
    }
    Ok(start.elapsed())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn peer_that_dies_in_the_middle_of_a_batch_leaves_no_wrong_bytes_and_the_next_one_is_used()
-> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let peer = there.serve(&store, 2)?;
    let tier = tier_with(patient(), watchful(2), &records, 48)?;
    tier.fetch_many(&batch(&keys(&records)[..1]), 0)?;
    there.shape(2)?;

    let time = Duration::from_secs(8);
    let start = Instant::now();
    let batch_of_all = long_batch(&records);
    let pending = tier.submit(&batch_of_all, Some(time))?;
    sleep(MIDDLE);
    ensure!(
        !pending.is_done(),
        "the batch was over before the peer died"
    );
    peer.kill()?;
    let (results, _) = pending.wait()?;
    let took = start.elapsed();
    ensure!(took < time + Duration::from_secs(2), "it took {took:?}");
    let right = right_ones(results, &records);
    ensure!(right < batch_of_all.len(), "nothing was under way any more");
    guest::figure("right_before_the_end", right);
    wait_until("the slots are given back", || unsettled(tier.arena()) == 0);

    let _peer = there.serve(&store, 2)?;
    let start = Instant::now();
    assert_all_right(&tier, &records, 16);
    guest::figure("first_batch_after_restart_s", start.elapsed().as_secs_f64());
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn tier_that_is_dropped_while_its_peer_is_dead_ends() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let peer = there.serve(&store, 2)?;
    let tier = tier(&records, 16, 2)?;
    let arena = tier.arena().clone();
    tier.fetch_many(&batch(&keys(&records)[..1]), 0)?;
    there.shape(2)?;
    let pending = tier.submit(&batch(&keys(&records)), Some(Duration::from_secs(60)))?;
    sleep(MIDDLE);
    // It says nothing any more, and its links carry nothing: no end of a connection is seen here.
    peer.signal(Signal::Stop)?;
    for rail in [0, 1] {
        there.run(&format!("ip link set eth{rail} down"))?;
    }
    drop(pending);
    let start = Instant::now();
    drop(tier);
    let took = start.elapsed();
    guest::figure("drop_s", took.as_secs_f64());
    ensure!(took < Duration::from_secs(8), "it took {took:?}");
    wait_until("the slots are given back", || unsettled(&arena) == 0);
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn batch_completes_on_the_other_link_and_the_one_that_was_down_is_used_again() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let _peer = there.serve(&store, 2)?;
    let tier = tier_with(patient(), watchful(2), &records, 48)?;
    assert_all_right(&tier, &records, 16);
    there.shape(2)?;

    let batch_of_all = long_batch(&records);
    let pending = tier.submit(&batch_of_all, Some(Duration::from_secs(60)))?;
    sleep(MIDDLE);
    there.run("ip link set eth1 down")?;
    ensure!(!pending.is_done(), "the batch was over before the link was");
    let start = Instant::now();
    let (results, _) = pending.wait()?;
    guest::figure("end_after_link_down_s", start.elapsed().as_secs_f64());
    ensure!(right_ones(results, &records) == batch_of_all.len());
    let stats = tier.stats();
    ensure!(stats.rails[1].errors > 0, "{:#?}", stats.rails);

    // All comes over the other one while it is down.
    let before = rail_bytes(&tier.stats());
    assert_all_right(&tier, &records, 16);
    let after = rail_bytes(&tier.stats());
    ensure!(
        after[1] == before[1] && after[0] > before[0],
        "{before:?} {after:?}"
    );

    there.heal(0)?;
    there.run("ip link set eth1 up")?;
    let took = until_carried(&tier, &records, 1)?;
    guest::figure("used_again_after_s", took.as_secs_f64());
    ensure!(took < Duration::from_secs(5), "it took {took:?}");
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn records_are_right_where_one_packet_in_a_hundred_is_lost() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let _peer = there.serve(&store, 2)?;
    // As a user has it, but for the time that a request may take.
    let options = VerbsOptions {
        stall: VerbsOptions::default().stall,
        ..verbs(2)
    };
    let tier = tier_with(patient(), options, &records, 16)?;
    assert_all_right(&tier, &records, 16);
    let bytes: usize = records.values().map(Vec::len).sum();
    let rate = |name: &str| {
        let start = Instant::now();
        assert_all_right(&tier, &records, 16);
        let rate = bytes as f64 / 1e6 / start.elapsed().as_secs_f64();
        guest::figure(name, rate);
    };
    rate("without_loss_mb_per_s");
    for rail in [0, 1] {
        there.run(&format!("tc qdisc add dev eth{rail} root netem loss 1%"))?;
    }
    rate("with_loss_mb_per_s");
    let mut dropped = 0;
    for rail in [0, 1] {
        let said = there.run(&format!("tc -s qdisc show dev eth{rail}"))?;
        let (_, after) = said.split_once("dropped ").context("a count")?;
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        dropped += digits.parse::<u64>()?;
    }
    guest::figure("lost_packets", dropped);
    ensure!(dropped > 0, "nothing was lost");
    let stats = tier.stats();
    guest::figure(
        "rails_down",
        stats
            .rails
            .iter()
            .map(|r| r.errors_by_cause.downs)
            .sum::<u64>(),
    );
    ensure!(
        stats.failed == 0 && stats.verify_failures == 0,
        "{stats:#?}"
    );
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn default_deadline_is_met_by_an_error_when_the_peer_dies() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let peer = there.serve(&store, 1)?;
    let tier = tier_with(TierBuilder::new(), watchful(1), &records, 16)?;
    tier.fetch_many(&batch(&keys(&records)[..1]), 0)?;
    there.shape(1)?;
    let start = Instant::now();
    let pending = tier.submit(&batch(&keys(&records)), None)?;
    sleep(MIDDLE);
    peer.kill()?;
    let (results, _) = pending.wait()?;
    let took = start.elapsed();
    guest::figure("ended_after_s", took.as_secs_f64());
    // Two seconds, 1 per 10 MB, and what a busy host adds.
    ensure!(took < Duration::from_secs(8), "it took {took:?}");
    ensure!(right_ones(results, &records) < records.len());
    Ok(())
}
