//! A TCP connection to a peer, up to the end of the handshake, with a deadline on each step.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use expert_wire::auth::{NONCE_BYTES, Token};
use expert_wire::client::{Handshake, Outcome, Protocol};
use expert_wire::message::Role;
use rand::TryRng;
use rand::rngs::SysRng;
use socket2::{SockRef, TcpKeepalive};

use crate::error::TierError;

/// Idle time before keep-alive asks, and between its questions; three stay unanswered at most.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
/// Data that nobody acknowledges for this long ends the connection.
const USER_TIMEOUT: Duration = Duration::from_secs(15);

/// Connects and shakes hands; with a token both sides prove that they know it.
///
/// *Errors*: [`TierError::Connect`] and [`TierError::Handshake`], each within `limit`.
pub(crate) fn connect(
    addr: &str,
    client_id: u64,
    role: Role,
    protocol: Protocol,
    token: Option<&Token>,
    limit: Instant,
) -> Result<(TcpStream, Outcome), TierError> {
    let stream = connect_any(addr, limit)?;
    let failed = |e: io::Error| connect_error(addr, &e);
    stream.set_nodelay(true).map_err(failed)?;
    let mut handshake = Handshake::new(client_id, role, protocol);
    if let Some(token) = token {
        let mut nonce = [0; NONCE_BYTES];
        SysRng
            .try_fill_bytes(&mut nonce)
            .map_err(|e| TierError::Config(format!("no random numbers from the system: {e}")))?;
        handshake = handshake.with_token(token, nonce);
    }
    let outcome = shake_hands(&stream, addr, handshake, limit)?;
    stream.set_read_timeout(None).map_err(failed)?;
    stream
        .set_write_timeout(Some(USER_TIMEOUT))
        .map_err(failed)?;
    let socket = SockRef::from(&stream);
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE)
        .with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&keepalive).map_err(failed)?;
    socket
        .set_tcp_user_timeout(Some(USER_TIMEOUT))
        .map_err(failed)?;
    Ok((stream, outcome))
}

/// Checks the form of `host:port` without asking a name server.
pub(crate) fn check_addr(addr: &str) -> Result<(), TierError> {
    let port = addr
        .rsplit_once(':')
        .filter(|(host, _)| !host.is_empty())
        .and_then(|(_, port)| port.parse::<u16>().ok())
        .filter(|&p| p != 0);
    match port {
        Some(_) => Ok(()),
        None => Err(TierError::Config(format!(
            "peer address {addr:?} is not of the form host:port, e.g. 10.0.0.2:9909"
        ))),
    }
}

fn connect_any(addr: &str, limit: Instant) -> Result<TcpStream, TierError> {
    let candidates: Vec<SocketAddr> = addr
        .to_socket_addrs()
        .map_err(|e| connect_error(addr, &e))?
        .collect();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (i, candidate) in candidates.iter().enumerate() {
        // The remaining time is shared, so that one dead address does not use it up.
        let left = limit.saturating_duration_since(Instant::now()) / (candidates.len() - i) as u32;
        if left.is_zero() {
            last = io::ErrorKind::TimedOut.into();
            break;
        }
        match TcpStream::connect_timeout(candidate, left) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(connect_error(addr, &last))
}

fn shake_hands(
    mut stream: &TcpStream,
    addr: &str,
    mut handshake: Handshake,
    limit: Instant,
) -> Result<Outcome, TierError> {
    let mut buffer = Vec::new();
    loop {
        let transmit = handshake.take_transmit();
        let left = limit.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(connect_error(addr, &io::ErrorKind::TimedOut.into()));
        }
        stream
            .set_write_timeout(Some(left))
            .and_then(|()| stream.write_all(&transmit))
            .map_err(|e| connect_error(addr, &e))?;
        let want = handshake.wants();
        buffer.clear();
        while buffer.len() < want {
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(connect_error(addr, &io::ErrorKind::TimedOut.into()));
            }
            stream
                .set_read_timeout(Some(left))
                .map_err(|e| connect_error(addr, &e))?;
            // Grows with what really arrives, not with what is announced.
            let at = buffer.len();
            buffer.resize(want.min(at + (64 << 10)), 0);
            match stream.read(&mut buffer[at..]) {
                Ok(0) => {
                    return Err(connect_error(addr, &io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(n) => buffer.truncate(at + n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => buffer.truncate(at),
                Err(e) => return Err(connect_error(addr, &e)),
            }
        }
        let outcome = handshake
            .handle(&buffer)
            .map_err(|source| TierError::Handshake {
                addr: addr.to_owned(),
                source,
            })?;
        if let Some(outcome) = outcome {
            let transmit = handshake.take_transmit();
            stream
                .write_all(&transmit)
                .map_err(|e| connect_error(addr, &e))?;
            return Ok(outcome);
        }
    }
}

fn connect_error(addr: &str, e: &io::Error) -> TierError {
    let why = match e.kind() {
        io::ErrorKind::ConnectionRefused => {
            "connection refused: no peer listens there; start atlas-expert-peer, or check host and port".to_owned()
        }
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            "no answer in time: host down, a firewall, or something that is no expert peer".to_owned()
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            "the other side closed the connection during the handshake".to_owned()
        }
        _ => e.to_string(),
    };
    TierError::Connect {
        addr: addr.to_owned(),
        why,
    }
}
