//! Clients come and go, and leave nothing behind.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use atlas_expert_tests::guest;
use atlas_expert_tests::net::rig::batch;
use expert_store::Key;
use expert_tier::ExpertTier;

use crate::peer::{Host, SIXTEEN, records_of, tier};

fn resources_here() -> Result<String> {
    let output = std::process::Command::new("rdma")
        .arg("resource")
        .output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Of each device, in order.
fn queue_pairs(resources: &str) -> Vec<&str> {
    let words: Vec<&str> = resources.split_whitespace().collect();
    let pairs = words.windows(2).filter(|w| w[0] == "qp");
    pairs.map(|w| w[1]).collect()
}

fn rss_kib(there: &Host, pid: u32) -> Result<u64> {
    let line = there.run(&format!("grep VmRSS /proc/{pid}/status"))?;
    Ok(line.split_whitespace().nth(1).unwrap_or("").parse()?)
}

/// The peer lets go of a client when it sees its end, which takes a moment.
fn settle(there: &Host, wanted: &str) -> Result<()> {
    let start = Instant::now();
    loop {
        let found = there.run("rdma resource")?;
        if found == wanted {
            return Ok(());
        }
        ensure!(
            start.elapsed() < Duration::from_secs(20),
            "{found} instead of {wanted}"
        );
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn clients_that_come_and_go_leave_no_queue_pair_and_no_region_behind() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let peer = there.serve(&store, 2)?;
    let unused = there.run("rdma resource")?;
    let here = resources_here()?;
    let visit = |expert: u32| -> Result<()> {
        let tier = tier(&records, 1, 2)?;
        for record in tier.fetch_many(&batch(&[Key::new(0, expert)]), 0)? {
            record?;
        }
        Ok(())
    };
    // The first one makes what all share.
    visit(0)?;
    let start = Instant::now();
    let mut before = there.run("rdma resource")?;
    while queue_pairs(&before) != queue_pairs(&unused) {
        ensure!(start.elapsed() < Duration::from_secs(20), "{before}");
        before = there.run("rdma resource")?;
    }
    let rss = rss_kib(&there, peer.pid)?;
    let start = Instant::now();
    for i in 0..20 {
        visit(i % 16)?;
    }
    guest::figure("visit_s", start.elapsed().as_secs_f64() / 20.0);
    settle(&there, &before)?;
    ensure!(
        resources_here()? == here,
        "{} was {here}",
        resources_here()?
    );
    let grown = rss_kib(&there, peer.pid)?.saturating_sub(rss);
    guest::figure("peer_rss_growth_kib", grown);
    ensure!(grown < 2048, "the peer grew by {grown} KiB");
    Ok(())
}
