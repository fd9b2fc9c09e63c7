//! The streamer over real tiers: what is leased is right and stays where it is, what nobody leases makes room, and
//! every call ends.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::parts::Parts;
use atlas_expert_tests::net::proxy::Proxy;
use atlas_expert_tests::net::rig::{Backend, Rig, arena_for, patient, serve, unsettled};
use atlas_expert_tests::net::streams::{assert_right, is_resident, streamer};
use atlas_expert_tests::net::{SLACK, wait_until};
use expert_arena::{ArenaBuilder, Fence, ForeignMemory};
use expert_store::Key;
use expert_tier::eviction::Eviction;
use expert_tier::{Class, StreamerBuilder, TierBuilder, TierError};
use rustix::event::{PollFd, PollFlags, poll};

/// Fires when it is told.
#[derive(Clone, Default)]
struct Switch(Arc<AtomicBool>);

impl Switch {
    fn fire(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Fence for Switch {
    fn fired(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

fn hits_and_misses(backend: Backend) {
    let rig = Rig::new(backend);
    let streamer = streamer(&rig, 8);
    for _ in 0..2 {
        let leases = streamer.lease_many(1, &[5, 0, 5, 3], SLACK).unwrap();
        let experts: Vec<u32> = leases.iter().map(|l| l.key().expert).collect();
        assert_eq!(experts, [5, 0, 5, 3], "in the order of the call");
        assert_right(&leases, &rig.records);
    }
    let stats = streamer.stats();
    assert_eq!((stats.hits, stats.misses), (4, 4));
    assert_eq!(stats.fetched, 3, "the one that comes twice is fetched once");
    let bytes: usize = [5, 0, 3]
        .map(|e| rig.records[&Key::new(1, e)].len())
        .iter()
        .sum();
    assert_eq!(stats.fetched_bytes, bytes as u64);
    assert!(streamer.lease_many(0, &[], SLACK).unwrap().is_empty());
}

#[test]
fn what_is_in_memory_is_not_fetched_again_posix() {
    hits_and_misses(Backend::Posix);
}

#[test]
fn what_is_in_memory_is_not_fetched_again_rdma() {
    hits_and_misses(Backend::RdmaInPlace);
}

#[test]
fn least_recently_used_record_makes_room() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 4);
    drop(streamer.lease_many(0, &[0, 1, 2, 3], SLACK).unwrap());
    drop(streamer.lease_many(0, &[0], SLACK).unwrap());
    drop(streamer.lease_many(1, &[6], SLACK).unwrap());
    let resident: Vec<u32> = (0..8)
        .filter(|&e| is_resident(&streamer, Key::new(0, e)))
        .collect();
    assert_eq!(resident, [0, 2, 3]);
    assert_eq!(streamer.stats().evictions, 1);
}

#[test]
fn leased_record_stays_whatever_is_fetched() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 3);
    let kept = streamer.lease_many(2, &[7], SLACK).unwrap();
    let at = kept[0].host_ptr();
    for layer in 0..3 {
        for expert in 0..7 {
            let lease = streamer.lease_many(layer, &[expert], SLACK).unwrap();
            assert_right(&lease, &rig.records);
        }
    }
    assert_right(&kept, &rig.records);
    assert_eq!(kept[0].host_ptr(), at);
    let again = streamer.lease_many(2, &[7], SLACK).unwrap();
    assert_eq!(again[0].host_ptr(), at);
    assert_eq!(again[0].residency(), kept[0].residency());
}

#[test]
fn more_than_the_arena_holds_is_refused_with_advice() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 4);
    let error = streamer.lease_many(0, &[0, 1, 2, 3, 4], SLACK).unwrap_err();
    assert!(matches!(
        error,
        TierError::TooManyAtOnce { asked: 5, slots: 4 }
    ));
    assert!(error.to_string().contains("waves"), "{error}");
    // As many as there are, one of them several times, is fine.
    let leases = streamer.lease_many(0, &[0, 1, 2, 3, 3, 3], SLACK).unwrap();
    assert_right(&leases, &rig.records);
}

#[test]
fn call_ends_by_its_deadline_when_all_slots_are_leased() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 2);
    let held = streamer.lease_many(0, &[0, 1], SLACK).unwrap();
    let time = Duration::from_millis(100);
    let began = Instant::now();
    let error = streamer.lease_many(0, &[2], time).unwrap_err();
    assert!(began.elapsed() >= time);
    assert!(
        matches!(error, TierError::NotYet { .. } | TierError::Deadline { .. }),
        "{error}"
    );
    let mut ticket = streamer
        .submit(&[Key::new(0, 3)], Class::Demand, time)
        .unwrap();
    let error = ticket.next(Instant::now() + SLACK).unwrap().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("no slot became free: of 2 slots 2 hold records that are in use"),
        "{error}"
    );
    drop(held);
    assert_right(&streamer.lease_many(0, &[2], SLACK).unwrap(), &rig.records);
}

#[test]
fn waiting_demand_gets_the_slot_that_is_released() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 1);
    for round in 0..20 {
        let held = streamer.lease_many(0, &[round % 8], SLACK).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| streamer.lease_many(1, &[round % 8], SLACK));
            wait_until("it waits", || streamer.stats().under_way == 1);
            drop(held);
            assert_right(&waiter.join().unwrap().unwrap(), &rig.records);
        });
    }
}

#[test]
fn ticket_yields_what_arrives_and_says_when_nothing_does() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 2);
    // More than there is room for: each lease that goes makes room for the next.
    let keys = rig.keys();
    let mut ticket = streamer.submit(&keys, Class::Demand, SLACK).unwrap();
    let mut seen = Vec::new();
    while let Some(lease) = ticket.next(Instant::now() + SLACK) {
        let lease = lease.unwrap();
        assert_right(std::slice::from_ref(&lease), &rig.records);
        seen.push(lease.key());
    }
    seen.sort_unstable();
    assert_eq!(seen, keys);
    assert!(ticket.is_done());

    let held = streamer.lease_many(0, &[0, 1], SLACK).unwrap();
    let mut ticket = streamer
        .submit(&[Key::new(0, 5)], Class::Demand, SLACK)
        .unwrap();
    let late = ticket.next(Instant::now() + Duration::from_millis(20));
    let late = late.unwrap().unwrap_err();
    assert!(matches!(
        late,
        TierError::NotYet {
            missing: 1,
            asked: 1,
            ..
        }
    ));
    assert!(late.is_retryable());
    drop(held);
    assert!(ticket.next(Instant::now() + SLACK).unwrap().is_ok());
}

#[test]
fn error_names_its_record_and_the_others_arrive() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 8);
    let keys = [
        Key::new(0, 1),
        Key::new(0, 99),
        Key::new(17, 0),
        Key::new(0, 2),
    ];
    let mut ticket = streamer.submit(&keys, Class::Demand, SLACK).unwrap();
    let (mut right, mut wrong) = (Vec::new(), Vec::new());
    while let Some((index, result)) = ticket.next_indexed(Instant::now() + SLACK) {
        match result {
            Ok(lease) => right.push((index, lease.key())),
            Err(TierError::NoSuchRecord { key, .. }) => wrong.push((index, key)),
            Err(other) => panic!("{other}"),
        }
    }
    right.sort_unstable();
    wrong.sort_unstable();
    assert_eq!(right, [(0, keys[0]), (3, keys[3])]);
    assert_eq!(wrong, [(1, keys[1]), (2, keys[2])]);
    assert!(streamer.lease_many(0, &[1, 99], SLACK).is_err());
}

#[test]
fn dropped_ticket_gives_its_slots_back() {
    let rig = Rig::new(Backend::RdmaInPlace);
    let streamer = streamer(&rig, 4);
    for round in 0..10 {
        let keys: Vec<Key> = (0..8).map(|e| Key::new(round % 3, e)).collect();
        let ticket = streamer.submit(&keys, Class::Demand, SLACK).unwrap();
        std::thread::sleep(Duration::from_micros(u64::from(round) * 300));
        drop(ticket);
    }
    wait_until("all are back", || {
        unsettled(streamer.arena()) == 0 && streamer.stats().under_way == 0
    });
    let leases = streamer.lease_many(2, &[0, 1, 2, 3], SLACK).unwrap();
    assert_right(&leases, &rig.records);
}

#[test]
fn record_that_two_ask_for_is_fetched_once_and_outlives_the_one_that_gives_up() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = serve(model.open());
    let proxy = Proxy::start(peer.local_addr());
    let records = model.records();
    let tier = patient()
        .connect(&proxy.addr(), arena_for(&records, 4))
        .unwrap();
    let streamer = StreamerBuilder::new().start(tier).unwrap();
    drop(streamer.lease_many(0, &[0], SLACK).unwrap());
    proxy.hold_after(1000);
    let key = [Key::new(0, 4)];
    let first = streamer.submit(&key, Class::Demand, SLACK).unwrap();
    let mut second = streamer.submit(&key, Class::Demand, SLACK).unwrap();
    wait_until("it is under way", || proxy.is_holding());
    drop(first);
    proxy.resume();
    let lease = second.next(Instant::now() + SLACK).unwrap().unwrap();
    assert_right(&[lease], &records);
    assert_eq!(streamer.stats().fetched, 2);
}

#[test]
fn guess_is_used_and_never_takes_what_is_leased() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 4);
    let held = streamer.lease_many(0, &[0, 1, 2], SLACK).unwrap();
    let guessed: Vec<Key> = (0..8).map(|e| Key::new(1, e)).collect();
    assert_eq!(streamer.prefetch(&guessed), 8);
    wait_until("all were tried", || streamer.stats().under_way == 0);
    assert_right(&held, &rig.records);
    assert!((0..3).all(|e| is_resident(&streamer, Key::new(0, e))));
    assert!(is_resident(&streamer, Key::new(1, 7)), "the last guess");
    assert_eq!(streamer.prefetch(&[Key::new(1, 7), Key::new(9, 0)]), 0);
    let before = streamer.stats();
    assert_right(&streamer.lease_many(1, &[7], SLACK).unwrap(), &rig.records);
    let after = streamer.stats();
    assert_eq!(after.fetched, before.fetched);
    assert_eq!((after.guesses, after.guesses_used), (8, 1));
}

#[test]
fn demand_goes_before_guesses_that_wait() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 1);
    let held = streamer.lease_many(0, &[0], SLACK).unwrap();
    streamer.prefetch(&[Key::new(1, 0), Key::new(1, 1)]);
    let ticket = streamer
        .submit(&[Key::new(2, 5)], Class::Demand, SLACK)
        .unwrap();
    drop(held);
    // Whatever the guesses do later, the demand has the only slot first: nothing was fetched before it.
    let leases = ticket.all(Instant::now() + SLACK).unwrap();
    assert_right(&leases, &rig.records);
    assert_eq!(streamer.stats().fetched, 2);
    // It holds the only slot: the guesses go on waiting, and the next demand is the one that they waited for.
    let ticket = streamer
        .submit(&[Key::new(1, 1)], Class::Demand, SLACK)
        .unwrap();
    drop(leases);
    assert_right(&ticket.all(Instant::now() + SLACK).unwrap(), &rig.records);
}

/// A peer that has half of the experts stops in the middle; the other half is another's.
#[test]
fn layer_whose_catalogue_does_not_come_holds_up_no_other() {
    let parts = Parts::new(Sizes::SMALL);
    let (one, two) = (
        serve(parts.packed_shard(1, 2)),
        serve(parts.packed_shard(2, 2)),
    );
    let proxy = Proxy::start(one.local_addr());
    let addrs = format!("{},{}", proxy.addr(), two.local_addr());
    let tier = patient()
        .connect(&addrs, arena_for(&parts.records, 8))
        .unwrap();
    let streamer = StreamerBuilder::new().start(tier).unwrap();
    proxy.hold_after(0);
    let stuck = streamer
        .submit(&[Key::new(1, 0)], Class::Demand, SLACK)
        .unwrap();
    wait_until("the catalogue is asked for", || proxy.is_holding());
    let began = Instant::now();
    for layer in [0, 2] {
        assert_right(
            &streamer.lease_many(layer, &[5], SLACK).unwrap(),
            &parts.records,
        );
    }
    assert!(!stuck.is_done() && began.elapsed() < SLACK / 2);
    proxy.resume();
    assert_right(&stuck.all(Instant::now() + SLACK).unwrap(), &parts.records);
}

#[test]
fn slot_behind_a_fence_is_not_reused_before_it_fires() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 1);
    let switch = Switch::default();
    for lease in streamer.lease_many(0, &[0], SLACK).unwrap() {
        lease.release_after(Box::new(switch.clone()));
    }
    // It is still in memory, and others may read it.
    assert_right(&streamer.lease_many(0, &[0], SLACK).unwrap(), &rig.records);
    assert_eq!(streamer.stats().fetched, 1);
    let mut ticket = streamer
        .submit(&[Key::new(0, 1)], Class::Demand, SLACK)
        .unwrap();
    let late = ticket.next(Instant::now() + Duration::from_millis(50));
    assert!(matches!(late, Some(Err(TierError::NotYet { .. }))));
    switch.fire();
    assert_right(
        &[ticket.next(Instant::now() + SLACK).unwrap().unwrap()],
        &rig.records,
    );
}

#[test]
fn record_without_a_fence_goes_before_one_with() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 2);
    for lease in streamer.lease_many(0, &[0], SLACK).unwrap() {
        lease.release_after(Box::new(Switch::default()));
    }
    drop(streamer.lease_many(0, &[1], SLACK).unwrap());
    drop(streamer.lease_many(0, &[2], SLACK).unwrap());
    assert!(is_resident(&streamer, Key::new(0, 0)) && !is_resident(&streamer, Key::new(0, 1)));
}

#[test]
fn fence_that_never_fires_costs_its_slot_and_nothing_hangs() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 2);
    for lease in streamer.lease_many(0, &[0], SLACK).unwrap() {
        lease.release_after(Box::new(Switch::default()));
    }
    // Both slots are needed: the fenced record is given up, its slot never comes back.
    let short = Duration::from_millis(200);
    let error = streamer.lease_many(1, &[0, 1], short).unwrap_err();
    assert!(error.is_retryable(), "{error}");
    for expert in 0..8 {
        assert_right(
            &streamer.lease_many(2, &[expert], SLACK).unwrap(),
            &rig.records,
        );
    }
    assert_eq!(streamer.stats().slots_out, 1);
    wait_until("it is counted as lost", || {
        streamer.stats().slots_stuck == 1
    });
    let began = Instant::now();
    drop(streamer);
    assert!(began.elapsed() < SLACK);
}

#[test]
fn descriptor_is_readable_when_something_arrived() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 2);
    let readable = |time: i64| {
        let mut fds = [PollFd::new(&streamer, PollFlags::IN)];
        let time = rustix::event::Timespec {
            tv_sec: time,
            tv_nsec: 0,
        };
        poll(&mut fds, Some(&time)).unwrap() == 1
    };
    assert!(!readable(0));
    let mut ticket = streamer
        .submit(&[Key::new(0, 1)], Class::Demand, SLACK)
        .unwrap();
    assert!(readable(SLACK.as_secs() as i64));
    streamer.clear_readable();
    assert!(ticket.next(Instant::now() + SLACK).unwrap().is_ok());
    assert!(!readable(0));
    // A hit arrives, too; and so does an error.
    let ticket = streamer
        .submit(&[Key::new(0, 1)], Class::Demand, SLACK)
        .unwrap();
    assert!(readable(SLACK.as_secs() as i64) && ticket.is_done());
    streamer.clear_readable();
    let _ticket = streamer
        .submit(&[Key::new(0, 77)], Class::Demand, SLACK)
        .unwrap();
    assert!(readable(SLACK.as_secs() as i64));
    let _ = streamer.as_fd();
}

#[test]
fn table_tells_where_the_leaves_are_and_never_moves() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 4);
    assert!(streamer.table(1).is_none(), "nothing is known of it yet");
    let lease = streamer.lease_many(1, &[3], SLACK).unwrap().remove(0);
    let table = streamer.table(1).unwrap();
    let (slots, hosts) = (table.slots().as_ptr(), table.host_addresses().as_ptr());
    assert_eq!((table.experts(), table.leaves()), (8, 3));
    for leaf in 0..3 {
        let (_, bytes) = lease.leaf(leaf).unwrap();
        let address = table.host_addresses()[leaf * 8 + 3].load(Ordering::Relaxed);
        assert_eq!(address, bytes.as_ptr() as u64);
        assert_eq!(
            table.device_addresses()[leaf * 8 + 3].load(Ordering::Relaxed),
            0
        );
    }
    assert_eq!(
        table.slots()[3].load(Ordering::Acquire),
        lease.slot().slot as i32
    );
    assert_eq!(table.slots()[4].load(Ordering::Acquire), -1);
    drop(lease);
    for expert in [4, 5, 6, 7] {
        drop(streamer.lease_many(1, &[expert], SLACK).unwrap());
    }
    let table = streamer.table(1).unwrap();
    assert_eq!(
        (slots, hosts),
        (table.slots().as_ptr(), table.host_addresses().as_ptr())
    );
    assert_eq!(
        table.slots()[3].load(Ordering::Acquire),
        -1,
        "it was given up"
    );
    assert_eq!(table.host_addresses()[3].load(Ordering::Relaxed), 0);
}

#[test]
fn records_of_another_model_are_refused_while_those_in_memory_stay() {
    let (old, new) = (Model::bf16(Sizes::SMALL), Model::bf16(Sizes::SMALL.seed(2)));
    let records = old.records();
    let peer = serve(old.open());
    let tier = patient()
        .connect(&peer.local_addr().to_string(), arena_for(&records, 4))
        .unwrap();
    let streamer = StreamerBuilder::new().start(tier).unwrap();
    let held = streamer.lease_many(0, &[0, 1], SLACK).unwrap();
    peer.reload(new.open()).expect("a reload");
    wait_until("the new content is noticed", || {
        let missing = streamer.lease_many(0, &[2], SLACK);
        match missing {
            // Until it is noticed, it may be that nothing serves the old content.
            Err(TierError::ContentChanged { .. }) => true,
            Err(_) => false,
            Ok(leases) => panic!("{:?} was leased", leases[0].key()),
        }
    });
    assert_right(&held, &records);
    assert_right(&streamer.lease_many(0, &[1, 0], SLACK).unwrap(), &records);
    peer.reload(old.open()).expect("a reload");
    wait_until("the old content is back", || {
        let leases = streamer.lease_many(0, &[2], SLACK);
        leases.is_ok_and(|leases| {
            assert_right(&leases, &records);
            true
        })
    });
}

#[test]
fn shut_down_ends_what_is_under_way_and_leaves_leases_alone() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 2);
    let held = streamer.lease_many(0, &[0, 1], SLACK).unwrap();
    let mut ticket = streamer
        .submit(&[Key::new(0, 2)], Class::Demand, SLACK)
        .unwrap();
    drop(streamer);
    assert!(matches!(
        ticket.next(Instant::now() + SLACK),
        Some(Err(TierError::ShutDown))
    ));
    assert_right(&held, &rig.records);
}

#[test]
fn arena_that_does_not_fit_is_refused() {
    let rig = Rig::new(Backend::Posix);
    let small = ForeignMemory::heap(4 * 4096).unwrap();
    let arena = ArenaBuilder::new()
        .slab(4, 4096)
        .foreign(small)
        .build()
        .unwrap();
    let tier = rig.connect(patient(), Arc::new(arena)).unwrap();
    let error = StreamerBuilder::new().start(tier).unwrap_err();
    assert!(error.to_string().contains("317184 bytes"), "{error}");
    let tier = rig.tier(4);
    let error = StreamerBuilder::new()
        .stream_slabs(1)
        .start(tier)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("at least one must be left for the pool"),
        "{error}"
    );
}

#[test]
fn segmented_policy_keeps_what_was_used_twice() {
    let rig = Rig::new(Backend::Posix);
    let tier = rig.tier(5);
    let streamer = StreamerBuilder::new()
        .eviction(Eviction::SEGMENTED)
        .start(tier)
        .unwrap();
    for _ in 0..2 {
        drop(streamer.lease_many(0, &[0, 1], SLACK).unwrap());
    }
    // A scan goes by.
    for expert in 0..8 {
        drop(streamer.lease_many(1, &[expert], SLACK).unwrap());
    }
    assert!(is_resident(&streamer, Key::new(0, 0)) && is_resident(&streamer, Key::new(0, 1)));
}

#[test]
fn threads_lease_the_same_and_others_at_once() {
    let rig = Rig::new(Backend::RdmaPacked);
    let streamer = streamer(&rig, 9);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (streamer, records) = (&streamer, &rig.records);
            scope.spawn(move || {
                for round in 0..60u32 {
                    let layer = (round + thread / 2) % 3;
                    let experts = [round % 8, (round * 3 + thread) % 8];
                    let leases = streamer.lease_many(layer, &experts, SLACK).unwrap();
                    assert_right(&leases, records);
                }
            });
        }
    });
    assert_eq!(streamer.stats().under_way, 0);
    assert_eq!(unsettled(streamer.arena()), 0);
}

#[test]
fn builder_defaults_connect_and_stream() {
    let rig = Rig::new(Backend::RdmaInPlace);
    let addr = rig.addr().unwrap().to_string();
    let tier = TierBuilder::new().connect(&addr, rig.arena(6)).unwrap();
    let streamer = StreamerBuilder::new().start(tier).unwrap();
    assert_right(
        &streamer.lease_many(1, &[1, 2], SLACK).unwrap(),
        &rig.records,
    );
    assert_eq!(streamer.tier().kind(), expert_tier::TierKind::Rdma);
}
