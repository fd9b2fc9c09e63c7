//! Ports: state, GIDs, packet sizes, and which of them become rails.

use atlas_rdma::attributes::{GidType, LinkLayer, PortState};
use atlas_rdma::choose::{
    ChooseError, GidChoice, PortView, RAILS_MAX, RailChoice, RailSpec, Wanted, choose_gid,
    choose_rails, shares_subnet,
};
use expert_tier::RailsWanted;

use crate::Options;
use crate::finding::{Check, Finding, Level};
use crate::system::System;
use crate::verbs::Device;

/// Entries of a GID table that are listed; more are counted.
const GIDS_SHOWN: usize = 8;

/// Which ports can be used, and which would be.
#[derive(Debug, Default)]
pub(crate) struct Rails {
    /// What a client would use by its settings.
    pub(crate) chosen: Vec<RailChoice>,
    /// What is worth trying with a peer: named rails, else all ports that can be used.
    pub(crate) usable: Vec<RailChoice>,
}

pub(crate) fn check(
    out: &mut Vec<Finding>,
    options: &Options,
    system: &System,
    devices: &[Device],
) -> Rails {
    let mut views: Vec<&PortView> = Vec::new();
    for opened in devices.iter().filter_map(|d| d.opened.as_ref().ok()) {
        for port in &opened.ports {
            match port {
                Ok(view) => views.push(view),
                Err(error) => out.push(Finding::trouble(
                    options.verbs_level(),
                    Check::PortState,
                    error.to_string(),
                    "the port cannot be used",
                    "dmesg | tail    (is the device being removed or reset?)",
                )),
            }
        }
    }
    let is_usable = |v: &PortView| is_active(v) && choose_gid(v, None).is_ok();
    let any_usable = views.iter().any(|v| is_usable(v));
    for view in &views {
        let spec = options.spec_of(view);
        // A port that nobody named may be idle while another one works.
        let level = match options.verbs_required && (spec.is_some() || !any_usable) {
            true => Level::Failure,
            false => Level::Warning,
        };
        one(out, system, view, spec.and_then(|s| s.gid_index), level);
    }
    let views: Vec<PortView> = views.into_iter().cloned().collect();
    if views.is_empty() {
        if !options.named().is_empty() {
            let names: Vec<String> = options.named().iter().map(RailSpec::to_string).collect();
            out.push(Finding::trouble(
                options.verbs_level(),
                Check::Rails,
                format!(
                    "{} is asked for, and no device can be used",
                    names.join(", ")
                ),
                "see the findings on devices above; TCP works",
                "mend the device, or leave the rail out",
            ));
        }
        return Rails::default();
    }
    let usable = every_rail(&views);
    out.extend(shared_subnets(system, &usable));
    let chosen = chosen(out, options, &views);
    let usable = match &options.verbs.rails {
        RailsWanted::List(_) => chosen.clone(),
        RailsWanted::Slots(_) => usable,
    };
    Rails { chosen, usable }
}

fn one(
    out: &mut Vec<Finding>,
    system: &System,
    view: &PortView,
    gid_index: Option<u32>,
    level: Level,
) {
    let name = port_name(view);
    let netdev = netdev(system, view);
    if !is_active(view) {
        out.push(inactive(system, view, netdev.as_deref(), level));
        return;
    }
    out.push(active(system, view));
    let gid = choose_gid(view, gid_index);
    if view.attributes.link_layer == LinkLayer::Ethernet
        && !view.gids.is_empty()
        && view.gids.iter().all(|g| g.netdev.is_none())
    {
        out.push(Finding::trouble(
            level,
            Check::NetworkNamespace,
            format!("none of the {} GIDs of {name} belongs to an interface of this network namespace", view.gids.len()),
            "packets cannot be sent through this port from here; TCP works where the namespace has a network",
            "start the container with --network=host (Kubernetes: hostNetwork: true), or move the interface: ip link set dev NETDEV netns NAME",
        ));
    }
    match gid {
        Ok(gid) => out.push(gid_chosen(&name, netdev.as_deref(), &gid)),
        Err(refusal) => {
            let fix = match gid_index {
                Some(_) => format!("leave the index out: --rail {}:{}", view.device, view.port),
                None if view.attributes.link_layer == LinkLayer::InfiniBand => {
                    "systemctl start opensm    (on one machine of the fabric)".to_owned()
                }
                None => format!(
                    "ip addr add 192.168.100.1/24 dev {}    (an address of the fast network)",
                    netdev.as_deref().unwrap_or("NETDEV")
                ),
            };
            out.push(Finding::trouble(
                level,
                Check::Gid,
                refusal.to_string(),
                "no connection can be made through this port",
                fix,
            ));
        }
    }
    out.push(mtu(view, &name, netdev.as_deref()));
}

fn port_name(view: &PortView) -> String {
    format!("{} port {}", view.device, view.port)
}

fn is_active(view: &PortView) -> bool {
    view.attributes.state == PortState::Active
}

/// The interface of a RoCE port, where it can be told.
fn netdev(system: &System, view: &PortView) -> Option<String> {
    let of_gid = view.gids.iter().find_map(|g| g.netdev.clone());
    let device = &view.device;
    let of_card = || {
        let names = system.names(&format!("sys/class/infiniband/{device}/device/net"));
        names.into_iter().next()
    };
    of_gid
        .or_else(|| system.soft_parent(device))
        .or_else(of_card)
}

fn active(system: &System, view: &PortView) -> Finding {
    let name = port_name(view);
    let link = match view.attributes.link_layer {
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::InfiniBand => "InfiniBand",
    };
    let what = match (
        system.soft_parent(&view.device),
        view.attributes.link_mbit_per_s,
    ) {
        (Some(parent), _) => format!("{name} is active (soft-RoCE on {parent}: no card)"),
        (None, 0) => format!("{name} is active ({link}, speed unknown)"),
        (None, mbit) => format!("{name} is active ({link}, {} Gbit/s)", mbit as f64 / 1000.0),
    };
    Finding::ok(Check::PortState, what)
}

fn inactive(system: &System, view: &PortView, netdev: Option<&str>, level: Level) -> Finding {
    let state = match view.attributes.state {
        PortState::Down => "down",
        PortState::Initializing => "initializing",
        PortState::Armed => "armed",
        PortState::ActiveDefer => "without link since a moment ago",
        PortState::Active | PortState::Unknown(_) => "in an unknown state",
    };
    let is_infiniband = view.attributes.link_layer == LinkLayer::InfiniBand;
    let waits_for_manager = is_infiniband
        && matches!(
            view.attributes.state,
            PortState::Initializing | PortState::Armed
        );
    let (means, fix) = if waits_for_manager {
        (
            "the cable is in, and no subnet manager has configured the port",
            "systemctl start opensm    (on one machine of the fabric)".to_owned(),
        )
    } else {
        match netdev {
            Some(netdev) if is_admin_up(system, netdev) == Some(true) => (
                "the interface is up and has no link: no cable, or the other end is down",
                format!(
                    "ethtool {netdev} | grep -e Speed -e 'Link detected'    (then connect the cable)"
                ),
            ),
            Some(netdev) => (
                "the port carries nothing until its interface is up",
                format!("ip link set dev {netdev} up"),
            ),
            None => (
                "the port carries nothing",
                format!(
                    "rdma link show {}/{}    (then connect the cable)",
                    view.device, view.port
                ),
            ),
        }
    };
    Finding::trouble(
        level,
        Check::PortState,
        format!("{} is {state}", port_name(view)),
        means,
        fix,
    )
}

/// Whether an administrator has it up; `None` where the interface is not here.
fn is_admin_up(system: &System, netdev: &str) -> Option<bool> {
    let flags = system.text(&format!("sys/class/net/{netdev}/flags"))?;
    let flags = u32::from_str_radix(flags.strip_prefix("0x")?, 16).ok()?;
    Some(flags & 1 == 1)
}

fn gid_chosen(name: &str, netdev: Option<&str>, gid: &GidChoice) -> Finding {
    let entry = &gid.entry;
    let skipped: Vec<String> = gid
        .skipped
        .iter()
        .take(GIDS_SHOWN)
        .map(ToString::to_string)
        .collect();
    let more = match gid.skipped.len().saturating_sub(GIDS_SHOWN) {
        0 => String::new(),
        n => format!("; and {n} more"),
    };
    let not = match skipped.is_empty() {
        true => String::new(),
        false => format!("; not {}{more}", skipped.join("; not ")),
    };
    let what = format!(
        "{name} uses GID [{}] {} {} ({}){not}",
        entry.index, entry.gid, entry.kind, gid.why
    );
    let netdev = netdev.unwrap_or("NETDEV");
    let address = format!(
        "ip addr add 192.168.100.1/24 dev {netdev}    (an address of the fast network, its own on each machine)"
    );
    match entry.kind {
        GidType::RoceV1 => Finding::trouble(
            Level::Warning,
            Check::Gid,
            what,
            "RoCE v1 works inside one Ethernet segment alone, and both ends must use it",
            address,
        ),
        GidType::RoceV2 if !entry.gid.is_routable() => Finding::trouble(
            Level::Warning,
            Check::Gid,
            what,
            "a link-local address says nothing of which port of the peer belongs to this one: all are tried",
            address,
        ),
        _ => Finding::ok(Check::Gid, what),
    }
}

fn mtu(view: &PortView, name: &str, netdev: Option<&str>) -> Finding {
    let bytes = view.attributes.active_mtu.bytes();
    let what = format!("{name} sends packets of {bytes} bytes");
    if bytes >= 4096 {
        return Finding::ok(Check::Mtu, what);
    }
    let means = "the smaller of both ends counts; packets of 4096 bytes cost less on the way";
    match view.attributes.link_layer {
        LinkLayer::InfiniBand => Finding::ok(Check::Mtu, what).meaning(means),
        LinkLayer::Ethernet => Finding::trouble(
            Level::Warning,
            Check::Mtu,
            what,
            means,
            format!(
                "ip link set dev {} mtu 9000    (on both ends, and on the switch)",
                netdev.unwrap_or("NETDEV")
            ),
        ),
    }
}

/// All ports that can be used, the best of them.
fn every_rail(views: &[PortView]) -> Vec<RailChoice> {
    let choose = |count| {
        let preferred = Vec::new();
        choose_rails(views, Wanted::Automatic { count, preferred })
    };
    match choose(RAILS_MAX) {
        Err(ChooseError::TooFew { usable, .. }) if usable > 0 => choose(usable).unwrap_or_default(),
        other => other.unwrap_or_default(),
    }
}

/// What a client would use, and what it would miss.
fn chosen(out: &mut Vec<Finding>, options: &Options, views: &[PortView]) -> Vec<RailChoice> {
    let wants: Vec<Wanted> = match &options.verbs.rails {
        RailsWanted::List(specs) => specs
            .iter()
            .map(|spec| Wanted::Explicit(vec![spec.clone()]))
            .collect(),
        RailsWanted::Slots(slots) => slots
            .iter()
            .map(|slot| match &slot.device {
                Some(device) => Wanted::Explicit(vec![RailSpec {
                    device: device.clone(),
                    port: None,
                    gid_index: slot.gid_index,
                }]),
                None => Wanted::Automatic {
                    count: 1,
                    preferred: slot.preferred.iter().cloned().collect(),
                },
            })
            .collect(),
    };
    let mut rails: Vec<RailChoice> = Vec::new();
    for wanted in wants {
        let is_free = |v: &&PortView| {
            !rails
                .iter()
                .any(|r| r.device == v.device && r.port == v.port)
        };
        let free: Vec<PortView> = views.iter().filter(is_free).cloned().collect();
        match choose_rails(&free, wanted) {
            Ok(more) => rails.extend(more),
            Err(error) => {
                let fix = match &error {
                    ChooseError::UnknownDevice { .. } | ChooseError::UnknownPort { .. } => {
                        "ibv_devinfo    (lists devices and ports; then correct --rail or ATLAS_EXPERT_RAILS)"
                    }
                    ChooseError::Gid { .. } => "leave the GID index out of --rail",
                    _ => "see the findings on ports above",
                };
                out.push(Finding::trouble(
                    options.verbs_level(),
                    Check::Rails,
                    error.to_string(),
                    match rails.is_empty() {
                        true => "no rail: records go over TCP, or nowhere with --require-rdma",
                        false => "one rail less than was asked for",
                    },
                    fix,
                ));
            }
        }
    }
    if !rails.is_empty() {
        let words: Vec<String> = rails
            .iter()
            .map(|r| format!("{} port {} ({})", r.device, r.port, r.why))
            .collect();
        out.push(Finding::ok(
            Check::Rails,
            format!("a client uses {}", words.join(", ")),
        ));
    }
    rails
}

fn shared_subnets(system: &System, usable: &[RailChoice]) -> Vec<Finding> {
    let name = |i: usize| format!("{} port {}", usable[i].device, usable[i].port);
    let mut findings = Vec::new();
    for (a, b) in shares_subnet(usable) {
        let netdevs: Vec<&str> = [a, b]
            .into_iter()
            .filter_map(|i| usable[i].gid.entry.netdev.as_deref())
            .collect();
        let is_set = |netdev: &&str| {
            system.arp(netdev, "arp_ignore") >= 1 && system.arp(netdev, "arp_announce") >= 2
        };
        let what = format!("{} and {} are in one subnet", name(a), name(b));
        if !netdevs.is_empty() && netdevs.iter().all(is_set) {
            findings.push(
                Finding::ok(
                    Check::SharedSubnet,
                    format!("{what}, and ARP answers on the right one (arp_ignore, arp_announce)"),
                )
                .meaning("compare the counters of both below /sys/class/infiniband/DEV/ports/1/counters after a fetch"),
            );
            continue;
        }
        findings.push(Finding::trouble(
            Level::Warning,
            Check::SharedSubnet,
            what,
            "ARP may answer for either port, so that both rails run through one of them although each passes a test",
            "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2    (or give each port a subnet of its own)",
        ));
    }
    findings
}
