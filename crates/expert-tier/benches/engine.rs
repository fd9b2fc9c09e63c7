//! What the engine itself costs, with rails that cost nothing: `cargo bench -p expert-tier --bench engine`.
//!
//! Processor time of the one thread that runs it, medians of rounds. It prints, and asserts no time.

#[path = "../tests/common/mod.rs"]
mod common;

use std::mem::size_of;
use std::sync::Arc;
use std::time::Duration;

use allocation_counter::measure;
use common::{Catalogue, Hand, Numbers};
use expert_store::Key;
use expert_store::catalogue::CHUNK_BYTES;
use expert_tier::EngineConfig;
use expert_tier::rail::Read;
use rustix::time::{ClockId, clock_gettime};

/// What a READ may cost, nanoseconds: a rail of 10 GB/s brings one of 256 KiB every 26 us, so that
/// eight of them leave the driver's thread two thirds of its time.
const GOAL_NS: f64 = 1000.0;

const ROUNDS: usize = 9;

const BATCH: u32 = 8;

fn main() {
    println!(
        "CPU time of a READ of 256 KiB: planned, assigned, posted, completed, committed; checksums off"
    );
    println!("{:>8} {:>10} {:>12}", "rails", "ns", "of 1 us");
    for rails in [1, 2, 4, 8] {
        let ns = read_ns(rails);
        println!("{rails:>8} {ns:>10.0} {:>12.2}", ns / GOAL_NS);
    }
    println!();
    println!(
        "CPU time of a request of {BATCH} records of one READ, from keys to leases and back; 2 rails"
    );
    println!("{:>8} {:>10} {:>12}", "records", "ns", "of 1 us/READ");
    for records in [100, 10_000, 1_000_000] {
        let ns = request_ns(records);
        let share = ns / f64::from(BATCH) / GOAL_NS;
        println!("{records:>8} {ns:>10.0} {share:>12.2}");
    }
    println!();
    let (reads, bytes) = bytes_in_flight();
    let own = size_of::<Read>();
    println!("memory of a READ in flight, {reads} of them of {BATCH} records");
    println!("{own:>8} bytes: itself, at its rail");
    println!("{bytes:>8.1} bytes: the engine's, its share of request and record");
}

fn config() -> EngineConfig {
    EngineConfig {
        read_bytes: CHUNK_BYTES,
        ..EngineConfig::default()
    }
}

fn read_ns(rails: usize) -> f64 {
    let catalogue = Arc::new(Catalogue::new(64, 16 * CHUNK_BYTES));
    let mut hand = Hand::new(rails, config(), &catalogue, BATCH, false);
    let mut numbers = Numbers(1);
    median(|| {
        let (mut reads, mut spent) = (0, Duration::ZERO);
        for _ in 0..200 {
            let orders = hand.orders(keys(&mut numbers, &catalogue));
            let began = cpu_time();
            hand.submit(orders);
            reads += hand.run();
            let finished = hand.finished();
            spent += cpu_time() - began;
            drop(finished);
        }
        spent.as_nanos() as f64 / reads as f64
    })
}

fn request_ns(records: u32) -> f64 {
    let catalogue = Arc::new(Catalogue::new(records, CHUNK_BYTES));
    let mut hand = Hand::new(2, config(), &catalogue, BATCH, false);
    let mut numbers = Numbers(2);
    median(|| {
        let requests = 2000;
        let began = cpu_time();
        for _ in 0..requests {
            let orders = hand.orders(keys(&mut numbers, &catalogue));
            hand.submit(orders);
            hand.run();
            drop(hand.finished());
        }
        (cpu_time() - began).as_nanos() as f64 / f64::from(requests)
    })
}

/// READs in flight, and bytes that the engine holds for each.
fn bytes_in_flight() -> (u64, f64) {
    let catalogue = Arc::new(Catalogue::new(64, 64 * CHUNK_BYTES));
    let all_at_once = EngineConfig {
        window_bytes: u64::MAX,
        adapt_window: false,
        ..config()
    };
    let mut hand = Hand::new(2, all_at_once, &catalogue, BATCH, false);
    let mut reads = 0;
    let counted = measure(|| {
        let orders = hand.orders(keys(&mut Numbers(3), &catalogue));
        hand.submit(orders);
        reads = hand.post();
    });
    hand.land();
    drop(hand.finished());
    (reads, counted.bytes_current as f64 / reads as f64)
}

fn keys(numbers: &mut Numbers, catalogue: &Catalogue) -> [Key; BATCH as usize] {
    std::array::from_fn(|_| catalogue.key(numbers.next()))
}

/// Of some rounds after one that warms up.
fn median(mut round: impl FnMut() -> f64) -> f64 {
    round();
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
