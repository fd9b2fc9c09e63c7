//! What `/sys` tells of ports: counters of bytes and packets, and network interfaces.
//!
//! Only reads files, and addresses from the kernel; the root is a parameter, so that tests bring their own.

use crate::attributes::Gid;
use crate::choose::is_device_name;
use crate::interfaces::interfaces;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Unit of `port_xmit_data` and `port_rcv_data`: the InfiniBand specification counts in lanes of four bytes.
const DATA_UNIT_BYTES: u64 = 4;

/// A port is silent when the busier one of the two carried more than so many times as much. Acknowledgements and the
/// chatter of an idle network stay far below; two rails under one load stay far above.
const SILENT_RATIO: u64 = 16;

/// A `/sys` to read from.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
}

/// What a port has carried since its counters began, as far as the device counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Bytes received.
    pub rx_bytes: Option<u64>,
    /// Bytes sent.
    pub tx_bytes: Option<u64>,
    /// Packets received.
    pub rx_packets: Option<u64>,
    /// Packets sent.
    pub tx_packets: Option<u64>,
    /// Where the numbers are from.
    pub source: CounterSource,
}

/// Where counters are from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CounterSource {
    /// The device counts nothing that is known here.
    #[default]
    None,
    /// `ports/P/counters`: the counters of the InfiniBand specification.
    Port,
    /// `ports/P/hw_counters`: those of the driver. Soft-RoCE has packets alone.
    Driver,
}

/// Whether both of two ports carried traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carried {
    /// Both did.
    Both,
    /// One did, the other stood by.
    OnlyOne {
        /// Which one of the two stood by, 0 or 1.
        silent: usize,
    },
    /// Neither did.
    Neither,
    /// The ports count nothing that could be compared.
    Unknown,
}

/// Names under which drivers count in `hw_counters`: received and sent.
struct Names {
    bytes: &'static [(&'static str, &'static str)],
    packets: &'static [(&'static str, &'static str)],
}

const DRIVER_NAMES: Names = Names {
    bytes: &[
        ("rx_bytes", "tx_bytes"),
        ("hw_rx_bytes_cnt", "hw_tx_bytes_cnt"),
    ],
    packets: &[
        // Soft-RoCE, on every kernel.
        ("rcvd_pkts", "sent_pkts"),
        ("rx_pkts", "tx_pkts"),
        ("hw_rx_packets_cnt", "hw_tx_packets_cnt"),
    ],
};

impl Default for Sysfs {
    fn default() -> Self {
        Self::at(Path::new("/sys"))
    }
}

impl Sysfs {
    /// A tree that stands for `/sys`.
    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// Whether a device is soft-RoCE: no card, an interface of the kernel's. Its posts are system calls that do a card's
    /// work themselves.
    pub fn is_soft(&self, device: &str) -> bool {
        let device_dir = self.root.join("class/infiniband").join(device);
        is_device_name(device) && device_dir.join("parent").exists()
    }

    /// The counters of a port. What it does not count is `None`.
    ///
    /// # Errors
    ///
    /// `NotFound` where there is no such port; whatever reading gives otherwise.
    pub fn counters(&self, device: &str, port: u8) -> io::Result<PortCounters> {
        let dir = self.port_dir(device, port)?;
        let standard = dir.join("counters");
        let driver = dir.join("hw_counters");
        let mut found = PortCounters {
            rx_bytes: data_bytes(&standard.join("port_rcv_data")),
            tx_bytes: data_bytes(&standard.join("port_xmit_data")),
            rx_packets: number(&standard.join("port_rcv_packets")),
            tx_packets: number(&standard.join("port_xmit_packets")),
            source: CounterSource::Port,
        };
        // All from one place: the two count at different layers.
        if !found.is_known() {
            let pair = |names: &[(&str, &str)]| {
                let read = |(rx, tx): &(&str, &str)| {
                    Some((number(&driver.join(rx))?, number(&driver.join(tx))?))
                };
                names.iter().find_map(read).unzip()
            };
            let (rx_bytes, tx_bytes) = pair(DRIVER_NAMES.bytes);
            let (rx_packets, tx_packets) = pair(DRIVER_NAMES.packets);
            found = PortCounters {
                rx_bytes,
                tx_bytes,
                rx_packets,
                tx_packets,
                source: CounterSource::Driver,
            };
        }
        if !found.is_known() {
            found.source = CounterSource::None;
        }
        Ok(found)
    }

    /// The network interface below an Ethernet port, where it is visible here; `None` on InfiniBand.
    ///
    /// # Errors
    ///
    /// `NotFound` where there is no such port.
    pub fn netdev_of(&self, device: &str, port: u8) -> io::Result<Option<String>> {
        let dir = self.port_dir(device, port)?;
        let link_layer = fs::read_to_string(dir.join("link_layer")).unwrap_or_default();
        if link_layer.trim() == "InfiniBand" {
            return Ok(None);
        }
        // The table's first entry is the port's own interface; later ones may be VLANs on top of it. Empty slots cannot
        // be read.
        let table = dir.join("gid_attrs/ndevs");
        let of_table = numbered(&table)
            .into_iter()
            .find_map(|index| word(&table.join(index.to_string())));
        let found = of_table
            .or_else(|| self.netdev_of_function(device, port))
            .or_else(|| word(&self.device_dir(device).join("parent")));
        // A name without an interface belongs to another network namespace.
        let visible =
            |name: &String| is_device_name(name) && self.root.join("class/net").join(name).exists();
        Ok(found.filter(visible))
    }

    /// The interface of a card's function whose `dev_port` says that it is this port.
    fn netdev_of_function(&self, device: &str, port: u8) -> Option<String> {
        let dir = self.device_dir(device).join("device/net");
        let mut names: Vec<String> = fs::read_dir(&dir)
            .ok()?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        let mut of_port = names
            .into_iter()
            .filter(|name| number(&dir.join(name).join("dev_port")) == Some(u64::from(port) - 1));
        of_port.next()
    }

    fn device_dir(&self, device: &str) -> PathBuf {
        self.root.join("class/infiniband").join(device)
    }

    fn port_dir(&self, device: &str, port: u8) -> io::Result<PathBuf> {
        let missing = |what: String| io::Error::new(io::ErrorKind::NotFound, what);
        if !is_device_name(device) || port == 0 {
            return Err(missing(format!(
                "'{device}' port {port} cannot be an RDMA port; names have no slashes, ports begin at 1"
            )));
        }
        let dir = self.device_dir(device).join("ports").join(port.to_string());
        if dir.is_dir() {
            Ok(dir)
        } else {
            let path = dir.display();
            Err(missing(format!(
                "RDMA device {device} has no port {port}: there is no {path}"
            )))
        }
    }
}

impl PortCounters {
    fn is_known(&self) -> bool {
        let all = [
            self.rx_bytes,
            self.tx_bytes,
            self.rx_packets,
            self.tx_packets,
        ];
        all.iter().any(Option::is_some)
    }

    /// What was carried since `before`; a counter that went back, because the device was reset, counts from 0.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let delta = |now: Option<u64>, then: Option<u64>| {
            let (now, then) = (now?, then?);
            Some(now.checked_sub(then).unwrap_or(now))
        };
        Self {
            rx_bytes: delta(self.rx_bytes, before.rx_bytes),
            tx_bytes: delta(self.tx_bytes, before.tx_bytes),
            rx_packets: delta(self.rx_packets, before.rx_packets),
            tx_packets: delta(self.tx_packets, before.tx_packets),
            source: self.source,
        }
    }
}

/// Whether both of two ports in one subnet carried traffic between two looks at their counters.
///
/// Judged by bytes where both count them, else by packets, in the direction that carried more in all. Put load on both
/// rails between the two looks: with none, the answer is `Neither` or chance.
pub fn carried_both(before: &[PortCounters; 2], after: &[PortCounters; 2]) -> Carried {
    let [a, b] = [after[0].since(&before[0]), after[1].since(&before[1])];
    let both = |x: Option<u64>, y: Option<u64>| Some([x?, y?]);
    let busier = |rx: Option<[u64; 2]>, tx: Option<[u64; 2]>| {
        let sum = |pair: &[u64; 2]| pair[0].saturating_add(pair[1]);
        rx.into_iter().chain(tx).max_by_key(sum)
    };
    let bytes = busier(both(a.rx_bytes, b.rx_bytes), both(a.tx_bytes, b.tx_bytes));
    let packets = busier(
        both(a.rx_packets, b.rx_packets),
        both(a.tx_packets, b.tx_packets),
    );
    match bytes.or(packets) {
        None => Carried::Unknown,
        Some([0, 0]) => Carried::Neither,
        Some([a, b]) if a < b.div_ceil(SILENT_RATIO) => Carried::OnlyOne { silent: 0 },
        Some([a, b]) if b < a.div_ceil(SILENT_RATIO) => Carried::OnlyOne { silent: 1 },
        Some(_) => Carried::Both,
    }
}

/// Prefix length of an address on a network interface of this namespace, or `None` if it has no such address.
///
/// # Errors
///
/// Whatever asking the kernel for its addresses gives.
pub fn prefix_len_of(netdev: &str, ip: IpAddr) -> io::Result<Option<u8>> {
    let all = interfaces()?;
    let found = all.iter().find(|interface| interface.name == netdev);
    Ok(found.and_then(|interface| interface.prefix_len(Gid::of(ip))))
}

fn data_bytes(path: &Path) -> Option<u64> {
    number(path)?.checked_mul(DATA_UNIT_BYTES)
}

/// A counter; drivers without it answer with an error or with words such as `N/A (no PMA)`.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn word(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|word| !word.is_empty())
}

/// The numbers that name files of a directory, in their order.
fn numbered(dir: &Path) -> Vec<u32> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysfs) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let sysfs = Sysfs::at(root.path());
        (root, sysfs)
    }

    fn packets(rx: u64, tx: u64) -> PortCounters {
        PortCounters {
            rx_packets: Some(rx),
            tx_packets: Some(tx),
            source: CounterSource::Driver,
            ..PortCounters::default()
        }
    }

    #[test]
    fn standard_counters_are_bytes_and_go_before_the_drivers_own() {
        let dir = "class/infiniband/mlx5_0/ports/1";
        let (_root, sysfs) = tree(&[
            (&format!("{dir}/counters/port_rcv_data"), "1000\n"),
            (&format!("{dir}/counters/port_xmit_data"), "25\n"),
            (&format!("{dir}/counters/port_rcv_packets"), "4\n"),
            (
                &format!("{dir}/counters/port_xmit_packets"),
                "N/A (no PMA)\n",
            ),
            (&format!("{dir}/hw_counters/rx_bytes"), "7\n"),
            (&format!("{dir}/hw_counters/tx_bytes"), "7\n"),
        ]);
        let expected = PortCounters {
            rx_bytes: Some(4000),
            tx_bytes: Some(100),
            rx_packets: Some(4),
            tx_packets: None,
            source: CounterSource::Port,
        };
        assert_eq!(sysfs.counters("mlx5_0", 1).unwrap(), expected);
    }

    #[test]
    fn soft_roce_counts_packets_alone() {
        let dir = "class/infiniband/rxe0/ports/1/hw_counters";
        let (_root, sysfs) = tree(&[
            (&format!("{dir}/sent_pkts"), "850\n"),
            (&format!("{dir}/rcvd_pkts"), "851\n"),
            (&format!("{dir}/duplicate_request"), "0\n"),
        ]);
        assert_eq!(sysfs.counters("rxe0", 1).unwrap(), packets(851, 850));
    }

    #[test]
    fn soft_roce_is_told_from_cards_by_its_interface() {
        let (_root, sysfs) = tree(&[
            ("class/infiniband/rxe0/parent", "eth0\n"),
            ("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
        ]);
        assert!(sysfs.is_soft("rxe0"));
        assert!(!sysfs.is_soft("mlx5_0") && !sysfs.is_soft("../rxe0") && !sysfs.is_soft("x"));
    }

    #[test]
    fn device_that_counts_nothing_says_so_and_an_absent_port_is_an_error() {
        let (_root, sysfs) = tree(&[("class/infiniband/x0/ports/1/state", "4: ACTIVE\n")]);
        assert_eq!(sysfs.counters("x0", 1).unwrap(), PortCounters::default());
        for (device, port) in [("x0", 2), ("x0", 0), ("x1", 1), ("../x0", 1)] {
            let error = sysfs.counters(device, port).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{device} {port}");
        }
    }

    #[test]
    fn port_that_stood_by_is_named_whichever_direction_tells() {
        let zero = [packets(0, 0), packets(0, 0)];
        let after = |a, b| carried_both(&zero, &[a, b]);
        assert_eq!(after(packets(1000, 10), packets(900, 9)), Carried::Both);
        // Both sent, and everything came back through the first.
        let verdict = after(packets(2000, 100), packets(3, 100));
        assert_eq!(verdict, Carried::OnlyOne { silent: 1 });
        // On the other end the sent packets tell.
        let verdict = after(packets(50, 5), packets(50, 2000));
        assert_eq!(verdict, Carried::OnlyOne { silent: 0 });
        assert_eq!(
            after(packets(1, 0), packets(0, 0)),
            Carried::OnlyOne { silent: 1 }
        );
        assert_eq!(after(packets(0, 0), packets(0, 0)), Carried::Neither);
        assert_eq!(
            after(PortCounters::default(), packets(5, 5)),
            Carried::Unknown
        );
    }

    #[test]
    fn only_what_came_since_the_first_look_counts_and_a_reset_counts_from_zero() {
        let before = [packets(1_000_000, 0), packets(0, 0)];
        let after = [packets(1_000_100, 0), packets(90, 0)];
        assert_eq!(carried_both(&before, &after), Carried::Both);
        assert_eq!(packets(7, 0).since(&packets(100, 0)), packets(7, 0));
    }

    #[test]
    fn bytes_decide_where_both_ports_count_them() {
        let with_bytes = |rx_bytes: u64| PortCounters {
            rx_bytes: Some(rx_bytes),
            ..packets(100, 100)
        };
        let zero = [PortCounters {
            rx_bytes: Some(0),
            ..packets(0, 0)
        }; 2];
        let verdict = carried_both(&zero, &[with_bytes(1 << 20), with_bytes(640)]);
        assert_eq!(verdict, Carried::OnlyOne { silent: 1 });
    }

    #[test]
    fn interface_is_the_first_of_the_gid_table_and_must_be_visible() {
        let dir = "class/infiniband/rxe0";
        let (root, sysfs) = tree(&[
            (&format!("{dir}/ports/1/link_layer"), "Ethernet\n"),
            (&format!("{dir}/ports/1/gid_attrs/ndevs/0"), ""),
            (&format!("{dir}/ports/1/gid_attrs/ndevs/2"), "eth1\n"),
            (&format!("{dir}/ports/1/gid_attrs/ndevs/10"), "eth1.5\n"),
        ]);
        assert_eq!(sysfs.netdev_of("rxe0", 1).unwrap(), None);
        fs::create_dir_all(root.path().join("class/net/eth1")).unwrap();
        assert_eq!(sysfs.netdev_of("rxe0", 1).unwrap().as_deref(), Some("eth1"));
        assert!(sysfs.netdev_of("rxe9", 1).is_err());
    }

    #[test]
    fn without_a_gid_table_the_cards_function_or_the_parent_tells() {
        let card = "class/infiniband/mlx5_0";
        let (_root, sysfs) = tree(&[
            (&format!("{card}/ports/2/link_layer"), "Ethernet\n"),
            (&format!("{card}/device/net/p0/dev_port"), "0\n"),
            (&format!("{card}/device/net/p1/dev_port"), "1\n"),
            ("class/infiniband/rxe0/ports/1/link_layer", "Ethernet\n"),
            ("class/infiniband/rxe0/parent", "p0\n"),
            ("class/infiniband/ib0/ports/1/link_layer", "InfiniBand\n"),
            ("class/infiniband/ib0/parent", "p0\n"),
            ("class/net/p0/ifindex", "2\n"),
            ("class/net/p1/ifindex", "3\n"),
        ]);
        assert_eq!(sysfs.netdev_of("mlx5_0", 2).unwrap().as_deref(), Some("p1"));
        assert_eq!(sysfs.netdev_of("rxe0", 1).unwrap().as_deref(), Some("p0"));
        assert_eq!(sysfs.netdev_of("ib0", 1).unwrap(), None);
    }

    #[test]
    fn prefix_length_comes_from_the_interface_that_has_the_address() {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(prefix_len_of("lo", loopback).unwrap(), Some(8));
        assert_eq!(prefix_len_of("no-such", loopback).unwrap(), None);
        let absent = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(prefix_len_of("lo", absent).unwrap(), None);
    }
}
