//! Library, kernel, device files and devices.

use std::io;

use atlas_rdma::RdmaError;
use atlas_rdma::mapping::MappingMode;
use rustix::io::Errno;

use super::super::machine::os_error;
use super::{Fault, fault, permission};
use crate::finding::Check;
use crate::finding::Level::{Failure, Warning};

fn too_little_lockable() -> RdmaError {
    RdmaError::MemoryLock {
        bytes: 1 << 20,
        device: "mlx5_0".into(),
        limit_bytes: Some(65_536),
        need_bytes: 1 << 20,
        source: os_error(Errno::NOMEM),
    }
}

fn not_registrable() -> RdmaError {
    RdmaError::NotRegistrable {
        bytes: 1 << 20,
        device: "mlx5_0".into(),
        source: os_error(Errno::FAULT),
    }
}

pub(super) fn list() -> Vec<Fault> {
    vec![
        fault(
            "no library",
            Check::VerbsLibrary,
            Failure,
            "no such file",
            "apt install libibverbs1",
            |m| {
                m.no_devices = Some(|| RdmaError::NoLibrary {
                    reason: "no such file".into(),
                });
            },
        ),
        fault(
            "no module",
            Check::KernelModules,
            Failure,
            "ib_uverbs",
            "modprobe ib_uverbs",
            |m| {
                m.remove("sys/class/infiniband_verbs");
                m.remove("sys/class/infiniband");
                m.no_devices = Some(|| RdmaError::NoKernel {
                    reason: "planted".into(),
                });
            },
        ),
        fault(
            "no module, in a container",
            Check::KernelModules,
            Failure,
            "ib_uverbs",
            "on the host: modprobe",
            |m| {
                m.remove("sys/class/infiniband_verbs");
                m.set(".dockerenv", "");
                m.no_devices = Some(|| RdmaError::NoKernel {
                    reason: "planted".into(),
                });
            },
        ),
        fault(
            "no device",
            Check::RdmaDevices,
            Failure,
            "no RDMA device",
            "rdma link add rxe0 type rxe netdev eth0",
            |m| {
                m.remove("sys/class/infiniband");
                m.no_devices = Some(|| RdmaError::NoDevice);
            },
        ),
        fault(
            "no provider",
            Check::RdmaDevices,
            Failure,
            "no provider",
            "apt install ibverbs-providers",
            |m| {
                m.no_devices = Some(|| RdmaError::NoProvider {
                    devices: "mlx5_0".into(),
                });
            },
        ),
        fault(
            "no device file",
            Check::DeviceNodes,
            Failure,
            "/dev/infiniband/uverbs1 (mlx5_1)",
            "udevadm trigger",
            |m| {
                m.remove("dev/infiniband/uverbs1");
            },
        ),
        fault(
            "container without devices",
            Check::DeviceNodes,
            Failure,
            "/dev/infiniband/uverbs0",
            "--device=/dev/infiniband",
            |m| {
                m.remove("dev/infiniband");
                m.set(".dockerenv", "");
            },
        ),
        fault(
            "device without permission",
            Check::DevicePermissions,
            Failure,
            "/dev/infiniband/uverbs0",
            "chmod a+rw /dev/infiniband/uverbs0",
            |m| {
                m.cards[0].refuses = Some(permission);
            },
        ),
        fault(
            "iWARP",
            Check::DeviceTransport,
            Warning,
            "iWARP",
            "--expert-backend rdma",
            |m| {
                m.cards[0].refuses = Some(|| RdmaError::UnsupportedTransport {
                    device: "mlx5_0".into(),
                    reason: "it offers iWARP".into(),
                });
            },
        ),
        fault(
            "broken device",
            Check::DeviceOpens,
            Failure,
            "mlx5_0 does not open",
            "dmesg",
            |m| {
                m.cards[0].refuses = Some(|| RdmaError::Open {
                    device: "mlx5_0".into(),
                    source: io::Error::other("planted"),
                });
            },
        ),
        fault(
            "READ depth 1",
            Check::ReadDepth,
            Warning,
            "1 READs under way",
            "--qps-per-rail",
            |m| {
                m.cards[0].attributes.max_qp_init_rd_atom = 1;
            },
        ),
        fault(
            "small regions",
            Check::RegionLimits,
            Failure,
            "4 regions",
            "--shard",
            |m| {
                m.cards[0].attributes.max_mr = 4;
                m.cards[0].attributes.max_mr_bytes = 1 << 20;
                m.options.arena_bytes = Some(1 << 30);
            },
        ),
        fault(
            "memlock refuses a region",
            Check::Registration,
            Failure,
            "65536",
            "ulimit -l unlimited",
            |m| {
                m.register = |_| Err(too_little_lockable().into());
            },
        ),
        fault(
            "old kernel",
            Check::FileMapping,
            Warning,
            "cannot be registered",
            "Linux 6.2",
            |m| {
                m.register = |mode| match mode {
                    MappingMode::Copy => Ok(()),
                    _ => Err(not_registrable().into()),
                };
            },
        ),
        fault(
            "DAX",
            Check::FileMapping,
            Warning,
            "cannot be registered",
            "put the store on ext4",
            |m| {
                m.register = |mode| match mode {
                    MappingMode::Copy => Ok(()),
                    _ => Err(RdmaError::Register {
                        bytes: 1 << 20,
                        device: "mlx5_0".into(),
                        source: os_error(Errno::OPNOTSUPP),
                    }
                    .into()),
                };
            },
        ),
        fault(
            "narrow slot",
            Check::PcieLink,
            Warning,
            "4 lanes",
            "lspci",
            |m| {
                let dir = "sys/class/infiniband/mlx5_0/device";
                for (name, text) in [
                    ("current_link_width", "4"),
                    ("max_link_width", "16"),
                    ("current_link_speed", "32.0 GT/s PCIe"),
                    ("max_link_speed", "32.0 GT/s PCIe"),
                ] {
                    m.set(&format!("{dir}/{name}"), text);
                }
            },
        ),
        fault(
            "card of a node that is not allowed",
            Check::Numa,
            Warning,
            "NUMA node 1",
            "numactl --cpunodebind=1",
            |m| {
                m.set(
                    "sys/devices/system/node/node0/meminfo",
                    "Node 0 MemFree: 1 kB",
                );
                m.set(
                    "sys/devices/system/node/node1/meminfo",
                    "Node 1 MemFree: 1 kB",
                );
                m.set("sys/class/infiniband/mlx5_0/device/numa_node", "1");
            },
        ),
        fault(
            "full node",
            Check::Numa,
            Warning,
            "free",
            "numactl --cpunodebind=0",
            |m| {
                m.set(
                    "sys/devices/system/node/node0/meminfo",
                    "Node 0 MemFree:        100 kB",
                );
                m.set(
                    "sys/devices/system/node/node1/meminfo",
                    "Node 1 MemFree:        100 kB",
                );
                m.set("sys/class/infiniband/mlx5_0/device/numa_node", "0");
                m.options.arena_bytes = Some(1 << 20);
            },
        ),
        fault(
            "translating IOMMU",
            Check::Iommu,
            Warning,
            "DMA-FQ",
            "iommu.passthrough=1",
            |m| {
                m.set(
                    "sys/class/infiniband/mlx5_0/device/iommu_group/type",
                    "DMA-FQ",
                );
            },
        ),
    ]
}
