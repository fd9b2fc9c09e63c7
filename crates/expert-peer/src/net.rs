//! Sockets, wake-ups and waits, without policy.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tracing::warn;

use crate::{Limits, PeerError};

/// Connections that wait in the kernel for the acceptor.
const BACKLOG: i32 = 1024;

/// Wakes a thread that polls its descriptor. Stays readable until cleared.
pub(crate) struct Wake(OwnedFd);

impl Wake {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    pub(crate) fn wake(&self) {
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }

    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.0, PollFlags::IN)
    }
}

/// Waits until one of `fds` is ready, and says whether one is; `false` when `deadline` passed.
pub(crate) fn wait(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let timeout = deadline.map(|d| {
            let left = d.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match rustix::event::poll(fds, timeout.as_ref()) {
            Ok(0) if deadline.is_some_and(|d| Instant::now() >= d) => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(e.into()),
        }
    }
}

/// The addresses that `listen` stands for.
pub(crate) fn resolve(
    listen: &[String],
    allow_open: bool,
) -> Result<Vec<Vec<SocketAddr>>, PeerError> {
    if listen.is_empty() {
        return Err(PeerError::Address {
            address: String::new(),
            why: "none given".into(),
        });
    }
    listen
        .iter()
        .map(|address| {
            let wrong = |why: String| PeerError::Address {
                address: address.clone(),
                why,
            };
            let mut found: Vec<SocketAddr> = address
                .to_socket_addrs()
                .map_err(|e| wrong(e.to_string()))?
                .collect();
            found.dedup();
            if found.is_empty() {
                return Err(wrong("the name has no address".into()));
            }
            let open = |a: &&SocketAddr| !a.ip().to_canonical().is_loopback();
            match found.iter().find(open) {
                Some(&address) if !allow_open => Err(PeerError::Anonymous { address }),
                _ => Ok(found),
            }
        })
        .collect()
}

/// Sockets that are bound but do not listen yet: strangers are refused by the kernel until
/// [`listen`]. A name with several addresses needs only one that can be bound.
pub(crate) fn bind(names: &[Vec<SocketAddr>]) -> Result<Vec<(SocketAddr, Socket)>, PeerError> {
    let mut bound = Vec::new();
    let ipv4_ports: Vec<u16> = names
        .iter()
        .flatten()
        .filter(|a| a.is_ipv4())
        .map(SocketAddr::port)
        .collect();
    for addresses in names {
        let mut failure = None;
        let before = bound.len();
        for &address in addresses {
            // `[::]` alone means IPv4, too; beside an IPv4 address of the same port it must not.
            let only_v6 = ipv4_ports.contains(&address.port());
            match bind_one(address, only_v6) {
                Ok(socket) => bound.push((address, socket)),
                Err(e) => failure = Some(listen_error(address, e)),
            }
        }
        match failure {
            Some(e) if bound.len() == before => return Err(e),
            Some(e) => warn!("{e}"),
            None => {}
        }
    }
    Ok(bound)
}

fn bind_one(address: SocketAddr, only_v6: bool) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    // Without it a restart within a minute finds the port taken by its own old connections.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::from(address))?;
    Ok(socket)
}

/// Makes bound sockets listen.
pub(crate) fn listen(bound: Vec<(SocketAddr, Socket)>) -> Result<Vec<TcpListener>, PeerError> {
    bound
        .into_iter()
        .map(|(address, socket)| match socket.listen(BACKLOG) {
            Ok(()) => Ok(TcpListener::from(socket)),
            Err(e) => Err(listen_error(address, e)),
        })
        .collect()
}

fn listen_error(address: SocketAddr, source: io::Error) -> PeerError {
    let hint = match source.kind() {
        io::ErrorKind::AddrInUse => {
            "another program (perhaps another peer) has the port: stop it (`ss -ltnp` shows it), or pass another --listen HOST:PORT"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this machine has no such address: `ip address` shows those it has"
        }
        io::ErrorKind::PermissionDenied => "ports below 1024 need privileges: choose a higher one",
        _ => "pass another --listen HOST:PORT",
    };
    PeerError::Listen {
        address,
        source,
        hint,
    }
}

/// Options of an accepted connection; failures only cost what the option brings.
pub(crate) fn tune(stream: impl AsFd, limits: &Limits, send_buffer_bytes: Option<usize>) {
    use rustix::net::sockopt;
    let stream = stream.as_fd();
    let interval = limits.keepalive_interval.max(Duration::from_secs(1));
    let user_timeout_ms = u32::try_from(limits.send_timeout.as_millis()).unwrap_or(u32::MAX);
    let outcome = sockopt::set_tcp_nodelay(stream, true)
        .and_then(|()| sockopt::set_socket_keepalive(stream, true))
        .and_then(|()| sockopt::set_tcp_keepidle(stream, interval))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, interval))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, 3))
        .and_then(|()| sockopt::set_tcp_user_timeout(stream, user_timeout_ms));
    if let Err(e) = outcome {
        tracing::debug!("setting socket options: {e}");
    }
    if let Some(bytes) = send_buffer_bytes {
        if let Err(e) = sockopt::set_socket_send_buffer_size(stream, bytes) {
            tracing::debug!("setting the send buffer to {bytes} bytes: {e}");
        }
    }
}

/// Says at once what would keep a peer from listening, before a store is opened at length.
///
/// `allow_open` is whether addresses beyond loopback are allowed: consent, or a token.
///
/// *Errors*: as [`crate::Peer::start`] for the same addresses.
pub fn check_listen(listen: &[String], allow_open: bool) -> Result<(), PeerError> {
    bind(&resolve(listen, allow_open)?).map(drop)
}

/// Raises the soft limit on open files to the hard one, and gives back what it is then.
///
/// A connection takes two descriptors and a store one per file: the usual soft limit of 1024 is
/// soon reached.
pub fn raise_open_files_limit() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
}

/// The address at which a connection reached this machine.
pub(crate) fn own_address(stream: &impl AsFd) -> Option<SocketAddr> {
    socket2::SockRef::from(stream)
        .local_addr()
        .ok()?
        .as_socket()
}

/// What may wait in a connection to a client on this machine. The kernel's own choice grows to
/// megabytes, which a link with a delay needs; here it would only carry the bytes out of the cache before
/// the client copies them.
const LOCAL_SEND_BYTES: usize = 128 << 10;

/// Bounds what waits for a client on this machine.
pub(crate) fn keep_in_cache(stream: &impl AsFd) {
    // It is slower without, and right.
    if let Err(e) = socket2::SockRef::from(stream).set_send_buffer_size(LOCAL_SEND_BYTES) {
        tracing::debug!("the size of a socket's buffer cannot be set: {e}");
    }
}
