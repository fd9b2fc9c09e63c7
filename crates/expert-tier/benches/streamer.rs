//! What a hit costs: leases of eight experts that are in memory, policy and release included, among
//! a hundred thousand records of which half turn over.
//!
//! `cargo bench -p expert-tier --bench streamer`: figures and ratios, no assertions. It writes a
//! checkpoint of 80 MB into a temporary folder, and uses as many megabytes of memory as the pages of
//! 75,000 slots have (300 with pages of 4 KiB).

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ForeignMemory};
use expert_store::synth::{SynthSpec, synth};
use expert_store::{OpenOptions, Store};
use expert_tier::eviction::Eviction;
use expert_tier::{ExpertStreamer, StreamerBuilder, TierBuilder, largest_image_bytes};

/// With [`EXPERTS`] of each, 100,096 records. Those of even layers stay in memory, those of odd
/// ones turn over.
const LAYERS: u32 = 391;
const EXPERTS: u32 = 256;

/// Room for all of the even layers, and for half of the others.
const SLOTS: u32 = EXPERTS * (LAYERS.div_ceil(2) + LAYERS / 4);

/// The largest pages that there are.
const PAGE_MAX_BYTES: usize = 64 << 10;

/// Experts of one call.
const USED: usize = 8;

/// How long each figure is measured, and how often: the best counts, as others only add to it.
const MEASURE: Duration = Duration::from_millis(500);
const ROUNDS: usize = 5;

const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let checkpoint = dir.path().join("checkpoint");
    let spec = SynthSpec {
        family: "granite".into(),
        layers: Some(LAYERS),
        experts: Some(EXPERTS),
        hidden: Some(16),
        inter: Some(8),
        shards: 1,
        seed: 1,
        ..SynthSpec::default()
    };
    synth(&spec, &checkpoint)?;
    let store = Arc::new(Store::open(&checkpoint, &OpenOptions::default())?);
    let record_bytes = largest_image_bytes(store.info()) as usize;
    println!(
        "{} records of {record_bytes} bytes, {SLOTS} slots",
        LAYERS * EXPERTS
    );
    for eviction in [Eviction::Lru, Eviction::SEGMENTED] {
        // Slots begin at pages; what is not touched costs nothing.
        let slot_bytes = record_bytes.next_multiple_of(PAGE_MAX_BYTES);
        let memory = ForeignMemory::heap(slot_bytes * SLOTS as usize)?;
        let arena = ArenaBuilder::new().slab(SLOTS, record_bytes);
        let arena = Arc::new(arena.foreign(memory).build()?);
        let tier = TierBuilder::new().open_posix(store.clone(), arena)?;
        let streamer = StreamerBuilder::new().eviction(eviction).start(tier)?;
        measure(eviction, &streamer)?;
    }
    Ok(())
}

fn measure(eviction: Eviction, streamer: &ExpertStreamer) -> Result<(), Box<dyn Error>> {
    let all: Vec<u32> = (0..EXPERTS).collect();
    for layer in (1..LAYERS).step_by(2).chain((0..LAYERS).step_by(2)) {
        streamer.lease_many(layer, &all, PATIENCE)?;
    }
    let (mut one, mut two, mut busy) = (Cost::MAX, Cost::MAX, Cost::MAX);
    let mut turned_over = 0.0_f64;
    for round in 0..ROUNDS as u64 {
        // In turns, so that what changes on the machine meets all of them.
        one = one.min(cost_per_call(streamer, 1, round));
        two = two.min(cost_per_call(streamer, 2, round));
        let before = streamer.stats().evictions;
        let began = Instant::now();
        let cost = while_turning_over(streamer, || cost_per_call(streamer, 1, round))?;
        busy = busy.min(cost);
        let evictions = (streamer.stats().evictions - before) as f64;
        turned_over = turned_over.max(evictions / began.elapsed().as_secs_f64());
    }
    println!(
        "{eviction}: a hit for {USED} experts, with release: {one} uncontended, {busy} while {turned_over:.0} records/s turn over"
    );
    println!(
        "{eviction}: two threads {two} each, {:.2}x of one thread; {:.2}x by the work alone",
        2.0 * one.wall_ns / two.wall_ns,
        2.0 * one.cpu_ns / two.cpu_ns
    );
    println!("{eviction}: {:?}", streamer.stats());
    Ok(())
}

/// Of one call, in nanoseconds: what passed, and what the thread worked, which others that want
/// the same cores do not change.
#[derive(Clone, Copy)]
struct Cost {
    wall_ns: f64,
    cpu_ns: f64,
}

impl Cost {
    const MAX: Self = Self {
        wall_ns: f64::MAX,
        cpu_ns: f64::MAX,
    };

    fn min(self, other: Self) -> Self {
        Self {
            wall_ns: self.wall_ns.min(other.wall_ns),
            cpu_ns: self.cpu_ns.min(other.cpu_ns),
        }
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.0} ns ({:.0} ns of work)", self.wall_ns, self.cpu_ns)
    }
}

/// What this thread worked so far.
fn work() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Threads lease what is in memory, each for itself; the mean over all calls.
fn cost_per_call(streamer: &ExpertStreamer, threads: u64, round: u64) -> Cost {
    let began = Instant::now();
    let done: Vec<(u64, Duration)> = std::thread::scope(|scope| {
        let run = |thread| scope.spawn(move || lease_hits(streamer, round * 16 + thread, began));
        let threads: Vec<_> = (0..threads).map(run).collect();
        let done = threads.into_iter().map(|t| t.join().unwrap_or_default());
        done.collect()
    });
    let wall = began.elapsed() * threads as u32;
    let calls: u64 = done.iter().map(|(calls, _)| calls).sum();
    let cpu: Duration = done.iter().map(|(_, work)| *work).sum();
    let per_call = |time: Duration| time.as_nanos() as f64 / calls.max(1) as f64;
    Cost {
        wall_ns: per_call(wall),
        cpu_ns: per_call(cpu),
    }
}

fn lease_hits(streamer: &ExpertStreamer, seed: u64, began: Instant) -> (u64, Duration) {
    let before = work();
    let mut random = seed;
    let mut calls = 0;
    while began.elapsed() < MEASURE {
        for _ in 0..64 {
            // splitmix64: the experts of a call are eight bytes of one number.
            random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let layer = 2 * ((bits ^ random) % u64::from(LAYERS.div_ceil(2))) as u32;
            let experts: [u32; USED] = bits.to_le_bytes().map(|e| u32::from(e) % EXPERTS);
            let leases = streamer.lease_many(layer, &experts, PATIENCE);
            std::hint::black_box(leases.map(|l| l.len()).unwrap_or(0));
        }
        calls += 64;
    }
    (calls, work().saturating_sub(before))
}

/// Does something while another thread walks through the odd layers.
fn while_turning_over(
    streamer: &ExpertStreamer,
    what: impl FnOnce() -> Cost,
) -> Result<Cost, Box<dyn Error>> {
    let is_over = AtomicBool::new(false);
    let all: Vec<u32> = (0..EXPERTS).collect();
    std::thread::scope(|scope| {
        let turning = scope.spawn(|| {
            for layer in (1..LAYERS).step_by(2).cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                streamer.lease_many(layer, &all, PATIENCE)?;
            }
            Ok::<(), expert_tier::TierError>(())
        });
        let result = what();
        is_over.store(true, Ordering::Relaxed);
        match turning.join() {
            Ok(ended) => ended?,
            Err(_) => return Err("the thread that turns records over panicked".into()),
        }
        Ok(result)
    })
}
