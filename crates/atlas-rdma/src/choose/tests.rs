//! Tables and fabrics that people met, and properties of the pairing.

use super::*;
use crate::attributes::{Gid, GidEntry, GidType, LinkLayer, Mtu, PortAttributes, PortState};
use proptest::prelude::*;
use std::net::IpAddr;

fn gid(text: &str) -> Gid {
    Gid::of(text.parse::<IpAddr>().unwrap())
}

fn entry(index: u32, address: &str, kind: GidType) -> GidEntry {
    GidEntry {
        index,
        gid: gid(address),
        kind,
        netdev: Some("eth0".to_owned()),
        prefix_len: None,
    }
}

fn v1(index: u32, address: &str) -> GidEntry {
    entry(index, address, GidType::RoceV1)
}

fn v2(index: u32, address: &str) -> GidEntry {
    entry(index, address, GidType::RoceV2)
}

fn foreign(mut entry: GidEntry) -> GidEntry {
    entry.netdev = None;
    entry
}

fn ethernet(device: &str, port: u8, gids: Vec<GidEntry>) -> PortView {
    PortView {
        device: device.to_owned(),
        port,
        attributes: PortAttributes {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            active_mtu: Mtu::B4096,
            max_message_bytes: 1 << 31,
            gid_table_len: 256,
            link_mbit_per_s: 100_000,
        },
        gids,
    }
}

fn infiniband(device: &str, lid: u16, address: &str) -> PortView {
    let mut view = ethernet(device, 1, vec![]);
    view.attributes.link_layer = LinkLayer::InfiniBand;
    view.attributes.lid = lid;
    view.gids = vec![foreign(entry(0, address, GidType::InfiniBand))];
    view
}

fn down(mut view: PortView) -> PortView {
    view.attributes.state = PortState::Down;
    view
}

fn speed(mut view: PortView, link_mbit_per_s: u64) -> PortView {
    view.attributes.link_mbit_per_s = link_mbit_per_s;
    view
}

/// Index chosen and the reason given for each skipped one.
fn chosen(gids: Vec<GidEntry>) -> (u32, Vec<(u32, &'static str)>) {
    let choice = choose_gid(&ethernet("dev0", 1, gids), None).unwrap();
    let skipped = choice.skipped.iter().map(|s| (s.entry.index, s.reason));
    (choice.entry.index, skipped.collect())
}

fn automatic(views: &[PortView], count: usize, preferred: &[&str]) -> Vec<String> {
    let preferred = preferred.iter().map(|name| (*name).to_owned()).collect();
    let rails = choose_rails(views, Wanted::Automatic { count, preferred }).unwrap();
    rails
        .iter()
        .map(|rail| format!("{}:{}", rail.device, rail.port))
        .collect()
}

fn explicit(views: &[PortView], list: &str) -> Result<Vec<RailChoice>, ChooseError> {
    choose_rails(views, Wanted::Explicit(parse_rails(list).unwrap()))
}

// What users write.

#[test]
fn every_form_of_a_rail_is_read_and_shown_again() {
    let spec = |device: &str, port, gid_index| RailSpec {
        device: device.to_owned(),
        port,
        gid_index,
    };
    for (text, expected) in [
        ("rxe0", spec("rxe0", None, None)),
        ("mlx5_0:1", spec("mlx5_0", Some(1), None)),
        (
            "roceP2p1s0f1:255:0",
            spec("roceP2p1s0f1", Some(255), Some(0)),
        ),
        ("rxe0::3", spec("rxe0", None, Some(3))),
    ] {
        let parsed: RailSpec = text.parse().unwrap();
        assert_eq!(parsed, expected);
        assert_eq!(parsed.to_string(), text);
    }
}

#[test]
fn refused_rail_names_the_part_that_is_wrong() {
    for (text, part) in [
        ("", "no device"),
        (":1", "no device"),
        ("a b", "device 'a b'"),
        ("../x", "device '../x'"),
        ("rxe0:", "port ''"),
        ("rxe0:0", "port '0'"),
        ("rxe0:256", "port '256'"),
        ("rxe0:+1", "port '+1'"),
        ("rxe0:one", "port 'one'"),
        ("rxe0:1:", "GID index ''"),
        ("rxe0:1:-3", "GID index '-3'"),
        ("rxe0:1:4294967296", "GID index '4294967296'"),
        ("rxe0:1:3:4", "4 parts"),
    ] {
        let error = text.parse::<RailSpec>().unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn list_of_rails_keeps_its_order_and_refuses_repeats_gaps_and_too_many() {
    let rails = parse_rails("b:1, a:2:3,a").unwrap();
    let shown: Vec<String> = rails.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["b:1", "a:2:3", "a"]);
    let error = parse_rails("a:1:2,b,a:1:3").unwrap_err().to_string();
    assert!(error.contains("'a:1:2' and 'a:1:3'"), "{error}");
    let error = parse_rails("a,,b").unwrap_err().to_string();
    assert!(error.contains("rail 2 of 'a,,b'"), "{error}");
    assert!(parse_rails("").is_err());
    assert_eq!(parse_rails("a,b,c,d,e,f,g,h").unwrap().len(), RAILS_MAX);
    let error = parse_rails("a,b,c,d,e,f,g,h,i").unwrap_err();
    assert_eq!(error, RailSpecError::TooMany { count: 9 });
}

// Which GID (references: nvidia/nccl#769 and its kind).

#[test]
fn roce_v2_with_ipv4_is_taken_from_a_mixed_table_and_each_skip_is_explained() {
    let (index, skipped) = chosen(vec![
        v1(0, "fe80::1"),
        v2(1, "fe80::1"),
        v1(2, "192.168.1.5"),
        v2(3, "192.168.1.5"),
    ]);
    assert_eq!(index, 3);
    assert_eq!(skipped.len(), 3);
    assert!(skipped[0].1.contains("RoCE v1"), "{skipped:?}");
    assert!(skipped[1].1.contains("link-local"), "{skipped:?}");
    assert!(skipped[2].1.contains("RoCE v1"), "{skipped:?}");
}

#[test]
fn private_network_classes_count_as_much_as_any_other() {
    for address in ["10.1.2.3", "172.17.0.2", "100.64.0.1", "8.8.8.8"] {
        let (index, _) = chosen(vec![v2(1, "fe80::1"), v2(4, address)]);
        assert_eq!(index, 4, "{address}");
    }
    // Two of them: the lower index, not the nicer class.
    assert_eq!(chosen(vec![v2(2, "10.0.0.1"), v2(3, "8.8.8.8")]).0, 2);
}

#[test]
fn ipv6_only_fabric_works_with_global_and_unique_local_addresses() {
    assert_eq!(chosen(vec![v2(1, "fe80::1"), v2(2, "2001:db8::5")]).0, 2);
    assert_eq!(chosen(vec![v2(1, "fe80::1"), v2(2, "fd00::5")]).0, 2);
    // An all-IPv6 table whose index 0 is link-local.
    let (index, _) = chosen(vec![
        v1(0, "fe80::1"),
        v2(1, "fe80::1"),
        v1(2, "fd01::7"),
        v2(3, "fd01::7"),
    ]);
    assert_eq!(index, 3);
    // Beside IPv4 of the same rank it is second.
    let (index, skipped) = chosen(vec![v2(2, "2001:db8::5"), v2(3, "10.0.0.1")]);
    assert_eq!(index, 3);
    assert!(skipped[0].1.contains("IPv6"), "{skipped:?}");
}

#[test]
fn link_local_is_used_where_nothing_else_is_there() {
    assert_eq!(chosen(vec![v1(0, "fe80::1"), v2(1, "fe80::1")]).0, 1);
    assert_eq!(chosen(vec![v1(0, "169.254.1.1")]).0, 0);
}

#[test]
fn roce_v2_goes_before_v1_even_when_v1_comes_first() {
    let (index, _) = chosen(vec![v1(0, "10.0.0.1"), v2(1, "10.0.0.1")]);
    assert_eq!(index, 1);
}

#[test]
fn holes_in_the_table_do_not_matter() {
    // Slots 0 to 4 are empty, and one empty entry slipped in.
    let (index, skipped) = chosen(vec![v2(5, "::"), v2(9, "10.0.0.9")]);
    assert_eq!(index, 9);
    assert_eq!(skipped, [(5, "empty")]);
}

#[test]
fn entries_of_another_network_namespace_are_skipped() {
    let host = foreign(v2(3, "192.168.1.5"));
    let (index, skipped) = chosen(vec![host.clone(), v2(5, "fe80::2")]);
    assert_eq!(index, 5);
    assert!(skipped[0].1.contains("namespace"), "{skipped:?}");

    let view = ethernet("dev0", 1, vec![host.clone()]);
    let error = choose_gid(&view, None).unwrap_err().to_string();
    assert!(error.contains("[3] ::ffff:192.168.1.5 RoCE v2"), "{error}");
    assert!(error.contains("namespace"), "{error}");

    let error = choose_gid(&view, Some(3)).unwrap_err();
    assert!(matches!(error, GidRefusal::ForeignIndex { index: 3, .. }));
}

#[test]
fn explicit_index_wins_but_must_be_there() {
    let view = ethernet("dev0", 1, vec![v1(0, "fe80::1"), v2(3, "10.0.0.1")]);
    let choice = choose_gid(&view, Some(0)).unwrap();
    assert_eq!(choice.entry.kind, GidType::RoceV1);
    assert!(choice.why.contains("asked for"), "{}", choice.why);
    assert_eq!(choice.skipped.len(), 1);
    let error = choose_gid(&view, Some(4)).unwrap_err().to_string();
    for words in [
        "index 4",
        "[0] fe80::1 RoCE v1",
        "[3] ::ffff:10.0.0.1",
        "256",
    ] {
        assert!(error.contains(words), "{error}");
    }
    let empty = ethernet("dev0", 1, vec![]);
    let error = choose_gid(&empty, None).unwrap_err().to_string();
    assert!(error.contains("its table is empty"), "{error}");
}

#[test]
fn infiniband_goes_by_lid_and_never_with_lid_zero() {
    let view = infiniband("mlx5_0", 0x17, "fe80::2:c903:1:2");
    let choice = choose_gid(&view, None).unwrap();
    assert_eq!(choice.entry.index, 0);
    assert!(!choice.needs_grh);
    assert!(choice.why.contains("0x17"), "{}", choice.why);
    let rails = explicit(std::slice::from_ref(&view), "mlx5_0").unwrap();
    let endpoint = rails[0].endpoint();
    assert_eq!(
        (endpoint.lid, endpoint.link_layer),
        (0x17, LinkLayer::InfiniBand)
    );
    assert_eq!(endpoint.subnet_prefix, 0xfe80 << 48);

    let mut unmanaged = view;
    unmanaged.attributes.lid = 0;
    let error = choose_gid(&unmanaged, None).unwrap_err().to_string();
    assert!(error.contains("subnet manager"), "{error}");
    assert!(
        choose_gid(&ethernet("d", 1, vec![v2(0, "10.0.0.1")]), None)
            .unwrap()
            .needs_grh
    );
}

// Which ports.

fn two_port_card() -> Vec<PortView> {
    vec![
        down(ethernet("mlx5_1", 1, vec![])),
        ethernet("mlx5_1", 2, vec![v2(3, "10.0.1.1")]),
        ethernet("mlx5_10", 1, vec![v2(3, "10.0.2.1")]),
    ]
}

#[test]
fn explicit_device_is_matched_by_its_whole_name_and_first_active_port() {
    let views = two_port_card();
    let rails = explicit(&views, "mlx5_1").unwrap();
    assert_eq!((rails[0].device.as_str(), rails[0].port), ("mlx5_1", 2));
    let error = explicit(&views, "mlx5").unwrap_err().to_string();
    for words in ["'mlx5'", "mlx5_1 port 1 (Ethernet, down)", "mlx5_10 port 1"] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn explicit_rails_come_in_the_order_written() {
    let rails = explicit(&two_port_card(), "mlx5_10,mlx5_1:2:3").unwrap();
    let names: Vec<&str> = rails.iter().map(|rail| rail.device.as_str()).collect();
    assert_eq!(names, ["mlx5_10", "mlx5_1"]);
}

#[test]
fn explicit_rail_that_cannot_work_says_what_there_is() {
    let views = two_port_card();
    let error = explicit(&views, "mlx5_1:3").unwrap_err();
    assert!(matches!(error, ChooseError::UnknownPort { .. }), "{error}");
    let error = explicit(&views, "mlx5_1:1").unwrap_err();
    assert!(matches!(error, ChooseError::NotActive { .. }), "{error}");
    assert!(
        error.to_string().contains("mlx5_1 port 1 (Ethernet, down)"),
        "{error}"
    );
    let error = explicit(&views, "mlx5_1:2:0").unwrap_err();
    assert!(matches!(error, ChooseError::Gid { .. }), "{error}");
    let error = explicit(&views, "mlx5_1,mlx5_1:2").unwrap_err();
    assert!(
        matches!(error, ChooseError::SamePort { port: 2, .. }),
        "{error}"
    );
    let error = explicit(&[], "mlx5_1").unwrap_err().to_string();
    assert!(error.contains("no port at all"), "{error}");
}

#[test]
fn automatic_rails_go_by_reach_then_speed_then_name() {
    let views = [
        speed(ethernet("d", 1, vec![v2(0, "fe80::4")]), 400_000),
        speed(ethernet("b", 1, vec![v2(0, "10.0.2.1")]), 100_000),
        speed(ethernet("a", 1, vec![v2(0, "10.0.1.1")]), 100_000),
        speed(infiniband("c", 5, "fe80::7"), 200_000),
        speed(ethernet("e", 1, vec![v1(0, "10.0.3.1")]), 400_000),
        speed(down(ethernet("f", 1, vec![v2(0, "10.0.4.1")])), 800_000),
        speed(ethernet("g", 1, vec![]), 800_000),
    ];
    assert_eq!(
        automatic(&views, 5, &[]),
        ["c:1", "a:1", "b:1", "d:1", "e:1"]
    );
    // Whatever the order in which devices were listed.
    let mut reversed = views.to_vec();
    reversed.reverse();
    assert_eq!(automatic(&reversed, 3, &[]), ["c:1", "a:1", "b:1"]);
}

#[test]
fn preferred_devices_go_first_only_where_they_exist_and_work() {
    let views = [
        speed(ethernet("a", 1, vec![v2(0, "10.0.1.1")]), 400_000),
        speed(ethernet("b", 1, vec![v2(0, "10.0.2.1")]), 100_000),
        down(ethernet("c", 1, vec![v2(0, "10.0.3.1")])),
    ];
    assert_eq!(automatic(&views, 1, &["b"]), ["b:1"]);
    assert_eq!(automatic(&views, 2, &["c", "absent", "b"]), ["b:1", "a:1"]);
    assert_eq!(automatic(&views, 1, &["b", "a"]), ["b:1"]);
    assert_eq!(automatic(&views, 1, &["absent"]), ["a:1"]);
}

#[test]
fn too_few_usable_ports_are_an_error_that_names_all() {
    let views = [
        ethernet("a", 1, vec![v2(0, "10.0.1.1")]),
        ethernet("b", 1, vec![foreign(v2(0, "10.0.2.1"))]),
        down(ethernet("c", 1, vec![])),
    ];
    let wanted = Wanted::Automatic {
        count: 2,
        preferred: vec![],
    };
    let error = choose_rails(&views, wanted).unwrap_err();
    assert!(matches!(
        error,
        ChooseError::TooFew {
            count: 2,
            usable: 1,
            ..
        }
    ));
    let error = error.to_string();
    for words in [
        "a port 1 (Ethernet, active)",
        "namespace",
        "c port 1 (Ethernet, down)",
    ] {
        assert!(error.contains(words), "{error}");
    }
    for count in [0, RAILS_MAX + 1] {
        let preferred = vec![];
        let error = choose_rails(&views, Wanted::Automatic { count, preferred }).unwrap_err();
        assert_eq!(error, ChooseError::Count { count });
    }
}

// Which rail talks to which.

fn end(address: &str) -> Endpoint {
    Endpoint::ethernet(gid(address), None)
}

fn prefixed(address: &str, prefix_len: u8) -> Endpoint {
    Endpoint::ethernet(gid(address), Some(prefix_len))
}

#[test]
fn rails_pair_by_subnet_when_the_other_end_lists_them_in_another_order() {
    let local = [end("10.0.1.1"), end("10.0.2.1"), end("fd00:3::1")];
    let remote = [end("fd00:3::2"), end("10.0.2.2"), end("10.0.1.2")];
    let pairing = pair(&local, &remote);
    assert_eq!(pairing.paired, [(0, 2), (1, 1), (2, 0)]);
    assert!(pairing.candidates.is_empty());
}

#[test]
fn rail_on_an_unreachable_subnet_is_left_to_the_probe_and_holds_up_no_other() {
    let local = [end("10.0.1.1"), end("172.16.0.1"), end("10.0.2.1")];
    let remote = [end("10.0.1.2"), end("10.0.2.2"), end("10.0.9.2")];
    let pairing = pair(&local, &remote);
    assert_eq!(pairing.paired, [(0, 0), (2, 1)]);
    // The unused one first, then those that another rail has already.
    assert_eq!(pairing.candidates, [(1, vec![2, 0, 1])]);
}

#[test]
fn within_one_subnet_rails_pair_in_order() {
    let local = [end("10.0.0.1"), end("10.0.0.2")];
    let remote = [end("10.0.0.12"), end("10.0.0.11")];
    assert_eq!(pair(&local, &remote).paired, [(0, 0), (1, 1)]);
    // One rail more here than there: it may share, once nothing else is free.
    let pairing = pair(&local, &remote[..1]);
    assert_eq!(pairing.paired, [(0, 0)]);
    assert_eq!(pairing.candidates, [(1, vec![0])]);
}

#[test]
fn known_prefix_length_decides_and_an_unknown_one_is_assumed() {
    let paired = |a, b| pair(&[a], &[b]).paired.len();
    assert_eq!(paired(end("10.0.0.1"), end("10.0.0.200")), 1);
    assert_eq!(paired(end("10.0.0.1"), end("10.0.1.1")), 0);
    assert_eq!(paired(prefixed("10.0.0.1", 16), end("10.0.1.1")), 1);
    assert_eq!(paired(end("10.0.0.1"), prefixed("10.0.1.1", 16)), 1);
    assert_eq!(paired(prefixed("10.0.0.1", 30), end("10.0.0.5")), 0);
    assert_eq!(paired(prefixed("10.0.0.1", 31), end("10.0.0.0")), 1);
    // Each must see the other in its own subnet.
    assert_eq!(paired(prefixed("10.0.0.1", 8), prefixed("10.0.1.1", 24)), 0);
    assert_eq!(paired(end("2001:db8:0:1::1"), end("2001:db8:0:1:f::2")), 1);
    assert_eq!(paired(end("2001:db8:0:1::1"), end("2001:db8:0:2::2")), 0);
    assert_eq!(paired(prefixed("10.0.0.1", 255), end("10.0.0.1")), 1);
}

#[test]
fn link_local_addresses_prove_no_subnet_and_families_do_not_mix() {
    let pairing = pair(&[end("fe80::1"), end("10.0.0.1")], &[end("fe80::2")]);
    assert!(pairing.paired.is_empty());
    assert_eq!(pairing.candidates, [(0, vec![0]), (1, vec![])]);
}

#[test]
fn infiniband_pairs_by_subnet_prefix_and_never_with_ethernet() {
    let local = [
        Endpoint::infiniband(gid("fec0:0:0:2::1"), 7),
        Endpoint::infiniband(gid("fec0:0:0:1::1"), 3),
        end("10.0.0.1"),
    ];
    let remote = [
        Endpoint::infiniband(gid("fec0:0:0:1::9"), 4),
        Endpoint::infiniband(gid("fec0:0:0:3::9"), 8),
    ];
    let pairing = pair(&local, &remote);
    assert_eq!(pairing.paired, [(1, 0)]);
    assert_eq!(pairing.candidates, [(0, vec![1, 0]), (2, vec![])]);
}

#[test]
fn rail_moves_over_when_another_has_no_other_match() {
    // The wide rail could take either; the narrow one only the first.
    let local = [prefixed("10.0.0.1", 16), prefixed("10.0.0.2", 24)];
    let remote = [end("10.0.0.9"), end("10.0.1.9")];
    assert_eq!(pair(&local, &remote).paired, [(0, 1), (1, 0)]);
}

#[test]
fn two_chosen_ports_in_one_subnet_are_reported() {
    let views = [
        ethernet("a", 1, vec![v2(0, "10.0.1.1")]),
        ethernet("b", 1, vec![v2(0, "10.0.2.1")]),
        ethernet("c", 1, vec![v2(0, "10.0.1.2")]),
        infiniband("d", 1, "fe80::1"),
        infiniband("e", 2, "fe80::2"),
    ];
    let rails = explicit(&views, "a,b,c,d,e").unwrap();
    assert_eq!(shares_subnet(&rails), [(0, 2)]);
}

fn any_endpoint() -> impl Strategy<Value = Endpoint> {
    let prefix = prop_oneof![Just(None), Just(Some(16)), Just(Some(24)), Just(Some(28))];
    let v4 = (0u8..4, 0u8..=255, prefix).prop_map(|(net, host, prefix_len)| {
        Endpoint::ethernet(gid(&format!("10.0.{net}.{host}")), prefix_len)
    });
    let v6 = (0u16..3, 1u16..9).prop_map(|(net, host)| end(&format!("fd00:{net}::{host}")));
    let local = (1u16..9).prop_map(|host| end(&format!("fe80::{host}")));
    let ib = (0u16..3, 1u16..9).prop_map(|(net, host)| {
        Endpoint::infiniband(gid(&format!("fec0:0:0:{net}::{host}")), host)
    });
    prop_oneof![4 => v4, 2 => v6, 1 => local, 2 => ib]
}

fn any_ends() -> impl Strategy<Value = Vec<Endpoint>> {
    prop::collection::vec(any_endpoint(), 0..=RAILS_MAX)
}

/// Most pairs that subnets allow, by trying everything.
fn most_pairs(local: &[Endpoint], remote: &[Endpoint], used: u32) -> usize {
    let Some((first, rest)) = local.split_first() else {
        return 0;
    };
    let without = most_pairs(rest, remote, used);
    let with = (0..remote.len())
        .filter(|j| used & (1 << j) == 0 && first.same_subnet(&remote[*j]))
        .map(|j| 1 + most_pairs(rest, remote, used | 1 << j));
    with.chain([without]).max().unwrap_or(0)
}

proptest! {
    #[test]
    fn every_local_rail_is_paired_or_left_exactly_once(local in any_ends(), remote in any_ends()) {
        let pairing = pair(&local, &remote);
        let mut seen: Vec<usize> = pairing.paired.iter().map(|(i, _)| *i).collect();
        seen.extend(pairing.candidates.iter().map(|(i, _)| *i));
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..local.len()).collect::<Vec<_>>());
        let mut used: Vec<usize> = pairing.paired.iter().map(|(_, j)| *j).collect();
        used.sort_unstable();
        used.dedup();
        prop_assert_eq!(used.len(), pairing.paired.len());
        for (i, j) in &pairing.paired {
            prop_assert!(local[*i].same_subnet(&remote[*j]));
        }
        for (i, order) in &pairing.candidates {
            prop_assert!(order.iter().all(|j| local[*i].link_layer == remote[*j].link_layer));
        }
    }

    #[test]
    fn no_subnet_match_is_passed_over(
        local in prop::collection::vec(any_endpoint(), 0..=5),
        remote in prop::collection::vec(any_endpoint(), 0..=5),
    ) {
        let pairing = pair(&local, &remote);
        prop_assert_eq!(pairing.paired.len(), most_pairs(&local, &remote, 0));
    }

    #[test]
    fn order_of_the_other_end_does_not_matter_where_subnets_are_distinct(
        nets in Just((0u8..8).collect::<Vec<_>>()).prop_shuffle(),
        other in Just((0u8..8).collect::<Vec<_>>()).prop_shuffle(),
        count in 1usize..=8,
    ) {
        let local: Vec<Endpoint> = nets[..count].iter().map(|n| end(&format!("10.0.{n}.1"))).collect();
        let remote: Vec<Endpoint> = other.iter().map(|n| end(&format!("10.0.{n}.2"))).collect();
        let pairing = pair(&local, &remote);
        prop_assert_eq!(pairing.paired.len(), count);
        for (i, j) in pairing.paired {
            prop_assert_eq!(nets[i], other[j]);
        }
    }

    #[test]
    fn rails_that_parse_are_shown_as_they_were_written(
        device in "[a-zA-Z0-9_.-]{3,20}",
        port in prop::option::of(1u8..),
        gid_index in prop::option::of(any::<u32>()),
    ) {
        let spec = RailSpec { device, port, gid_index };
        prop_assert_eq!(spec.to_string().parse::<RailSpec>().unwrap(), spec);
    }
}
