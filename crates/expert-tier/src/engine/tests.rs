//! The engine under a hand-driven clock and rails that do exactly what the test says.

mod classes;
mod labels;
mod lanes;
mod parts;
mod walk;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, SlotId};
use expert_store::catalogue::{
    CHUNK_BYTES, Class, Layer, Leaf, Records, Role, Stacking, Transform,
};
use expert_store::{Dtype, Key};
use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::config::Policy;
use crate::rail::{BadChunk, Completion, Landed, ReadError};

const TAG: ContentTag = ContentTag {
    id: 7,
    instance: None,
};

/// Byte `at` of the record of an expert; a function that differs between neighbours and experts.
fn byte(expert: u32, at: u64) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 8) ^ (u64::from(expert) * 97)) as u8
}

const EXPERTS: u32 = 16;

/// Record images of a size, made once.
fn images(bytes: u64) -> Arc<Vec<Vec<u8>>> {
    static MADE: Mutex<BTreeMap<u64, Arc<Vec<Vec<u8>>>>> = Mutex::new(BTreeMap::new());
    MADE.lock()
        .unwrap()
        .entry(bytes)
        .or_insert_with(|| {
            let make = |e| (0..bytes).map(|at| byte(e, at)).collect();
            Arc::new((0..EXPERTS).map(make).collect())
        })
        .clone()
}

fn layer(experts: u32, bytes: u64) -> Arc<Layer> {
    let class = Class::layout(vec![Leaf {
        role: Role::Gate,
        leaf: "weight".into(),
        name: "l.{}".into(),
        stacking: Stacking::PerExpert,
        dtype: Dtype::from_name("U8").unwrap(),
        shape: vec![bytes],
        source_dim0: 0,
        image_offset: 0,
        bytes,
        transform: Transform::None,
    }])
    .unwrap();
    let sums = (0..experts)
        .flat_map(|e| {
            images(class.image_bytes)[e as usize]
                .chunks(CHUNK_BYTES as usize)
                .map(xxh3_64)
                .collect::<Vec<_>>()
        })
        .collect();
    Arc::new(
        Layer::new(
            0,
            0,
            experts,
            0,
            vec![class],
            (0..experts).collect(),
            vec![],
            Records::Remote,
            Some(sums),
            vec![],
        )
        .unwrap(),
    )
}

/// An engine, its arena, and the READs that each rail holds.
struct Bench {
    engine: Engine,
    arena: Arc<ExpertArena>,
    layer: Arc<Layer>,
    posted: Vec<Vec<Read>>,
    now: Instant,
    next_slot: u32,
}

fn caps() -> Capabilities {
    Capabilities {
        read_max_bytes: 1 << 24,
        whole_records: false,
        lanes: 1,
        pieces: 1,
        stall: Duration::from_millis(200),
        rank: 0,
    }
}

impl Bench {
    fn new(rails: usize, config: EngineConfig, record_bytes: u64) -> Self {
        Self::with_caps(vec![caps(); rails], config, record_bytes)
    }

    fn with_caps(caps: Vec<Capabilities>, config: EngineConfig, record_bytes: u64) -> Self {
        let now = Instant::now();
        let layer = layer(EXPERTS, record_bytes);
        let slot_bytes = layer.image_bytes_max() as usize;
        let slots = 24;
        let memory =
            ForeignMemory::heap(slots as usize * slot_bytes.next_multiple_of(4096)).unwrap();
        let arena = Arc::new(
            ArenaBuilder::new()
                .slab(slots, slot_bytes)
                .foreign(memory)
                .build()
                .unwrap(),
        );
        let rails = caps.len();
        let named = caps
            .into_iter()
            .enumerate()
            .map(|(i, c)| (format!("rail{i}"), RailKind::Mock, c));
        let mut bench = Self {
            engine: Engine::new(config, named, 1, now),
            arena,
            layer,
            posted: (0..rails).map(|_| Vec::new()).collect(),
            now,
            next_slot: 0,
        };
        bench.tick(Duration::ZERO);
        for rail in 0..rails {
            bench.event(rail, RailEvent::Ready(TAG));
        }
        bench
    }

    fn event(&mut self, rail: usize, event: RailEvent) {
        self.engine.handle(self.now, RailId(rail), event);
    }

    fn tick(&mut self, by: Duration) -> Vec<Action> {
        self.now += by;
        self.engine.handle_time(self.now, |_| 0);
        std::iter::from_fn(|| self.engine.poll_action()).collect()
    }

    fn order(&mut self, expert: u32) -> Order {
        let slot = SlotId {
            slab: 0,
            slot: self.next_slot,
        };
        self.next_slot += 1;
        let landing = self
            .arena
            .begin_landing(slot, self.layer.image_bytes_max() as usize)
            .unwrap();
        Order {
            key: Key::new(0, expert),
            position: expert as usize,
            layer: self.layer.clone(),
            content: TAG,
            landing,
            verify: true,
        }
    }

    fn submit(&mut self, experts: &[u32]) -> Handle {
        let orders = experts.iter().map(|&e| self.order(e)).collect();
        let deadline = self.now + Duration::from_secs(2);
        self.engine.submit(self.now, deadline, orders).unwrap()
    }

    fn post_all(&mut self) -> usize {
        let mut n = 0;
        while let Some((rail, read)) = self.engine.next_post(self.now) {
            self.posted[rail.0].push(read);
            n += 1;
        }
        n
    }

    /// Lets the READ at `index` of a rail land with the right bytes.
    fn land(&mut self, rail: usize, index: usize) {
        let mut read = self.posted[rail].remove(index);
        write_right(&mut read);
        self.complete(rail, read, Ok(Landed::default()));
    }

    fn complete(&mut self, rail: usize, read: Read, result: Result<Landed, ReadError>) {
        self.event(rail, RailEvent::Completion(Completion { read, result }));
    }

    fn run_to_end(&mut self) {
        loop {
            self.post_all();
            let Some(rail) = (0..self.posted.len()).find(|&r| !self.posted[r].is_empty()) else {
                return;
            };
            self.land(rail, 0);
        }
    }

    fn finished(&mut self) -> Finished {
        self.engine.poll_finished().expect("the request ended")
    }

    /// Nothing is under way: no slot may be in landing or quarantine.
    fn assert_no_slot_leaked(&self) {
        for slot in 0..self.next_slot {
            let state = self.arena.slot_state(SlotId { slab: 0, slot }).unwrap();
            assert!(
                matches!(
                    state,
                    expert_arena::SlotState::Free | expert_arena::SlotState::Committed
                ),
                "slot {slot} is {state:?}"
            );
        }
    }
}

fn write_right(read: &mut Read) {
    let images = images(read.layer.image_bytes_max());
    let offset = read.range.offset();
    let bytes = &images[read.key.expert as usize][offset..offset + read.range.len()];
    read.range.write(0, bytes);
}

fn assert_right(finished: &Finished, experts: &[u32]) {
    for (record, &expert) in finished.records.iter().zip(experts) {
        let lease = &record.as_ref().expect("committed").lease;
        assert!(lease[..] == images(lease.len() as u64)[expert as usize][..]);
    }
}

fn config() -> EngineConfig {
    EngineConfig {
        window_bytes: 1 << 20,
        read_bytes: CHUNK_BYTES,
        ..EngineConfig::default()
    }
}

const MEDIUM: u64 = 3 * CHUNK_BYTES + 700;

#[test]
fn batch_is_committed_with_its_bytes() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[3, 1, 3]);
    bench.run_to_end();
    let finished = bench.finished();
    assert!(finished.is_complete());
    assert_right(&finished, &[3, 1, 3]);
    drop(finished);
    bench.assert_no_slot_leaked();
}

#[test]
fn record_is_not_committed_before_its_last_read_came_back() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[2]);
    assert_eq!(bench.post_all(), 4);
    for _ in 0..3 {
        bench.land(0, 1.min(bench.posted[0].len() - 1));
        assert!(bench.engine.poll_finished().is_none());
    }
    bench.land(0, 0);
    assert!(bench.finished().is_complete());
}

#[test]
fn request_larger_than_the_window_is_windowed() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[0, 1, 2, 3]);
    bench.post_all();
    let out: u64 = bench.posted[0].iter().map(Read::bytes).sum();
    assert!(out <= 1 << 20 && out > 0, "{out} bytes out");
    bench.run_to_end();
    assert!(bench.finished().is_complete());
}

#[test]
fn read_larger_than_the_window_goes_out_alone() {
    let config = EngineConfig {
        window_bytes: 1000,
        ..config()
    };
    let mut bench = Bench::new(1, config, MEDIUM);
    bench.submit(&[0]);
    assert_eq!(bench.post_all(), 1);
    bench.run_to_end();
    assert!(bench.finished().is_complete());
}

#[test]
fn budget_refuses_the_second_request_and_never_the_first() {
    let config = EngineConfig {
        inflight_max_bytes: 10,
        ..config()
    };
    let mut bench = Bench::new(1, config, MEDIUM);
    bench.submit(&[0]);
    let order = bench.order(1);
    let (orders, refused) = bench
        .engine
        .submit(bench.now, bench.now + Duration::from_secs(1), vec![order])
        .unwrap_err();
    assert_eq!(refused.limit, 10);
    drop(orders);
    bench.run_to_end();
    assert!(bench.finished().is_complete());
    bench.assert_no_slot_leaked();
    bench.submit(&[1]);
}

#[test]
fn corrupt_chunk_is_read_again_and_then_fails_its_record_alone() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[4, 5]);
    let mut failures = 0;
    for _ in 0..20 {
        bench.post_all();
        let Some(mut read) = bench.posted[0].pop() else {
            break;
        };
        write_right(&mut read);
        if read.key.expert == 5 && read.range.offset() == CHUNK_BYTES as usize {
            read.range.write(9, &[!byte(5, CHUNK_BYTES + 9)]);
            failures += 1;
        }
        bench.complete(0, read, Ok(Landed::default()));
    }
    assert_eq!(failures, 2, "one repetition");
    let finished = bench.finished();
    assert!(finished.records[0].is_ok());
    assert!(matches!(
        finished.records[1],
        Err(Failure::Checksum(BadChunk { chunk: 1, .. }))
    ));
    assert_eq!(bench.engine.stats().verify_failures, 2);
    drop(finished);
    bench.assert_no_slot_leaked();
}

#[test]
fn expired_request_quarantines_its_slot_until_the_reads_are_back() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[6]);
    bench.post_all();
    bench.tick(Duration::from_secs(3));
    let finished = bench.finished();
    assert!(matches!(finished.records[0], Err(Failure::Deadline(_))));
    let slot = SlotId { slab: 0, slot: 0 };
    assert_eq!(
        bench.arena.slot_state(slot),
        Some(expert_arena::SlotState::Quarantined)
    );
    assert!(bench.arena.begin_landing(slot, 10).is_err());
    while !bench.posted[0].is_empty() {
        bench.land(0, 0);
    }
    assert!(bench.arena.begin_landing(slot, 10).is_ok());
}

#[test]
fn cancelled_request_ends_at_once_and_posts_nothing_more() {
    let mut bench = Bench::new(1, config(), 20 * CHUNK_BYTES);
    let request = bench.submit(&[6]);
    bench.post_all();
    bench.engine.cancel(bench.now, request);
    assert!(matches!(
        bench.finished().records[0],
        Err(Failure::Cancelled)
    ));
    while !bench.posted[0].is_empty() {
        bench.land(0, 0);
    }
    assert_eq!(bench.post_all(), 0);
    bench.assert_no_slot_leaked();
}

#[test]
fn failed_rail_hands_its_reads_to_the_other() {
    let mut bench = Bench::new(2, config(), MEDIUM);
    bench.submit(&[0, 1]);
    bench.post_all();
    assert!(!bench.posted[0].is_empty() && !bench.posted[1].is_empty());
    bench.event(0, RailEvent::Down("cable".into()));
    assert_eq!(bench.tick(Duration::ZERO), [Action::Quiesce(RailId(0))]);
    for read in std::mem::take(&mut bench.posted[0]) {
        bench.complete(0, read, Err(ReadError::Flushed));
    }
    bench.engine.handle_quiesced(bench.now, RailId(0));
    bench.run_to_end();
    let finished = bench.finished();
    assert_right(&finished, &[0, 1]);
    assert!(bench.posted[0].is_empty());
    assert!(bench.engine.stats().fallbacks > 0);
}

#[test]
fn fail_fast_fails_what_used_the_rail() {
    let config = EngineConfig {
        on_failure: OnFailure::FailFast,
        ..config()
    };
    let mut bench = Bench::new(2, config, MEDIUM);
    bench.submit(&[0]);
    bench.post_all();
    bench.event(0, RailEvent::Down("cable".into()));
    assert!(matches!(
        bench.finished().records[0],
        Err(Failure::RailFailed(_))
    ));
}

#[test]
fn failed_rail_comes_back_after_a_growing_wait() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.event(0, RailEvent::Down("cable".into()));
    bench.tick(Duration::ZERO);
    bench.engine.handle_quiesced(bench.now, RailId(0));
    assert!(!bench.engine.is_healthy());
    let mut waits = Vec::new();
    for _ in 0..4 {
        let before = bench.now;
        while bench.tick(Duration::from_millis(1)).is_empty() {}
        waits.push(bench.now - before);
        bench.event(0, RailEvent::ProbeFailed("still".into()));
    }
    assert!(waits.windows(2).all(|w| w[1] > w[0]), "{waits:?}");
    while bench.tick(Duration::from_millis(1)).is_empty() {}
    bench.event(0, RailEvent::Ready(TAG));
    assert!(bench.engine.is_healthy());
    bench.submit(&[1]);
    bench.run_to_end();
    assert!(bench.finished().is_complete());
}

#[test]
fn rail_without_progress_is_quiesced_and_one_with_progress_is_not() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[1]);
    bench.post_all();
    for step in 0..10u64 {
        bench.now += Duration::from_millis(100);
        bench.engine.handle_time(bench.now, |_| step);
        assert_eq!(bench.engine.poll_action(), None);
    }
    assert_eq!(
        bench.tick(Duration::from_millis(50)).len(),
        0,
        "the counter went back to 0: movement"
    );
    assert_eq!(
        bench.tick(Duration::from_millis(250)),
        [Action::Quiesce(RailId(0))]
    );
    assert_eq!(bench.engine.stats().rails[0].errors_by_cause.stalls, 1);
}

#[test]
fn idle_rail_never_counts_as_stalled() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    for _ in 0..10 {
        assert_eq!(bench.tick(Duration::from_secs(100)), []);
    }
    assert!(bench.engine.is_healthy());
}

#[test]
fn content_that_nobody_serves_any_more_fails_and_is_not_mixed() {
    let other = ContentTag {
        id: 8,
        instance: None,
    };
    let mut bench = Bench::new(2, config(), MEDIUM);
    bench.submit(&[0, 1]);
    bench.post_all();
    bench.event(0, RailEvent::Ready(other));
    assert!(
        bench.engine.poll_finished().is_none(),
        "rail 1 still has it"
    );
    for read in std::mem::take(&mut bench.posted[0]) {
        bench.complete(0, read, Err(ReadError::ContentChanged));
    }
    bench.post_all();
    assert!(
        bench.posted[0].is_empty(),
        "nothing goes to the other content"
    );
    bench.event(1, RailEvent::Ready(other));
    let finished = bench.finished();
    assert!(
        finished
            .records
            .iter()
            .all(|r| matches!(r, Err(Failure::ContentChanged)))
    );
}

#[test]
fn whole_record_rail_gets_whole_records() {
    let caps = Capabilities {
        whole_records: true,
        ..caps()
    };
    let mut bench = Bench::with_caps(vec![caps], config(), MEDIUM);
    bench.submit(&[0, 1]);
    bench.post_all();
    let image_bytes = bench.layer.image_bytes_max();
    assert!(bench.posted[0].iter().all(|r| r.bytes() == image_bytes));
    bench.run_to_end();
    assert!(bench.finished().is_complete());
}

#[test]
fn whole_record_that_is_read_again_keeps_to_the_window() {
    let caps = Capabilities {
        whole_records: true,
        ..caps()
    };
    // After two of these, the window has room for a READ of the usual size, not for a third.
    let config = EngineConfig {
        window_bytes: 11 * CHUNK_BYTES / 2,
        ..config()
    };
    let mut bench = Bench::with_caps(vec![caps; 3], config, 2 * CHUNK_BYTES + 1);
    bench.submit(&[0, 1, 2]);
    bench.post_all();
    for rail in [1, 2] {
        bench.event(rail, RailEvent::Down("cable".into()));
        for read in std::mem::take(&mut bench.posted[rail]) {
            bench.complete(rail, read, Err(ReadError::Flushed));
        }
    }
    bench.post_all();
    assert_eq!(bench.posted[0].len(), 2);
    bench.run_to_end();
    assert_right(&bench.finished(), &[0, 1, 2]);
}

#[test]
fn whole_record_rail_keeps_each_lane_busy_whatever_the_window() {
    let caps = Capabilities {
        whole_records: true,
        lanes: 3,
        ..caps()
    };
    let small = EngineConfig {
        window_bytes: 1000,
        ..config()
    };
    let mut bench = Bench::with_caps(vec![caps], small, MEDIUM);
    bench.submit(&[0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(bench.post_all(), 6);
    bench.run_to_end();
    assert!(bench.finished().is_complete());
}

#[test]
fn queues_do_not_grow_while_the_rail_is_away() {
    let mut bench = Bench::new(1, config(), 100);
    bench.event(0, RailEvent::Down("cable".into()));
    for _ in 0..2000 {
        bench.next_slot = 0;
        let request = bench.submit(&[1, 2]);
        bench.engine.cancel(bench.now, request);
        bench.finished();
    }
    let waiting = bench.engine.rails[0].queued() + bench.engine.retry_queues[0].len();
    assert!(waiting < 300, "{waiting}");
}

#[test]
fn stall_that_never_comes_is_no_panic() {
    let caps = Capabilities {
        stall: Duration::MAX,
        ..caps()
    };
    let mut bench = Bench::with_caps(vec![caps], config(), MEDIUM);
    bench.submit(&[0]);
    bench.post_all();
    assert!(bench.engine.next_timeout().is_some());
    bench.run_to_end();
}

#[test]
fn refused_post_is_posted_again() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[0]);
    let (rail, read) = bench.engine.next_post(bench.now).unwrap();
    bench.engine.handle_post_refused(rail, read);
    bench.run_to_end();
    assert_right(&bench.finished(), &[0]);
}

#[test]
fn duplicate_experts_and_an_empty_batch_end_well() {
    let mut bench = Bench::new(2, config(), 100);
    bench.submit(&[]);
    assert!(bench.finished().records.is_empty());
    bench.submit(&[5, 5, 5]);
    bench.run_to_end();
    assert_right(&bench.finished(), &[5, 5, 5]);
}

#[test]
fn expert_mod_stays_at_home_and_the_default_steals() {
    for (policy, expect_other) in [(Policy::ExpertMod, false), (Policy::HomeSteal, true)] {
        let mut bench = Bench::new(2, EngineConfig { policy, ..config() }, 20 * CHUNK_BYTES);
        bench.submit(&[0, 2]); // both at home on rail 0
        bench.post_all();
        assert_eq!(!bench.posted[1].is_empty(), expect_other, "{policy:?}");
        bench.run_to_end();
        assert!(bench.finished().is_complete());
    }
}

#[test]
fn expert_mod_does_not_wait_for_a_home_that_serves_other_content() {
    let other = ContentTag {
        id: 8,
        instance: None,
    };
    let policy = Policy::ExpertMod;
    let mut bench = Bench::new(2, EngineConfig { policy, ..config() }, MEDIUM);
    bench.event(0, RailEvent::Ready(other));
    bench.submit(&[0, 2]); // both at home on rail 0
    bench.run_to_end();
    assert_right(&bench.finished(), &[0, 2]);
}

#[test]
fn fallback_rail_works_only_while_no_preferred_one_does_and_hands_back() {
    let with_rank = |rank| Capabilities { rank, ..caps() };
    let rails = vec![with_rank(0), with_rank(0), with_rank(1)];
    let mut bench = Bench::with_caps(rails, config(), MEDIUM);
    assert!(bench.engine.is_settled());
    bench.submit(&[0, 1, 2]);
    bench.post_all();
    assert!(!bench.posted[0].is_empty() && !bench.posted[1].is_empty());
    assert!(bench.posted[2].is_empty(), "a preferred rail works");
    assert_eq!(bench.engine.stats().takeovers, 0);
    for rail in 0..2 {
        bench.event(rail, RailEvent::Down("gone".into()));
        for read in std::mem::take(&mut bench.posted[rail]) {
            bench.complete(rail, read, Err(ReadError::Flushed));
        }
    }
    assert_eq!(bench.engine.stats().takeovers, 1);
    bench.run_to_end();
    assert_right(&bench.finished(), &[0, 1, 2]);
    let before = bench.engine.stats().rails[2].bytes;
    assert!(before > 0);
    bench.engine.handle_quiesced(bench.now, RailId(0));
    bench.tick(Duration::from_secs(2));
    bench.event(0, RailEvent::Ready(TAG));
    bench.submit(&[4]);
    bench.run_to_end();
    assert_right(&bench.finished(), &[4]);
    assert_eq!(bench.engine.stats().rails[2].bytes, before, "handed back");
}

#[test]
fn slow_rail_gets_little_at_a_time_and_a_fast_one_its_whole_window() {
    let config = EngineConfig {
        window_bytes: 64 * CHUNK_BYTES,
        ..config()
    };
    let mut bench = Bench::new(1, config, 16 * CHUNK_BYTES);
    bench.submit(&[0, 1, 2, 3]);
    assert_eq!(bench.post_all(), 4, "nothing is known of the rail yet");
    // 256 KiB in 50 ms is 5 MB/s: two READs at a time.
    for _ in 0..4 {
        bench.now += Duration::from_millis(50);
        bench.land(0, 0);
    }
    bench.post_all();
    assert_eq!(bench.posted[0].len(), 2);
    // Then 256 KiB in 50 us, in bursts with pauses between them.
    for _ in 0..12 {
        bench.now += Duration::from_secs(1);
        bench.submit(&[4]);
        bench.post_all();
        while !bench.posted[0].is_empty() {
            bench.now += Duration::from_micros(50);
            bench.land(0, 0);
            bench.post_all();
        }
    }
    bench.submit(&[8, 9, 10, 11]);
    bench.post_all();
    assert!(bench.posted[0].len() > 30, "{}", bench.posted[0].len());
}
