//! What an examination found: one finding per check and subject.

use std::fmt;

use serde::Serialize;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, slower or with less than was meant.
    Warning,
    /// What was asked for cannot work.
    Failure,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failure => "failure",
        })
    }
}

/// Part of the system that a check looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Area {
    /// What verbs need of the machine: library, kernel, container.
    Machine,
    /// An RDMA device.
    Device,
    /// A port of a device.
    Port,
    /// Memory and the right to pin it.
    Memory,
    /// The local disk and the store on it.
    Store,
    /// The other end.
    Peer,
}

macro_rules! checks {
    ($($(#[$doc:meta])* $name:ident = $id:literal in $area:ident,)*) => {
        /// Everything that is looked at. Names are stable: programs and `docs/doctor.md` go by them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Check {
            $($(#[$doc])* $name,)*
        }

        impl Check {
            /// All of them, in the order of a report.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Its name.
            pub fn id(self) -> &'static str {
                match self {
                    $(Self::$name => $id),*
                }
            }

            /// What it looks at.
            pub fn area(self) -> Area {
                match self {
                    $(Self::$name => Area::$area),*
                }
            }
        }
    };
}

checks! {
    /// Whether this is a container, which needs devices passed to it.
    Container = "container" in Machine,
    /// Whether libibverbs can be loaded.
    VerbsLibrary = "verbs-library" in Machine,
    /// Whether the kernel's part of verbs is there.
    KernelModules = "kernel-modules" in Machine,
    /// Whether there are RDMA devices, and providers for them.
    RdmaDevices = "rdma-devices" in Machine,
    /// Whether each device has its file below `/dev/infiniband`.
    DeviceNodes = "device-nodes" in Machine,
    /// Whether this user may open a device.
    DevicePermissions = "device-permissions" in Device,
    /// Whether a device has reliable connections with one-sided READs.
    DeviceTransport = "device-transport" in Device,
    /// Whether a device opens and answers.
    DeviceOpens = "device-opens" in Device,
    /// READs that a device has under way and answers at once.
    ReadDepth = "read-depth" in Device,
    /// Whether regions as large as needed can be registered.
    RegionLimits = "region-limits" in Device,
    /// Whether anonymous memory can be registered, as arenas are.
    Registration = "registration" in Device,
    /// Whether the kernel registers a mapping of a file, so that a peer needs no copy.
    FileMapping = "file-mapping" in Device,
    /// Whether a card's link to the machine is as wide and fast as the card.
    PcieLink = "pcie-link" in Device,
    /// NUMA node of a card, and whether this process may use it.
    Numa = "numa" in Device,
    /// Whether an IOMMU translates what a card reads and writes.
    Iommu = "iommu" in Device,
    /// State and speed of a port.
    PortState = "port-state" in Port,
    /// Whether the GIDs of a port belong to interfaces that this process sees.
    NetworkNamespace = "network-namespace" in Port,
    /// The chosen entry of a port's GID table, and why not the others.
    Gid = "gid" in Port,
    /// Packet size of a port.
    Mtu = "mtu" in Port,
    /// Ports in one subnet, and the ARP settings of their interfaces.
    SharedSubnet = "shared-subnet" in Port,
    /// Which ports a client would use.
    Rails = "rails" in Port,
    /// Limit on locked memory against the need.
    Memlock = "memlock" in Memory,
    /// Available memory against the need and the part that must stay free.
    MemoryFloor = "memory-floor" in Memory,
    /// Huge pages.
    HugePages = "huge-pages" in Memory,
    /// Size of a page.
    PageSize = "page-size" in Memory,
    /// Whether files can be read through io_uring.
    IoUring = "io-uring" in Store,
    /// Whether the peer's port is free.
    ListenPort = "listen-port" in Machine,
    /// Whether the store is sound.
    Store = "store" in Store,
    /// Whether the store's bytes can be compared.
    StoreChecksums = "store-checksums" in Store,
    /// Whether the store fits into memory to be served by one-sided READs.
    StoreMemory = "store-memory" in Store,
    /// Whether the peer answers.
    PeerConnect = "peer-connect" in Peer,
    /// The protocol version of both ends.
    PeerProtocol = "peer-protocol" in Peer,
    /// The content that the peer serves.
    PeerContent = "peer-content" in Peer,
    /// Whether one record arrives over TCP with the right bytes.
    PeerRecord = "peer-record" in Peer,
    /// Which rails the peer has.
    PeerRails = "peer-rails" in Peer,
    /// Which rail of the peer each port of this machine belongs to.
    PeerPairing = "peer-pairing" in Peer,
    /// Packet size of both ends of a pair.
    PeerMtu = "peer-mtu" in Peer,
    /// READ depth of both ends of a pair.
    PeerReadDepth = "peer-read-depth" in Peer,
    /// A short read over each pair, against the speed of its links.
    PeerRead = "peer-read" in Peer,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check.
    pub id: &'static str,
    /// What it looks at.
    pub area: Area,
    /// How bad it is.
    pub level: Level,
    /// What was seen.
    pub what: String,
    /// What that means for the user; empty where it goes without saying.
    pub means: String,
    /// The line that mends it, where it is not ok.
    pub fix: Option<String>,
}

impl Finding {
    /// As it should be.
    pub fn ok(check: Check, what: impl Into<String>) -> Self {
        Self {
            id: check.id(),
            area: check.area(),
            level: Level::Ok,
            what: what.into(),
            means: String::new(),
            fix: None,
        }
    }

    /// Not as it should be; every such finding says what it means and what to do.
    pub fn trouble(
        level: Level,
        check: Check,
        what: impl Into<String>,
        means: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            level,
            means: means.into(),
            fix: Some(fix.into()),
            ..Self::ok(check, what)
        }
    }

    /// The same with a meaning.
    pub fn meaning(mut self, means: impl Into<String>) -> Self {
        self.means = means.into();
        self
    }
}

/// All findings of an examination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The worst of them.
    pub level: Level,
    /// How many failures.
    pub failures: usize,
    /// How many warnings.
    pub warnings: usize,
    /// In the order in which they were looked at.
    pub findings: Vec<Finding>,
}

impl From<Vec<Finding>> for Report {
    fn from(findings: Vec<Finding>) -> Self {
        let count = |level| findings.iter().filter(|f| f.level == level).count();
        Self {
            level: findings.iter().map(|f| f.level).max().unwrap_or(Level::Ok),
            failures: count(Level::Failure),
            warnings: count(Level::Warning),
            findings,
        }
    }
}
