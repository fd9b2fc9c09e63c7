//! How soon a client works: from `connect` to the first record where the peer's catalogue has many records, and from
//! the moment that a peer is back to its full rate. `cargo bench -p atlas-expert-tests --bench connect`.

use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::proxy::Proxy;
use atlas_expert_tests::net::rig::{arena_for, batch, serve, slot};
use expert_arena::{ArenaBuilder, ForeignMemory};
use expert_store::Key;
use expert_tier::{ExpertTier, RdmaTier, TierBuilder, largest_image_bytes};

const ROUNDS: usize = 7;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Times from `connect` to a record in memory.
fn first_record(layers: u32, experts: u32) {
    let model = Model::bf16(Sizes {
        layers,
        experts,
        hidden: 16,
        inter: 8,
        seed: 1,
    });
    let store = model.open();
    let bytes = largest_image_bytes(store.info()) as usize;
    let peer = serve(store);
    let addr = peer.local_addr().to_string();
    let key = Key::new(layers / 2, experts / 2);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let memory = ForeignMemory::heap(bytes.next_multiple_of(65_536)).expect("memory");
        let arena = ArenaBuilder::new().slab(1, bytes).foreign(memory);
        let arena = arena.build().expect("an arena");
        let began = Instant::now();
        let tier = TierBuilder::new().connect(&addr, arena.into());
        let record = tier.expect("a tier").fetch(key, slot(0), 0);
        times.push(began.elapsed());
        assert!(record.expect("a record").is_verified());
    }
    println!(
        "{:>9} records ({layers} layers of {experts}): connect to first record {:>8.1} ms (goal: below 100 with 10^5)",
        layers * experts,
        median(times).as_secs_f64() * 1e3
    );
}

fn rate(tier: &RdmaTier, keys: &[Key], bytes: f64) -> f64 {
    let began = Instant::now();
    let fetched = tier.fetch_many(&batch(keys), 0);
    let is_whole = fetched.is_ok_and(|records| records.iter().all(Result::is_ok));
    match is_whole {
        true => bytes / began.elapsed().as_secs_f64(),
        false => 0.0,
    }
}

/// A peer that is gone for a second, while batches are asked for all the time.
fn back_to_full_rate() {
    let model = Model::bf16(Sizes::LARGE);
    let records = model.records();
    let keys: Vec<Key> = records.keys().copied().collect();
    let bytes: usize = records.values().map(Vec::len).sum();
    let store = model.open();
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let peer = serve(store.clone());
        let proxy = Proxy::start(peer.local_addr());
        let arena = arena_for(&records, records.len() as u32);
        let tier = TierBuilder::new()
            .connect(&proxy.addr(), arena)
            .expect("a tier");
        let rates: Vec<f64> = (0..10).map(|_| rate(&tier, &keys, bytes as f64)).collect();
        let usual = rates.iter().sum::<f64>() / rates.len() as f64;
        drop(peer);
        proxy.cut();
        std::thread::sleep(Duration::from_secs(1));
        let peer = serve(store.clone());
        proxy.lead_to(peer.local_addr());
        let back = Instant::now();
        while rate(&tier, &keys, bytes as f64) < 0.9 * usual {
            assert!(
                back.elapsed() < Duration::from_secs(30),
                "it does not come back"
            );
        }
        times.push(back.elapsed());
    }
    println!(
        "peer back after a second: 0.9 of the usual rate again after {:.0} ms",
        median(times).as_secs_f64() * 1e3
    );
}

fn main() {
    for (layers, experts) in [(2, 50), (20, 500), (50, 2000)] {
        first_record(layers, experts);
    }
    back_to_full_rate();
}
