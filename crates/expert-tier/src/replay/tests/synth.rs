use std::collections::HashSet;

use xxhash_rust::xxh3::xxh3_64;

use super::*;

fn rows_of(spec: &SynthTrace) -> Vec<Row> {
    spec.rows().expect("a sound spec").collect()
}

/// The text of a trace is a promise: a seed in a report means the same trace on every machine.
#[test]
fn seed_always_means_the_same_bytes() {
    let spec = SynthTrace {
        layers: 6,
        experts: 100,
        top_k: 8,
        steps: 50,
        seed: 42,
        zipf: 0.9,
        skew: 0.35,
        reuse: 0.25,
    };
    let mut text = Vec::new();
    write_header(&mut text, &spec.header()).expect("memory");
    for row in rows_of(&spec) {
        write_row(&mut text, &row).expect("memory");
    }
    assert_eq!(format!("{:016x}", xxh3_64(&text)), "59e4297211f2c3c8");
}

#[test]
fn rows_are_what_the_spec_says() {
    let spec = small_spec();
    let rows = rows_of(&spec);
    assert_eq!(rows.len(), 180);
    for (at, row) in rows.iter().enumerate() {
        assert_eq!((row.step, row.layer), (at as u64 / 3, at as u32 % 3));
        let distinct: HashSet<u32> = row.experts.iter().copied().collect();
        assert_eq!(distinct.len(), 4, "{row:?}");
        assert!(distinct.iter().all(|&e| e < 16), "{row:?}");
    }
    let trace = trace_of(&rows);
    assert_eq!((trace.steps(), trace.widest()), (60, 4));
}

#[test]
fn fewer_steps_or_layers_are_a_part_of_more() {
    let spec = small_spec();
    let all = rows_of(&spec);
    let fewer = SynthTrace {
        steps: 20,
        ..spec.clone()
    };
    assert_eq!(rows_of(&fewer), all[..60]);
    let flat = SynthTrace { layers: 2, ..spec };
    let of_two: Vec<Row> = all.into_iter().filter(|row| row.layer < 2).collect();
    assert_eq!(rows_of(&flat), of_two);
}

#[test]
fn reuse_is_the_share_that_stays() {
    let base = SynthTrace {
        layers: 1,
        experts: 256,
        steps: 2000,
        zipf: 0.0,
        skew: 0.0,
        ..small_spec()
    };
    for reuse in [0.0, 0.5, 1.0] {
        let rows = rows_of(&SynthTrace {
            reuse,
            ..base.clone()
        });
        let kept: usize = rows
            .windows(2)
            .map(|pair| {
                pair[1]
                    .experts
                    .iter()
                    .filter(|e| pair[0].experts.contains(e))
                    .count()
            })
            .sum();
        let share = kept as f64 / (4.0 * (rows.len() - 1) as f64);
        // A redraw may meet one that was not kept: 4 of 256.
        let want = reuse + (1.0 - reuse) * 4.0 / 256.0;
        assert!((share - want).abs() < 0.02, "{reuse}: {share}");
    }
}

#[test]
fn exponents_spread_popularity_and_layers_differ() {
    let top_share = |zipf: f64, layer: u32| {
        let spec = SynthTrace {
            layers: 2,
            experts: 64,
            steps: 4000,
            zipf,
            skew: 0.0,
            reuse: 0.0,
            ..small_spec()
        };
        let mut counts = vec![0u32; 64];
        for row in rows_of(&spec).iter().filter(|row| row.layer == layer) {
            row.experts.iter().for_each(|&e| counts[e as usize] += 1);
        }
        let best = (0..64).max_by_key(|&e| counts[e]).expect("64");
        (f64::from(counts[best]) / 4000.0, best)
    };
    let (even, _) = top_share(0.0, 0);
    let (steep, first) = top_share(1.5, 0);
    // Four of 64 by chance, and nearly always.
    assert!((even - 4.0 / 64.0).abs() < 0.02, "{even}");
    assert!(steep > 0.8, "{steep}");
    assert_ne!(
        first,
        top_share(1.5, 1).1,
        "layers have favourites of their own"
    );
}

#[test]
fn every_expert_may_be_needed_at_once() {
    let spec = SynthTrace {
        top_k: 16,
        zipf: 4.0,
        skew: 0.0,
        ..small_spec()
    };
    assert!(rows_of(&spec).iter().all(|row| row.experts.len() == 16));
}

#[test]
fn numbers_that_make_no_trace_are_refused() {
    let spec = small_spec();
    let cases = [
        (
            SynthTrace {
                layers: 0,
                ..spec.clone()
            },
            "0 layers: it is 1 to 4096",
        ),
        (
            SynthTrace {
                experts: 65_536,
                ..spec.clone()
            },
            "65536 experts",
        ),
        (
            SynthTrace {
                top_k: 17,
                ..spec.clone()
            },
            "17 experts per token: it is 1 to 16",
        ),
        (
            SynthTrace {
                steps: 0,
                ..spec.clone()
            },
            "0 steps",
        ),
        (
            SynthTrace {
                zipf: f64::NAN,
                ..spec.clone()
            },
            "zipf NaN",
        ),
        (
            SynthTrace {
                skew: -0.1,
                ..spec.clone()
            },
            "skew -0.1: it is a number from 0 to 4",
        ),
        (
            SynthTrace {
                reuse: 1.01,
                ..spec.clone()
            },
            "reuse 1.01: it is a number from 0 to 1",
        ),
        (
            SynthTrace {
                steps: u32::MAX,
                ..spec.clone()
            },
            "rows: a trace has at most",
        ),
        (
            SynthTrace {
                experts: 65_000,
                top_k: 8192,
                steps: 5000,
                ..spec
            },
            "expert uses: a trace has at most",
        ),
    ];
    for (spec, want) in cases {
        let error = match spec.rows() {
            Ok(_) => panic!("accepted: {spec:?}"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(want), "{spec:?}: {error}");
    }
}
