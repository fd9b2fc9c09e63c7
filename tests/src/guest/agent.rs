//! The client's side: one connection to the agent in the peer's guest.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::protocol::{Ended, Message, Reply, Request, Signal};
use crate::binary::Output;

/// Over what the agent was asked to wait for: a guest under emulation is slow to answer.
const GRACE: Duration = Duration::from_secs(20);
/// For what takes no waiting.
const SHORT: Duration = Duration::from_secs(1);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(100);

/// Why the agent did not do what it was asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum GuestError {
    /// The connection failed; what was spawned over it has ended or will.
    Connection {
        /// The agent's address.
        addr: SocketAddr,
        /// What failed.
        source: io::Error,
    },
    /// It did not happen in time.
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
        /// What the program had written by then.
        output: String,
    },
    /// The agent refused; its words.
    Refused(String),
}

impl fmt::Display for GuestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connection { addr, source } => {
                write!(f, "connection to the agent at {addr} failed: {source}")
            }
            Self::TimedOut {
                what,
                after,
                output,
            } => write!(
                f,
                "{what} did not happen within {after:?}; output so far: {output:?}"
            ),
            Self::Refused(message) => write!(f, "the agent refused: {message}"),
        }
    }
}

impl std::error::Error for GuestError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Connection { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// A connection to the agent. Programs that it spawned are killed when it is dropped.
///
/// Commands are run by `bash -c`, as root, in the peer's guest; each is a process group of its own.
/// One request at a time: a second thread waits its turn, so a second view of the guest is a second `Agent`.
#[derive(Debug)]
pub struct Agent {
    addr: SocketAddr,
    /// `None` once an exchange failed half-way: what came next would answer another question.
    stream: Mutex<Option<TcpStream>>,
}

impl Agent {
    /// Connects, trying again until the deadline: the peer's guest may still be booting.
    pub fn connect(addr: SocketAddr, deadline: Duration) -> Result<Self, GuestError> {
        let start = Instant::now();
        let stream = loop {
            let left = deadline.saturating_sub(start.elapsed());
            match TcpStream::connect_timeout(&addr, left.max(RETRY)) {
                Ok(stream) => break stream,
                Err(source) if start.elapsed() + RETRY >= deadline => {
                    return Err(GuestError::Connection { addr, source });
                }
                Err(_) => thread::sleep(RETRY),
            }
        };
        let agent = Self {
            addr,
            stream: Mutex::new(Some(stream)),
        };
        let label = std::env::var("KERNEL_TEST_NAME").unwrap_or_default();
        agent.done(Request::Hello { label })?;
        Ok(agent)
    }

    /// The agent of the run: of the peer's guest where there are two, else one inside this process.
    ///
    /// Panics outside a guest.
    pub fn of_the_run() -> Result<Self, GuestError> {
        if super::variable("KERNEL_TEST_RIG") == "one" {
            return Self::local(&super::results().join("peer"));
        }
        let text = super::variable("KERNEL_TEST_AGENT");
        let addr = text
            .parse()
            .unwrap_or_else(|e| panic!("KERNEL_TEST_AGENT is '{text}': {e}"));
        Self::connect(addr, Duration::from_secs(30))
    }

    /// An agent for this machine, served by a thread of this process; output goes below `folder`.
    pub fn local(folder: &Path) -> Result<Self, GuestError> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let failed = |source| GuestError::Connection { addr: any, source };
        let listener = TcpListener::bind(any).map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let folder = folder.to_path_buf();
        thread::spawn(move || super::serve(listener, &folder));
        Self::connect(addr, GRACE)
    }

    /// Runs a command to its end; whatever its exit code, its output comes back (8 MiB each at most).
    ///
    /// When time is up the command and all of its group are killed, and the error has what it wrote.
    pub fn run(&self, command: &str, timeout: Duration) -> Result<Output, GuestError> {
        let request = Request::Run {
            command: command.into(),
            timeout_ms: millis(timeout),
        };
        let reply = self.exchange(request, timeout, command)?;
        match reply.header {
            Reply::Ended(ended) => Ok(Output {
                code: ended.code,
                stdout: text(&reply, 0),
                stderr: text(&reply, 1),
            }),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Starts a command under a name that is free or whose program has ended, and gives its process id.
    ///
    /// Names are letters, digits, `-` and `_`. Output goes to `peer/` in the results share.
    pub fn spawn(&self, name: &str, command: &str) -> Result<u32, GuestError> {
        let request = Request::Spawn {
            name: name.into(),
            command: command.into(),
        };
        match self.exchange(request, SHORT, "a start")?.header {
            Reply::Started { pid } => Ok(pid),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Sends a signal to a program and everything that it started in its group. Refused once it has ended.
    pub fn kill(&self, name: &str, signal: Signal) -> Result<(), GuestError> {
        self.done(Request::Signal {
            name: name.into(),
            signal,
        })
    }

    /// Waits until a program ended by itself or by a signal.
    pub fn wait(&self, name: &str, timeout: Duration) -> Result<Ended, GuestError> {
        let request = Request::Wait {
            name: name.into(),
            timeout_ms: millis(timeout),
        };
        let what = format!("the end of '{name}'");
        match self.exchange(request, timeout, &what)?.header {
            Reply::Ended(ended) => Ok(ended),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Waits for the first line that contains `pattern` in what the program wrote since its start, and gives it.
    ///
    /// A program that ends without it is a refusal with its output.
    pub fn wait_line(
        &self,
        name: &str,
        pattern: &str,
        timeout: Duration,
    ) -> Result<String, GuestError> {
        self.wait_nth_line(name, pattern, 1, timeout)
    }

    /// Waits for the `nth` (from 1) line that contains `pattern`, standard output first.
    pub fn wait_nth_line(
        &self,
        name: &str,
        pattern: &str,
        nth: usize,
        timeout: Duration,
    ) -> Result<String, GuestError> {
        let request = Request::WaitLine {
            name: name.into(),
            pattern: pattern.into(),
            nth,
            timeout_ms: millis(timeout),
        };
        let what = format!("line {nth} with '{pattern}' of '{name}'");
        match self.exchange(request, timeout, &what)?.header {
            Reply::Line { text } => Ok(text),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What a program has written so far: standard output and standard error, the last 8 MiB of each.
    pub fn output(&self, name: &str) -> Result<(String, String), GuestError> {
        let request = Request::Output { name: name.into() };
        let reply = self.exchange(request, SHORT, "output")?;
        Ok((text(&reply, 0), text(&reply, 1)))
    }

    /// The content of a file of the peer's guest, refused above 8 MiB.
    pub fn read_file(&self, path: &str) -> Result<Vec<u8>, GuestError> {
        let request = Request::ReadFile { path: path.into() };
        let mut reply = self.exchange(request, SHORT, path)?;
        Ok(reply.blobs.pop().unwrap_or_default())
    }

    /// Ends the agent, and with it the guest. For the harness, not for tests.
    pub fn quit(self) -> Result<(), GuestError> {
        self.done(Request::Quit)
    }

    fn done(&self, request: Request) -> Result<(), GuestError> {
        match self.exchange(request, SHORT, "an answer")?.header {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// One request and its reply. Time-outs and refusals of the agent are errors already.
    fn exchange(
        &self,
        request: Request,
        timeout: Duration,
        what: &str,
    ) -> Result<Message<Reply>, GuestError> {
        let mut guard = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = match guard.take() {
            None => Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "an earlier exchange failed",
            )),
            Some(stream) => {
                let reply = roundtrip(&stream, request, timeout + GRACE);
                if reply.is_ok() {
                    *guard = Some(stream);
                }
                reply
            }
        };
        drop(guard);
        let reply = reply.map_err(|source| GuestError::Connection {
            addr: self.addr,
            source,
        })?;
        match reply.header {
            Reply::TimedOut => Err(GuestError::TimedOut {
                what: what.into(),
                after: timeout,
                output: text(&reply, 0) + &text(&reply, 1),
            }),
            Reply::Refused { message } => Err(GuestError::Refused(message)),
            _ => Ok(reply),
        }
    }

    fn unexpected(&self, reply: &Reply) -> GuestError {
        GuestError::Refused(format!("an answer to another question: {reply:?}"))
    }
}

fn roundtrip(
    stream: &TcpStream,
    request: Request,
    timeout: Duration,
) -> io::Result<Message<Reply>> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(GRACE))?;
    stream.set_read_timeout(Some(timeout))?;
    Message::from(request).write(stream)?;
    Message::read(stream)
}

fn text(message: &Message<Reply>, index: usize) -> String {
    let blob = message.blobs.get(index).map_or(&[][..], Vec::as_slice);
    String::from_utf8_lossy(blob).into_owned()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
