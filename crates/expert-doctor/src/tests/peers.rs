//! The other end, as it describes itself.

use atlas_rdma::attributes::Mtu;
use atlas_rdma::choose::{Endpoint, RailChoice, Wanted, choose_rails};
use expert_store::info::{StoreInfo, StoreKind};
use expert_store::{Container, StackClass};
use expert_tier::error::Step;
use expert_tier::{PeerLook, PeerRail, TierError};
use expert_wire::verbs::{GID_ROCE_V2, LINK_ETHERNET, RailInfo};

use super::machine::{Card, card, ipv4};
use crate::Options;
use crate::finding::Level;
use crate::measure::{Speed, judge};
use crate::peer::{self, Pair};
use crate::port::Rails;

fn own(card: Card) -> RailChoice {
    let wanted = Wanted::Automatic {
        count: 1,
        preferred: Vec::new(),
    };
    let rails = choose_rails(&[card.port], wanted).expect("a rail");
    rails.into_iter().next().expect("one")
}

fn rail(subnet: u8) -> PeerRail {
    let mut gid = ipv4(subnet);
    gid.0[15] = 2;
    PeerRail {
        info: RailInfo {
            name: format!("far{subnet}"),
            link_layer: LINK_ETHERNET,
            gid_type: GID_ROCE_V2,
            mtu_code: 5,
            prefix_len: Some(24),
            lid: 0,
            reads_max: 16,
            qps_max: 2,
            link_mbit_per_s: 200_000,
            gid: gid.0,
            ip: None,
        },
        endpoint: Endpoint::ethernet(gid, Some(24)),
    }
}

#[test]
fn rails_are_paired_by_subnet_and_a_lost_one_is_named() {
    let rails = Rails {
        chosen: Vec::new(),
        usable: vec![own(card(0)), own(card(1))],
    };
    let look = PeerLook {
        version: 2,
        content_id: None,
        rails: vec![rail(9), rail(1)],
    };
    let mut out = Vec::new();
    let pairs = peer::pairing(&mut out, &Options::default(), "far:1", &rails, &look);
    let names: Vec<String> = pairs.iter().map(Pair::name).collect();
    assert_eq!(
        names,
        [
            "mlx5_1 port 1 and the peer's far1",
            "mlx5_0 port 1 and the peer's far9"
        ]
    );
    let levels: Vec<Level> = out.iter().map(|f| f.level).collect();
    assert_eq!(levels, [Level::Ok, Level::Warning], "{out:#?}");
    assert!(out[1].what.contains("mlx5_0"), "{out:#?}");
    assert!(
        out[1]
            .fix
            .as_deref()
            .is_some_and(|f| f.contains("ip addr add"))
    );
}

#[test]
fn rail_of_another_address_family_can_reach_nothing() {
    let rails = Rails {
        chosen: Vec::new(),
        usable: vec![own(card(0))],
    };
    let mut far = rail(0);
    far.endpoint = Endpoint::ethernet(
        atlas_rdma::attributes::Gid::of("2001:db8::1".parse().expect("an address")),
        Some(64),
    );
    let look = PeerLook {
        version: 2,
        content_id: None,
        rails: vec![far],
    };
    let mut out = Vec::new();
    let options = Options {
        verbs_required: true,
        ..Options::default()
    };
    assert!(peer::pairing(&mut out, &options, "far:1", &rails, &look).is_empty());
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].level, Level::Failure, "{out:#?}");
    assert!(out[0].what.contains("address family"), "{out:#?}");
}

#[test]
fn smaller_packets_of_either_end_are_named_with_the_end() {
    let mut near = card(0);
    near.port.attributes.active_mtu = Mtu::B1024;
    let (near, far) = (own(near), rail(0));
    let finding = peer::mtu(&Pair {
        own: &near,
        peer: &far,
    });
    assert_eq!(finding.level, Level::Warning);
    assert!(finding.what.contains("1024 and 4096"), "{finding:?}");
    let fix = finding.fix.expect("a fix");
    assert_eq!(fix, "ip link set dev eth0 mtu 9000    (here)");

    let near = own(card(0));
    let mut far = rail(0);
    far.info.mtu_code = 3;
    let pair = Pair {
        own: &near,
        peer: &far,
    };
    let fix = peer::mtu(&pair).fix.expect("a fix");
    assert!(fix.contains("on the peer"), "{fix}");
    far.info.mtu_code = 5;
    let pair = Pair {
        own: &near,
        peer: &far,
    };
    assert_eq!(peer::mtu(&pair).level, Level::Ok);
}

#[test]
fn peer_that_answers_one_read_at_a_time_is_named() {
    let near = own(card(0));
    let mut far = rail(0);
    far.info.reads_max = 1;
    let pair = Pair {
        own: &near,
        peer: &far,
    };
    let finding = peer::read_depth(&Options::default(), &pair);
    assert_eq!(finding.level, Level::Warning, "{finding:?}");
    far.info.reads_max = 16;
    let pair = Pair {
        own: &near,
        peer: &far,
    };
    let finding = peer::read_depth(&Options::default(), &pair);
    assert_eq!(finding.level, Level::Ok, "{finding:?}");
}

/// A link of 200 Gbit/s that carries 13.
#[test]
fn read_that_is_slow_for_its_link_is_named_and_soft_roce_is_not_judged() {
    let (near, far) = (own(card(0)), rail(0));
    let pair = Pair {
        own: &near,
        peer: &far,
    };
    let speed = |gbit: f64| Speed {
        bytes: (gbit * 1e9 / 8.0) as u64,
        seconds: 1.0,
    };
    let slow = judge(&pair, speed(13.0), false);
    assert_eq!(slow.level, Level::Warning);
    assert!(slow.what.contains("13.00 Gbit/s"), "{slow:?}");
    assert!(
        slow.what.contains("6 % of the link's 200 Gbit/s"),
        "{slow:?}"
    );
    let fix = slow.fix.expect("a fix");
    assert!(fix.starts_with("ib_read_bw -d mlx5_0 -i 1 -x 3"), "{fix}");
    assert_eq!(judge(&pair, speed(110.0), false).level, Level::Ok);
    assert_eq!(judge(&pair, speed(0.1), true).level, Level::Ok);
    let mut far = rail(0);
    far.info.link_mbit_per_s = 25_000;
    let pair = Pair {
        own: &near,
        peer: &far,
    };
    assert_eq!(judge(&pair, speed(13.0), false).level, Level::Ok);
}

#[test]
fn other_content_is_a_failure_with_both_ids() {
    let info = StoreInfo {
        kind: StoreKind::InPlace,
        stack: "model.layers".into(),
        class: StackClass::Trunk,
        container: Container::Safetensors,
        generation: 1,
        content_id: Some("1".repeat(32)),
        layout_id: "2".repeat(32),
        layers: Vec::new(),
        whole: None,
    };
    let mut options = Options::default();
    assert_eq!(peer::content(&options, "far:1", &info).level, Level::Ok);
    options.expect_content_id = Some(7);
    let finding = peer::content(&options, "far:1", &info);
    assert_eq!(finding.level, Level::Failure);
    for id in ["1".repeat(32), format!("{:032x}", 7)] {
        assert!(finding.what.contains(&id), "{finding:?}");
    }
    let unnamed = StoreInfo {
        content_id: None,
        ..info
    };
    options.expect_content_id = None;
    assert_eq!(
        peer::content(&options, "far:1", &unnamed).level,
        Level::Warning
    );
}

#[test]
fn peer_of_version_1_and_peer_that_does_not_answer_are_named() {
    let look = |version| PeerLook {
        version,
        content_id: None,
        rails: Vec::new(),
    };
    assert_eq!(peer::protocol("far:1", &look(1)).level, Level::Warning);
    assert_eq!(peer::protocol("far:1", &look(2)).level, Level::Ok);
    let silent = TierError::TimedOut {
        addr: "far:9909".into(),
        step: Step::Handshake,
        waited_ms: 5000,
    };
    let finding = peer::unreachable("far:9909", &silent);
    assert_eq!(finding.level, Level::Failure);
    let fix = finding.fix.expect("a fix");
    assert!(fix.starts_with("nc -zv far 9909"), "{fix}");
}
