//! A machine made of files and plain values, on which all is well until a test says otherwise.

use std::fs::{self, File};
use std::io;
use std::sync::Arc;

use atlas_rdma::attributes::{
    DeviceAttributes, Gid, GidEntry, GidType, LinkLayer, Mtu, PortAttributes, PortState,
};
use atlas_rdma::choose::PortView;
use atlas_rdma::mapping::MappingMode;
use atlas_rdma::{RdmaError, Transport};
use tempfile::TempDir;

use crate::finding::Report;
use crate::system::System;
use crate::verbs::{Device, Opened, Refused, Verbs};
use crate::{Options, examine_on};

/// What a device is when it is looked at.
pub(super) struct Card {
    pub(super) name: String,
    pub(super) attributes: DeviceAttributes,
    pub(super) port: PortView,
    pub(super) refuses: Option<fn() -> RdmaError>,
}

/// See the module.
pub(super) struct Machine {
    root: TempDir,
    pub(super) options: Options,
    pub(super) system: System,
    pub(super) cards: Vec<Card>,
    /// What libibverbs says instead of its devices.
    pub(super) no_devices: Option<fn() -> RdmaError>,
    pub(super) register: fn(MappingMode) -> Result<(), Refused>,
}

impl Machine {
    /// Two cards in two subnets.
    pub(super) fn new() -> Self {
        let mut machine = Self::without_devices();
        machine.no_devices = None;
        machine.set("sys/class/infiniband_verbs/abi_version", "6");
        for i in 0..2 {
            let name = format!("mlx5_{i}");
            machine.set(
                &format!("sys/class/infiniband_verbs/uverbs{i}/ibdev"),
                &name,
            );
            machine.set(&format!("sys/class/infiniband/{name}/node_type"), "1: CA");
            machine.set(&format!("dev/infiniband/uverbs{i}"), "");
            machine.set(&format!("sys/class/net/eth{i}/flags"), "0x1003");
            machine.cards.push(card(i));
        }
        machine
    }

    /// The bare rest of it.
    pub(super) fn without_devices() -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let machine = Self {
            system: System::at(root.path()),
            root,
            options: Options::default(),
            cards: Vec::new(),
            no_devices: Some(|| RdmaError::NoKernel {
                reason: "planted".into(),
            }),
            register: |_| Ok(()),
        };
        machine.set(
            "proc/meminfo",
            "MemTotal: 100000000 kB\nMemAvailable: 90000000 kB\n",
        );
        machine.set(
            "proc/self/limits",
            "Max locked memory         unlimited            unlimited            bytes",
        );
        machine.set(
            "proc/self/status",
            "CapEff:\t0000000000000000\nMems_allowed_list:\t0\n",
        );
        machine.set(
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always [madvise] never",
        );
        machine
    }

    pub(super) fn set(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, format!("{text}\n")).expect("a file");
    }

    pub(super) fn remove(&self, path: &str) {
        let path = self.root.path().join(path);
        match path.is_dir() {
            true => fs::remove_dir_all(path),
            false => fs::remove_file(path),
        }
        .expect("it was there");
    }

    pub(super) fn limit_locked_memory(&self, bytes: u64) {
        self.set(
            "proc/self/limits",
            &format!("Max locked memory         {bytes}            {bytes}            bytes"),
        );
    }

    pub(super) fn examine(&self) -> Report {
        examine_on(&self.options, &self.system, self)
    }
}

impl Verbs for Machine {
    fn devices(&self) -> Result<Vec<Device>, RdmaError> {
        if let Some(error) = self.no_devices {
            return Err(error());
        }
        let device = |card: &Card| Device {
            name: card.name.clone(),
            transport: Transport::InfiniBand,
            opened: match card.refuses {
                Some(error) => Err(error()),
                None => Ok(Opened {
                    attributes: card.attributes.clone(),
                    ports: vec![Ok(card.port.clone())],
                }),
            },
        };
        Ok(self.cards.iter().map(device).collect())
    }

    fn register(
        &self,
        _device: &str,
        file: &Arc<File>,
        bytes: u64,
        mode: MappingMode,
    ) -> Result<(), Refused> {
        assert!(file.metadata().expect("a file").len() >= bytes);
        (self.register)(mode)
    }
}

/// The i-th card: 10.77.i.1 on eth<i>.
pub(super) fn card(i: u8) -> Card {
    let name = format!("mlx5_{i}");
    let netdev = format!("eth{i}");
    let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0xff, 0xfe, 3, 4, i];
    Card {
        port: PortView {
            device: name.clone(),
            port: 1,
            attributes: PortAttributes {
                state: PortState::Active,
                link_layer: LinkLayer::Ethernet,
                lid: 0,
                active_mtu: Mtu::B4096,
                max_message_bytes: 1 << 30,
                gid_table_len: 16,
                link_mbit_per_s: 200_000,
            },
            gids: vec![
                gid(0, Gid(link_local), GidType::RoceV1, &netdev),
                gid(1, Gid(link_local), GidType::RoceV2, &netdev),
                gid(2, ipv4(i), GidType::RoceV1, &netdev),
                gid(3, ipv4(i), GidType::RoceV2, &netdev),
            ],
        },
        name,
        attributes: DeviceAttributes {
            firmware: "28.45".into(),
            node_guid: 1,
            max_mr_bytes: u64::MAX,
            max_mr: 1 << 24,
            max_qp: 1 << 17,
            max_qp_wr: 1 << 15,
            max_sge: 30,
            max_sge_rd: 30,
            max_cqe: 1 << 22,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 16,
            ports: 1,
        },
        refuses: None,
    }
}

pub(super) fn ipv4(i: u8) -> Gid {
    Gid::of(std::net::Ipv4Addr::new(10, 77, i, 1).into())
}

pub(super) fn gid(index: u32, gid: Gid, kind: GidType, netdev: &str) -> GidEntry {
    GidEntry {
        index,
        gid,
        kind,
        netdev: Some(netdev.into()),
        prefix_len: gid.is_routable().then_some(24),
    }
}

pub(super) fn os_error(errno: rustix::io::Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.raw_os_error())
}
