//! Rails whose peers hold parts of one content.

use super::*;
use crate::coverage::{Coverage, Holding};

const LEFT: ContentTag = ContentTag {
    id: 100,
    instance: None,
};
const RIGHT: ContentTag = ContentTag {
    id: 101,
    instance: None,
};

fn part(experts: [u32; 2]) -> Holding {
    Holding {
        whole: Some(TAG),
        held: Some(Arc::new(Coverage::of_ranges([(0, vec![experts])]))),
    }
}

/// One rail per content, in this order.
fn bench(contents: &[ContentTag]) -> Bench {
    let mut bench = Bench::new(contents.len(), config(), MEDIUM);
    bench.engine.learn(bench.now, LEFT, part([0, 8]));
    bench.engine.learn(bench.now, RIGHT, part([8, 16]));
    for (rail, content) in contents.iter().enumerate() {
        bench.event(rail, RailEvent::Ready(*content));
    }
    bench
}

#[test]
fn each_part_is_read_where_it_is() {
    let mut bench = bench(&[LEFT, RIGHT]);
    let experts: Vec<u32> = (0..EXPERTS).collect();
    bench.submit(&experts);
    let mut posted = 0;
    loop {
        bench.post_all();
        for (rail, content, experts) in [(0, LEFT, 0..8), (1, RIGHT, 8..16)] {
            for read in &bench.posted[rail] {
                assert!(experts.contains(&read.key.expert), "{}", read.key);
                assert_eq!(read.content, content, "the rail's own name of it");
            }
            posted += bench.posted[rail].len();
        }
        let Some(rail) = (0..2).find(|&r| !bench.posted[r].is_empty()) else {
            break;
        };
        bench.land(rail, 0);
    }
    assert!(posted > 0);
    let finished = bench.finished();
    assert_right(&finished, &experts);
    assert_eq!(finished.records.len(), experts.len());
}

#[test]
fn replica_takes_over_what_was_posted_on_a_rail_that_failed() {
    let mut bench = bench(&[LEFT, RIGHT, TAG]);
    bench.submit(&[1, 2, 12, 13]);
    bench.post_all();
    bench.event(1, RailEvent::Down("cable".into()));
    for read in std::mem::take(&mut bench.posted[1]) {
        bench.complete(1, read, Err(ReadError::Flushed));
    }
    bench.run_to_end();
    let finished = bench.finished();
    assert_right(&finished, &[1, 2, 12, 13]);
    bench.assert_no_slot_leaked();
}

#[test]
fn what_one_replica_refuses_or_gets_wrong_is_read_from_another() {
    let bad = |got| {
        ReadError::Checksum(crate::rail::BadChunk {
            chunk: 0,
            got,
            want: 1,
        })
    };
    let policies = [Policy::HomeSteal, Policy::ExpertMod, Policy::Split];
    for (error, policy) in [
        ReadError::Refused("not here".into()),
        ReadError::WrongRecord("another".into()),
        bad(2),
    ]
    .into_iter()
    .flat_map(|error| policies.map(|policy| (error.clone(), policy)))
    {
        let mut config = config();
        config.policy = policy;
        let mut bench = Bench::new(2, config, MEDIUM);
        bench.event(0, RailEvent::Ready(TAG));
        bench.event(1, RailEvent::Ready(TAG));
        let experts = [0, 1, 2, 3, 4];
        bench.submit(&experts);
        let mut refused = 0;
        loop {
            bench.post_all();
            if let Some(read) = bench.posted[0].pop() {
                refused += 1;
                bench.complete(0, read, Err(error.clone()));
            } else if !bench.posted[1].is_empty() {
                bench.land(1, 0);
            } else {
                break;
            }
        }
        assert!(refused > 0);
        assert_right(&bench.finished(), &experts);
        bench.assert_no_slot_leaked();
    }
    // Where both do, the record fails.
    let mut bench = bench(&[TAG, TAG]);
    bench.submit(&[0]);
    for _ in 0..20 {
        bench.post_all();
        for rail in 0..2 {
            while let Some(read) = bench.posted[rail].pop() {
                bench.complete(rail, read, Err(ReadError::Refused("not here".into())));
            }
        }
    }
    let finished = bench.finished();
    assert!(matches!(finished.records[0], Err(Failure::Refused(_))));
    bench.assert_no_slot_leaked();
}

#[test]
fn less_preferred_rail_reads_just_what_the_preferred_one_refused() {
    let mut second = caps();
    second.rank = 1;
    let mut bench = Bench::with_caps(vec![caps(), second], config(), MEDIUM);
    bench.event(0, RailEvent::Ready(TAG));
    bench.event(1, RailEvent::Ready(TAG));
    let experts = [0, 1, 2, 3];
    bench.submit(&experts);
    loop {
        bench.post_all();
        assert!(bench.posted[1].iter().all(|r| r.key.expert == 2));
        if let Some(read) = bench.posted[0].pop() {
            let result = match read.key.expert {
                2 => Err(ReadError::Refused("not here".into())),
                _ => Ok(Landed::default()),
            };
            let mut read = read;
            write_right(&mut read);
            bench.complete(0, read, result);
        } else if !bench.posted[1].is_empty() {
            bench.land(1, 0);
        } else {
            break;
        }
    }
    assert_right(&bench.finished(), &experts);
    bench.assert_no_slot_leaked();
}

#[test]
fn record_without_a_holder_waits_for_one_until_its_deadline() {
    let mut bench = bench(&[LEFT, RIGHT]);
    bench.event(1, RailEvent::Down("cable".into()));
    bench.submit(&[3, 9]);
    bench.run_to_end();
    assert!(bench.engine.poll_finished().is_none(), "one record waits");
    bench.tick(Duration::from_secs(1));
    bench.engine.handle_quiesced(bench.now, RailId(1));
    bench.tick(Duration::from_millis(500));
    bench.event(1, RailEvent::Ready(RIGHT));
    bench.run_to_end();
    assert_right(&bench.finished(), &[3, 9]);

    bench.event(1, RailEvent::Down("cable".into()));
    bench.submit(&[4, 10]);
    bench.run_to_end();
    bench.tick(Duration::from_secs(3));
    let finished = bench.finished();
    assert!(finished.records[0].is_ok());
    assert!(matches!(finished.records[1], Err(Failure::Deadline(_))));
    bench.assert_no_slot_leaked();
}

#[test]
fn content_of_another_model_gets_no_reads() {
    let mut bench = bench(&[TAG, TAG]);
    let other = ContentTag {
        id: 55,
        instance: None,
    };
    bench.event(0, RailEvent::Ready(other));
    assert_eq!(
        bench.engine.content(),
        Some(TAG),
        "one rail still serves it"
    );
    let strange: Vec<_> = bench.engine.strange_contents().collect();
    assert_eq!(strange, [(RailId(0), other)]);
    bench.submit(&[0, 1, 2, 3]);
    bench.post_all();
    assert!(bench.posted[0].is_empty());
    bench.run_to_end();
    assert!(bench.finished().is_complete());
    // When the last rail has gone over to it, it is what there is.
    bench.event(1, RailEvent::Ready(other));
    assert_eq!(bench.engine.content(), Some(other));
    assert_eq!(bench.engine.strange_contents().count(), 0);
}

#[test]
fn less_preferred_rail_reads_only_what_the_preferred_ones_lack() {
    let mut second = caps();
    second.rank = 1;
    let mut bench = Bench::with_caps(vec![caps(), second], config(), MEDIUM);
    bench.engine.learn(bench.now, LEFT, part([0, 8]));
    bench.event(0, RailEvent::Ready(LEFT));
    let experts = [1, 9, 2, 10];
    bench.submit(&experts);
    bench.post_all();
    assert!(bench.posted[0].iter().all(|r| r.key.expert < 8));
    assert!(bench.posted[1].iter().all(|r| r.key.expert >= 8));
    bench.run_to_end();
    assert_right(&bench.finished(), &experts);
}
