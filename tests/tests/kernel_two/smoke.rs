//! The rig itself: the agent answers, and every link carries READs between the two guests.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use atlas_expert_tests::guest::{self, Agent};

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn the_peer_is_another_host() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let limit = Duration::from_secs(20);
    agent.run("touch /dev/shm/only-there", limit)?.succeeded();
    let there = agent.read_file("/proc/sys/kernel/random/boot_id")?;
    let here = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    ensure!(there != here, "one boot id: {here:?}");
    ensure!(
        !Path::new("/dev/shm/only-there").exists(),
        "its memory is seen here"
    );
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn ib_read_bw_reads_over_every_link_and_the_packets_come_by_it() -> Result<()> {
    const READ_BYTES: usize = 1 << 20;
    const READS: usize = 50;
    let agent = Agent::of_the_run()?;
    for rail in 0..guest::rails() {
        let packets_before = guest::rail_counter(rail, "rcvd_pkts");
        let bytes_before = guest::interface_counter(rail, "rx_bytes");
        let limit = Duration::from_secs(60);
        let speed = guest::ib_read_bw(&agent, rail, READ_BYTES, READS, limit)?;
        guest::figure(&format!("ib_read_bw_rail{rail}_mb_per_s"), speed);

        let packets = guest::rail_counter(rail, "rcvd_pkts") - packets_before;
        ensure!(
            packets >= (READS * READ_BYTES / 4096) as u64,
            "rail {rail}: {packets} packets"
        );
        let bytes = guest::interface_counter(rail, "rx_bytes") - bytes_before;
        ensure!(
            bytes >= (READS * READ_BYTES) as u64,
            "rail {rail}: {bytes} bytes"
        );
    }
    Ok(())
}
