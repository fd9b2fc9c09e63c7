//! What is posted on a queue: which completion ends which post, without any verbs.

use crate::completion::CompletionStatus;
use crate::read_chain::SIGNAL_STEP_BYTES;
use expert_arena::LandingRange;
use std::fmt;

/// How a post failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletionError {
    /// The status of the request that failed.
    pub status: CompletionStatus,
    /// The device's own number for it.
    pub vendor_err: u32,
    /// Whether it is what took the queue down; `false` for what was flushed after that.
    pub root: bool,
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        if self.vendor_err != 0 {
            write!(f, " (vendor error {:#x})", self.vendor_err)?;
        }
        Ok(())
    }
}

impl std::error::Error for CompletionError {}

/// A post that ended: the device has let go of its range.
#[derive(Debug)]
pub struct ReadDone<T> {
    /// What it was posted with.
    pub token: T,
    /// The range; its bytes are there if `result` is `Ok`, and may be anything otherwise.
    pub range: LandingRange,
    /// How it ended.
    pub result: Result<(), CompletionError>,
}

/// Most posts of one queue.
pub(crate) const POSTS_MAX: u32 = (1 << INDEX_BITS) - 1;

/// Most requests of one post.
pub(crate) const REQUESTS_MAX: usize = 1 << POSITION_BITS;

/// The request that says that everything before it is over.
pub(crate) const MARKER: u64 = u64::MAX;

/// The request that shows that a path carries READs.
pub(crate) const PROBE: u64 = u64::MAX - 1;

const POSITION_BITS: u32 = 16;
const INDEX_BITS: u32 = 20;
const GENERATION_MASK: u32 = (1 << (u64::BITS - POSITION_BITS - INDEX_BITS)) - 1;

/// What a request is posted with: the entry of its post, that entry's generation, and the request's position in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WrId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
    pub(crate) position: u16,
}

impl WrId {
    pub(crate) fn encode(self) -> u64 {
        (u64::from(self.generation & GENERATION_MASK) << (INDEX_BITS + POSITION_BITS))
            | (u64::from(self.index) << POSITION_BITS)
            | u64::from(self.position)
    }

    pub(crate) fn decode(wr_id: u64) -> Self {
        let index_mask = (1_u64 << INDEX_BITS) - 1;
        // Each part fits: it was cut to its bits.
        Self {
            index: ((wr_id >> POSITION_BITS) & index_mask) as u32,
            generation: (wr_id >> (INDEX_BITS + POSITION_BITS)) as u32,
            position: wr_id as u16,
        }
    }
}

/// The posts of one queue.
pub(crate) struct Table<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    /// Requests of all posts: what the send queue and the completion queue hold at most.
    requests: usize,
    requests_max: usize,
    root: Option<CompletionError>,
    stale: u64,
    progress_bytes: u64,
}

struct Entry<T> {
    generation: u32,
    post: Option<Post<T>>,
}

struct Post<T> {
    token: T,
    range: LandingRange,
    /// The position whose completion ends the post.
    last: u16,
    /// Whether that request makes no completion when it succeeds: the chain was posted in part.
    cut: bool,
    error: Option<CompletionError>,
    /// Bytes that completions of requests before the last have shown.
    seen_bytes: u64,
}

/// What a completion means.
pub(crate) enum Outcome<T> {
    /// A post ended.
    Ended(ReadDone<T>),
    /// A post goes on.
    Pending,
    /// Nobody is waiting for it.
    Stale,
}

impl<T> Table<T> {
    pub(crate) fn new(posts_max: u32, requests_max: usize) -> Self {
        let entries = (0..posts_max).map(|_| Entry {
            generation: 0,
            post: None,
        });
        Self {
            entries: entries.collect(),
            free: (0..posts_max).rev().collect(),
            requests: 0,
            requests_max,
            root: None,
            stale: 0,
            progress_bytes: 0,
        }
    }

    /// Count of posts.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Completions that no post was waiting for.
    pub(crate) fn stale(&self) -> u64 {
        self.stale
    }

    /// Bytes that completions have shown so far.
    pub(crate) fn progress_bytes(&self) -> u64 {
        self.progress_bytes
    }

    /// The first failure that was not a flush.
    pub(crate) fn root(&self) -> Option<CompletionError> {
        self.root
    }

    pub(crate) fn set_root(&mut self, status: CompletionStatus) {
        self.root.get_or_insert(CompletionError {
            status,
            vendor_err: 0,
            root: true,
        });
    }

    /// Whether one more post of so many requests fits.
    pub(crate) fn has_room(&self, requests: usize) -> bool {
        !self.free.is_empty() && self.requests + requests <= self.requests_max
    }

    /// Takes a post in; the first request's identity comes back. There must be room.
    pub(crate) fn insert(&mut self, token: T, range: LandingRange, requests: usize) -> WrId {
        assert!(self.has_room(requests), "a post without room for it");
        let last = requests
            .checked_sub(1)
            .and_then(|last| u16::try_from(last).ok());
        let last = last.expect("1 to REQUESTS_MAX requests");
        let index = self.free.pop().expect("there is room");
        let entry = &mut self.entries[index as usize];
        entry.generation = entry.generation.wrapping_add(1) & GENERATION_MASK;
        entry.post = Some(Post {
            token,
            range,
            last,
            cut: false,
            error: None,
            seen_bytes: 0,
        });
        self.requests += requests;
        WrId {
            index,
            generation: entry.generation,
            position: 0,
        }
    }

    /// Takes a post out of which nothing was posted.
    pub(crate) fn withdraw(&mut self, id: WrId) -> (T, LandingRange) {
        let post = self.remove(id.index).expect("it was just taken in");
        (post.token, post.range)
    }

    /// Notes that only the first `posted` requests of a post went out, at least one.
    pub(crate) fn cut(&mut self, id: WrId, posted: usize) {
        let post = self.entries[id.index as usize].post.as_mut();
        let post = post.expect("it was just taken in");
        let last = u16::try_from(posted.saturating_sub(1)).unwrap_or(post.last);
        self.requests -= usize::from(post.last - last);
        post.last = last;
        post.cut = true;
    }

    pub(crate) fn has_cut(&self) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.post.as_ref().is_some_and(|post| post.cut))
    }

    /// Counts one completion.
    pub(crate) fn complete(
        &mut self,
        wr_id: u64,
        status: CompletionStatus,
        vendor_err: u32,
    ) -> Outcome<T> {
        let error = match status {
            CompletionStatus::Success => None,
            _ => Some(self.note(status, vendor_err)),
        };
        let id = WrId::decode(wr_id);
        let entry = self.entries.get_mut(id.index as usize);
        let entry = entry.filter(|entry| entry.generation == id.generation);
        let Some(post) = entry.and_then(|entry| entry.post.as_mut()) else {
            self.stale += 1;
            return Outcome::Stale;
        };
        if id.position > post.last {
            self.stale += 1;
            return Outcome::Stale;
        }
        // The first one of a post is the reason; what follows is noise.
        post.error = post.error.or(error);
        if id.position < post.last {
            if error.is_none() {
                // What was read since the last one that asked for a completion, at least.
                post.seen_bytes += SIGNAL_STEP_BYTES as u64;
                self.progress_bytes += SIGNAL_STEP_BYTES as u64;
            }
            return Outcome::Pending;
        }
        if error.is_none() {
            self.progress_bytes += (post.range.len() as u64).saturating_sub(post.seen_bytes);
        }
        match self.remove(id.index) {
            Some(post) => Outcome::Ended(done(post)),
            None => Outcome::Stale,
        }
    }

    /// One post that was posted in part, ended because everything before the marker is over.
    pub(crate) fn end_cut(&mut self) -> Option<ReadDone<T>> {
        let index = self
            .entries
            .iter()
            .position(|entry| entry.post.as_ref().is_some_and(|post| post.cut))?;
        let post = self.remove(u32::try_from(index).ok()?)?;
        Some(done(post))
    }

    /// One of all posts, when the device has let go of them without telling.
    pub(crate) fn take_any(&mut self) -> Option<ReadDone<T>> {
        let index = self.entries.iter().position(|entry| entry.post.is_some())?;
        let post = self.remove(u32::try_from(index).ok()?)?;
        let mut done = done(post);
        // Whatever it got, its last completion was not seen.
        done.result = Err(done.result.err().unwrap_or(FLUSHED));
        Some(done)
    }

    /// The error of one completion; the first that is no flush is the root cause.
    fn note(&mut self, status: CompletionStatus, vendor_err: u32) -> CompletionError {
        let root = status != CompletionStatus::Flushed && self.root.is_none();
        let error = CompletionError {
            status,
            vendor_err,
            root,
        };
        if root {
            self.root = Some(error);
        }
        error
    }

    fn remove(&mut self, index: u32) -> Option<Post<T>> {
        let post = self.entries.get_mut(index as usize)?.post.take()?;
        self.free.push(index);
        self.requests -= usize::from(post.last) + 1;
        Some(post)
    }
}

/// What a post gets that ends without a word of the device.
const FLUSHED: CompletionError = CompletionError {
    status: CompletionStatus::Flushed,
    vendor_err: 0,
    root: false,
};

fn done<T>(post: Post<T>) -> ReadDone<T> {
    let result = match post.error {
        Some(error) => Err(error),
        // The rest of it never went out.
        None if post.cut => Err(FLUSHED),
        None => Ok(()),
    };
    ReadDone {
        token: post.token,
        range: post.range,
        result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_arena::ranges;

    fn ended<T>(outcome: Outcome<T>) -> ReadDone<T> {
        match outcome {
            Outcome::Ended(done) => done,
            Outcome::Pending => panic!("the post goes on"),
            Outcome::Stale => panic!("stale"),
        }
    }

    fn at(id: WrId, position: u16) -> u64 {
        WrId { position, ..id }.encode()
    }

    #[test]
    fn wr_ids_round_trip_at_their_limits() {
        for id in [
            WrId {
                index: 0,
                generation: 0,
                position: 0,
            },
            WrId {
                index: POSTS_MAX - 1,
                generation: GENERATION_MASK,
                position: u16::MAX,
            },
        ] {
            assert_eq!(WrId::decode(id.encode()), id);
            assert_ne!(id.encode(), MARKER);
        }
    }

    #[test]
    fn a_post_ends_with_its_last_request_alone() {
        let mut table = Table::new(2, 8);
        let [range] = ranges(4096);
        let id = table.insert("token", range, 3);
        assert!(matches!(
            table.complete(at(id, 0), CompletionStatus::Success, 0),
            Outcome::Pending
        ));
        let done = ended(table.complete(at(id, 2), CompletionStatus::Success, 0));
        assert_eq!((done.token, done.result), ("token", Ok(())));
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn a_completion_of_an_earlier_generation_is_counted_and_ends_nothing() {
        let mut table = Table::new(1, 8);
        let [first, second] = ranges(4096);
        let old = table.insert(1, first, 1);
        ended(table.complete(old.encode(), CompletionStatus::Success, 0));
        let new = table.insert(2, second, 1);
        assert_eq!(old.index, new.index);
        assert!(matches!(
            table.complete(old.encode(), CompletionStatus::Success, 0),
            Outcome::Stale
        ));
        assert!(matches!(
            table.complete(at(new, 7), CompletionStatus::Success, 0),
            Outcome::Stale
        ));
        assert!(matches!(
            table.complete(u64::MAX / 3, CompletionStatus::Success, 0),
            Outcome::Stale
        ));
        assert_eq!((table.stale(), table.len()), (3, 1));
    }

    #[test]
    fn the_first_failure_is_the_root_cause_and_the_rest_is_flushed() {
        let mut table = Table::new(2, 8);
        let [first, second] = ranges(4096);
        let a = table.insert('a', first, 2);
        let b = table.insert('b', second, 1);
        // The unsignalled first request fails; then everything is flushed.
        let access = CompletionStatus::RemoteAccess;
        assert!(matches!(
            table.complete(at(a, 0), access, 0x88),
            Outcome::Pending
        ));
        let first = ended(table.complete(at(a, 1), CompletionStatus::Flushed, 0));
        let second = ended(table.complete(b.encode(), CompletionStatus::Flushed, 0));
        let root = CompletionError {
            status: access,
            vendor_err: 0x88,
            root: true,
        };
        assert_eq!(first.result, Err(root));
        assert_eq!(second.result, Err(FLUSHED));
        assert_eq!(table.root(), Some(root));
    }

    #[test]
    fn room_is_counted_in_posts_and_in_requests() {
        let mut table = Table::new(2, 5);
        let [first, second] = ranges(4096);
        assert!(table.has_room(5) && !table.has_room(6));
        let a = table.insert(1, first, 4);
        assert!(table.has_room(1) && !table.has_room(2));
        table.insert(2, second, 1);
        assert!(!table.has_room(1));
        ended(table.complete(at(a, 3), CompletionStatus::Success, 0));
        assert!(table.has_room(4) && !table.has_room(5));
    }

    #[test]
    fn a_chain_that_was_posted_in_part_ends_with_what_went_out_or_with_the_marker() {
        for by_marker in [false, true] {
            let mut table = Table::new(1, 8);
            let [range] = ranges(4096);
            let id = table.insert((), range, 5);
            table.cut(id, 2);
            assert!(table.has_cut() && !table.has_room(0));
            let done = if by_marker {
                table.end_cut().unwrap()
            } else {
                ended(table.complete(at(id, 1), CompletionStatus::Success, 0))
            };
            assert_eq!(done.result, Err(FLUSHED), "the rest never arrived");
            assert!(table.has_room(8));
        }
    }
}
