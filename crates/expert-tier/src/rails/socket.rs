//! A TCP connection to a peer, up to the end of the handshake, with a deadline on each step.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use expert_wire::auth::{NONCE_BYTES, Token};
use expert_wire::client::{Handshake, Outcome, Protocol};
use expert_wire::message::Role;
use rand::TryRng;
use rand::rngs::SysRng;
use socket2::{SockRef, TcpKeepalive};

use super::resolve::{self, NoAddress, Resolver};
use crate::error::{Step, TierError};

/// Idle time before keep-alive asks, and between its questions; three stay unanswered at most.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
/// Data that nobody acknowledges for this long ends the connection.
const USER_TIMEOUT: Duration = Duration::from_secs(15);

/// Connects and shakes hands; with a token both sides prove that they know it.
///
/// *Errors*: [`TierError::Connect`], [`TierError::NameTimedOut`], [`TierError::TimedOut`] and
/// [`TierError::Handshake`], each within `limit`.
pub(crate) fn connect(
    addr: &str,
    client_id: u64,
    role: Role,
    protocol: Protocol,
    token: Option<&Token>,
    limit: Instant,
) -> Result<(TcpStream, Outcome), TierError> {
    let stream = connect_any(resolve::system(), addr, limit)?;
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

fn connect_any(resolver: &Resolver, addr: &str, limit: Instant) -> Result<TcpStream, TierError> {
    let clock = Clock::until(addr, limit);
    let candidates = resolver.resolve(addr, limit).map_err(|e| match e {
        NoAddress::TimedOut => TierError::NameTimedOut {
            addr: addr.to_owned(),
            waited_ms: clock.waited_ms(),
        },
        NoAddress::Failed(why) => TierError::Connect {
            addr: addr.to_owned(),
            why: format!("looking up the name: {why}"),
        },
    })?;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (i, candidate) in candidates.iter().enumerate() {
        // The remaining time is shared, so that one dead address does not use it up.
        let left = clock.left(Step::Connect)? / (candidates.len() - i) as u32;
        match TcpStream::connect_timeout(candidate, left.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(clock.error(Step::Connect, &last))
}

/// A deadline, and the words for what did not meet it.
pub(crate) struct Clock<'a> {
    addr: &'a str,
    start: Instant,
    limit: Instant,
}

impl<'a> Clock<'a> {
    /// From now on, for what is done with the peer at `addr`.
    pub(crate) fn until(addr: &'a str, limit: Instant) -> Self {
        Self {
            addr,
            start: Instant::now(),
            limit,
        }
    }

    fn waited_ms(&self) -> u128 {
        self.start.elapsed().as_millis()
    }

    /// What is left of the time, never nothing: sockets take 0 for no limit.
    pub(crate) fn left(&self, step: Step) -> Result<Duration, TierError> {
        let left = self.limit.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(self.timed_out(step)),
            false => Ok(left),
        }
    }

    fn timed_out(&self, step: Step) -> TierError {
        TierError::TimedOut {
            addr: self.addr.to_owned(),
            step,
            waited_ms: self.waited_ms(),
        }
    }

    /// What a socket said. A time-out of its own is one of ours, whichever of its names it has.
    pub(crate) fn error(&self, step: Step, e: &io::Error) -> TierError {
        match e.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.timed_out(step),
            _ => connect_error(self.addr, e),
        }
    }
}

fn shake_hands(
    mut stream: &TcpStream,
    addr: &str,
    mut handshake: Handshake,
    limit: Instant,
) -> Result<Outcome, TierError> {
    let clock = Clock::until(addr, limit);
    let failed = |e: io::Error| clock.error(Step::Handshake, &e);
    let mut buffer = Vec::new();
    loop {
        let transmit = handshake.take_transmit();
        stream
            .set_write_timeout(Some(clock.left(Step::Handshake)?))
            .and_then(|()| stream.write_all(&transmit))
            .map_err(failed)?;
        let want = handshake.wants();
        buffer.clear();
        while buffer.len() < want {
            stream
                .set_read_timeout(Some(clock.left(Step::Handshake)?))
                .map_err(failed)?;
            // Grows with what really arrives, not with what is announced.
            let at = buffer.len();
            buffer.resize(want.min(at + (64 << 10)), 0);
            match stream.read(&mut buffer[at..]) {
                Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => buffer.truncate(at + n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => buffer.truncate(at),
                Err(e) => return Err(failed(e)),
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
            stream.write_all(&transmit).map_err(failed)?;
            return Ok(outcome);
        }
    }
}

fn connect_error(addr: &str, e: &io::Error) -> TierError {
    let why = match e.kind() {
        io::ErrorKind::ConnectionRefused => {
            "connection refused: no peer listens there; start atlas-expert-peer, or check host and port".to_owned()
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::Ordering;

    use super::resolve::tests::SlowServer;
    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    #[test]
    fn name_that_is_not_resolved_in_time_is_told_as_such_and_connected_to_when_it_is() {
        let server = SlowServer::new();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        for _ in 0..3 {
            let start = Instant::now();
            let error = connect_any(&server.resolver, "peer.example:9909", start + SHORT)
                .expect_err("no answer yet");
            let TierError::NameTimedOut { addr, waited_ms } = &error else {
                panic!("{error}");
            };
            assert_eq!(addr, "peer.example:9909");
            assert!(*waited_ms >= SHORT.as_millis(), "{error}");
            assert!(error.is_retryable());
            let text = error.to_string();
            assert!(
                text.contains("looking up the name timed out after"),
                "{text}"
            );
        }
        assert_eq!(server.asked.load(Ordering::SeqCst), 1, "one thread");
        let address = listener.local_addr().expect("its address");
        server.answer.send(address).expect("a look-up that waits");
        let limit = Instant::now() + Duration::from_secs(20);
        connect_any(&server.resolver, "peer.example:9909", limit).expect("a connection");
    }

    #[test]
    fn name_without_an_address_is_told_in_the_words_of_the_system() {
        let resolver = Resolver::new(|_| Err(io::Error::other("Name or service not known")));
        let limit = Instant::now() + Duration::from_secs(20);
        let error = connect_any(&resolver, "nowhere:9909", limit).expect_err("no address");
        let text = error.to_string();
        assert!(matches!(error, TierError::Connect { .. }), "{text}");
        assert!(
            text.contains("looking up the name: Name or service"),
            "{text}"
        );
        let resolver = Resolver::new(|_| Ok(Vec::new()));
        let error = connect_any(&resolver, "nowhere:9909", limit).expect_err("no address");
        assert!(error.to_string().contains("has no address"), "{error}");
    }

    #[test]
    fn each_name_of_a_time_out_of_the_system_is_told_with_address_time_and_what_to_look_at() {
        let clock = Clock::until("10.0.0.2:9909", Instant::now());
        for kind in [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut] {
            for (step, word) in [
                (Step::Connect, "nc -vz"),
                (Step::Handshake, "another service"),
                (Step::Answer, "hangs"),
            ] {
                let text = clock.error(step, &kind.into()).to_string();
                let start = format!("10.0.0.2:9909: {step} timed out after ");
                assert!(text.starts_with(&start) && text.contains(word), "{text}");
                assert!(!text.contains("unavailable"), "{text}");
            }
        }
        assert!(clock.left(Step::Answer).is_err());
    }
}
