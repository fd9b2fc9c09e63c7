//! What is left to be posted is cut, so that each lane of a rail carries a part of it.

use super::*;

fn two_lanes() -> Capabilities {
    Capabilities {
        lanes: 2,
        pieces: 4,
        ..caps()
    }
}

fn chunks(bench: &Bench) -> Vec<u64> {
    let posted = bench.posted[0].iter();
    posted.map(|r| r.bytes().div_ceil(CHUNK_BYTES)).collect()
}

fn config_1_mib() -> EngineConfig {
    EngineConfig {
        read_bytes: 4 * CHUNK_BYTES,
        window_bytes: 64 * CHUNK_BYTES,
        ..config()
    }
}

#[test]
fn small_request_is_cut_so_that_every_lane_has_a_part_of_it() {
    let mut bench = Bench::with_caps(vec![two_lanes()], config_1_mib(), 4 * CHUNK_BYTES - 7);
    bench.submit(&[0]);
    bench.post_all();
    assert_eq!(chunks(&bench), [1, 1, 1, 1]);
    bench.run_to_end();
    assert_right(&bench.finished(), &[0]);
}

#[test]
fn large_request_is_cut_at_its_end_alone() {
    let mut bench = Bench::with_caps(vec![two_lanes()], config_1_mib(), 4 * CHUNK_BYTES);
    // As much as the rail's window.
    bench.submit(&[0, 1, 2, 3]);
    bench.post_all();
    let chunks = chunks(&bench);
    assert_eq!(chunks[0], 4, "{chunks:?}");
    assert_eq!(chunks.iter().sum::<u64>(), 16, "{chunks:?}");
    assert_eq!(chunks[chunks.len() - 4..], [1, 1, 1, 1], "{chunks:?}");
    bench.run_to_end();
    assert_right(&bench.finished(), &[0, 1, 2, 3]);
}

#[test]
fn whole_records_are_never_cut_for_lanes() {
    let caps = Capabilities {
        whole_records: true,
        ..two_lanes()
    };
    let mut bench = Bench::with_caps(vec![caps], config_1_mib(), 3 * CHUNK_BYTES);
    bench.submit(&[0]);
    bench.post_all();
    assert_eq!(chunks(&bench), [3]);
    bench.run_to_end();
    assert_right(&bench.finished(), &[0]);
}
