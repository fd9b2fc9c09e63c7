//! Faults planted one by one in a machine on which all is well: each is named, with what mends it.

mod faults;
mod machine;
mod peers;

use std::collections::BTreeSet;

use crate::finding::{Check, Level};
use machine::Machine;

#[test]
fn healthy_machine_with_two_rails_has_no_complaint() {
    let report = Machine::new().examine();
    let complaints: Vec<_> = report
        .findings
        .iter()
        .filter(|f| f.level != Level::Ok)
        .collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
    assert_eq!(report.level, Level::Ok);
    let ids: BTreeSet<&str> = report.findings.iter().map(|f| f.id).collect();
    for check in [
        Check::VerbsLibrary,
        Check::KernelModules,
        Check::RdmaDevices,
        Check::DeviceNodes,
        Check::DeviceOpens,
        Check::ReadDepth,
        Check::RegionLimits,
        Check::Registration,
        Check::FileMapping,
        Check::Iommu,
        Check::PortState,
        Check::Gid,
        Check::Mtu,
        Check::Rails,
        Check::Memlock,
        Check::MemoryFloor,
        Check::HugePages,
        Check::PageSize,
        Check::IoUring,
        Check::ListenPort,
    ] {
        assert!(ids.contains(check.id()), "{} is missing", check.id());
    }
}

#[test]
fn machine_without_any_card_may_use_tcp_and_fails_only_where_verbs_are_required() {
    let mut machine = Machine::without_devices();
    let report = machine.examine();
    assert_eq!(report.level, Level::Warning, "{report:#?}");
    let devices = report
        .findings
        .iter()
        .find(|f| f.id == "rdma-devices")
        .expect("a finding");
    assert!(devices.means.contains("TCP"), "{devices:?}");
    machine.options.verbs_required = true;
    assert_eq!(machine.examine().level, Level::Failure);
}

#[test]
fn every_trouble_says_what_it_means_and_what_to_do_in_one_line() {
    for fault in faults::all() {
        for finding in fault.examine().findings {
            assert!(
                !finding.what.is_empty() && !finding.what.contains('\n'),
                "{finding:?}"
            );
            assert_eq!(
                finding.level == Level::Ok,
                finding.fix.is_none(),
                "{finding:?}"
            );
            if let Some(fix) = &finding.fix {
                assert!(!fix.is_empty() && !fix.contains('\n'), "{finding:?}");
                assert!(!finding.means.is_empty(), "{finding:?}");
            }
        }
    }
}

/// Programs go by the names, people by the page: both have all of them.
#[test]
fn documentation_has_each_check_and_no_other() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/doctor.md");
    let text = std::fs::read_to_string(path).expect("docs/doctor.md");
    let rows = text.lines().filter_map(|l| l.strip_prefix("| `"));
    let documented: Vec<&str> = rows.filter_map(|l| l.split('`').next()).collect();
    let ids: Vec<&str> = Check::ALL.iter().map(|c| c.id()).collect();
    assert_eq!(documented, ids);
    let distinct: BTreeSet<&&str> = ids.iter().collect();
    assert_eq!(distinct.len(), ids.len());
    for id in ids {
        let is_kebab = id.chars().all(|c| c.is_ascii_lowercase() || c == '-');
        assert!(is_kebab, "{id}");
    }
}
