//! A streamer under everything that can befall its sources, for as long as one likes: peers that are killed, come
//! back, serve other content, networks that are cut, held up and slow. What is leased is right, every call ends in
//! time, no slot is lost, and the best source is used again soon after it is back.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{Model, Records, Sizes};
use atlas_expert_tests::net::proxy::Proxy;
use atlas_expert_tests::net::rig::{arena_for, serve, unsettled};
use atlas_expert_tests::net::{Random, SLACK, wait_until};
use expert_arena::{ExpertArena, Fence};
use expert_peer::Peer;
use expert_store::{Key, Store};
use expert_tier::eviction::Eviction;
use expert_tier::{
    Class, ExpertLease, ExpertStreamer, ExpertTier, Sources, StreamerBuilder, TierBuilder,
    TierError,
};

/// 128 records of 12,288 bytes.
const SIZES: Sizes = Sizes {
    layers: 4,
    experts: 32,
    hidden: 64,
    inter: 32,
    seed: 1,
};

/// Less than half of the records, and more than all threads use at once.
const SLOTS: u32 = 48;

/// Threads that lease.
const THREADS: u64 = 8;

/// Experts of one call.
const EXPERTS_MAX: usize = 4;

/// So much later than its deadline a call may end on a machine that is busy.
const GRACE: Duration = Duration::from_secs(3);

/// So soon a source that is back is used.
const BACK: Duration = Duration::from_secs(5);

/// A peer and the network before it.
struct Source {
    proxy: Proxy,
    peer: Mutex<Option<Peer>>,
}

impl Source {
    fn new(store: &Arc<Store>) -> Self {
        let peer = serve(store.clone());
        Self {
            proxy: Proxy::start(peer.local_addr()),
            peer: Mutex::new(Some(peer)),
        }
    }

    fn kill(&self) {
        *self.peer.lock().expect("no panic") = None;
        self.proxy.cut();
    }

    fn start(&self, store: &Arc<Store>) {
        let peer = serve(store.clone());
        self.proxy.lead_to(peer.local_addr());
        *self.peer.lock().expect("no panic") = Some(peer);
    }
}

/// Two peers that have the same.
fn replicas(store: &Arc<Store>) -> Vec<Source> {
    vec![Source::new(store), Source::new(store)]
}

/// A tier over both and a store on this machine for the time that neither works; it refuses other content.
fn tier(
    replicas: &[Source],
    store: &Arc<Store>,
    arena: Arc<ExpertArena>,
) -> impl ExpertTier + 'static {
    let builder = TierBuilder::new()
        .streams(2)
        .expect_content_id(store.content_id())
        .stall(Duration::from_millis(500));
    let addrs: Vec<String> = replicas.iter().map(|r| r.proxy.addr()).collect();
    let mut sources = Sources::of_peers(&addrs.join(",")).expect("addresses");
    sources.local = Some(store.clone());
    builder.connect_sources(&sources, arena).expect("a tier")
}

/// Bytes that came over each peer's rail, in the order of the peers, and from this machine.
fn carried(streamer: &ExpertStreamer) -> Vec<u64> {
    let rails = streamer.tier().stats().rails;
    rails.iter().map(|rail| rail.bytes).collect()
}

/// What befalls a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Killed,
    OtherContent,
    Slow,
    Cut,
    HeldUp,
}

const FAULTS: [Fault; 5] = [
    Fault::Killed,
    Fault::OtherContent,
    Fault::Slow,
    Fault::Cut,
    Fault::HeldUp,
];

/// A reader that takes a while.
struct Due(Instant);

impl Fence for Due {
    fn fired(&self) -> bool {
        Instant::now() >= self.0
    }
}

struct Soak {
    seed: u64,
    records: Records,
    store: Arc<Store>,
    other: Arc<Store>,
    sources: Vec<Source>,
    streamer: ExpertStreamer,
    is_over: AtomicBool,
    leased: AtomicU64,
    failed: Mutex<BTreeMap<&'static str, u64>>,
}

/// Ends the others where one of them panics.
struct EndAll<'a>(&'a Soak);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.is_over.store(true, Ordering::Relaxed);
            eprintln!("soak failed with seed {}", self.0.seed);
        }
    }
}

impl Soak {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn pause(&self, time: Duration) {
        let limit = Instant::now() + time;
        while !self.is_over() && Instant::now() < limit {
            std::thread::sleep(time.min(Duration::from_millis(20)));
        }
    }

    /// One after the other, until it is over; what happened, and how often.
    fn trouble(&self) -> BTreeMap<Fault, u64> {
        let _end = EndAll(self);
        let mut random = Random(self.seed);
        let mut count = BTreeMap::new();
        while !self.is_over() {
            self.pause(Duration::from_millis(random.below(700) as u64));
            let which = random.below(self.sources.len());
            let source = &self.sources[which];
            let fault = FAULTS[random.below(FAULTS.len())];
            let time = Duration::from_millis(50 + random.below(2000) as u64);
            *count.entry(fault).or_default() += 1;
            match fault {
                Fault::Killed => {
                    source.kill();
                    self.pause(time);
                    source.start(&self.store);
                }
                Fault::OtherContent => {
                    source.kill();
                    source.start(&self.other);
                    self.pause(time);
                    source.kill();
                    source.start(&self.store);
                }
                Fault::Slow => {
                    let rate = 100_000 + random.below(2_000_000) as u64;
                    source.proxy.limit(Some(rate));
                    self.pause(time);
                    source.proxy.limit(None);
                }
                Fault::Cut => source.proxy.cut(),
                Fault::HeldUp => {
                    source.proxy.hold_after(random.below(100_000) as u64);
                    self.pause(time);
                    source.proxy.resume();
                }
            }
            // Now and then the other one has trouble, too, before this one is back.
            if random.below(4) > 0 {
                self.wait_for_return(fault, which);
            }
        }
        count
    }

    fn wait_for_return(&self, fault: Fault, which: usize) {
        let before = carried(&self.streamer)[which];
        let since = Instant::now();
        while carried(&self.streamer)[which] == before && !self.is_over() {
            assert!(
                since.elapsed() < BACK,
                "seed {}: {BACK:?} after {fault:?} peer {which} is not used: {:?}",
                self.seed,
                self.streamer.tier().stats()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn note(&self, error: &TierError) {
        let kind = match error {
            TierError::NotYet { .. } => "not yet",
            TierError::Deadline { .. } => "deadline",
            TierError::Unavailable { .. } => "unavailable",
            TierError::ContentChanged { .. } => "content changed",
            TierError::RailFailed { .. } => "rail failed",
            error => panic!("seed {}: {error}", self.seed),
        };
        *self
            .failed
            .lock()
            .expect("no panic")
            .entry(kind)
            .or_default() += 1;
    }

    fn check(&self, lease: &ExpertLease) {
        let key = lease.key();
        assert!(
            lease[..] == self.records[&key],
            "seed {}: {key} has wrong bytes",
            self.seed
        );
        self.leased.fetch_add(1, Ordering::Relaxed);
    }

    fn check_time(&self, began: Instant, time: Duration) {
        let took = began.elapsed();
        assert!(
            took < time + GRACE,
            "seed {}: a call with {time:?} took {took:?}",
            self.seed
        );
    }

    /// Leases, guesses and gives up at random, until it is over.
    fn lease(&self, mut random: Random) {
        let _end = EndAll(self);
        while !self.is_over() {
            let layer = random.below(SIZES.layers as usize) as u32;
            let count = 1 + random.below(EXPERTS_MAX);
            let mut one = || random.below(SIZES.experts as usize) as u32;
            let experts: Vec<u32> = (0..count).map(|_| one()).collect();
            let time = Duration::from_millis(20 + random.below(1500) as u64);
            match random.below(10) {
                0 => {
                    let keys: Vec<Key> = experts.iter().map(|&e| Key::new(layer, e)).collect();
                    self.streamer.prefetch(&keys);
                }
                1..=3 => self.submit(layer, &experts, time, &mut random),
                _ => {
                    let began = Instant::now();
                    let result = self.streamer.lease_many(layer, &experts, time);
                    self.check_time(began, time);
                    match result {
                        Ok(leases) => self.read(leases, &mut random),
                        Err(error) => self.note(&error),
                    }
                }
            }
            std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
        }
    }

    fn submit(&self, layer: u32, experts: &[u32], time: Duration, random: &mut Random) {
        let keys: Vec<Key> = experts.iter().map(|&e| Key::new(layer, e)).collect();
        let class = Class::ALL[random.below(Class::ALL.len())];
        let ticket = self.streamer.submit(&keys, class, time);
        let mut ticket = ticket.unwrap_or_else(|e| panic!("seed {}: {e}", self.seed));
        if random.below(4) == 0 {
            return; // given up
        }
        let began = Instant::now();
        let limit = began + time;
        let mut ended = 0;
        while let Some(result) = ticket.next(limit) {
            self.check_time(began, time);
            match result {
                Ok(lease) => {
                    ended += 1;
                    self.read(vec![lease], random);
                }
                Err(error) => {
                    self.note(&error);
                    ended += 1;
                    if matches!(error, TierError::NotYet { .. }) {
                        return;
                    }
                }
            }
        }
        assert_eq!(ended, keys.len(), "seed {}: records of a ticket", self.seed);
    }

    fn read(&self, leases: Vec<ExpertLease>, random: &mut Random) {
        for lease in leases {
            self.check(&lease);
            match random.below(3) {
                0 => {
                    let reads = Duration::from_micros(random.below(5000) as u64);
                    lease.release_after(Box::new(Due(Instant::now() + reads)));
                }
                1 => {
                    std::thread::sleep(Duration::from_micros(random.below(1000) as u64));
                    self.check(&lease);
                }
                _ => drop(lease),
            }
        }
    }

    /// What must be so when all is quiet.
    fn settle(&self) {
        let streamer = &self.streamer;
        wait_until("nothing is under way", || {
            let stats = streamer.stats();
            stats.under_way == 0 && stats.slots_out == 0
        });
        wait_until("all slots are settled", || unsettled(streamer.arena()) == 0);
        let mut all = Vec::new();
        for (layer, count) in [(0, SIZES.experts), (1, SLOTS - SIZES.experts)] {
            let experts: Vec<u32> = (0..count).collect();
            let leases = streamer.lease_many(layer, &experts, SLACK);
            all.extend(leases.unwrap_or_else(|e| panic!("seed {}: {e}", self.seed)));
        }
        for lease in &all {
            self.check(lease);
        }
        let slots: std::collections::HashSet<_> = all.iter().map(ExpertLease::slot).collect();
        assert_eq!(slots.len(), SLOTS as usize, "seed {}", self.seed);
    }
}

fn soak(time: Duration, seed: u64) {
    println!("soak of {time:?} with seed {seed}");
    let (model, other) = (Model::bf16(SIZES), Model::bf16(SIZES.seed(2)));
    let (store, other_store) = (model.open(), other.open());
    let records = model.records();
    let sources = replicas(&store);
    let tier = tier(&sources, &store, arena_for(&records, SLOTS));
    let eviction = match seed % 2 {
        0 => Eviction::Lru,
        _ => Eviction::SEGMENTED,
    };
    let streamer = StreamerBuilder::new().eviction(eviction).start(tier);
    let soak = Soak {
        seed,
        records,
        store,
        other: other_store,
        sources,
        streamer: streamer.expect("a streamer"),
        is_over: AtomicBool::new(false),
        leased: AtomicU64::new(0),
        failed: Mutex::default(),
    };
    let faults = std::thread::scope(|scope| {
        let trouble = scope.spawn(|| soak.trouble());
        for thread in 0..THREADS {
            let soak = &soak;
            scope.spawn(move || soak.lease(Random(seed.wrapping_mul(31) + thread)));
        }
        soak.pause(time);
        soak.is_over.store(true, Ordering::Relaxed);
        trouble.join().expect("trouble that ended as it should")
    });
    soak.settle();
    let failed = soak.failed.lock().expect("no panic");
    println!(
        "{faults:?}; {:?} leases, failed {failed:?}; bytes by source {:?}; {:?}",
        soak.leased,
        carried(&soak.streamer),
        soak.streamer.stats()
    );
    assert!(!faults.is_empty() && soak.leased.load(Ordering::Relaxed) > 0);
    assert!(
        soak.streamer.stats().evictions > u64::from(SLOTS),
        "slots were reused"
    );
}

#[test]
fn soak_one_minute() {
    soak(Duration::from_secs(60), 1);
}

/// Another seed in each run; a number in `SOAK_SEED` repeats one.
#[test]
#[ignore = "ten minutes: make test-long"]
fn long_soak_10_minutes() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = match std::env::var("SOAK_SEED") {
        Ok(seed) => seed.parse().expect("SOAK_SEED is a number"),
        Err(_) => now.map_or(0, |t| t.as_secs()),
    };
    soak(Duration::from_secs(600), seed);
}
