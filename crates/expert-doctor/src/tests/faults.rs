//! The faults of a machine: how each is planted, and what must be said of it.

mod devices;
mod ports;

use atlas_rdma::RdmaError;
use rustix::io::Errno;

use super::machine::{Machine, os_error};
use crate::finding::{Check, Finding, Level, Report};

pub(super) struct Fault {
    pub(super) name: &'static str,
    plant: fn(&mut Machine),
    check: Check,
    /// Where verbs are required; elsewhere nothing but `memory` and asked-for ports is a failure.
    level: Level,
    /// Part of what is said, and of the fix.
    what: &'static str,
    fix: &'static str,
}

impl Fault {
    pub(super) fn examine(&self) -> Report {
        let mut machine = Machine::new();
        machine.options.verbs_required = true;
        (self.plant)(&mut machine);
        machine.examine()
    }
}

/// A fault for a list; `plant` captures nothing.
fn fault(
    name: &'static str,
    check: Check,
    level: Level,
    what: &'static str,
    fix: &'static str,
    plant: fn(&mut Machine),
) -> Fault {
    Fault {
        name,
        plant,
        check,
        level,
        what,
        fix,
    }
}

fn only(machine: &mut Machine) {
    machine.cards.truncate(1);
    machine.remove("sys/class/infiniband/mlx5_1");
}

fn permission() -> RdmaError {
    RdmaError::Permission {
        device: "mlx5_0".into(),
        path: "/dev/infiniband/uverbs0".into(),
        source: os_error(Errno::ACCESS),
    }
}

pub(super) fn all() -> Vec<Fault> {
    let mut all = devices::list();
    all.extend(ports::list());
    all
}

#[test]
fn each_fault_is_named_with_its_level_and_its_fix() {
    let mut wrong = Vec::new();
    for fault in all() {
        let report = fault.examine();
        let is_it = |f: &&Finding| f.id == fault.check.id() && f.level != Level::Ok;
        let found: Vec<&Finding> = report.findings.iter().filter(is_it).collect();
        let fits = |f: &&&Finding| {
            f.level == fault.level
                && f.what.contains(fault.what)
                && f.fix.as_deref().is_some_and(|fix| fix.contains(fault.fix))
        };
        if found.iter().find(fits).is_none() {
            wrong.push(format!("{}: {found:#?}", fault.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_keeps_verbs_from_working_is_a_warning_where_tcp_will_do() {
    let of_machine = [Check::MemoryFloor, Check::Store, Check::ListenPort];
    for fault in all() {
        let mut machine = Machine::new();
        (fault.plant)(&mut machine);
        let report = machine.examine();
        if of_machine.contains(&fault.check) {
            assert_eq!(report.level, fault.level, "{}: {report:#?}", fault.name);
        } else {
            assert_eq!(report.level, Level::Warning, "{}: {report:#?}", fault.name);
        }
    }
}

#[test]
fn arp_that_answers_on_the_right_port_makes_one_subnet_usable() {
    let shared = all().into_iter().find(|f| f.check == Check::SharedSubnet);
    let shared = shared.expect("it is in the list");
    let mut machine = Machine::new();
    (shared.plant)(&mut machine);
    machine.set("proc/sys/net/ipv4/conf/all/arp_ignore", "1");
    machine.set("proc/sys/net/ipv4/conf/eth0/arp_announce", "2");
    let level = |machine: &Machine| {
        let findings = machine.examine().findings;
        let found = findings.iter().find(|f| f.id == "shared-subnet");
        found.expect("a finding").level
    };
    assert_eq!(
        level(&machine),
        Level::Warning,
        "eth1 announces as it likes"
    );
    machine.set("proc/sys/net/ipv4/conf/eth1/arp_announce", "2");
    assert_eq!(level(&machine), Level::Ok);
}

#[test]
fn capability_passes_the_limit_on_locked_memory() {
    let machine = Machine::new();
    machine.limit_locked_memory(65_536);
    machine.set("proc/self/status", "CapEff:\t000001ffffffffff");
    machine.set("proc/self/uid_map", "         0          0 4294967295");
    assert_eq!(machine.examine().level, Level::Ok);
}
