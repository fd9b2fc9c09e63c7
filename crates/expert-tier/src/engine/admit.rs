//! How requests come in, become more urgent, and are given up.

use std::time::Instant;

use expert_wire::Key;

use super::{Engine, Failure, Handle, Order, RailBook, Record, Refused, Request};
use crate::config::Class;
use crate::rail::ContentTag;
use crate::stats::RequestStats;

impl Engine {
    /// Takes a request over that somebody waits for; see [`Engine::submit_as`].
    pub fn submit(
        &mut self,
        now: Instant,
        deadline: Instant,
        orders: Vec<Order>,
    ) -> Result<Handle, (Vec<Order>, Refused)> {
        self.submit_as(now, deadline, Class::Demand, orders)
    }

    /// Takes a request over, to end by `deadline`.
    ///
    /// *Errors*: the orders come back when the in-flight budget is used up; a request alone is
    /// never too large.
    pub fn submit_as(
        &mut self,
        now: Instant,
        deadline: Instant,
        class: Class,
        orders: Vec<Order>,
    ) -> Result<Handle, (Vec<Order>, Refused)> {
        let bytes: u64 = orders.iter().map(|o| o.landing.image_bytes() as u64).sum();
        let over = self.inflight_bytes.saturating_add(bytes) > self.config.inflight_max_bytes;
        if over && self.inflight_bytes > 0 {
            self.counters.backpressure += 1;
            let refused = Refused {
                asked: bytes,
                inflight: self.inflight_bytes,
                limit: self.config.inflight_max_bytes,
            };
            return Err((orders, refused));
        }
        self.inflight_bytes += bytes;
        self.unposted_bytes[class as usize] += bytes;
        let account = self.open_account(now, bytes, orders.len());
        let request = self.requests.insert(Request {
            deadline,
            bytes,
            open: orders.len(),
            results: orders.iter().map(|_| None).collect(),
            members: Vec::with_capacity(orders.len()),
            submitted: now,
            first_post: None,
            stats: RequestStats::default(),
            account,
        });
        for (index, order) in orders.into_iter().enumerate() {
            let home = self.home(order.key, order.content);
            let empty = order.landing.image_bytes() == 0;
            let record = self.records.insert(Record {
                request,
                class,
                index,
                key: order.key,
                position: order.position,
                layer: order.layer,
                content: order.content,
                verify: order.verify,
                landing: order.landing,
                retries: Vec::new(),
                queued: !empty,
                in_retry_queue: false,
                landed_bytes: 0,
                attempts_failed: 0,
                refused_by: 0,
                was_flushed: false,
                verified: order.verify,
                touched: 0,
            });
            self.requests
                .get_mut(request)
                .expect("just inserted")
                .members
                .push(record);
            if empty {
                self.commit(now, record);
            } else {
                self.rails[home].queues[class as usize].push_back(record);
            }
        }
        if self.requests.get(request).is_some_and(|r| r.open == 0) {
            self.finish(now, request);
        }
        let mut i = 0;
        while let Some(record) = self.member(request, i) {
            self.check_served(now, record);
            i += 1;
        }
        self.note_times(now);
        Ok(request)
    }

    /// The rail that a record queues at: `expert % n` over the most preferred rails that have it,
    /// working or not, so that a flap does not reshuffle.
    pub(super) fn home(&self, key: Key, content: ContentTag) -> usize {
        let has_it = |book: &RailBook| book.serves() != Some(content) || book.holds(key);
        let having = self.rails.iter().filter(|b| has_it(b));
        let rank = having.map(|b| b.capabilities.rank).min();
        let is_home = |i: &usize| {
            let book = &self.rails[*i];
            match rank {
                Some(rank) => book.capabilities.rank == rank && has_it(book),
                None => true, // nobody has it: the deadline ends it
            }
        };
        let mut homes = (0..self.rails.len()).filter(is_home);
        let nth = key.expert as usize % homes.clone().count();
        homes.nth(nth).expect("fewer than there are")
    }

    /// Somebody waits now for what was a guess, or a stream.
    pub fn promote(&mut self, now: Instant, request: Handle, class: Class) {
        let Some(entry) = self.requests.get(request) else {
            return;
        };
        for handle in entry.members.clone() {
            let Some(record) = self.records.get_mut(handle) else {
                continue;
            };
            if record.class <= class {
                continue;
            }
            let before = std::mem::replace(&mut record.class, class);
            let unposted = record.landing.remaining() as u64;
            self.unposted_bytes[before as usize] -= unposted;
            self.unposted_bytes[class as usize] += unposted;
            let (key, content) = (record.key, record.content);
            let (queued, retried) = (record.queued, record.in_retry_queue);
            if queued {
                let home = self.home(key, content);
                self.rails[home].queues[class as usize].push_back(handle);
            }
            if retried {
                self.retry_queues[class as usize].push_back(handle);
            }
        }
        self.note_times(now);
    }

    /// Gives a request up: its unfinished records fail, READs that are posted run out.
    pub fn cancel(&mut self, now: Instant, request: Handle) {
        self.fail_request(now, request, &Failure::Cancelled);
        self.note_times(now);
    }
}
