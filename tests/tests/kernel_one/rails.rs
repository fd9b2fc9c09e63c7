//! One, two and four rails, named by the environment: what each of them carries.

use std::collections::BTreeMap;

use atlas_expert_tests::guest;
use atlas_expert_tests::net::process::PeerProcess;
use expert_peer::Source;
use serde_json::Value;

use super::programs::{
    Shape, digest, fetch_with, folder, number, packets, posix_digest, rail_bytes,
};

const MTU: u64 = 4096;

/// A model on all rails of the guest.
struct Rig {
    peer: PeerProcess,
    digest: Value,
    /// Bytes of all records of each expert.
    of_expert: BTreeMap<u32, u64>,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let folder = folder();
        let path = Shape::UNEVEN.in_place(folder.path());
        let store = atlas_expert_tests::net::model::open(&path);
        let mut of_expert = BTreeMap::new();
        store.for_each_record(&mut |key, bytes| *of_expert.entry(key.expert).or_default() += bytes);
        let peer = PeerProcess::start(&path, &["--rdma", "require"]);
        let rails = peer.ready["rails"].as_array().expect("rails").len();
        assert_eq!(rails, guest::rails(), "{}", peer.ready);
        Self {
            peer,
            digest: posix_digest(&path),
            of_expert,
            _folder: folder,
        }
    }

    /// Fetches all of it and checks that the devices carried what the report says of them.
    fn fetch(&self, devices: &[usize], flags: &[&str], env: &[(&str, &str)]) -> Vec<u64> {
        let before: Vec<u64> = (0..guest::rails()).map(packets).collect();
        let report = fetch_with(&self.peer, flags, env);
        assert_eq!(digest(&report), self.digest);
        let bytes = rail_bytes(&report);
        let names: Vec<String> = devices.iter().map(|d| format!("verbs:rxe{d}")).collect();
        let rails = report["rails"].as_array().expect("rails");
        let told: Vec<&str> = rails.iter().filter_map(|r| r["name"].as_str()).collect();
        assert_eq!(told, names, "{report}");
        for (rail, before) in before.into_iter().enumerate() {
            let count = packets(rail) - before;
            match devices.iter().position(|d| *d == rail) {
                Some(i) => {
                    assert!(
                        count >= bytes[i] / MTU,
                        "rxe{rail}: {} bytes in {count} packets",
                        bytes[i]
                    );
                    guest::figure(
                        &format!("{}_rails_rxe{rail}_bytes", devices.len()),
                        bytes[i],
                    );
                    guest::figure(&format!("{}_rails_rxe{rail}_packets", devices.len()), count);
                }
                None => assert!(count < 100, "rxe{rail} is no rail: {count} packets"),
            }
        }
        assert_eq!(number(&report["bytes"]), bytes.iter().sum::<u64>());
        bytes
    }

    fn by_remainder(&self, rails: u32) -> Vec<u64> {
        (0..rails)
            .map(|rail| {
                let own = self.of_expert.iter().filter(|(e, _)| *e % rails == rail);
                own.map(|(_, bytes)| bytes).sum()
            })
            .collect()
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_one_two_and_four_rails_carry_each_expert_by_its_remainder() {
    const MODULO: [&str; 2] = ["--policy", "expert-mod"];
    let rig = Rig::new();
    let single = [("ATLAS_EXPERT_RDMA_DEV", "rxe2")];
    assert_eq!(rig.fetch(&[2], &MODULO, &single), rig.by_remainder(1));
    let dual = [
        ("ATLAS_EXPERT_DUAL_RAIL", "1"),
        ("ATLAS_EXPERT_RDMA_DEV", "rxe1"),
        ("ATLAS_EXPERT_RAIL2_DEV", "rxe0"),
    ];
    assert_eq!(rig.fetch(&[1, 0], &MODULO, &dual), rig.by_remainder(2));
    let four = [("ATLAS_EXPERT_RAILS", "rxe0,rxe1,rxe2,rxe3")];
    let bytes = rig.fetch(&[0, 1, 2, 3], &MODULO, &four);
    assert_eq!(bytes, rig.by_remainder(4));
}

/// `split` follows the rates that it measures, and the rails of one emulated machine are as fast as its scheduler makes
/// them: how far off an even spread they were is noted, and that each one had its part.
#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_split_spreads_each_record_over_all_its_rails() {
    let rig = Rig::new();
    for (devices, names, read_kib) in [
        (vec![0, 1], "rxe0,rxe1", "512"),
        (vec![0, 1, 2, 3], "rxe0,rxe1,rxe2,rxe3", "256"),
    ] {
        let env = [("ATLAS_EXPERT_RAILS", names)];
        let flags = [
            "--policy",
            "split",
            "--read-kib",
            read_kib,
            "--batch",
            "1",
            "--depth",
            "1",
        ];
        let bytes = rig.fetch(&devices, &flags, &env);
        let fair = bytes.iter().sum::<u64>() as f64 / bytes.len() as f64;
        let worst = bytes
            .iter()
            .map(|b| (*b as f64 / fair - 1.0).abs())
            .fold(0.0, f64::max);
        guest::figure(
            &format!("split_{}_rails_off_by_goal_0.05", devices.len()),
            worst,
        );
        assert!(bytes.iter().all(|b| *b as f64 > fair / 4.0), "{bytes:?}");
    }
}
