//! A namespace of the guest without RDMA devices, and one that does not see the kernel's part of it either, as in a
//! container: each has an error of its own, and TCP works.

use std::time::Duration;

use anyhow::Result;
use atlas_expert_tests::guest::Agent;
use atlas_expert_tests::net::no_rdma::Machine;

const LONG: Duration = Duration::from_secs(60);
const NAME: &str = "no-rdma";

/// A network namespace that no device belongs to. Goes with what it changed.
struct Namespace<'a>(&'a Agent);

impl<'a> Namespace<'a> {
    fn new(agent: &'a Agent) -> Result<Self> {
        let namespace = Self(agent);
        // Else every namespace sees every device.
        let command = format!(
            "rdma system set netns exclusive && ip netns add {NAME} && ip -n {NAME} link set lo up"
        );
        agent.run(&command, LONG)?.succeeded();
        Ok(namespace)
    }

    /// A machine that is this namespace, with its own `/sys`, after `prepare` ran in it.
    fn machine(&self, prepare: &str, complaint: &str) -> Machine {
        let script = format!("{prepare} && exec \"$@\"");
        let words = ["ip", "netns", "exec", NAME, "sh", "-c", &script, "sh"];
        Machine {
            complaint: complaint.into(),
            inside: words.map(str::to_owned).to_vec(),
            ..Machine::default()
        }
    }
}

impl Drop for Namespace<'_> {
    fn drop(&mut self) {
        let command = format!("ip netns delete {NAME}; rdma system set netns shared");
        let _ = self.0.run(&command, LONG);
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_without_devices_fail_by_name_or_fall_back() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let namespace = Namespace::new(&agent)?;
    check(&namespace.machine("true", "there is no RDMA device"));
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_without_the_kernels_part_fail_by_name_or_fall_back() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let namespace = Namespace::new(&agent)?;
    let hide = "mount -t tmpfs none /sys/class/infiniband_verbs";
    check(&namespace.machine(hide, "the kernel offers no RDMA here"));
    Ok(())
}

fn check(machine: &Machine) {
    machine.required_verbs_fail();
    machine.verbs_fall_back_to_tcp();
    machine.tcp_works_and_says_nothing();
    machine.peer_that_must_serve_verbs_does_not_start();
    machine.peer_serves_tcp();
}
