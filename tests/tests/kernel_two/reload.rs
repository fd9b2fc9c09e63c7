//! Other content under the peer while records come.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::guest::{self, Signal};
use atlas_expert_tests::net::model::Sizes;
use atlas_expert_tests::net::rig::{batch, unsettled};
use atlas_expert_tests::net::wait_until;
use expert_store::Key;
use expert_tier::ExpertTier;

use crate::peer::{Host, SIXTEEN, records_of, tier};

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn client_ends_on_the_new_content_and_sees_no_mixture() -> Result<()> {
    const NEW: Sizes = Sizes {
        seed: 42,
        ..SIXTEEN
    };
    let there = Host::new()?;
    let (old, new) = (records_of(SIXTEEN), records_of(NEW));
    let first = there.synth("first", SIXTEEN)?;
    let second = there.synth("second", NEW)?;
    let store = there.path("store");
    there.run(&format!("ln -s {first} {store}"))?;
    let peer = there.serve(&store, 2)?;
    let tier = tier(&old, 8, 2)?;
    let first_id = tier.info().content_id.context("a content id")?;
    // Slow enough that a batch is under way when the content changes.
    there.shape(2)?;
    let keys: Vec<Key> = old.keys().copied().collect();
    let limit = Instant::now() + Duration::from_secs(60);
    let (mut from_old, mut from_new, mut failed) = (0u64, 0u64, 0u64);
    let mut is_told = false;
    let mut round = 0;
    while from_new < 32 {
        ensure!(
            Instant::now() < limit,
            "{from_old} old, {from_new} new, {failed} failed: {:#?} {:?}",
            tier.stats().rails,
            peer.output()
        );
        let keys = &keys[round % 2 * 8..][..8];
        round += 1;
        let pending = match tier.submit(&batch(keys), Some(Duration::from_secs(10))) {
            Ok(pending) => pending,
            Err(e) => {
                ensure!(e.is_retryable() || unsettled(tier.arena()) > 0, "{e}");
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
        };
        if from_old >= 16 && !is_told {
            there.run(&format!(
                "ln -s {second} {store}.new && mv -T {store}.new {store}"
            ))?;
            peer.signal(Signal::Hup)?;
            is_told = true;
        }
        let (results, _) = pending.wait()?;
        let mut here = (0, 0);
        for result in results {
            match result {
                Ok(record) if record.bytes() == old[&record.key()] => here.0 += 1,
                Ok(record) if record.bytes() == new[&record.key()] => here.1 += 1,
                Ok(record) => panic!("{} is neither", record.key()),
                Err(e) => {
                    ensure!(e.is_retryable(), "{e}");
                    failed += 1;
                }
            }
        }
        ensure!(here.0 == 0 || here.1 == 0, "a batch of both: {here:?}");
        ensure!(here.0 == 0 || from_new == 0, "old content after new");
        from_old += here.0;
        from_new += here.1;
    }
    guest::figure("records_old", from_old);
    guest::figure("records_new", from_new);
    guest::figure("records_failed", failed);
    let id = tier.info().content_id.context("a content id")?;
    ensure!(id != first_id, "still described as {id}");
    wait_until("the slots are given back", || unsettled(tier.arena()) == 0);
    Ok(())
}
