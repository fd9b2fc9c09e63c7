//! What the engine tells of a request that ended: times, label, span.

use std::fmt::Write;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record as Values};
use tracing::{Event, Metadata, Subscriber};

use super::*;

/// Lets each READ take that long, one rail after the other.
fn run_slowly(bench: &mut Bench, each: Duration) {
    loop {
        bench.post_all();
        if bench.posted.iter().all(Vec::is_empty) {
            return;
        }
        bench.now += each;
        for rail in 0..bench.posted.len() {
            if !bench.posted[rail].is_empty() {
                bench.land(rail, 0);
            }
        }
    }
}

#[test]
fn request_over_one_rail_is_limited_by_it() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[0]);
    run_slowly(&mut bench, Duration::from_millis(10));
    let stats = bench.finished().stats;
    assert_eq!(stats.limit.name(), "network-slowest-rail");
    assert_eq!(stats.total, Duration::from_millis(40));
    assert_eq!(stats.wire, stats.total);
    assert_eq!(stats.reads, 4);
    let tier = bench.engine.stats();
    assert_eq!(tier.limits.get("network-slowest-rail"), 1);
    assert!(tier.total.p50_us >= 40_000 && tier.total.p50_us <= 50_000);
    assert!(tier.wire.p99_us >= 40_000 && tier.queue.p99_us <= 2);
}

#[test]
fn rail_that_the_policy_leaves_out_is_named_as_idle() {
    let policy = Policy::ExpertMod;
    let mut bench = Bench::new(2, EngineConfig { policy, ..config() }, 20 * CHUNK_BYTES);
    bench.submit(&[0]);
    run_slowly(&mut bench, Duration::from_millis(10));
    let limit = bench.finished().stats.limit;
    assert!(
        matches!(
            limit,
            crate::attribution::Limit::NetworkRailIdle { rail: 1, .. }
        ),
        "{limit}"
    );
}

#[test]
fn rail_of_lower_preference_is_not_idle_but_in_reserve() {
    let caps = vec![caps(), Capabilities { rank: 1, ..caps() }];
    let mut bench = Bench::with_caps(caps, config(), 20 * CHUNK_BYTES);
    bench.submit(&[0]);
    run_slowly(&mut bench, Duration::from_millis(10));
    assert_eq!(bench.finished().stats.limit.name(), "network-slowest-rail");
}

#[test]
fn request_behind_others_is_limited_by_back_pressure() {
    let mut bench = Bench::new(1, config(), 20 * CHUNK_BYTES);
    bench.submit(&[0, 1, 2]);
    bench.post_all();
    bench.submit(&[3]);
    run_slowly(&mut bench, Duration::from_millis(10));
    assert_eq!(bench.finished().stats.limit.name(), "network-slowest-rail");
    let stats = bench.finished().stats;
    assert_eq!(stats.limit.name(), "back-pressure", "{stats:?}");
    assert!(stats.queued > stats.wire);
}

#[test]
fn peer_that_refuses_is_the_limit() {
    let config = EngineConfig {
        retries: 8,
        ..config()
    };
    let mut bench = Bench::new(1, config, MEDIUM);
    bench.submit(&[0]);
    for _ in 0..2 {
        bench.post_all();
        bench.now += Duration::from_millis(5);
        let read = bench.posted[0].pop().unwrap();
        let busy = ReadError::Unavailable("overloaded".into());
        bench.complete(0, read, Err(busy));
    }
    run_slowly(&mut bench, Duration::from_millis(1));
    let stats = bench.finished().stats;
    assert_eq!(stats.limit.name(), "peer", "{stats:?}");
    assert_eq!((stats.reads, stats.retries), (6, 2));
}

#[test]
fn processor_time_that_the_driver_tells_of_is_the_clients() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[0]);
    bench.post_all();
    bench.now += Duration::from_millis(10);
    bench
        .engine
        .note_cpu(Duration::from_millis(9), |_| Duration::ZERO);
    for _ in 0..4 {
        bench.land(0, 0);
    }
    assert_eq!(bench.finished().stats.limit.name(), "software-client-cpu");
}

#[test]
fn request_that_takes_no_time_is_unknown() {
    let mut bench = Bench::new(1, config(), MEDIUM);
    bench.submit(&[]);
    assert_eq!(bench.finished().stats.limit.name(), "unknown");
}

/// Keeps what spans were made and recorded with.
#[derive(Default, Clone)]
struct Log(Arc<Mutex<String>>);

impl Visit for Log {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0.lock().unwrap(), "{field}={value:?} ");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span()
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let _ = write!(self.0.lock().unwrap(), "{}: ", span.metadata().name());
        span.record(&mut self.clone());
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, values: &Values<'_>) {
        values.record(&mut self.clone());
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn each_request_has_a_span_with_its_numbers() {
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), || {
        let mut bench = Bench::new(1, config(), 100);
        bench.submit(&[0, 1]);
        run_slowly(&mut bench, Duration::from_millis(1));
        bench.finished();
    });
    let text = log.0.lock().unwrap().clone();
    for part in [
        "request: bytes=512 records=2",
        "request=0",
        "queued_us=0",
        "wire_us=2000",
        "verify_us=0",
        "limit=\"network-slowest-rail\"",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
