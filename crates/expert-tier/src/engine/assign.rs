//! Picks the next READ: which rail has room, which record it should serve, how much of it.

use std::time::{Duration, Instant};

use expert_arena::LandingRange;

use expert_store::catalogue::CHUNK_BYTES;

use super::share::{self, Load};
use expert_wire::Key;

use super::{Engine, Guards, Handle, RailBook, RailState, Read, ReadId, Record, later};
use crate::config::{Class, Policy};
use crate::rail::{ContentTag, RailId};

impl Engine {
    /// Hands READs to `post` until there is none, or as many came back as there are rails; says
    /// whether one was taken.
    pub fn post_all(
        &mut self,
        now: Instant,
        mut post: impl FnMut(RailId, Read) -> Result<(), Box<Read>>,
    ) -> bool {
        let (mut taken, mut refusals) = (false, 0);
        while refusals <= self.rails.len() {
            let Some((rail, read)) = self.next_post(now) else {
                break;
            };
            match post(rail, read) {
                Ok(()) => taken = true,
                Err(read) => {
                    refusals += 1;
                    self.handle_post_refused(rail, *read);
                }
            }
        }
        taken
    }

    /// The next READ to post and its rail, `None` while every window is full or nothing waits.
    /// The engine counts it as posted; a rail that cannot take it gives it back through
    /// [`Engine::handle_post_refused`].
    pub fn next_post(&mut self, now: Instant) -> Option<(RailId, Read)> {
        let rails = self.rails.len();
        for step in 0..rails {
            let rail = (self.turn + step) % rails;
            if !self.rails[rail].is_up() {
                continue;
            }
            // One that is outranked may still read what those before it refused.
            if self.is_outranked(rail) && self.refused_open == 0 {
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

    /// Whether a preferred rail works with the same content, and has all of its records.
    pub(super) fn is_outranked(&self, rail: usize) -> bool {
        let own = &self.rails[rail];
        let mut before = self.rails.iter().filter(|b| b.precedes(own));
        before.any(|b| !b.is_partial())
    }

    fn pick(&mut self, now: Instant, rail: usize) -> Option<Read> {
        for class in Class::ALL {
            let room = self.rails[rail].room_bytes(class, &self.config);
            if room == 0 {
                return None; // a less urgent class has no more
            }
            if let Some(read) = self.pick_retry(now, rail, class, room) {
                return Some(read);
            }
            if let Some(read) = self.pick_queued(now, rail, class, room) {
                return Some(read);
            }
        }
        None
    }

    fn pick_retry(&mut self, now: Instant, rail: usize, class: Class, room: u64) -> Option<Read> {
        for i in 0..self.retry_queues[class as usize].len() {
            let handle = self.retry_queues[class as usize][i];
            let guards = self.guards;
            let whole = self.rails[rail].capabilities.whole_records;
            let max = self.read_max_bytes(&self.rails[rail]);
            let Some(record) = self.records.get_mut(handle) else {
                continue; // cleaned up below
            };
            if record.class != class || !may_read(&self.rails, rail, record, guards) {
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
                self.retry_queues[class as usize].remove(i);
            }
            return Some(self.post(now, rail, handle, range));
        }
        let records = &self.records;
        self.retry_queues[class as usize]
            .retain(|&h| records.get(h).is_some_and(|r| r.class == class));
        None
    }

    fn pick_queued(&mut self, now: Instant, rail: usize, class: Class, room: u64) -> Option<Read> {
        if let Some(read) = self.pick_from(now, (rail, rail), class, room, false) {
            return Some(read);
        }
        let serves = self.rails[rail].serves();
        let policy = self.config.policy;
        let rank = self.rails[rail].capabilities.rank;
        let may_take = |book: &RailBook| match policy {
            Policy::HomeSteal | Policy::Split => true,
            // Nobody else's work, unless its home cannot do it: it is down, or it serves other
            // content than this rail (which takes nothing but its own).
            Policy::ExpertMod => {
                let serves_other = book.content.is_some() && book.serves() != serves;
                // One that was preferred and is down waits for nobody: this rail is there for that.
                let is_gone = book.capabilities.rank < rank || book.state != RailState::Probing;
                // Nor does one that never worked.
                let is_unknown = book.content.is_none();
                serves_other || (!book.is_up() && (is_gone || is_unknown))
            }
        };
        // The longest queue first: it is the one that would end last. Of equals the first.
        let mut asked: u64 = 1 << rail;
        loop {
            let waits = |d: &usize| {
                let book = &self.rails[*d];
                let is_empty = book.queues[class as usize].is_empty();
                let has_work = may_take(book) || self.refused_open > 0;
                asked & (1 << d) == 0 && !is_empty && has_work
            };
            let donors = (0..self.rails.len()).filter(waits).rev();
            let donor = donors.max_by_key(|&d| self.rails[d].queues[class as usize].len())?;
            asked |= 1 << donor;
            let only_refused = !may_take(&self.rails[donor]);
            if let Some(read) = self.pick_from(now, (rail, donor), class, room, only_refused) {
                return Some(read);
            }
        }
    }

    /// The next READ of the first record in `donor`'s queue that `rail` can serve, or of the first
    /// of those that some rail refused.
    fn pick_from(
        &mut self,
        now: Instant,
        (rail, donor): (usize, usize),
        class: Class,
        room: u64,
        only_refused: bool,
    ) -> Option<Read> {
        let guards = self.guards;
        let queue = class as usize;
        let whole = self.rails[rail].capabilities.whole_records;
        let max = self.read_max_bytes(&self.rails[rail]);
        let mut i = 0;
        while i < self.rails[donor].queues[queue].len() {
            let handle = self.rails[donor].queues[queue][i];
            let record = self.records.get(handle);
            let Some(record) = record.filter(|r| r.class == class && r.queued) else {
                // Ended, or it waits in another queue since it became more urgent.
                self.rails[donor].queues[queue].remove(i);
                continue;
            };
            let image_bytes = record.landing.image_bytes() as u64;
            let remaining = record.landing.remaining() as u64;
            let len = match whole {
                true if remaining == image_bytes => image_bytes,
                true => 0, // begun on another kind of rail
                false => max.min(remaining),
            };
            let is_meant = !only_refused || record.refused_by != 0;
            if !is_meant || !may_read(&self.rails, rail, record, guards) || len == 0 {
                i += 1;
                continue;
            }
            let wanted = (record.content, record.key, record.refused_by);
            let len = self.share(now, rail, wanted, class, len)?;
            let len = self.for_every_lane(rail, class, len);
            if len > room {
                return None;
            }
            let record = self.records.get_mut(handle).expect("seen above");
            let range = record
                .landing
                .split(len as usize)
                .expect("remaining bytes were asked for");
            self.unposted_bytes[queue] -= len;
            if len == remaining {
                record.queued = false;
                self.rails[donor].queues[queue].remove(i);
            }
            return Some(self.post(now, rail, handle, range));
        }
        None
    }

    /// How much of a READ of `len` bytes a rail should take, in view of what the others can do;
    /// `None` where it should leave it to them.
    fn share(
        &mut self,
        now: Instant,
        rail: usize,
        (content, key, refused_by): (ContentTag, Key, u64),
        class: Class,
        len: u64,
    ) -> Option<u64> {
        let own = &self.rails[rail];
        let rank = own.capabilities.rank;
        let helps = |i: &usize| {
            let book = &self.rails[*i];
            let has_it = book.holds(key) && refused_by & 1 << *i == 0;
            let is_peer = book.capabilities.rank == rank && has_it;
            book.is_up() && book.serves() == Some(content) && is_peer
        };
        let others = (0..self.rails.len()).filter(|i| *i != rail).filter(helps);
        let has_whole = own.capabilities.whole_records
            || others
                .clone()
                .any(|i| self.rails[i].capabilities.whole_records);
        let taken = match self.config.policy {
            _ if has_whole => Ok(len),
            Policy::ExpertMod => Ok(len),
            Policy::HomeSteal => self.share_whole(now, rail, others, class, len),
            Policy::Split => self.share_evenly(now, rail, others, class, len),
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

    /// How much of a READ of `len` bytes to post at once, so that what is left is enough for each of
    /// the rail's lanes.
    fn for_every_lane(&self, rail: usize, class: Class, len: u64) -> u64 {
        let capabilities = &self.rails[rail].capabilities;
        if capabilities.whole_records || capabilities.pieces <= 1 {
            return len;
        }
        let each = self.waiting_bytes(class) / u64::from(capabilities.pieces);
        len.min(each.next_multiple_of(CHUNK_BYTES).max(CHUNK_BYTES))
    }

    /// Whole READs: all of it or nothing. The error is when the rail would have been done.
    fn share_whole(
        &self,
        now: Instant,
        rail: usize,
        others: impl Iterator<Item = usize> + Clone,
        class: Class,
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
        match share::may_take(own, counted, loads, read_bytes, self.waiting_bytes(class)) {
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
        class: Class,
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
        let waiting_bytes = self.waiting_bytes(class);
        let fair = share::fair_bytes(own, loads.clone(), waiting_bytes);
        if fair >= CHUNK_BYTES / 2 {
            return Ok(len.min(fair.next_multiple_of(CHUNK_BYTES)));
        }
        let least = len.min(CHUNK_BYTES);
        match share::may_take(own, least, loads, CHUNK_BYTES, waiting_bytes) {
            true => Ok(least),
            false => Err(share::end_s(own, least)),
        }
    }

    /// Bytes that wait and go before what is less urgent than `class`.
    fn waiting_bytes(&self, class: Class) -> u64 {
        self.unposted_bytes[..=class as usize].iter().sum()
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
            // The rail knows its own content, not what that is part of.
            content: match self.guards.content {
                true => self.rails[rail].content.unwrap_or(record.content),
                false => record.content,
            },
            range,
            verify: record.verify && self.guards.verify,
            class: record.class,
            posted_at: now,
        };
        if let Some(request) = self.requests.get_mut(record.request) {
            request.first_post.get_or_insert(now);
        }
        self.rails[rail].posted(read.bytes(), read.class, now);
        read
    }
}

/// Whether another rail works with the record's content, has it, and did not refuse it.
pub(super) fn has_other_reader(rails: &[RailBook], rail: usize, record: &Record) -> bool {
    rails.iter().enumerate().any(|(i, book)| {
        i != rail
            && record.refused_by & 1 << i == 0
            && book.is_up()
            && book.serves() == Some(record.content)
            && book.holds(record.key)
    })
}

/// Whether a rail may read for a record: it serves the content, has the record, and no preferred
/// rail that works does, unless that refused it.
fn may_read(rails: &[RailBook], rail: usize, record: &Record, guards: Guards) -> bool {
    let own = &rails[rail];
    if !guards.admit(own.serves(), record.content) || !own.holds(record.key) {
        return false;
    }
    if record.refused_by & 1 << rail != 0 && has_other_reader(rails, rail, record) {
        return false;
    }
    let mut before = rails.iter().enumerate();
    !before.any(|(i, b)| b.precedes(own) && b.holds(record.key) && record.refused_by & 1 << i == 0)
}
