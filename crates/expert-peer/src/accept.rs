//! The thread that lets connections in, or turns them away.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use expert_wire::server::refusal;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, SocketFlags};
use tracing::{debug, warn};

use crate::connection::{self, Connection};
use crate::net::{Wake, tune, wait};
use crate::peer::Shared;
use crate::refusal::Refusal;
use crate::stats::add;

/// Stack of a connection's thread: its frames are small, buffers are on the heap.
const STACK_BYTES: usize = 256 << 10;
/// Connections taken from one listener before the others get their turn.
const BATCH: usize = 64;
/// First pause when the system has no descriptors left; doubled up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

pub(crate) fn run(shared: &Arc<Shared>, listeners: &[TcpListener]) {
    let mut pause = None;
    while !shared.stopping.load(Ordering::SeqCst) {
        // While there is nothing to accept with, the listeners would be ready for ever.
        let polled: &[TcpListener] = match pause {
            Some(_) => &[],
            None => listeners,
        };
        let mut fds = vec![shared.stop_wake.poll_fd()];
        fds.extend(polled.iter().map(|l| PollFd::new(l, PollFlags::IN)));
        let deadline = pause.map(|pause| Instant::now() + pause);
        if let Err(e) = wait(&mut fds, deadline) {
            warn!("waiting for connections: {e}");
            pause = Some(PAUSE_MAX);
            continue;
        }
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let mut exhausted = None;
        for listener in listeners {
            if let Err(e) = accept_some(shared, listener) {
                exhausted = Some(e);
            }
        }
        pause = match (exhausted, pause) {
            (None, _) => None,
            (Some(e), None) => {
                warn!("accepting connections: {e}; trying again soon (is `ulimit -n` too low?)");
                Some(PAUSE_MIN)
            }
            (Some(_), Some(pause)) => Some((pause * 2).min(PAUSE_MAX)),
        };
    }
}

/// Accepts what waits; an error means that the system lacks something and a pause is due.
fn accept_some(shared: &Arc<Shared>, listener: &TcpListener) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    for _ in 0..BATCH {
        match rustix::net::acceptfrom_with(listener, flags) {
            Ok((stream, address)) => {
                let address = address
                    .and_then(|a| SocketAddr::try_from(a).ok())
                    .map_or(IpAddr::from([0, 0, 0, 0]), |a| a.ip().to_canonical());
                admit(shared, stream, address);
            }
            Err(Errno::AGAIN) => return Ok(()),
            Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                return Err(e.into());
            }
            // Errors of the connection that was about to be accepted, see accept(2).
            Err(e) => debug!("a connection was lost before it was accepted: {e}"),
        }
    }
    Ok(())
}

fn admit(shared: &Arc<Shared>, stream: OwnedFd, address: IpAddr) {
    let limits = &shared.config.limits;
    let id = shared.next_connection.fetch_add(1, Ordering::Relaxed);
    let mut connections = shared.connections();
    let same_address = connections
        .values()
        .filter(|c| c.address == address)
        .count();
    let (mut handshaking, mut same_handshaking) = (0, 0);
    for connection in connections.values() {
        if connection.handshaking.load(Ordering::SeqCst) {
            handshaking += 1;
            same_handshaking += usize::from(connection.address == address);
        }
    }
    // So that one address cannot keep all others out.
    let same_max = limits.handshakes_max - limits.handshakes_max / 4;
    let over = if connections.len() >= limits.connections_max {
        Some(("connections in all", Refusal::LimitTotal))
    } else if same_address >= limits.connections_per_address_max {
        Some(("connections from one address", Refusal::LimitAddress))
    } else if handshaking >= limits.handshakes_max || same_handshaking >= same_max {
        Some(("handshakes at once", Refusal::LimitHandshakes))
    } else {
        None
    };
    if let Some((over, why)) = over {
        drop(connections);
        return turn_away(shared, &stream, address, over, why);
    }
    tune(&stream, limits, shared.config.send_buffer_bytes);
    let wake = match Wake::new() {
        Ok(wake) => wake,
        Err(e) => {
            drop(connections);
            let over = format!("descriptors ({e})");
            return turn_away(shared, &stream, address, &over, Refusal::Resources);
        }
    };
    let connection = Arc::new(Connection {
        id,
        address,
        stream,
        wake,
        handshaking: AtomicBool::new(true),
        accepted_at: Instant::now(),
    });
    connections.insert(id, connection.clone());
    drop(connections);
    let guard = Registration {
        shared: shared.clone(),
        connection: connection.clone(),
    };
    // If it fails the closure is dropped, and the guard in it.
    let spawned = thread::Builder::new()
        .name(format!("peer-conn-{id}"))
        .stack_size(STACK_BYTES)
        .spawn(move || connection::serve(&guard.shared, &guard.connection));
    match spawned {
        Ok(_) => add(&shared.counters.accepted, 1),
        Err(e) => turn_away(
            shared,
            &connection.stream,
            address,
            &format!("threads ({e})"),
            Refusal::Resources,
        ),
    }
}

/// Says `busy` as far as that goes without waiting.
fn turn_away(shared: &Shared, stream: &OwnedFd, address: IpAddr, over: &str, why: Refusal) {
    shared.counters.refused(why);
    if shared.busy_log.allows() {
        warn!("{address}: turned away, too many {over}");
    }
    let message = refusal(shared.instance_id, "busy");
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = rustix::net::send(stream, &message, flags);
    let _ = rustix::net::shutdown(stream, Shutdown::Write);
}

/// Keeps a connection in the peer's list as long as its thread runs, however that ends.
struct Registration {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.connections().remove(&self.connection.id);
        self.shared.ended.notify_all();
    }
}
