//! The thread that looks at the store's files, every second and when a client reports bad bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::net::wait;
use crate::peer::Shared;

/// Reports within this time after a look share the next one.
const LOOK_GAP: Duration = Duration::from_millis(100);

pub(crate) fn run(shared: &Arc<Shared>) {
    while !shared.stopping.load(Ordering::SeqCst) {
        let looked = Instant::now();
        look(shared);
        shared.watched.beat();
        let next = Instant::now() + shared.config.restat_interval;
        let mut wakes = [shared.report_wake.poll_fd(), shared.stop_wake.poll_fd()];
        if wait(&mut wakes, Some(next)).unwrap_or(false) {
            shared.report_wake.clear();
            // A flood of reports must not become a flood of `stat` calls.
            let pause_end = Some(looked + LOOK_GAP);
            let _ = wait(&mut [shared.stop_wake.poll_fd()], pause_end);
        }
    }
}

fn look(shared: &Shared) {
    shared.epoch().check_files(&shared.counters);
}
