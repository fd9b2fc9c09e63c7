//! Who may send now: clients in turn, by bytes.
//!
//! Each connection has a thread, and the system would give each thread its share: a client with
//! sixty connections would get sixty times as much as one with one. So a connection sends only in
//! its turn, of about [`TURN_BYTES`]. There are as many turns as processors, and while no
//! more connections than that want one, taking it costs a lock that nobody holds. When more do, the
//! next turn goes to the address that has sent least, and of that to the client that has sent least.
//! A connection that waits for its socket gives its turn back meanwhile.
//!
//! Where the network is what is scarce, turns are free all the time and the system shares by
//! connections. So the answers under way to one client are bounded, too, as long as another client
//! wants something.
//!
//! *Invariant*: what waits is bounded by the connections, each wait has a deadline, and a
//! connection that ends leaves nothing behind.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Instant;

/// Bytes of one turn, a READ of default size: a few hundred microseconds of copying. What is begun in
/// it is ended, so that an answer with its header takes one turn: twice as much at most.
pub(crate) const TURN_BYTES: u64 = 1 << 20;
/// What a turn costs at least: small answers take time, too.
const TURN_MIN_BYTES: u64 = 4 << 10;
/// Fewest turns at once: while one waits for a disk, another sends. More than processors are no good:
/// the system shares them by threads again (`net_hostile.rs` showed 0.37 of the rate with twice as
/// many, 0.5 with these, below 0.1 without turns).
const TURNS_MIN: usize = 2;

/// See the module.
pub(crate) struct Shares {
    turns_max: usize,
    client_bytes_max: u64,
    /// Turns that were not free when they were asked for.
    waited: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Turns that are taken.
    turns: usize,
    /// Where the turn that was given last began, in bytes that an address has sent.
    now: u64,
    addresses: HashMap<IpAddr, Address>,
    /// In order of arrival.
    waiting: Vec<Waiting>,
    /// Clients with answers under way or waiting.
    busy: usize,
}

#[derive(Default)]
struct Address {
    /// Bytes sent, turns under way counted whole.
    sent: u64,
    now: u64,
    clients: HashMap<u64, Client>,
}

#[derive(Default)]
struct Client {
    sent: u64,
    connections: usize,
    /// Bytes of answers that were begun and have not ended.
    under_way: u64,
    answers: usize,
    waiting: usize,
}

impl Client {
    fn is_busy(&self) -> bool {
        self.answers > 0 || self.waiting > 0
    }
}

type Name = (IpAddr, u64);

struct Waiting {
    name: Name,
    /// Bytes of the answer that begins with this turn.
    begins: Option<u64>,
    granted: Arc<AtomicBool>,
    thread: Thread,
}

impl Shares {
    /// As many turns as processors.
    pub(crate) fn new(client_bytes_max: u64) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self::with_turns(processors.max(TURNS_MIN), client_bytes_max)
    }

    fn with_turns(turns_max: usize, client_bytes_max: u64) -> Self {
        Self {
            turns_max,
            client_bytes_max,
            waited: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    /// Turns that had to be waited for.
    pub(crate) fn waited(&self) -> u64 {
        self.waited.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives turns to those who wait, as far as there are any.
    fn dispatch(&self, state: &mut State) {
        while state.turns < self.turns_max {
            let best = (0..state.waiting.len())
                .filter(|&i| self.may_begin(state, state.waiting[i].name, state.waiting[i].begins))
                .min_by_key(|&i| state.order(state.waiting[i].name));
            let Some(best) = best else { return };
            // Not `swap_remove`: of one client the first comes first.
            let waiting = state.waiting.remove(best);
            state.change(waiting.name, |client| client.waiting -= 1);
            state.grant(waiting.name, waiting.begins);
            waiting.granted.store(true, Ordering::Release);
            waiting.thread.unpark();
        }
    }

    fn may_begin(&self, state: &State, name: Name, begins: Option<u64>) -> bool {
        let (Some(bytes), Some(client)) = (begins, state.client(name)) else {
            return true;
        };
        let others = state.busy - usize::from(client.is_busy());
        client.answers == 0
            || client.under_way.saturating_add(bytes) <= self.client_bytes_max
            || others == 0
    }
}

impl State {
    fn client(&self, (address, client): Name) -> Option<&Client> {
        self.addresses.get(&address)?.clients.get(&client)
    }

    /// Changes a client and keeps count of the busy ones.
    fn change(&mut self, (address, client): Name, change: impl FnOnce(&mut Client)) {
        let address = self.addresses.get_mut(&address);
        let Some(client) = address.and_then(|a| a.clients.get_mut(&client)) else {
            return;
        };
        let before = client.is_busy();
        change(client);
        match (before, client.is_busy()) {
            (false, true) => self.busy += 1,
            (true, false) => self.busy -= 1,
            _ => {}
        }
    }

    /// Who has the smallest gets the next turn. What was not used while idle is not saved up.
    fn order(&self, (address, client): Name) -> (u64, u64) {
        let Some(address) = self.addresses.get(&address) else {
            return (0, 0);
        };
        let sent = address.clients.get(&client).map_or(0, |c| c.sent);
        (address.sent.max(self.now), sent.max(address.now))
    }

    fn grant(&mut self, name: Name, begins: Option<u64>) {
        self.turns += 1;
        let (start, client_start) = self.order(name);
        self.now = start;
        if let Some(address) = self.addresses.get_mut(&name.0) {
            address.sent = start.saturating_add(TURN_BYTES);
            address.now = client_start;
        }
        self.change(name, |client| {
            client.sent = client_start.saturating_add(TURN_BYTES);
            if let Some(bytes) = begins {
                client.answers += 1;
                client.under_way = client.under_way.saturating_add(bytes);
            }
        });
    }

    /// Takes a turn back, and what was not used of it.
    fn take_back(&mut self, name: Name, used: u64) {
        self.turns -= 1;
        let used = used.max(TURN_MIN_BYTES);
        let settle = |sent: u64| sent.saturating_sub(TURN_BYTES).saturating_add(used);
        if let Some(address) = self.addresses.get_mut(&name.0) {
            address.sent = settle(address.sent);
        }
        self.change(name, |client| client.sent = settle(client.sent));
    }

    fn enter(&mut self, (address, client): Name) {
        let address = self.addresses.entry(address).or_default();
        address.clients.entry(client).or_default().connections += 1;
    }

    fn leave(&mut self, (ip, client): Name) {
        let Some(address) = self.addresses.get_mut(&ip) else {
            return;
        };
        if let Some(left) = address.clients.get_mut(&client) {
            left.connections -= 1;
            if left.connections == 0 {
                address.clients.remove(&client);
            }
        }
        if address.clients.is_empty() {
            self.addresses.remove(&ip);
        }
    }
}

/// No turn came before the deadline.
#[derive(Debug)]
pub(crate) struct NoTurn;

/// One connection's part. Used by its thread alone.
pub(crate) struct Share<'a> {
    shares: &'a Shares,
    name: Cell<Name>,
    /// Bytes that were sent in this turn, where it has one.
    turn: Cell<Option<u64>>,
    /// Bytes of the answer under way.
    answer: Cell<Option<u64>>,
}

impl<'a> Share<'a> {
    /// A connection whose client is not known yet.
    pub(crate) fn new(shares: &'a Shares, address: IpAddr) -> Self {
        let name = (address, 0);
        shares.lock().enter(name);
        Self {
            shares,
            name: Cell::new(name),
            turn: Cell::new(None),
            answer: Cell::new(None),
        }
    }

    /// The client has said who it is; not within an answer.
    pub(crate) fn identify(&self, client_id: u64) {
        self.end();
        let mut state = self.shares.lock();
        let (address, _) = self.name.get();
        // Entered first: the address must not be forgotten in between.
        state.enter((address, client_id));
        state.leave(self.name.get());
        self.name.set((address, client_id));
    }

    /// Begins an answer of that many bytes, with a turn.
    pub(crate) fn begin(&self, bytes: u64, deadline: Instant) -> Result<(), NoTurn> {
        self.end();
        self.wait(Some(bytes), deadline)?;
        self.answer.set(Some(bytes));
        Ok(())
    }

    /// Whether an answer is under way.
    pub(crate) fn is_answering(&self) -> bool {
        self.answer.get().is_some()
    }

    /// Has a turn that is not used up when it returns.
    pub(crate) fn turn(&self, deadline: impl FnOnce() -> Instant) -> Result<(), NoTurn> {
        match self.turn.get() {
            Some(used) if used < TURN_BYTES => return Ok(()),
            _ => self.pause(),
        }
        self.wait(None, deadline())
    }

    /// Bytes were sent in this turn.
    pub(crate) fn sent(&self, bytes: u64) {
        if let Some(used) = self.turn.get() {
            self.turn.set(Some(used.saturating_add(bytes)));
        }
    }

    /// Gives the turn back; the answer goes on later.
    pub(crate) fn pause(&self) {
        if let Some(used) = self.turn.take() {
            let mut state = self.shares.lock();
            state.take_back(self.name.get(), used);
            self.shares.dispatch(&mut state);
        }
    }

    /// Gives back the turn, and ends the answer where there is one.
    pub(crate) fn end(&self) {
        let (turn, answer) = (self.turn.take(), self.answer.take());
        if turn.is_none() && answer.is_none() {
            return;
        }
        let mut state = self.shares.lock();
        if let Some(used) = turn {
            state.take_back(self.name.get(), used);
        }
        if let Some(bytes) = answer {
            state.change(self.name.get(), |client| {
                client.answers -= 1;
                client.under_way = client.under_way.saturating_sub(bytes);
            });
        }
        self.shares.dispatch(&mut state);
    }

    fn wait(&self, begins: Option<u64>, deadline: Instant) -> Result<(), NoTurn> {
        let name = self.name.get();
        let mut state = self.shares.lock();
        // The usual case: nobody waits, and nothing is allocated.
        let is_free = state.turns < self.shares.turns_max && state.waiting.is_empty();
        if is_free && self.shares.may_begin(&state, name, begins) {
            state.grant(name, begins);
            self.turn.set(Some(0));
            return Ok(());
        }
        let waiting = Waiting {
            name,
            begins,
            granted: Arc::default(),
            thread: thread::current(),
        };
        let granted = waiting.granted.clone();
        state.change(name, |client| client.waiting += 1);
        state.waiting.push(waiting);
        self.shares.dispatch(&mut state);
        drop(state);
        if !granted.load(Ordering::Acquire) {
            self.shares.waited.fetch_add(1, Ordering::Relaxed);
        }
        while !granted.load(Ordering::Acquire) {
            let left = deadline.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                thread::park_timeout(left);
                continue;
            }
            let mut state = self.shares.lock();
            let at = (state.waiting.iter()).position(|w| Arc::ptr_eq(&w.granted, &granted));
            // Else it was granted just now.
            if let Some(at) = at {
                state.waiting.remove(at);
                state.change(name, |client| client.waiting -= 1);
                self.shares.dispatch(&mut state);
                return Err(NoTurn);
            }
        }
        self.turn.set(Some(0));
        Ok(())
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.end();
        self.shares.lock().leave(self.name.get());
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn address(n: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, n).into()
    }

    fn is_empty(shares: &Shares) -> bool {
        let state = shares.lock();
        state.addresses.is_empty()
            && state.waiting.is_empty()
            && (state.turns, state.busy) == (0, 0)
    }

    fn share(shares: &Shares, n: u8, client: u64) -> Share<'_> {
        let share = Share::new(shares, address(n));
        share.identify(client);
        share
    }

    /// Everybody wants the only turn, uses `used` bytes of it and wants the next; gives back who got
    /// how many of the first `turns`.
    fn contend(clients: &[(u8, u64, u64)], turns: usize) -> Vec<usize> {
        let shares = Shares::with_turns(1, u64::MAX);
        let mut state = shares.lock();
        let mut counts = vec![0; clients.len()];
        let want = |state: &mut State, i: usize| {
            let name = (address(clients[i].0), clients[i].1);
            let granted = Arc::<AtomicBool>::default();
            state.change(name, |client| client.waiting += 1);
            state.waiting.push(Waiting {
                name,
                begins: None,
                granted: granted.clone(),
                thread: thread::current(),
            });
            (name, granted)
        };
        let mut wants = Vec::new();
        for (i, &(n, client, _)) in clients.iter().enumerate() {
            state.enter((address(n), client));
            wants.push(want(&mut state, i));
        }
        for _ in 0..turns {
            shares.dispatch(&mut state);
            let has_it = |(_, granted): &&(Name, Arc<AtomicBool>)| granted.load(Ordering::Acquire);
            let mut having = wants.iter().enumerate().filter(|(_, want)| has_it(want));
            let (i, (name, _)) = having.next().expect("a turn is given while any is free");
            assert!(having.next().is_none(), "there is one turn");
            counts[i] += 1;
            let name = *name;
            state.take_back(name, clients[i].2);
            wants[i] = want(&mut state, i);
        }
        counts
    }

    #[test]
    fn turn_that_nobody_else_wants_is_had_at_once() {
        let shares = Shares::with_turns(2, 1);
        let one = share(&shares, 1, 1);
        for _ in 0..100 {
            one.begin(5 << 20, Instant::now()).unwrap();
            one.sent(TURN_BYTES);
            one.turn(Instant::now).unwrap();
            one.pause();
        }
        assert_eq!(shares.waited(), 0);
        drop(one);
        assert!(is_empty(&shares));
    }

    #[test]
    fn turns_go_to_clients_and_not_to_connections() {
        let mut clients = vec![(1, 1, TURN_BYTES); 10];
        clients.push((1, 2, TURN_BYTES));
        let counts = contend(&clients, 1000);
        assert!((498..=502).contains(&counts[10]), "{counts:?}");
        // Those of one client take theirs in the order in which they came.
        assert!(
            counts[..10].iter().all(|n| (49..=51).contains(n)),
            "{counts:?}"
        );
    }

    #[test]
    fn address_with_many_clients_gets_one_share() {
        let mut clients: Vec<_> = (1..=10).map(|client| (1, client, TURN_BYTES)).collect();
        clients.push((2, 1, TURN_BYTES));
        let counts = contend(&clients, 1000);
        assert!((498..=502).contains(&counts[10]), "{counts:?}");
    }

    #[test]
    fn shares_are_of_bytes_and_small_answers_cost_something() {
        let counts = contend(&[(1, 1, TURN_BYTES), (2, 1, TURN_BYTES / 4)], 1000);
        assert!((198..=202).contains(&counts[0]), "{counts:?}");
        let counts = contend(&[(1, 1, TURN_MIN_BYTES), (2, 1, 1)], 1000);
        assert!((498..=502).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn answers_under_way_to_one_client_are_bounded_while_another_wants_some() {
        let shares = Shares::with_turns(8, 10);
        let mine: Vec<_> = (0..4).map(|_| share(&shares, 1, 1)).collect();
        let other = share(&shares, 2, 2);
        // Alone it gets what it asks for.
        mine[0].begin(8, Instant::now()).unwrap();
        mine[1].begin(8, Instant::now()).unwrap();
        other.begin(100, Instant::now()).unwrap();
        assert!(mine[2].begin(1, Instant::now()).is_err());
        mine[1].end();
        mine[2].begin(1, Instant::now()).unwrap();
        assert!(mine[3].begin(2, Instant::now()).is_err());
        // One answer is always let through, however large, and nobody else need wait for it.
        for share in &mine {
            share.end();
        }
        mine[0].begin(99, Instant::now()).unwrap();
        assert!(mine[1].begin(1, Instant::now()).is_err());
        other.end();
        mine[1].begin(1, Instant::now()).unwrap();
        drop((mine, other));
        assert!(is_empty(&shares));
    }

    #[test]
    fn answer_that_waits_begins_when_the_other_client_has_what_it_wanted() {
        let shares = Shares::with_turns(8, 10);
        let other = share(&shares, 2, 2);
        other.begin(1, Instant::now()).unwrap();
        thread::scope(|scope| {
            let first = share(&shares, 1, 1);
            first.begin(8, Instant::now()).unwrap();
            let waiter = scope.spawn(|| share(&shares, 1, 1).begin(8, soon()));
            while shares.lock().waiting.is_empty() {
                thread::yield_now();
            }
            other.end();
            waiter.join().unwrap().unwrap();
        });
        assert_eq!(shares.waited(), 1);
    }

    #[test]
    fn turn_is_given_back_by_whoever_waits_for_a_socket_or_ends() {
        let shares = Shares::with_turns(1, 100);
        let slow = share(&shares, 1, 1);
        let quick = share(&shares, 2, 1);
        slow.begin(50, Instant::now()).unwrap();
        assert!(quick.turn(Instant::now).is_err());
        slow.pause();
        quick.begin(50, Instant::now()).unwrap();
        assert!(slow.turn(Instant::now).is_err());
        drop(quick);
        slow.turn(Instant::now).unwrap();
        assert!(slow.is_answering());
        drop(slow);
        assert!(is_empty(&shares));
    }
}
