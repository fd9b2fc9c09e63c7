//! Library, kernel, container, device files, ports to listen on.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use atlas_rdma::RdmaError;

use crate::Options;
use crate::finding::{Check, Finding, Level};
use crate::system::System;
use crate::verbs::Device;

/// Port that a peer listens on where nobody says otherwise.
const PEER_PORT: u16 = 9909;

const TCP_WORKS: &str = "no one-sided READs here; TCP (--expert-backend rdma) works";

/// `devices` is what the library says.
pub(crate) fn check(
    out: &mut Vec<Finding>,
    options: &Options,
    system: &System,
    devices: &Result<Vec<Device>, RdmaError>,
) {
    let container = system.container();
    if let Some(how) = container {
        let what = format!("this is a container ({how})");
        out.push(Finding::ok(Check::Container, what).meaning(
            "one-sided READs need --device=/dev/infiniband --network=host --ulimit memlock=-1:-1; modules are loaded on the host",
        ));
    }
    out.push(library(options, devices));
    out.push(kernel(options, system, container.is_some()));
    let present = system.names("sys/class/infiniband");
    out.push(present_devices(options, system, devices, &present));
    if !present.is_empty() {
        out.push(nodes(options, system, &present, container.is_some()));
    }
}

fn library(options: &Options, devices: &Result<Vec<Device>, RdmaError>) -> Finding {
    match devices {
        Err(RdmaError::NoLibrary { reason }) => Finding::trouble(
            options.verbs_level(),
            Check::VerbsLibrary,
            format!("libibverbs.so.1 cannot be used: {reason}"),
            TCP_WORKS,
            "apt install libibverbs1 ibverbs-providers    (Fedora, RHEL: dnf install libibverbs)",
        ),
        _ => Finding::ok(Check::VerbsLibrary, "libibverbs.so.1 can be loaded"),
    }
}

fn kernel(options: &Options, system: &System, in_container: bool) -> Finding {
    if system.exists("sys/class/infiniband_verbs/abi_version") {
        return Finding::ok(Check::KernelModules, "the module ib_uverbs is loaded");
    }
    let place = match in_container {
        true => "on the host: ",
        false => "",
    };
    Finding::trouble(
        options.verbs_level(),
        Check::KernelModules,
        "/sys/class/infiniband_verbs is missing: the module ib_uverbs is not loaded",
        TCP_WORKS,
        format!(
            "{place}modprobe ib_uverbs && modprobe mlx5_ib    (or the card's own: bnxt_re, irdma, …)"
        ),
    )
}

fn present_devices(
    options: &Options,
    system: &System,
    devices: &Result<Vec<Device>, RdmaError>,
    present: &[String],
) -> Finding {
    if let Err(RdmaError::NoProvider { devices }) = devices {
        return Finding::trouble(
            options.verbs_level(),
            Check::RdmaDevices,
            format!("the kernel has {devices}, and libibverbs has no provider for it"),
            TCP_WORKS,
            "apt install ibverbs-providers    (Fedora, RHEL: dnf install libibverbs)",
        );
    }
    if let Ok(devices) = devices {
        let names: Vec<String> = devices
            .iter()
            .map(|d| format!("{} ({})", d.name, d.transport))
            .collect();
        return Finding::ok(Check::RdmaDevices, names.join(", "));
    }
    if !present.is_empty() {
        // What is wrong is another finding's: library, kernel or device files.
        let what = format!("the kernel has {}", present.join(", "));
        return Finding::ok(Check::RdmaDevices, what);
    }
    let netdev = system
        .names("sys/class/net")
        .into_iter()
        .find(|n| n != "lo")
        .unwrap_or_else(|| "eth0".into());
    Finding::trouble(
        options.verbs_level(),
        Check::RdmaDevices,
        "there is no RDMA device",
        format!(
            "{TCP_WORKS}. A card shows up once its driver is loaded; in a network namespace of its own it may be hidden ('rdma system show'). Without a card, soft-RoCE shows that READs work, not how fast"
        ),
        format!(
            "modprobe mlx5_ib    (or the card's driver; without a card: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {netdev})"
        ),
    )
}

fn nodes(options: &Options, system: &System, present: &[String], in_container: bool) -> Finding {
    let mut missing = Vec::new();
    let mut found = Vec::new();
    let entries = system.names("sys/class/infiniband_verbs");
    for device in present {
        let node = entries.iter().find(|e| {
            let of = system.text(&format!("sys/class/infiniband_verbs/{e}/ibdev"));
            of.as_deref() == Some(device)
        });
        match node {
            Some(node) if system.exists(&format!("dev/infiniband/{node}")) => {
                found.push(format!("/dev/infiniband/{node} ({device})"));
            }
            Some(node) => missing.push(format!("/dev/infiniband/{node} ({device})")),
            None => missing.push(format!("the verbs entry of {device}")),
        }
    }
    if missing.is_empty() {
        return Finding::ok(Check::DeviceNodes, found.join(", "));
    }
    Finding::trouble(
        options.verbs_level(),
        Check::DeviceNodes,
        format!("missing: {}", missing.join(", ")),
        "the kernel has the device, and this process has no file to open it by; TCP works",
        match in_container {
            true => "start the container with --device=/dev/infiniband",
            false => {
                "modprobe ib_uverbs && udevadm trigger --subsystem-match=infiniband_verbs    (container: --device=/dev/infiniband)"
            }
        },
    )
}

/// io_uring and the port to listen on.
pub(crate) fn check_io(out: &mut Vec<Finding>, options: &Options, system: &System) {
    out.push(io_uring((system.io_uring)(), system));
    let addr = options
        .listen
        .unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, PEER_PORT)));
    out.push(listen_port(
        addr,
        options.listen.is_some(),
        (system.listen)(addr),
    ));
}

fn io_uring(tried: io::Result<()>, system: &System) -> Finding {
    let Err(error) = tried else {
        return Finding::ok(Check::IoUring, "files can be read through io_uring");
    };
    let disabled = system.number("proc/sys/kernel/io_uring_disabled");
    let fix = match (disabled, system.container()) {
        (Some(1 | 2), _) => "sysctl -w kernel.io_uring_disabled=0",
        (_, Some(_)) => {
            "start the container with --security-opt seccomp=PROFILE where PROFILE allows io_uring_setup, io_uring_enter and io_uring_register"
        }
        _ => "use Linux 5.6 or newer, or allow io_uring in the security policy of this service",
    };
    Finding::trouble(
        Level::Warning,
        Check::IoUring,
        format!("io_uring is refused: {error}"),
        "--expert-backend uma and --local-store read files one by one, with a thread each: slower",
        fix,
    )
}

fn listen_port(addr: SocketAddr, is_asked: bool, tried: io::Result<()>) -> Finding {
    let Err(error) = tried else {
        return Finding::ok(Check::ListenPort, format!("{addr} is free for a peer"));
    };
    let level = match is_asked {
        true => Level::Failure,
        false => Level::Warning,
    };
    let port = addr.port();
    let (means, fix) = match error.kind() {
        io::ErrorKind::AddrInUse => (
            "a peer, or another program, listens there already; a second peer needs another port",
            format!(
                "ss -ltnp 'sport = :{port}'    shows who; or atlas-expert-peer --listen HOST:OTHER"
            ),
        ),
        io::ErrorKind::AddrNotAvailable => (
            "a peer cannot listen on an address that this machine does not have",
            "ip -brief addr    lists those that it has".to_owned(),
        ),
        io::ErrorKind::PermissionDenied => (
            "ports below 1024 are for root",
            format!(
                "choose a port above 1023, or setcap cap_net_bind_service=+ep on the peer's binary (port {port})"
            ),
        ),
        _ => (
            "a peer cannot listen there",
            format!("choose another address than {addr}"),
        ),
    };
    Finding::trouble(
        level,
        Check::ListenPort,
        format!("{addr} cannot be listened on: {error}"),
        means,
        fix,
    )
}
