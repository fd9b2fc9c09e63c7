//! Ports, rails, memory, and what is tried.

use atlas_rdma::attributes::{GidType, LinkLayer, Mtu, PortState};
use expert_tier::RailsWanted;
use rustix::io::Errno;

use super::super::machine::{Machine, card, ipv4, os_error};
use super::{Fault, fault, only, permission};
use crate::finding::Check;
use crate::finding::Level::{Failure, Warning};

fn rails(machine: &mut Machine, text: &str) {
    let specs = atlas_rdma::choose::parse_rails(text).expect("rails");
    machine.options.verbs.rails = RailsWanted::List(specs);
}

pub(super) fn list() -> Vec<Fault> {
    vec![
        fault(
            "link down, interface down",
            Check::PortState,
            Failure,
            "mlx5_0 port 1 is down",
            "ip link set dev eth0 up",
            |m| {
                only(m);
                m.set("sys/class/net/eth0/flags", "0x1002");
                m.cards[0].port.attributes.state = PortState::Down;
            },
        ),
        fault(
            "link down, interface up",
            Check::PortState,
            Failure,
            "mlx5_0 port 1 is down",
            "ethtool eth0",
            |m| {
                only(m);
                m.cards[0].port.attributes.state = PortState::Down;
            },
        ),
        fault(
            "one of two links down",
            Check::PortState,
            Warning,
            "mlx5_1 port 1 is down",
            "ethtool eth1",
            |m| {
                m.cards[1].port.attributes.state = PortState::Down;
            },
        ),
        fault(
            "a named link down",
            Check::PortState,
            Failure,
            "mlx5_1 port 1 is down",
            "ethtool eth1",
            |m| {
                m.cards[1].port.attributes.state = PortState::Down;
                rails(m, "mlx5_1");
            },
        ),
        fault(
            "no subnet manager",
            Check::PortState,
            Failure,
            "initializing",
            "opensm",
            |m| {
                only(m);
                let port = &mut m.cards[0].port;
                port.attributes.state = PortState::Initializing;
                port.attributes.link_layer = LinkLayer::InfiniBand;
                port.gids.clear();
            },
        ),
        fault("LID 0", Check::Gid, Failure, "no LID", "opensm", |m| {
            only(m);
            m.cards[0].port.attributes.link_layer = LinkLayer::InfiniBand;
        }),
        fault(
            "another network namespace",
            Check::NetworkNamespace,
            Failure,
            "none of the 4 GIDs",
            "--network=host",
            |m| {
                only(m);
                m.cards[0]
                    .port
                    .gids
                    .iter_mut()
                    .for_each(|g| g.netdev = None);
            },
        ),
        fault(
            "no GID at all",
            Check::Gid,
            Failure,
            "no usable GID",
            "ip addr add",
            |m| {
                only(m);
                m.cards[0].port.gids.clear();
            },
        ),
        fault(
            "no GID of the asked index",
            Check::Gid,
            Failure,
            "no GID at index 77",
            "--rail mlx5_0:1",
            |m| {
                rails(m, "mlx5_0:1:77");
            },
        ),
        fault(
            "RoCE v1 alone",
            Check::Gid,
            Warning,
            "RoCE v1",
            "ip addr add",
            |m| {
                m.cards[0].port.gids.retain(|g| g.kind == GidType::RoceV1);
            },
        ),
        fault(
            "link-local alone",
            Check::Gid,
            Warning,
            "link-local",
            "ip addr add",
            |m| {
                m.cards[0].port.gids.retain(|g| !g.gid.is_routable());
            },
        ),
        fault(
            "MTU 1024",
            Check::Mtu,
            Warning,
            "1024 bytes",
            "ip link set dev eth0 mtu 9000",
            |m| {
                m.cards[0].port.attributes.active_mtu = Mtu::B1024;
            },
        ),
        fault(
            "two ports in one subnet",
            Check::SharedSubnet,
            Warning,
            "mlx5_0 port 1 and mlx5_1 port 1",
            "arp_ignore=1",
            |m| {
                let mut twin = card(1);
                for entry in &mut twin.port.gids {
                    if entry.gid.is_routable() {
                        let mut gid = ipv4(0);
                        gid.0[15] = 2;
                        entry.gid = gid;
                    }
                }
                m.cards[1] = twin;
            },
        ),
        fault(
            "unknown rail",
            Check::Rails,
            Failure,
            "no device 'mlx5_9'",
            "ibv_devinfo",
            |m| {
                rails(m, "mlx5_9");
            },
        ),
        fault(
            "rail without any device that opens",
            Check::Rails,
            Failure,
            "mlx5_0 is asked for",
            "mend the device",
            |m| {
                only(m);
                m.cards[0].refuses = Some(permission);
                rails(m, "mlx5_0");
            },
        ),
        fault(
            "memlock 64 KiB",
            Check::Memlock,
            Failure,
            "65536 bytes; the need",
            "ulimit -l unlimited",
            |m| {
                m.limit_locked_memory(65_536);
            },
        ),
        fault(
            "memlock below rails x bytes",
            Check::Memlock,
            Failure,
            "an arena on 2 rails needs 2000",
            "LimitMEMLOCK=infinity",
            |m| {
                m.limit_locked_memory(1999);
                m.options.arena_bytes = Some(1000);
                rails(m, "mlx5_0,mlx5_1");
            },
        ),
        fault(
            "capability in a user namespace",
            Check::Memlock,
            Failure,
            "65536",
            "ulimit -l unlimited",
            |m| {
                m.limit_locked_memory(65_536);
                m.set("proc/self/status", "CapEff:\t000001ffffffffff");
                m.set("proc/self/uid_map", "         0       1000          1");
            },
        ),
        fault(
            "arena too large",
            Check::MemoryFloor,
            Failure,
            "to stay free",
            "--reserve-gb",
            |m| {
                m.options.arena_bytes = Some(90_000_000 << 10);
            },
        ),
        fault(
            "machine full",
            Check::MemoryFloor,
            Warning,
            "to stay free",
            "--reserve-gb",
            |m| {
                m.set(
                    "proc/meminfo",
                    "MemTotal: 100000000 kB\nMemAvailable: 1000 kB",
                );
            },
        ),
        fault(
            "no proc",
            Check::MemoryFloor,
            Warning,
            "/proc/meminfo",
            "mount -t proc",
            |m| {
                m.remove("proc/meminfo");
            },
        ),
        fault(
            "no huge pages",
            Check::HugePages,
            Warning,
            "switched off",
            "echo madvise",
            |m| {
                m.set(
                    "sys/kernel/mm/transparent_hugepage/enabled",
                    "always madvise [never]",
                );
            },
        ),
        fault(
            "io_uring switched off",
            Check::IoUring,
            Warning,
            "refused",
            "kernel.io_uring_disabled=0",
            |m| {
                m.set("proc/sys/kernel/io_uring_disabled", "2");
                m.system.io_uring = || Err(os_error(Errno::PERM));
            },
        ),
        fault(
            "io_uring forbidden by seccomp",
            Check::IoUring,
            Warning,
            "refused",
            "seccomp=",
            |m| {
                m.set("run/.containerenv", "");
                m.system.io_uring = || Err(os_error(Errno::PERM));
            },
        ),
        fault(
            "port in use",
            Check::ListenPort,
            Warning,
            "127.0.0.1:9909",
            "ss -ltnp",
            |m| {
                m.system.listen = |_| Err(os_error(Errno::ADDRINUSE));
            },
        ),
        fault(
            "asked-for port in use",
            Check::ListenPort,
            Failure,
            "10.0.0.1:7000",
            "ss -ltnp 'sport = :7000'",
            |m| {
                m.options.listen = Some("10.0.0.1:7000".parse().expect("an address"));
                m.system.listen = |_| Err(os_error(Errno::ADDRINUSE));
            },
        ),
        fault(
            "no such store",
            Check::Store,
            Failure,
            "/nowhere/at/all",
            "atlas-expert index",
            |m| {
                m.options.store = Some("/nowhere/at/all".into());
            },
        ),
    ]
}
