//! Whole layers through the streamer: in waves, and through slabs set aside for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{Model, Records, Sizes};
use atlas_expert_tests::net::rig::{Backend, Rig, arena_for, largest, patient, serve};
use atlas_expert_tests::net::streams::{assert_right, is_resident, streamer};
use atlas_expert_tests::net::{SLACK, wait_until};
use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory};
use expert_store::Key;
use expert_tier::{StreamerBuilder, TierError};

fn layer_of_256() -> (Model, Records) {
    let model = Model::bf16(Sizes {
        layers: 1,
        experts: 256,
        ..Sizes::TINY
    });
    let records = model.records();
    (model, records)
}

#[test]
fn layer_of_256_goes_through_24_slots_in_waves() {
    let (model, records) = layer_of_256();
    let peer = serve(model.open());
    let arena = arena_for(&records, 24);
    let tier = patient()
        .connect(&peer.local_addr().to_string(), arena)
        .unwrap();
    let streamer = StreamerBuilder::new().start(tier).unwrap();
    let experts: Vec<u32> = (0..256).rev().collect();
    let mut seen = Vec::new();
    let mut overlapped = 0;
    for wave in streamer.waves(0, &experts, 24, SLACK) {
        let wave = wave.unwrap();
        assert!(wave.len() <= 12);
        // While these are read, the next ones arrive in the other half.
        let next = seen.len() as u32 + wave.len() as u32;
        if next < 256 {
            wait_until("the next wave arrives meanwhile", || {
                is_resident(&streamer, Key::new(0, 255 - next))
            });
            overlapped += 1;
        }
        assert_right(&wave, &records);
        seen.extend(wave.iter().map(|l| l.key().expert));
    }
    assert_eq!(seen, experts);
    assert_eq!(overlapped, 21, "256 in twelves, but for the last");
    assert_eq!(streamer.stats().fetched, 256);
}

#[test]
fn wave_keeps_to_its_slots_and_leaves_the_rest_of_the_cache_alone() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 12);
    drop(
        streamer
            .lease_many(0, &[0, 1, 2, 3, 4, 5, 6, 7], SLACK)
            .unwrap(),
    );
    for layer in [1, 2] {
        for wave in streamer.waves(layer, &[0, 1, 2, 3, 4, 5, 6, 7], 4, SLACK) {
            assert_right(&wave.unwrap(), &rig.records);
        }
    }
    assert!((0..8).all(|e| is_resident(&streamer, Key::new(0, e))));
}

#[test]
fn wave_through_one_slot_ends() {
    let rig = Rig::new(Backend::Posix);
    let streamer = streamer(&rig, 1);
    let waves: Vec<u32> = streamer
        .waves(0, &[3, 1, 4], 1, SLACK)
        .map(|wave| wave.unwrap()[0].key().expert)
        .collect();
    assert_eq!(waves, [3, 1, 4]);
}

fn two_slabs(records: &Records, slots: u32, slabs: u32) -> Arc<ExpertArena> {
    let bytes = largest(records).next_multiple_of(4096);
    let memory = ForeignMemory::heap(bytes * (slots * slabs) as usize).unwrap();
    let mut builder = ArenaBuilder::new();
    for _ in 0..slabs {
        builder = builder.slab(slots, bytes);
    }
    Arc::new(builder.foreign(memory).build().unwrap())
}

#[test]
fn layers_stream_through_their_slabs_beside_the_pool() {
    let rig = Rig::new(Backend::RdmaInPlace);
    let arena = two_slabs(&rig.records, 8, 3);
    let tier = rig.connect(patient(), arena).unwrap();
    let streamer = StreamerBuilder::new().stream_slabs(2).start(tier).unwrap();
    drop(streamer.lease_many(0, &[2], SLACK).unwrap());
    let experts: Vec<u32> = (0..8).collect();
    let all = |ticket: expert_tier::Ticket| ticket.all(Instant::now() + SLACK).unwrap();
    for round in 0..2 {
        let mut next = Some(streamer.stream_layer(0, &experts, SLACK).unwrap());
        for layer in 0..3 {
            let leases = all(next.take().unwrap());
            if layer < 2 {
                next = Some(streamer.stream_layer(layer + 1, &experts, SLACK).unwrap());
            }
            assert_right(&leases, &rig.records);
            for (i, lease) in leases.iter().enumerate() {
                let slot = lease.slot();
                match (layer, lease.key().expert) {
                    (0, 2) => assert_eq!(slot.slab, 0, "the pool's"),
                    _ => assert_eq!((slot.slab, slot.slot), (1 + layer % 2, i as u32)),
                }
            }
        }
        assert!(is_resident(&streamer, Key::new(0, 2)), "round {round}");
    }
    assert!(matches!(
        streamer.stream_layer(0, &[0; 9], SLACK),
        Err(TierError::TooManyAtOnce { asked: 9, slots: 8 })
    ));
}

#[test]
fn layer_waits_for_its_slab_until_the_one_before_is_released() {
    let rig = Rig::new(Backend::Posix);
    let arena = two_slabs(&rig.records, 8, 2);
    let tier = rig.connect(patient(), arena).unwrap();
    let streamer = StreamerBuilder::new().stream_slabs(1).start(tier).unwrap();
    let first = streamer.stream_layer(0, &[0, 1], SLACK).unwrap();
    let first = first.all(Instant::now() + SLACK).unwrap();
    let mut second = streamer.stream_layer(1, &[4, 5], SLACK).unwrap();
    let late = second.next(Instant::now() + Duration::from_millis(30));
    assert!(matches!(late, Some(Err(TierError::NotYet { .. }))));
    // A demand of the pool is not held up by it.
    assert_right(&streamer.lease_many(2, &[1], SLACK).unwrap(), &rig.records);
    assert_right(&first, &rig.records);
    drop(first);
    assert_right(&second.all(Instant::now() + SLACK).unwrap(), &rig.records);
}
