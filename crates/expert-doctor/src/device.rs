//! Devices: whether they open, what they can do, how they are attached.

use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;

use atlas_rdma::RdmaError;
use atlas_rdma::attributes::DeviceAttributes;
use atlas_rdma::mapping::MappingMode;

use crate::Options;
use crate::finding::{Check, Finding, Level};
use crate::store::Audited;
use crate::system::{System, human, list_has};
use crate::verbs::{Device, Refused, Verbs};

/// Bytes that are registered to see whether that works: more than the least of all limits on locked memory in use,
/// 64 KiB, and next to nothing.
const TRY_BYTES: u64 = 1 << 20;

/// READs under way at once below which a card does not reach its speed.
const READ_DEPTH_GOOD: u32 = 16;

pub(crate) fn check(
    out: &mut Vec<Finding>,
    options: &Options,
    system: &System,
    verbs: &dyn Verbs,
    devices: &[Device],
    store: Option<&Audited>,
) {
    for device in devices {
        let opened = match &device.opened {
            Ok(opened) => opened,
            Err(error) => {
                out.push(unopened(options, system, device, error));
                continue;
            }
        };
        let attributes = &opened.attributes;
        let name = &device.name;
        let firmware = match attributes.firmware.as_str() {
            "" => String::new(),
            text => format!(", firmware {text}"),
        };
        let what = format!("{name} opens ({}{firmware})", device.transport);
        out.push(Finding::ok(Check::DeviceOpens, what));
        out.push(read_depth(name, attributes));
        out.push(region_limits(options, name, attributes, store));
        register(out, options, verbs, name, store);
        out.extend(pcie_link(system, name));
        out.extend(numa(options, system, name));
        out.push(iommu(system, name));
    }
}

fn unopened(options: &Options, system: &System, device: &Device, error: &RdmaError) -> Finding {
    let name = &device.name;
    let level = options.verbs_level();
    match error {
        RdmaError::Permission { path, source, .. } => Finding::trouble(
            level,
            Check::DevicePermissions,
            format!("{name} cannot be opened: no access to {path}: {source}"),
            "this user may not use the card; TCP works",
            // A container's device rules say EPERM, a file's mode says EACCES.
            match system
                .container()
                .filter(|_| source.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error()))
            {
                Some(_) => "start the container with --device=/dev/infiniband".to_owned(),
                None => format!(
                    "chmod a+rw {path}    (for good: echo 'KERNEL==\"uverbs*\", MODE=\"0666\"' >/etc/udev/rules.d/99-uverbs.rules)"
                ),
            },
        ),
        RdmaError::UnsupportedTransport { reason, .. } => Finding::trouble(
            Level::Warning,
            Check::DeviceTransport,
            format!("{name} cannot be used: {reason}"),
            "cards with iWARP, EFA or usNIC have no reliable connections with one-sided READs as InfiniBand and RoCE have; TCP over the same card works",
            "atlas-expert fetch --expert-backend rdma    (TCP), or name another device with --rail",
        ),
        _ => Finding::trouble(
            level,
            Check::DeviceOpens,
            format!("{name} does not open: {error}"),
            "the card cannot be used; TCP works",
            "dmesg | grep -i -e infiniband -e mlx5 -e uverbs    (a card that was reset needs its driver loaded again)",
        ),
    }
}

fn read_depth(name: &str, attributes: &DeviceAttributes) -> Finding {
    let out = attributes.max_qp_init_rd_atom;
    let answered = attributes.max_qp_rd_atom;
    let what = format!("{name}: a queue pair has {out} READs under way and answers {answered}");
    if out.min(answered) >= READ_DEPTH_GOOD {
        return Finding::ok(Check::ReadDepth, what);
    }
    Finding::trouble(
        Level::Warning,
        Check::ReadDepth,
        what,
        format!(
            "below {READ_DEPTH_GOOD} a card waits for answers instead of asking; more queue pairs make up for it"
        ),
        "atlas-expert fetch --qps-per-rail 8    (firmware that says 0 or 1 is to be updated)",
    )
}

fn region_limits(
    options: &Options,
    name: &str,
    attributes: &DeviceAttributes,
    store: Option<&Audited>,
) -> Finding {
    let need = options
        .arena_bytes
        .unwrap_or(0)
        .max(store.map_or(0, |s| s.bytes));
    let (each, count) = (attributes.max_mr_bytes, attributes.max_mr);
    let room = each.saturating_mul(u64::from(count));
    let what = format!("{name}: {count} regions of at most {each} bytes");
    if room < need {
        return Finding::trouble(
            options.verbs_level(),
            Check::RegionLimits,
            format!("{what}, needed are {need} bytes"),
            "the device cannot register all of it, whatever it is cut into",
            "serve a part of the model from each of several machines: atlas-expert index --shard 1/2",
        );
    }
    Finding::ok(Check::RegionLimits, what)
}

/// Anonymous memory, then a mapping of a file: of the store where there is one, else of one in memory.
fn register(
    out: &mut Vec<Finding>,
    options: &Options,
    verbs: &dyn Verbs,
    name: &str,
    store: Option<&Audited>,
) {
    let Some(scratch) = scratch() else {
        return;
    };
    let tried = verbs.register(name, &scratch, TRY_BYTES, MappingMode::Copy);
    let is_right = tried.is_ok();
    out.push(registration(options, name, tried));
    if !is_right {
        // The answer for a file would be the same.
        return;
    }
    let of_store = store.and_then(|s| s.first.as_ref());
    let (file, bytes, label) = match of_store {
        Some((file, bytes, label)) => (file, (*bytes).min(TRY_BYTES), label.clone()),
        None => (
            &scratch,
            TRY_BYTES,
            "a file in memory (name a store with --store to try its file system)".to_owned(),
        ),
    };
    let tried = verbs.register(name, file, bytes, MappingMode::SharedReadOnly);
    out.push(file_mapping(name, &label, tried));
}

/// A file in memory with something in it.
fn scratch() -> Option<Arc<File>> {
    let fd =
        rustix::fs::memfd_create("atlas-expert-doctor", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
    let mut file = File::from(fd);
    file.write_all(&vec![1; TRY_BYTES as usize]).ok()?;
    Some(Arc::new(file))
}

fn registration(options: &Options, name: &str, tried: Result<(), Refused>) -> Finding {
    match tried {
        Ok(()) => Finding::ok(
            Check::Registration,
            format!("{name}: {} of memory can be registered", human(TRY_BYTES)),
        ),
        Err(Refused::Rdma(error @ RdmaError::MemoryLock { .. })) => Finding::trouble(
            options.verbs_level(),
            Check::Registration,
            error.to_string(),
            "no arena can be registered on this card; TCP works",
            expert_arena::MEMLOCK_ADVICE,
        ),
        Err(error) => Finding::trouble(
            options.verbs_level(),
            Check::Registration,
            error.to_string(),
            "no arena can be registered on this card; TCP works",
            "rdma resource show    (what is in use on the card; 'dmesg' may say more)",
        ),
    }
}

fn file_mapping(name: &str, label: &str, tried: Result<(), Refused>) -> Finding {
    let error = match tried {
        Ok(()) => {
            let what = format!("{name}: a read-only mapping of {label} can be registered");
            return Finding::ok(Check::FileMapping, what)
                .meaning("a peer serves its page cache without a copy");
        }
        Err(error) => error,
    };
    let fix = match &error {
        Refused::Rdma(RdmaError::NotRegistrable { .. }) => {
            "use Linux 6.2 or newer (or atlas-expert-peer --allow-rw-map, which lets the kernel write the files back and changes their times)"
        }
        _ => "put the store on ext4, xfs or tmpfs, which can be pinned",
    };
    Finding::trouble(
        Level::Warning,
        Check::FileMapping,
        format!("{name}: a mapping of {label} cannot be registered: {error}"),
        "a peer copies its store into anonymous memory as large as the experts, and the page cache does not help",
        fix,
    )
}

/// Nothing where the card does not say, as soft-RoCE has none.
fn pcie_link(system: &System, name: &str) -> Option<Finding> {
    let dir = format!("sys/class/infiniband/{name}/device");
    let width = |which: &str| system.number(&format!("{dir}/{which}_link_width"));
    let speed = |which: &str| -> Option<(f64, String)> {
        let text = system.text(&format!("{dir}/{which}_link_speed"))?;
        let number = text.split_whitespace().next()?.parse().ok()?;
        Some((number, text))
    };
    let (width_now, width_max) = (width("current")?, width("max")?);
    let (speed_now, speed_max) = (speed("current")?, speed("max")?);
    let what = format!("{name} is attached by {width_now} lanes of {}", speed_now.1);
    if width_now >= width_max && speed_now.0 >= speed_max.0 {
        return Some(Finding::ok(Check::PcieLink, what));
    }
    Some(Finding::trouble(
        Level::Warning,
        Check::PcieLink,
        format!("{what}; it can do {width_max} lanes of {}", speed_max.1),
        "the card is slower than its network link if the slot is the narrower of both",
        format!(
            "lspci -vv -s $(basename $(readlink /sys/class/infiniband/{name}/device)) | grep LnkSta    (then use another slot, or seat the card anew)"
        ),
    ))
}

/// Nothing on a machine with one node.
fn numa(options: &Options, system: &System, name: &str) -> Option<Finding> {
    let nodes: Vec<String> = system
        .names("sys/devices/system/node")
        .into_iter()
        .filter(|n| {
            n.strip_prefix("node")
                .is_some_and(|n| n.parse::<u32>().is_ok())
        })
        .collect();
    let node = system.number(&format!("sys/class/infiniband/{name}/device/numa_node"));
    let node = node.filter(|n| *n >= 0 && nodes.len() > 1)?;
    let what = format!("{name} is at NUMA node {node} of {}", nodes.len());
    let bind = format!(
        "numactl --cpunodebind={node} --membind={node} COMMAND    (container: --cpuset-mems={node})"
    );
    let allowed = system.status("Mems_allowed_list");
    if let Some(allowed) = allowed.filter(|list| !list_has(list, node)) {
        return Some(Finding::trouble(
            Level::Warning,
            Check::Numa,
            format!("{what}, and this process may use memory of {allowed} alone"),
            "all bytes cross from one socket to the other: slower",
            bind,
        ));
    }
    let meminfo = system.text(&format!("sys/devices/system/node/node{node}/meminfo"));
    let free = meminfo.and_then(|text| {
        let line = text.lines().find(|l| l.contains("MemFree:"))?;
        let kib: u64 = line.split_whitespace().rev().nth(1)?.parse().ok()?;
        kib.checked_mul(1024)
    });
    if let (Some(free), Some(need)) = (free, options.arena_bytes) {
        if free < need {
            return Some(Finding::trouble(
                Level::Warning,
                Check::Numa,
                format!(
                    "{what}, which has {} free, and the arena needs {}",
                    human(free),
                    human(need)
                ),
                "a part of the arena will lie at another node: slower",
                format!("{bind} with a smaller arena, or free memory of node {node}"),
            ));
        }
    }
    Some(Finding::ok(Check::Numa, what).meaning(format!("memory of that node is nearest: {bind}")))
}

fn iommu(system: &System, name: &str) -> Finding {
    let group = format!("sys/class/infiniband/{name}/device/iommu_group/type");
    match system.text(&group).as_deref() {
        None => Finding::ok(Check::Iommu, format!("{name}: no IOMMU in between")),
        Some("identity") => Finding::ok(
            Check::Iommu,
            format!("{name}: the IOMMU passes addresses through"),
        ),
        Some(kind) => Finding::trouble(
            Level::Warning,
            Check::Iommu,
            format!("{name}: the IOMMU translates addresses ({kind})"),
            "large regions outgrow its cache: reads into them were seen at two thirds of the speed",
            "kernel command line: iommu.passthrough=1    (x86: iommu=pt)",
        ),
    }
}
