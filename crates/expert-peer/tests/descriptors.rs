//! A peer that runs out of file descriptors; alone in its process because the limit is the process's.

mod common;

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use expert_wire::Key;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

#[test]
fn peer_without_descriptors_waits_without_spinning_and_recovers() {
    let source = Arc::new(TempSource::pieced(1));
    let peer = start(&source);
    let (mut served, welcome) = Client::v2(peer.local_addr());
    let before = getrlimit(Resource::Nofile);
    // Room for the sockets of this test, not for those of the peer.
    let waiting: Vec<TcpStream> = {
        let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(used + 20),
                maximum: before.maximum,
            },
        )
        .unwrap();
        std::iter::from_fn(|| TcpStream::connect(peer.local_addr()).ok())
            .take(64)
            .collect()
    };
    let cpu = || {
        let t = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    };
    let (cpu_before, start) = (cpu(), Instant::now());
    std::thread::sleep(Duration::from_millis(700));
    let busy = (cpu() - cpu_before).as_secs_f64() / start.elapsed().as_secs_f64();
    assert!(
        busy < 0.2,
        "{busy:.2} processors busy while nothing can be accepted"
    );
    let key = Key::new(0, 0);
    assert!(served.fetch(request(key, welcome.epoch, 0, 100)).is_ok());
    drop(waiting);
    setrlimit(Resource::Nofile, before).unwrap();
    let (mut late, welcome) = Client::v2(peer.local_addr());
    assert!(late.fetch(request(key, welcome.epoch, 0, 100)).is_ok());
}
