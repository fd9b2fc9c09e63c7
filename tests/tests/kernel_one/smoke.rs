//! The rig itself: the devices are there and carry READs.

use std::time::Duration;

use anyhow::{Result, ensure};
use atlas_expert_tests::guest::{self, Agent};

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn every_rail_has_an_active_device_with_an_ipv4_gid() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let devices = agent
        .run("ibv_devinfo", Duration::from_secs(30))?
        .succeeded()
        .stdout;
    for rail in 0..guest::rails() {
        ensure!(devices.contains(&format!("rxe{rail}\n")), "{devices}");
        let gid =
            std::fs::read_to_string(format!("/sys/class/infiniband/rxe{rail}/ports/1/gids/1"))?;
        let want = format!("0000:0000:0000:0000:0000:ffff:0a4d:{rail:02x}01");
        ensure!(gid.trim() == want, "rail {rail}: GID 1 is {gid}");
    }
    for each in ["PORT_ACTIVE (4)", "active_mtu:\t\t4096"] {
        let count = devices.matches(each).count();
        ensure!(count == guest::rails(), "{count} times {each}: {devices}");
    }
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn ib_read_bw_reads_over_one_device_and_its_packets_are_counted() -> Result<()> {
    const READ_BYTES: usize = 1 << 20;
    const READS: usize = 50;
    let agent = Agent::of_the_run()?;
    let before = guest::rail_counter(0, "rcvd_pkts");
    let speed = guest::ib_read_bw(&agent, 0, READ_BYTES, READS, Duration::from_secs(60))?;
    guest::figure("ib_read_bw_mb_per_s", speed);
    ensure!(speed > 0.0, "{speed} MB/s");
    let packets = guest::rail_counter(0, "rcvd_pkts") - before;
    ensure!(
        packets >= (READS * READ_BYTES / 4096) as u64,
        "{packets} packets"
    );
    Ok(())
}
