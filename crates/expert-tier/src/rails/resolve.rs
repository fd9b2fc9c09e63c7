//! Names of peers to addresses, within a deadline that the system's resolver does not have.
//!
//! A thread asks the system; whoever needs the name waits for it as long as its own deadline allows.
//! The thread cannot be ended: it goes on until the system answers, which may take minutes, and whoever
//! asks for the same name meanwhile waits for the same thread. So there is one thread for a name at most,
//! and at most [`LOOKUPS_MAX`] in all.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use crate::sync::lock;

/// Names that are asked for at a time. A tier has 32 peers at most; more are several tiers whose name
/// server does not answer.
const LOOKUPS_MAX: usize = 64;

/// Asks for the addresses of a `host:port`, for as long as it takes.
type Ask = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Why there is no address.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoAddress {
    /// Not in time; a later try may find the answer there.
    TimedOut,
    /// The system says so.
    Failed(String),
}

/// Asks for names, each of them once at a time.
pub(crate) struct Resolver {
    ask: Arc<Ask>,
    running: Arc<Running>,
}

/// Questions that were not answered yet, by name.
type Running = Mutex<HashMap<String, Arc<Lookup>>>;

/// One question.
#[derive(Default)]
struct Lookup {
    answer: Mutex<Option<Result<Vec<SocketAddr>, String>>>,
    answered: Condvar,
}

/// The system's names, for all tiers of the process.
pub(crate) fn system() -> &'static Resolver {
    static SYSTEM: LazyLock<Resolver> =
        LazyLock::new(|| Resolver::new(|addr| Ok(addr.to_socket_addrs()?.collect())));
    &SYSTEM
}

impl Resolver {
    pub(crate) fn new(
        ask: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            ask: Arc::new(ask),
            running: Arc::default(),
        }
    }

    /// The addresses of a `host:port`, of which there may be none. What is an address already takes no
    /// thread and no time.
    pub(crate) fn resolve(&self, addr: &str, limit: Instant) -> Result<Vec<SocketAddr>, NoAddress> {
        if let Ok(address) = addr.parse() {
            return Ok(vec![address]);
        }
        let lookup = self.lookup(addr)?;
        let mut answer = lock(&lookup.answer);
        loop {
            if let Some(answer) = &*answer {
                return answer.clone().map_err(NoAddress::Failed);
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NoAddress::TimedOut);
            }
            answer = lookup
                .answered
                .wait_timeout(answer, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The question that runs, or a new one.
    fn lookup(&self, addr: &str) -> Result<Arc<Lookup>, NoAddress> {
        let mut running = lock(&self.running);
        if let Some(lookup) = running.get(addr) {
            return Ok(lookup.clone());
        }
        if running.len() >= LOOKUPS_MAX {
            return Err(NoAddress::Failed(format!(
                "{LOOKUPS_MAX} other names are being looked up and none has an answer: does the name server work?"
            )));
        }
        let lookup = Arc::new(Lookup::default());
        let asked = Asked {
            addr: addr.to_owned(),
            lookup: lookup.clone(),
            running: self.running.clone(),
        };
        let ask = self.ask.clone();
        // If it fails the closure is dropped, and `asked` in it, which takes the lock.
        running.insert(addr.to_owned(), lookup.clone());
        drop(running);
        thread::Builder::new()
            .name("tier-resolve".into())
            .spawn(move || {
                let answer = ask(&asked.addr).map_err(|e| e.to_string());
                asked.lookup.set(answer);
            })
            .map_err(|e| NoAddress::Failed(format!("starting a thread to look it up: {e}")))?;
        Ok(lookup)
    }
}

impl Lookup {
    fn set(&self, answer: Result<Vec<SocketAddr>, String>) {
        lock(&self.answer).get_or_insert(answer);
        self.answered.notify_all();
    }
}

/// A question as its thread has it: answered when it is dropped, however the thread ends.
struct Asked {
    addr: String,
    lookup: Arc<Lookup>,
    running: Arc<Running>,
}

impl Drop for Asked {
    fn drop(&mut self) {
        lock(&self.running).remove(&self.addr);
        self.lookup
            .set(Err("the look-up ended without an answer".into()));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{self, Sender};
    use std::time::Duration;

    use super::*;

    const SLACK: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(50);

    /// A name server that answers when it is told to.
    pub(crate) struct SlowServer {
        pub(crate) resolver: Arc<Resolver>,
        /// Each message answers one question with this address.
        pub(crate) answer: Sender<SocketAddr>,
        pub(crate) asked: Arc<AtomicUsize>,
    }

    impl SlowServer {
        pub(crate) fn new() -> Self {
            let (answer, answers) = mpsc::channel();
            let (answers, asked) = (Mutex::new(answers), Arc::new(AtomicUsize::new(0)));
            let count = asked.clone();
            let resolver = Resolver::new(move |_| {
                count.fetch_add(1, Ordering::SeqCst);
                let answer = lock(&answers).recv();
                answer.map(|a| vec![a]).map_err(io::Error::other)
            });
            Self {
                resolver: Arc::new(resolver),
                answer,
                asked,
            }
        }

        fn count(&self) -> usize {
            self.asked.load(Ordering::SeqCst)
        }
    }

    fn soon() -> Instant {
        Instant::now() + SHORT
    }

    fn late() -> Instant {
        Instant::now() + SLACK
    }

    fn address() -> SocketAddr {
        "10.0.0.2:9909".parse().unwrap()
    }

    fn until_idle(resolver: &Resolver) {
        let limit = late();
        while !lock(&resolver.running).is_empty() {
            assert!(Instant::now() < limit, "a question stays");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn name_that_takes_long_is_waited_for_until_the_deadline_and_asked_for_once() {
        let server = SlowServer::new();
        for _ in 0..5 {
            let start = Instant::now();
            let got = server.resolver.resolve("slow:9909", start + SHORT);
            assert_eq!(got, Err(NoAddress::TimedOut));
            assert!(start.elapsed() >= SHORT);
        }
        let waiting: Vec<_> = (0..4)
            .map(|_| {
                let resolver = server.resolver.clone();
                thread::spawn(move || resolver.resolve("slow:9909", late()))
            })
            .collect();
        // Another name does not wait for this one.
        assert_eq!(
            server.resolver.resolve("other:1", soon()),
            Err(NoAddress::TimedOut)
        );
        assert_eq!(server.count(), 2);
        server.answer.send(address()).unwrap();
        server.answer.send(address()).unwrap();
        for thread in waiting {
            assert_eq!(thread.join().unwrap(), Ok(vec![address()]));
        }
        until_idle(&server.resolver);
        // What was answered is not remembered: the next one asks anew.
        server.answer.send(address()).unwrap();
        assert_eq!(
            server.resolver.resolve("slow:9909", late()),
            Ok(vec![address()])
        );
        assert_eq!(server.count(), 3);
    }

    #[test]
    fn failure_is_told_in_the_words_of_the_system_and_the_next_try_asks_again() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let resolver = Resolver::new(move |addr| match count.fetch_add(1, Ordering::SeqCst) {
            0 => Err(io::Error::other(format!("no {addr} here"))),
            1 => panic!("a resolver with a fault"),
            _ => Ok(vec![]),
        });
        let said = |text: &str| Err(NoAddress::Failed(text.into()));
        assert_eq!(resolver.resolve("a:1", late()), said("no a:1 here"));
        until_idle(&resolver);
        let silent = "the look-up ended without an answer";
        assert_eq!(resolver.resolve("a:1", late()), said(silent));
        until_idle(&resolver);
        assert_eq!(resolver.resolve("a:1", late()), Ok(vec![]));
    }

    #[test]
    fn number_of_questions_at_a_time_has_a_limit_and_addresses_are_none() {
        let server = SlowServer::new();
        for i in 0..LOOKUPS_MAX {
            let got = server
                .resolver
                .resolve(&format!("name-{i}:1"), Instant::now());
            assert_eq!(got, Err(NoAddress::TimedOut));
        }
        let over = server.resolver.resolve("one-more:1", late());
        assert!(matches!(over, Err(NoAddress::Failed(why)) if why.contains("64 other names")));
        for addr in ["10.0.0.2:9909", "[::1]:9909"] {
            let got = server.resolver.resolve(addr, Instant::now());
            assert_eq!(got, Ok(vec![addr.parse().unwrap()]));
        }
        // All threads end when the answers come.
        drop(server.answer);
        until_idle(&server.resolver);
        assert_eq!(server.asked.load(Ordering::SeqCst), LOOKUPS_MAX);
    }
}
