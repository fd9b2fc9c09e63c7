//! A server for a few small pages: `GET`, an answer, and the end of the connection.
//!
//! Whoever reaches its port may ask, so it holds at most [`CONNECTIONS_MAX`] connections of at most
//! [`REQUEST_MAX_BYTES`] each, for at most [`DEADLINE`]; more wait in the kernel. One thread serves
//! all of them at once, so that a slow one keeps nobody waiting.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

/// Connections at once.
pub const CONNECTIONS_MAX: usize = 16;
/// Bytes of a request: its first line and its headers.
pub const REQUEST_MAX_BYTES: usize = 8 << 10;
/// From a connection's begin to its end.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// Headers of a request; scrapers send about six.
const HEADERS_MAX: usize = 64;
/// Pause when the system has nothing left to accept with.
const PAUSE: Duration = Duration::from_millis(200);

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Status code.
    pub status: u16,
    /// Media type of the body.
    pub content_type: &'static str,
    /// The body.
    pub body: String,
}

impl Reply {
    /// A line of text.
    pub fn text(status: u16, line: &str) -> Self {
        Self {
            status,
            content_type: "text/plain; charset=utf-8",
            body: format!("{line}\n"),
        }
    }
}

/// What answers: the reply for a path, `None` where there is nothing.
pub type Pages = dyn Fn(&str) -> Option<Reply> + Send + Sync;

/// A running server; ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `HOST:PORT`, or on a port of the loopback address where only that is given.
    ///
    /// *Errors*: [`io::ErrorKind::InvalidInput`] where the address cannot be read, else what the
    /// system says when it does not let us listen.
    pub fn start(address: &str, pages: Arc<Pages>) -> io::Result<Self> {
        let unreadable = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        let addresses: Vec<SocketAddr> = match address.parse::<u16>() {
            Ok(port) => vec![([127, 0, 0, 1], port).into()],
            Err(_) => address
                .to_socket_addrs()
                .map_err(|e| unreadable(e.to_string()))?
                .collect(),
        };
        if addresses.is_empty() {
            return Err(unreadable("the name has no address".into()));
        }
        let listener = TcpListener::bind(&addresses[..])?;
        listener.set_nonblocking(true)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(rustix::event::eventfd(0, flags)?);
        let address = listener.local_addr()?;
        let woken = wake.clone();
        let thread = thread::Builder::new()
            .name("status-http".into())
            .spawn(move || serve(&listener, &woken, &*pages))?;
        Ok(Self {
            address,
            wake,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails only when the counter is full, and then the thread is awake anyway.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // Its waits all end at the wake-up.
            let _ = thread.join();
        }
    }
}

struct Connection {
    stream: TcpStream,
    deadline: Instant,
    request: Vec<u8>,
    /// The answer and how much of it went out; empty until the request is whole.
    answer: Vec<u8>,
    sent: usize,
    is_closing: bool,
}

fn serve(listener: &TcpListener, wake: &OwnedFd, pages: &Pages) {
    let mut connections: Vec<Connection> = Vec::new();
    let mut pause_end: Option<Instant> = None;
    loop {
        let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
        for connection in &connections {
            let wanted = match connection.is_writing() {
                true => PollFlags::OUT,
                false => PollFlags::IN,
            };
            fds.push(PollFd::new(&connection.stream, wanted));
        }
        let accepts = connections.len() < CONNECTIONS_MAX && pause_end.is_none();
        if accepts {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        let next = connections.iter().map(|c| c.deadline).chain(pause_end);
        let timeout = next.min().map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs() as i64,
                // Rounded up: a poll that ends too early would only be repeated.
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        if let Err(e) = rustix::event::poll(&mut fds, timeout.as_ref()) {
            if e != rustix::io::Errno::INTR {
                tracing::warn!("waiting for requests: {e}");
                thread::sleep(PAUSE);
            }
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if ready[0] {
            return;
        }
        let now = Instant::now();
        let mut index = 0;
        connections.retain_mut(|connection| {
            index += 1;
            now < connection.deadline && (!ready[index] || connection.go_on(pages).unwrap_or(false))
        });
        pause_end = pause_end.filter(|end| now < *end);
        if accepts && ready.last() == Some(&true) {
            match listener.accept() {
                Ok((stream, _)) => connections.extend(Connection::new(stream, now)),
                Err(e) if is_lost(&e) => {}
                Err(e) => {
                    tracing::warn!("accepting a request: {e}; trying again soon");
                    pause_end = Some(now + PAUSE);
                }
            }
        }
    }
}

/// Errors of the connection that was about to be accepted, see accept(2), not of this process.
fn is_lost(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(
        e.kind(),
        ConnectionAborted | ConnectionReset | Interrupted | WouldBlock
    )
}

impl Connection {
    fn new(stream: TcpStream, now: Instant) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        Some(Self {
            stream,
            deadline: now + DEADLINE,
            request: Vec::new(),
            answer: Vec::new(),
            sent: 0,
            is_closing: false,
        })
    }

    fn is_writing(&self) -> bool {
        !self.answer.is_empty() && !self.is_closing
    }

    /// Reads or writes what can be read or written now; whether the connection lives on.
    fn go_on(&mut self, pages: &Pages) -> io::Result<bool> {
        let outcome = match self.is_writing() {
            true => self.write(),
            false => self.read(pages),
        };
        match outcome {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(true),
            other => other,
        }
    }

    fn read(&mut self, pages: &Pages) -> io::Result<bool> {
        let mut buffer = [0; 2048];
        let bytes = self.stream.read(&mut buffer)?;
        if bytes == 0 {
            return Ok(false);
        }
        if self.is_closing {
            return Ok(true); // what it says now nobody reads
        }
        self.request.extend_from_slice(&buffer[..bytes]);
        if let Some((reply, has_body)) = answer(&self.request, pages) {
            self.answer = encode(&reply, has_body);
            return self.write();
        }
        Ok(true)
    }

    fn write(&mut self) -> io::Result<bool> {
        while self.sent < self.answer.len() {
            match self.stream.write(&self.answer[self.sent..])? {
                0 => return Ok(false),
                bytes => self.sent += bytes,
            }
        }
        // Closing on unread bytes would reset the connection and could take the answer with it.
        self.is_closing = true;
        self.stream.shutdown(Shutdown::Write)?;
        Ok(true)
    }
}

/// The reply to a request, and whether its body is sent; `None` while the request is not whole.
fn answer(request: &[u8], pages: &Pages) -> Option<(Reply, bool)> {
    if request.len() > REQUEST_MAX_BYTES {
        return Some((Reply::text(431, "the request is too long"), true));
    }
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(request) {
        Ok(httparse::Status::Partial) => return None,
        Err(httparse::Error::TooManyHeaders) => {
            return Some((Reply::text(431, "the request has too many headers"), true));
        }
        Ok(httparse::Status::Complete(_)) => {}
        Err(e) => return Some((Reply::text(400, &format!("no HTTP request: {e}")), true)),
    }
    let has_body = match parsed.method {
        Some("GET") => true,
        Some("HEAD") => false,
        _ => return Some((Reply::text(405, "GET and HEAD alone"), true)),
    };
    let path = parsed.path.unwrap_or("/").split('?').next().unwrap_or("/");
    let reply = pages(path).unwrap_or_else(|| Reply::text(404, "there is no such page"));
    Some((reply, has_body))
}

fn encode(reply: &Reply, has_body: bool) -> Vec<u8> {
    let reason = match reply.status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "See Body",
    };
    let allow = match reply.status {
        405 => "Allow: GET, HEAD\r\n",
        _ => "",
    };
    let mut text = format!(
        "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{allow}Connection: close\r\nCache-Control: no-store\r\n\r\n",
        reply.status,
        reply.content_type,
        reply.body.len()
    );
    if has_body {
        text.push_str(&reply.body);
    }
    text.into_bytes()
}

#[cfg(test)]
mod tests;
