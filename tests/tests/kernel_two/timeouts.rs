//! A peer that says nothing: its memory is read all the same, and nobody waits for ever.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use atlas_expert_tests::guest::{self, Signal};
use atlas_expert_tests::net::rig::{arena_for, assert_all_right, patient};

use crate::peer::{ADDR, Host, SIXTEEN, records_of, tier, verbs};

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn stopped_peer_is_read_on_and_a_new_connection_to_it_ends_in_time() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let peer = there.serve(&store, 2)?;
    let old = tier(&records, 16, 2)?;
    // What the peer has to be asked for is here with this.
    assert_all_right(&old, &records, 16);

    peer.signal(Signal::Stop)?;
    let start = Instant::now();
    let mut passes = 0u64;
    while start.elapsed() < Duration::from_secs(3) {
        assert_all_right(&old, &records, 16);
        passes += 1;
    }
    guest::figure("passes_while_stopped", passes);

    let allowed = Duration::from_secs(3);
    let start = Instant::now();
    let new = patient()
        .connect_timeout(allowed)
        .verbs(verbs(2))
        .connect(ADDR, arena_for(&records, 16));
    let took = start.elapsed();
    let Err(error) = new else {
        bail!("connected to a peer that is stopped");
    };
    println!("{error}");
    guest::figure("connect_ended_after_s", took.as_secs_f64());
    ensure!(error.is_retryable(), "{error}");
    ensure!(took < allowed + Duration::from_secs(3), "it took {took:?}");

    peer.signal(Signal::Cont)?;
    assert_all_right(&tier(&records, 16, 2)?, &records, 16);
    assert_all_right(&old, &records, 16);
    Ok(())
}
