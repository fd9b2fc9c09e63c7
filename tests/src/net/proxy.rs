//! A network between client and peer that can be cut, held up, slowed down and led elsewhere.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of one direction of one connection that are recorded.
pub const RECORDED_MAX_BYTES: usize = 1 << 20;

/// See the module. Clients connect to [`Proxy::addr`], which stays the same whatever happens behind it. Ends its
/// threads when it is dropped.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    upstream: SocketAddr,
    /// Bytes from the peer that may still pass; `None` for any number.
    allowance: Option<u64>,
    /// How fast bytes from the peer pass; `None` as fast as they come.
    rate: Option<Rate>,
    /// Bytes from the peer that passed.
    passed: u64,
    stop: bool,
    /// What each connection said, client and peer, where that is wanted.
    recorded: Option<Vec<[Vec<u8>; 2]>>,
    /// Both ends of every connection; the number tells cut ones from later ones.
    streams: Vec<TcpStream>,
    cuts: u64,
}

/// A bucket that fills at a constant rate.
struct Rate {
    bytes_per_s: u64,
    /// Bytes that may pass at `at`.
    bytes: u64,
    at: Instant,
}

/// A network is smooth: what passes at once is a few packets.
const PIECE_BYTES: u64 = 8 << 10;

/// What may pass at once after a pause, so that a thread that wakes late does not slow the network down.
const BURST: Duration = Duration::from_millis(4);

impl Rate {
    /// Takes at most so many bytes; how long to wait where there are none.
    fn take(&mut self, want: u64) -> Result<u64, Duration> {
        let now = Instant::now();
        let most = bytes_in(BURST, self.bytes_per_s).max(PIECE_BYTES);
        let more = bytes_in(now.saturating_duration_since(self.at), self.bytes_per_s);
        if more > 0 {
            self.bytes = self.bytes.saturating_add(more).min(most);
            self.at = now;
        }
        let piece = want.min(PIECE_BYTES);
        if self.bytes < piece {
            let lack = piece - self.bytes;
            return Err(Duration::from_secs_f64(
                lack as f64 / self.bytes_per_s as f64,
            ));
        }
        self.bytes -= piece;
        Ok(piece)
    }
}

fn bytes_in(time: Duration, bytes_per_s: u64) -> u64 {
    (time.as_secs_f64() * bytes_per_s as f64) as u64
}

impl Proxy {
    /// Leads to `upstream`.
    pub fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("its address");
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                upstream,
                allowance: None,
                rate: None,
                passed: 0,
                stop: false,
                recorded: None,
                streams: Vec::new(),
                cuts: 0,
            }),
            changed: Condvar::new(),
        });
        let thread = std::thread::spawn({
            let shared = shared.clone();
            move || shared.accept(&listener)
        });
        Self {
            addr,
            shared,
            thread: Some(thread),
        }
    }

    /// Where it listens.
    pub fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// Leads connections that are made from now on elsewhere.
    pub fn lead_to(&self, upstream: SocketAddr) {
        self.shared.lock().upstream = upstream;
    }

    /// Lets so many bytes from the peer pass, over all connections, and holds the rest back.
    pub fn hold_after(&self, bytes: u64) {
        self.shared.lock().allowance = Some(bytes);
    }

    /// Lets everything pass again, what was held back first.
    pub fn resume(&self) {
        self.shared.lock().allowance = None;
        self.shared.changed.notify_all();
    }

    /// Lets bytes from the peer pass at this rate, over all connections; `None` as fast as they come.
    pub fn limit(&self, bytes_per_s: Option<u64>) {
        self.shared.lock().rate = bytes_per_s.map(|bytes_per_s| Rate {
            bytes_per_s: bytes_per_s.max(1),
            bytes: 0,
            at: Instant::now(),
        });
        self.shared.changed.notify_all();
    }

    /// Ends every connection; what was held back is lost.
    pub fn cut(&self) {
        let mut state = self.shared.lock();
        state.cut();
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Whether bytes from the peer are being held back, all allowed ones having passed.
    pub fn is_holding(&self) -> bool {
        self.shared.lock().allowance == Some(0)
    }

    /// Records from now on what passes, up to [`RECORDED_MAX_BYTES`] of each direction.
    pub fn record(&self) {
        self.shared.lock().recorded = Some(Vec::new());
    }

    /// What passed on each connection, from the client and from the peer.
    pub fn recorded(&self) -> Vec<[Vec<u8>; 2]> {
        self.shared.lock().recorded.clone().unwrap_or_default()
    }

    /// Bytes from the peer that passed.
    pub fn passed_bytes(&self) -> u64 {
        self.shared.lock().passed
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        state.cut();
        drop(state);
        self.shared.changed.notify_all();
        // Wakes the acceptor.
        let _ = TcpStream::connect(self.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl State {
    fn write_down(&mut self, tape: usize, from_peer: bool, bytes: &[u8]) {
        let tape = self.recorded.as_mut().and_then(|tapes| tapes.get_mut(tape));
        if let Some(tape) = tape {
            let tape = &mut tape[usize::from(from_peer)];
            let room = RECORDED_MAX_BYTES.saturating_sub(tape.len());
            tape.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    fn cut(&mut self) {
        self.cuts += 1;
        for stream in self.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(&self, listener: &TcpListener) {
        std::thread::scope(|scope| {
            for client in listener.incoming() {
                let Ok(client) = client else { continue };
                let upstream = {
                    let state = self.lock();
                    if state.stop {
                        break;
                    }
                    state.upstream
                };
                // Without a peer the client is hung up on, as by a peer that ends.
                let Ok(peer) = TcpStream::connect(upstream) else {
                    continue;
                };
                let ends = [&client, &client, &peer, &peer].map(|end| {
                    let _ = end.set_nodelay(true);
                    end.try_clone().expect("a descriptor")
                });
                let [client_out, client_kept, peer_out, peer_kept] = ends;
                let (cuts, tape) = {
                    let mut state = self.lock();
                    let tape = state.recorded.as_mut().map(|tapes| {
                        tapes.push(Default::default());
                        tapes.len() - 1
                    });
                    state.streams.extend([client_kept, peer_kept]);
                    (state.cuts, tape)
                };
                scope.spawn(move || self.pump(client, peer_out, None, tape));
                scope.spawn(move || self.pump(peer, client_out, Some(cuts), tape));
            }
        });
    }

    /// Copies one direction; the one from the peer is subject to the allowance.
    fn pump(
        &self,
        mut from: TcpStream,
        mut to: TcpStream,
        gated: Option<u64>,
        tape: Option<usize>,
    ) {
        let mut buffer = vec![0; 64 << 10];
        'copy: while let Ok(count @ 1..) = from.read(&mut buffer) {
            if let Some(tape) = tape {
                self.lock()
                    .write_down(tape, gated.is_some(), &buffer[..count]);
            }
            let mut at = 0;
            while at < count {
                let piece = match gated {
                    Some(cuts) => match self.take(count - at, cuts) {
                        Some(piece) => piece,
                        None => break 'copy,
                    },
                    None => count - at,
                };
                if to.write_all(&buffer[at..at + piece]).is_err() {
                    break 'copy;
                }
                at += piece;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }

    /// Waits until bytes may pass and says how many; `None` when the connection was cut meanwhile.
    fn take(&self, want: usize, cuts: u64) -> Option<usize> {
        let mut state = self.lock();
        loop {
            if state.cuts != cuts {
                return None;
            }
            let allowed = state.allowance.unwrap_or(u64::MAX).min(want as u64);
            let taken = match &mut state.rate {
                Some(rate) if allowed > 0 => rate.take(allowed),
                _ => Ok(allowed),
            };
            let wait = match taken {
                Ok(0) => None,
                Ok(taken) => {
                    if let Some(left) = &mut state.allowance {
                        *left -= taken;
                    }
                    state.passed += taken;
                    return Some(taken as usize);
                }
                Err(wait) => Some(wait),
            };
            let Some(wait) = wait else {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
