//! The device on both clocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::workload::{
    Clock, Measured, Objects, Setup, fetch, make_arena, make_orders, make_rails,
};
use super::{Control, MockSpec, ReadFault, RealRail, Verifies};
use crate::config::{EngineConfig, Policy};
use crate::driver::{Driver, Outcome, Ticket};
use crate::engine::Finished;
use crate::model::{self, Shape};
use crate::notify::Notifier;
use crate::rail::Rail;

const MIB: u64 = 1 << 20;

fn setup(rates_mb: &[u64], read_bytes: u64, policy: Policy) -> Setup {
    let rails = rates_mb.iter().map(|mb| MockSpec::steady(mb * 1_000_000));
    Setup {
        rails: rails.collect(),
        engine: EngineConfig {
            policy,
            read_bytes,
            window_bytes: (4 * MIB).max(2 * read_bytes),
            ..EngineConfig::default()
        },
        batch: 1,
        verify: true,
        clock: Clock::Virtual,
    }
}

fn mb_per_s(measured: &Measured) -> f64 {
    measured.bytes as f64 / measured.time.as_secs_f64() / 1e6
}

fn run(object_bytes: u64, setup: &Setup) -> (Measured, f64) {
    let objects = Arc::new(Objects::new(object_bytes, 2).unwrap());
    let measured = fetch(&objects, setup).unwrap();
    assert_eq!(measured.digest, objects.digest());
    let rates: Vec<u64> = setup.rails.iter().map(|r| r.bytes_per_s).collect();
    let shape = Shape {
        object_bytes: objects.image_bytes(),
        objects: u64::from(setup.batch),
        read_bytes: setup.engine.read_bytes,
    };
    let bound = model::balanced_bytes_per_s(&rates, &shape) / 1e6;
    (measured, bound)
}

#[test]
fn equal_rails_reach_the_balanced_bound() {
    for rails in [1, 2, 3, 4, 8] {
        let setup = setup(&vec![125; rails], 4 * MIB, Policy::HomeSteal);
        let (measured, bound) = run(64 * MIB, &setup);
        let got = mb_per_s(&measured);
        assert!(
            got > 0.98 * bound && got < 1.01 * bound,
            "{rails} rails: {got} of {bound}"
        );
    }
}

#[test]
fn split_has_no_dip_at_three_rails() {
    let (measured, _) = run(64 * MIB, &setup(&[125; 3], 4 * MIB, Policy::Split));
    assert!(
        mb_per_s(&measured) > 0.97 * 375.0,
        "{}",
        mb_per_s(&measured)
    );
}

#[test]
fn unequal_rails_add_up_under_the_default_policy() {
    for read_bytes in [MIB, 4 * MIB] {
        let (measured, _) = run(64 * MIB, &setup(&[100, 25], read_bytes, Policy::HomeSteal));
        let got = mb_per_s(&measured);
        assert!(got > 0.96 * 125.0, "{read_bytes}-byte READs: {got}");
    }
}

#[test]
fn rails_of_any_rates_come_close_to_the_balanced_bound() {
    let mut rng = super::rng::SplitMix::new(7);
    for draw in 0..24 {
        let rails = *rng.pick(&[1u64, 2, 3, 4, 8]);
        let rates: Vec<u64> = (0..rails).map(|_| rng.magnitude(25, 1000)).collect();
        let read_bytes = *rng.pick(&[256 << 10, MIB, 2 * MIB]);
        // Enough READs that each rail is seen at work in the first fetch.
        let object_bytes = read_bytes * rails * rng.between(3, 6) + rng.below(read_bytes);
        let (measured, bound) = run(object_bytes, &setup(&rates, read_bytes, Policy::HomeSteal));
        let got = mb_per_s(&measured);
        assert!(
            got > 0.95 * bound,
            "draw {draw}, {rates:?} MB/s, {object_bytes} bytes in READs of {read_bytes}: {got} of {bound}"
        );
    }
}

#[test]
fn one_virtual_run_is_like_another() {
    let mut setup = setup(&[125, 50, 80], MIB, Policy::HomeSteal);
    setup.rails[0].verifies = Verifies::Rail;
    let (first, _) = run(8 * MIB, &setup);
    let (again, _) = run(8 * MIB, &setup);
    assert_eq!(first.time, again.time);
    assert_eq!(first.rail_bytes, again.rail_bytes);
    assert_eq!(first.verify, again.verify);
}

#[test]
fn bytes_on_the_real_clock_are_those_of_the_source() {
    for verifies in [Verifies::Engine, Verifies::Rail] {
        let mut setup = setup(&[2000, 500], MIB, Policy::HomeSteal);
        setup.clock = Clock::Real;
        for rail in &mut setup.rails {
            rail.verifies = verifies;
        }
        // An odd size: the last READ and the last chunk are short.
        let (measured, _) = run(5 * MIB + 700, &setup);
        assert!(measured.verify > Duration::ZERO, "{verifies:?}");
        assert!(measured.rail_bytes.iter().all(|bytes| *bytes > 0));
    }
}

#[test]
fn real_clock_is_never_faster_than_the_rails() {
    let mut setup = setup(&[100, 50], MIB, Policy::HomeSteal);
    setup.clock = Clock::Real;
    let began = Instant::now();
    let (measured, _) = run(4 * MIB, &setup);
    assert!(mb_per_s(&measured) < 150.0 * 1.001);
    // Three fetches of 4 MiB.
    assert!(began.elapsed() > Duration::from_millis(3 * 27));
}

/// Two slow rails under a real driver, and a fetch of one object over them.
struct Live {
    controls: Vec<Control>,
    driver: Driver,
    objects: Arc<Objects>,
    arena: Arc<expert_arena::ExpertArena>,
    setup: Setup,
}

impl Live {
    fn start(rates_mb: &[u64], object_bytes: u64) -> Self {
        let mut setup = setup(rates_mb, MIB, Policy::HomeSteal);
        setup.clock = Clock::Real;
        let objects = Arc::new(Objects::new(object_bytes, 1).unwrap());
        let notifier = Arc::new(Notifier::new().unwrap());
        let rails: Vec<RealRail> = make_rails(&objects, &setup, Instant::now())
            .into_iter()
            .map(|rail| RealRail::start(rail, notifier.clone()).unwrap())
            .collect();
        let controls = rails.iter().map(RealRail::control).collect();
        let rails = rails.into_iter().map(|r| Box::new(r) as Box<dyn Rail>);
        let driver =
            Driver::start("live", setup.engine.clone(), rails.collect(), notifier).unwrap();
        while driver.stats().rails.iter().any(|r| r.state != "up") {
            std::thread::sleep(Duration::from_millis(1));
        }
        Self {
            controls,
            driver,
            arena: make_arena(&objects, 1).unwrap(),
            objects,
            setup,
        }
    }

    /// Submits, lets `meanwhile` happen 20 ms later, and waits.
    fn fetch(&self, time: Duration, meanwhile: impl FnOnce(&Self)) -> Finished {
        let orders = make_orders(&self.objects, &self.arena, &self.setup, &[0]).unwrap();
        let deadline = Instant::now() + time;
        let ticket = self.driver.submit(orders, crate::Class::Demand, deadline);
        std::thread::sleep(Duration::from_millis(20));
        meanwhile(self);
        match ticket.wait(deadline, Duration::from_secs(20)) {
            Outcome::Finished(finished) => finished,
            _ => panic!("the driver ended the request"),
        }
    }

    fn assert_right(&self, finished: &Finished) {
        let lease = &finished.records[0].as_ref().unwrap().lease;
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(lease);
        assert_eq!(hash.digest128(), self.objects.digest());
    }
}

#[test]
fn object_arrives_over_the_other_rail_when_one_is_cut() {
    let live = Live::start(&[40, 40], 8 * MIB);
    let finished = live.fetch(Duration::from_secs(20), |live| {
        live.controls[0].change(|rail| rail.disconnect(Duration::from_secs(3600)));
    });
    live.assert_right(&finished);
    let stats = live.driver.stats();
    assert_eq!(stats.rails[0].errors_by_cause.downs, 1);
    assert!(stats.fallbacks > 0);
}

#[test]
fn chunk_that_arrives_wrong_is_read_again() {
    let live = Live::start(&[1000], 4 * MIB);
    for (i, fault) in [ReadFault::Corrupt, ReadFault::Short]
        .into_iter()
        .enumerate()
    {
        live.controls[0].change(move |rail| rail.arm(fault));
        let finished = live.fetch(Duration::from_secs(20), |_| {});
        live.assert_right(&finished);
        assert_eq!(live.driver.stats().verify_failures, i as u64 + 1);
        assert_eq!(finished.stats.retries, 1);
    }
}

#[test]
fn slot_of_an_expired_request_is_free_only_when_its_reads_have_landed() {
    // A MiB takes 500 ms: two are posted when the time is over.
    let live = Live::start(&[2], 8 * MIB);
    let finished = live.fetch(Duration::from_millis(40), |_| {});
    assert!(finished.records[0].is_err());
    let slot = expert_arena::SlotId { slab: 0, slot: 0 };
    assert!(live.arena.begin_landing(slot, 1).is_err());
    drop(live.driver);
    assert!(live.arena.begin_landing(slot, 1).is_ok());
}

/// A fetch that is over within a millisecond, into an arena of its own.
fn submit_to(live: &Live, arena: &Arc<expert_arena::ExpertArena>, time: Duration) -> Ticket {
    let orders = make_orders(&live.objects, arena, &live.setup, &[0]).unwrap();
    let deadline = Instant::now() + time;
    live.driver.submit(orders, crate::Class::Demand, deadline)
}

#[test]
fn callers_and_rails_that_do_the_drivers_work_lose_nothing_that_comes_meanwhile() {
    const CALLERS: usize = 4;
    const FETCHES: usize = 300;
    let live = Live::start(&[20_000, 20_000], MIB / 16);
    // A wake-up that is lost shows as a request that ends by its deadline.
    let time = Duration::from_secs(60);
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            let (live, arena) = (&live, make_arena(&live.objects, 1).unwrap());
            scope.spawn(move || {
                for _ in 0..FETCHES {
                    let ticket = submit_to(live, &arena, time);
                    let Outcome::Finished(finished) = ticket.wait(Instant::now() + time, time)
                    else {
                        panic!("the driver ended the request");
                    };
                    assert!(finished.records[0].is_ok(), "{:?}", finished.records[0]);
                }
            });
        }
    });
    assert_eq!(live.driver.stats().requests as usize, CALLERS * FETCHES);
}

#[test]
fn who_asked_to_be_called_back_is_never_called_within_a_submit() {
    let live = Live::start(&[20_000], MIB / 16);
    let arenas = [(); 2].map(|()| make_arena(&live.objects, 1).unwrap());
    let time = Duration::from_secs(20);
    let submits = Arc::new(AtomicBool::new(false));
    let (tell, told) = std::sync::mpsc::channel();
    let own = std::thread::current().id();
    for _ in 0..200 {
        let first = submit_to(&live, &arenas[0], time);
        let (tell, submits) = (tell.clone(), submits.clone());
        let within = submits.clone();
        first.on_end(Box::new(move || {
            let is_own = std::thread::current().id() == own;
            tell.send(is_own && within.load(Ordering::SeqCst)).unwrap();
        }));
        // Its turn may find the end of the first.
        submits.store(true, Ordering::SeqCst);
        let second = submit_to(&live, &arenas[1], time);
        submits.store(false, Ordering::SeqCst);
        assert!(!told.recv_timeout(time).unwrap());
        for ticket in [first, second] {
            let outcome = ticket.wait(Instant::now() + time, time);
            assert!(matches!(outcome, Outcome::Finished(_)));
        }
    }
}
