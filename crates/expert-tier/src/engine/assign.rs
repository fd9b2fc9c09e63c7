//! Picks the next READ: which rail has room, which record it should serve, how much of it.

use std::time::{Duration, Instant};

use expert_arena::LandingRange;

use expert_store::catalogue::CHUNK_BYTES;

use super::share::{self, Load};
use super::{Engine, Handle, RailBook, RailState, Read, ReadId, later};
use crate::config::Policy;
use crate::rail::{ContentTag, RailId};

impl Engine {
    /// The next READ to post and its rail, `None` while every window is full or nothing waits.
    /// The engine counts it as posted; a rail that cannot take it gives it back through
    /// [`Engine::handle_post_refused`].
    pub fn next_post(&mut self, now: Instant) -> Option<(RailId, Read)> {
        let rails = self.rails.len();
        for step in 0..rails {
            let rail = (self.turn + step) % rails;
            if !self.rails[rail].is_up() || self.is_outranked(rail) {
                continue;
            }
            if let Some(read) = self.pick(now, rail) {
                // Fill one rail's window after the other's turn: small windows fill evenly.
                self.turn = (rail + 1) % rails;
                self.note_times(now);
                return Some((RailId(rail), read));
            }
        }
        None
    }

    /// Whether a preferred rail works with the same content.
    pub(super) fn is_outranked(&self, rail: usize) -> bool {
        let own = &self.rails[rail];
        self.rails.iter().any(|b| {
            b.capabilities.rank < own.capabilities.rank && b.is_up() && b.content == own.content
        })
    }

    fn pick(&mut self, now: Instant, rail: usize) -> Option<Read> {
        let book = &self.rails[rail];
        let window = book.window_bytes(&self.config);
        let always = match book.capabilities.whole_records {
            // A record may be larger than the window: two per lane keep each lane busy.
            true => 2 * u64::from(book.capabilities.lanes.max(1)),
            false => 1, // one READ may always be out, however small the window
        };
        let room = match book.outstanding_reads < always {
            true => u64::MAX,
            false => window.saturating_sub(book.outstanding_bytes),
        };
        if room == 0 {
            return None;
        }
        if let Some(read) = self.pick_retry(now, rail, room) {
            return Some(read);
        }
        self.pick_queued(now, rail, room)
    }

    fn pick_retry(&mut self, now: Instant, rail: usize, room: u64) -> Option<Read> {
        for i in 0..self.retry_queue.len() {
            let handle = self.retry_queue[i];
            let serves = self.rails[rail].content;
            let guards = self.guards;
            let whole = self.rails[rail].capabilities.whole_records;
            let max = self.read_max_bytes(&self.rails[rail]);
            let Some(record) = self.records.get_mut(handle) else {
                continue; // cleaned up below
            };
            if !guards.admit(serves, record.content) {
                continue;
            }
            let image_bytes = record.landing.image_bytes() as u64;
            let Some(range) = record.retries.last_mut() else {
                continue;
            };
            let len = range.len() as u64;
            if whole && len != image_bytes {
                continue;
            }
            // A range posted on a rail with larger READs may have to be cut for this one.
            let take = if whole { len } else { max.min(len) };
            if take > room {
                continue;
            }
            let range = if take < len {
                let tail = range.split_off(take as usize);
                std::mem::replace(range, tail)
            } else {
                record.retries.pop().expect("seen above")
            };
            if record.retries.is_empty() {
                record.in_retry_queue = false;
                self.retry_queue.remove(i);
            }
            return Some(self.post(now, rail, handle, range));
        }
        self.retry_queue.retain(|&h| self.records.get(h).is_some());
        None
    }

    fn pick_queued(&mut self, now: Instant, rail: usize, room: u64) -> Option<Read> {
        if let Some(read) = self.pick_from(now, rail, rail, room) {
            return Some(read);
        }
        let serves = self.rails[rail].content;
        let policy = self.config.policy;
        let rank = self.rails[rail].capabilities.rank;
        let may_take = |book: &RailBook| match policy {
            Policy::HomeSteal | Policy::Split => true,
            // Nobody else's work, unless its home cannot do it: it is down, or it serves other
            // content than this rail (which takes nothing but its own).
            Policy::ExpertMod => {
                let serves_other = book.content.is_some() && book.content != serves;
                // One that was preferred and is down waits for nobody: this rail is there for that.
                let is_gone = book.capabilities.rank < rank || book.state != RailState::Probing;
                serves_other || (!book.is_up() && is_gone)
            }
        };
        // The longest queue first: it is the one that would end last. Of equals the first.
        let mut asked: u64 = 1 << rail;
        loop {
            let waits = |d: &usize| {
                let book = &self.rails[*d];
                asked & (1 << d) == 0 && !book.queue.is_empty() && may_take(book)
            };
            let donors = (0..self.rails.len()).filter(waits).rev();
            let donor = donors.max_by_key(|&d| self.rails[d].queue.len())?;
            asked |= 1 << donor;
            if let Some(read) = self.pick_from(now, rail, donor, room) {
                return Some(read);
            }
        }
    }

    /// The next READ of the first record in `donor`'s queue that `rail` can serve.
    fn pick_from(&mut self, now: Instant, rail: usize, donor: usize, room: u64) -> Option<Read> {
        let serves = self.rails[rail].content;
        let guards = self.guards;
        let whole = self.rails[rail].capabilities.whole_records;
        let max = self.read_max_bytes(&self.rails[rail]);
        let mut i = 0;
        while i < self.rails[donor].queue.len() {
            let handle = self.rails[donor].queue[i];
            let Some(record) = self.records.get_mut(handle) else {
                self.rails[donor].queue.remove(i);
                continue;
            };
            let image_bytes = record.landing.image_bytes() as u64;
            let remaining = record.landing.remaining() as u64;
            let len = match whole {
                true if remaining == image_bytes => image_bytes,
                true => 0, // begun on another kind of rail
                false => max.min(remaining),
            };
            if !guards.admit(serves, record.content) || len == 0 {
                i += 1;
                continue;
            }
            let content = record.content;
            let len = self.share(now, rail, content, len)?;
            if len > room {
                return None;
            }
            let record = self.records.get_mut(handle).expect("seen above");
            let range = record
                .landing
                .split(len as usize)
                .expect("remaining bytes were asked for");
            self.unposted_bytes -= len;
            if len == remaining {
                record.queued = false;
                self.rails[donor].queue.remove(i);
            }
            return Some(self.post(now, rail, handle, range));
        }
        None
    }

    /// How much of a READ of `len` bytes a rail should take, in view of what the others can do;
    /// `None` where it should leave it to them.
    fn share(&mut self, now: Instant, rail: usize, content: ContentTag, len: u64) -> Option<u64> {
        let own = &self.rails[rail];
        let rank = own.capabilities.rank;
        let helps = |i: &usize| {
            let book = &self.rails[*i];
            book.is_up() && book.content == Some(content) && book.capabilities.rank == rank
        };
        let others = (0..self.rails.len()).filter(|i| *i != rail).filter(helps);
        let has_whole = own.capabilities.whole_records
            || others
                .clone()
                .any(|i| self.rails[i].capabilities.whole_records);
        let taken = match self.config.policy {
            _ if has_whole => Ok(len),
            Policy::ExpertMod => Ok(len),
            Policy::HomeSteal => self.share_whole(now, rail, others, len),
            Policy::Split => self.share_evenly(now, rail, others, len),
        };
        match taken {
            Ok(len) => Some(len),
            Err(end_s) => {
                // Those others may stand still meanwhile.
                let at = later(
                    now,
                    Duration::try_from_secs_f64(end_s).unwrap_or(Duration::MAX),
                );
                self.look_again = Some(self.look_again.map_or(at, |before| before.min(at)));
                None
            }
        }
    }

    /// Whole READs: all of it or nothing. The error is when the rail would have been done.
    fn share_whole(
        &self,
        now: Instant,
        rail: usize,
        others: impl Iterator<Item = usize> + Clone,
        len: u64,
    ) -> Result<u64, f64> {
        let Some(own) = self.rails[rail].load(now) else {
            return Ok(len); // its rate is to be learnt
        };
        // One size for all who are asked, so that they come to the same end.
        let sizes = others.clone().chain([rail]);
        let sizes = sizes.map(|i| self.read_max_bytes(&self.rails[i]));
        let read_bytes = sizes.min().unwrap_or(len);
        let loads = others.filter_map(|i| self.rails[i].load(now));
        let counted = len.min(read_bytes);
        match share::may_take(own, counted, loads, read_bytes, self.unposted_bytes) {
            true => Ok(len),
            false => Err(share::end_s(own, counted)),
        }
    }

    /// READs that get smaller towards the end, so that all rails end together.
    fn share_evenly(
        &self,
        now: Instant,
        rail: usize,
        others: impl Iterator<Item = usize> + Clone,
        len: u64,
    ) -> Result<u64, f64> {
        // A rail of which nothing is known is taken for one like the others.
        let known = others.clone().chain([rail]);
        let known = known.filter_map(|i| self.rails[i].load(now));
        let (sum, count) = known.fold((0.0, 0u32), |(sum, n), l| (sum + l.bytes_per_s, n + 1));
        let usual = if count == 0 {
            1.0
        } else {
            sum / f64::from(count)
        };
        let load = |i: usize| -> Load {
            let book = &self.rails[i];
            book.load(now).unwrap_or_else(|| book.load_at(usual, now))
        };
        let (own, loads) = (load(rail), others.map(load));
        let fair = share::fair_bytes(own, loads.clone(), self.unposted_bytes);
        if fair >= CHUNK_BYTES / 2 {
            return Ok(len.min(fair.next_multiple_of(CHUNK_BYTES)));
        }
        let least = len.min(CHUNK_BYTES);
        match share::may_take(own, least, loads, CHUNK_BYTES, self.unposted_bytes) {
            true => Ok(least),
            false => Err(share::end_s(own, least)),
        }
    }

    fn read_max_bytes(&self, book: &RailBook) -> u64 {
        self.config.posted_bytes(book.capabilities.read_max_bytes)
    }

    fn post(&mut self, now: Instant, rail: usize, handle: Handle, range: LandingRange) -> Read {
        let record = self.records.get_mut(handle).expect("the caller found it");
        record.touched |= 1 << rail;
        let read = Read {
            id: ReadId {
                record: handle.index,
                reuse: handle.reuse,
            },
            key: record.key,
            position: record.position,
            layer: record.layer.clone(),
            content: record.content,
            range,
            verify: record.verify && self.guards.verify,
            posted_at: now,
        };
        if let Some(request) = self.requests.get_mut(record.request) {
            request.first_post.get_or_insert(now);
        }
        self.rails[rail].posted(read.bytes(), now);
        read
    }
}
