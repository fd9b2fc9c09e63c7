//! Readers that the CPU does not see: they were given an address, they hold no lease, and they read some time after
//! the call that launched them returned, as a graphics card does. A fence keeps their bytes in place; without one
//! they read what came after, which shows that these tests can tell.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{self, Model, Records, Sizes};
use atlas_expert_tests::net::rig::{arena_for, patient};
use atlas_expert_tests::net::{Random, SLACK};
use expert_arena::Fence;
use expert_store::Key;
use expert_tier::{ExpertLease, ExpertStreamer, StreamerBuilder};

/// 1,024 records of 768 bytes: many more than there are slots.
const MANY: Sizes = Sizes {
    layers: 4,
    experts: 256,
    hidden: 16,
    inter: 8,
    seed: 1,
};

/// A reader looks so late at most, and a little later where the machine is busy.
const LATEST: Duration = Duration::from_millis(5);

/// Threads that lease and launch.
const CALLERS: u64 = 2;

/// Threads that read.
const READERS: usize = 2;

/// Experts of one call.
const PER_CALL: usize = 4;

/// What a reader was told: nothing that keeps the bytes where they are.
struct Launch {
    due: Instant,
    address: u64,
    key: Key,
    done: Arc<AtomicBool>,
}

struct Done(Arc<AtomicBool>);

impl Fence for Done {
    fn fired(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Reads memory of this process by address, as a device would.
struct Device<'a> {
    memory: File,
    records: &'a Records,
    /// Records read.
    reads: AtomicU64,
    /// Records of which a byte was wrong.
    wrong: AtomicU64,
    first_wrong: Mutex<Option<String>>,
}

impl<'a> Device<'a> {
    fn new(records: &'a Records) -> Self {
        Self {
            memory: File::open("/proc/self/mem").expect("/proc/self/mem"),
            records,
            reads: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            first_wrong: Mutex::default(),
        }
    }

    /// Reads what is due, until nobody launches any more.
    fn run(&self, launches: &Receiver<Launch>) {
        // By time; the second number only tells them apart.
        let mut order = BinaryHeap::new();
        let mut waiting = std::collections::HashMap::new();
        let mut count = 0_u64;
        let mut is_open = true;
        while is_open || !order.is_empty() {
            let now = Instant::now();
            let next = order
                .peek()
                .map(|Reverse((due, _)): &Reverse<(Instant, u64)>| *due);
            match next {
                Some(due) if due <= now => {
                    let Reverse((_, number)) = order.pop().expect("peeked at");
                    let launch = waiting.remove(&number).expect("one of each");
                    self.read(&launch);
                    continue;
                }
                _ => {}
            }
            // A pause, so that a thousand launches do not make a thousand wake-ups.
            std::thread::sleep(Duration::from_micros(200));
            let first = match next {
                Some(_) => launches.try_recv().ok(),
                None => match launches.recv_timeout(LATEST) {
                    Ok(launch) => Some(launch),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => {
                        is_open = false;
                        None
                    }
                },
            };
            for launch in first.into_iter().chain(launches.try_iter()) {
                count += 1;
                order.push(Reverse((launch.due, count)));
                waiting.insert(count, launch);
            }
        }
    }

    fn read(&self, launch: &Launch) {
        let want = &self.records[&launch.key];
        let mut got = vec![0; want.len()];
        self.memory
            .read_exact_at(&mut got, launch.address)
            .expect("memory of this process");
        // Nothing is read after this.
        launch.done.store(true, Ordering::Release);
        self.reads.fetch_add(1, Ordering::Relaxed);
        let differs = (0..want.len()).find(|&at| want[at] != got[at]);
        if let Some(at) = differs {
            self.wrong.fetch_add(1, Ordering::Relaxed);
            let mut first = self.first_wrong.lock().expect("no panic");
            first.get_or_insert_with(|| {
                format!(
                    "{} byte {at} is {:#04x}, must be {:#04x}",
                    launch.key, got[at], want[at]
                )
            });
        }
    }
}

/// What came of a run.
#[derive(Debug)]
struct Outcome {
    reads: u64,
    wrong: u64,
    first_wrong: Option<String>,
    reuses: u64,
    took: Duration,
}

/// Leases, launches and lets go until so many slots were reused; without fences until a wrong byte was read, too.
fn run(slots: u32, reuses: u64, is_fenced: bool, seed: u64) -> Outcome {
    let model = Model::bf16(MANY);
    let records = model.records();
    let store = model::open(&model.pack());
    let tier = patient()
        .open_posix(store, arena_for(&records, slots))
        .expect("a tier");
    let streamer = StreamerBuilder::new().start(tier).expect("a streamer");
    let device = Device::new(&records);
    let is_over = AtomicBool::new(false);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let mut queues = Vec::new();
        for _ in 0..READERS {
            let (launch, launches) = mpsc::sync_channel(4096);
            queues.push(launch);
            let device = &device;
            scope.spawn(move || device.run(&launches));
        }
        for caller in 0..CALLERS {
            let (streamer, is_over, queues) = (&streamer, &is_over, queues.clone());
            let random = Random(seed + caller);
            scope.spawn(move || call(streamer, random, &queues, is_fenced, is_over));
        }
        drop(queues);
        // However it ends, the threads do.
        let limit = began + SLACK + Duration::from_millis(reuses);
        while Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(20));
            let is_shown = device.wrong.load(Ordering::Relaxed) > 0;
            let is_enough = streamer.stats().evictions >= reuses;
            if is_shown || (is_enough && is_fenced) {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    Outcome {
        reads: device.reads.into_inner(),
        wrong: device.wrong.into_inner(),
        first_wrong: device.first_wrong.into_inner().expect("no panic"),
        reuses: streamer.stats().evictions,
        took: began.elapsed(),
    }
}

/// A caller: leases, launches, lets go at once.
fn call(
    streamer: &ExpertStreamer,
    mut random: Random,
    queues: &[SyncSender<Launch>],
    is_fenced: bool,
    is_over: &AtomicBool,
) {
    while !is_over.load(Ordering::Relaxed) {
        let layer = random.below(MANY.layers as usize) as u32;
        let mut one = || random.below(MANY.experts as usize) as u32;
        let experts: Vec<u32> = (0..PER_CALL).map(|_| one()).collect();
        let leases = streamer.lease_many(layer, &experts, SLACK);
        for lease in leases.expect("a slot is free as soon as readers have read") {
            let done = Arc::new(AtomicBool::new(false));
            let delay = random.below(LATEST.as_micros() as usize);
            let launch = Launch {
                due: Instant::now() + Duration::from_micros(delay as u64),
                address: lease.host_ptr() as u64,
                key: lease.key(),
                done: done.clone(),
            };
            queues[random.below(queues.len())]
                .send(launch)
                .expect("a reader");
            release(lease, is_fenced, done);
        }
    }
}

fn release(lease: ExpertLease, is_fenced: bool, done: Arc<AtomicBool>) {
    match is_fenced {
        true => lease.release_after(Box::new(Done(done))),
        false => drop(lease),
    }
}

fn assert_all_right(slots: u32, reuses: u64) {
    let outcome = run(slots, reuses, true, 1);
    println!("in {:?}: {outcome:?}", outcome.took);
    assert_eq!(outcome.wrong, 0, "{:?}", outcome.first_wrong);
    assert!(outcome.reuses >= reuses, "too slow: {outcome:?}");
    assert!(outcome.reads >= outcome.reuses);
}

#[test]
fn late_reader_with_a_fence_reads_nothing_wrong() {
    assert_all_right(32, 20_000);
}

#[test]
#[ignore = "about a minute: make test-long"]
fn long_late_reader_with_a_fence_reads_nothing_wrong_in_a_million_reuses() {
    assert_all_right(128, 1_000_000);
}

#[test]
fn late_reader_without_a_fence_reads_what_came_after() {
    let outcome = run(32, 0, false, 1);
    println!("{outcome:?}");
    assert!(
        outcome.wrong > 0,
        "these tests would not notice a missing fence: {outcome:?}"
    );
}
