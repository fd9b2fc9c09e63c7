//! How records and requests end.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Committed, Engine, Failure, Finished, Guards, Handle, RailBook};

impl Engine {
    pub(super) fn commit(&mut self, now: Instant, handle: Handle) {
        let record = self
            .records
            .remove(handle)
            .expect("only open records commit");
        self.refused_open -= usize::from(record.refused_by != 0);
        let bytes = record.landing.image_bytes() as u64;
        let verified = record.verified && record.layer.checksums.is_some();
        let took = self
            .requests
            .get(record.request)
            .map_or(Duration::ZERO, |r| {
                now.saturating_duration_since(r.submitted)
            });
        let result = match record.landing.commit() {
            Ok(lease) => {
                self.counters.records += 1;
                self.counters.bytes += bytes;
                self.counters.unverified += u64::from(!verified);
                Ok(Committed {
                    lease,
                    verified,
                    took,
                })
            }
            // The engine counts what the arena counts, so this is a bug of ours; the arena's word
            // stands and nothing is handed out.
            Err((_landing, error)) => {
                debug_assert!(self.guards != Guards::ON, "commit refused: {error}");
                self.counters.commits_refused += 1;
                tracing::error!(key = %record.key, "commit refused: {error}");
                Err(Failure::RailFailed(error.to_string()))
            }
        };
        if result.is_ok() {
            if let Some(request) = self.requests.get_mut(record.request) {
                request.stats.bytes += bytes;
            }
        }
        self.resolve(now, record.request, record.index, result);
    }

    pub(super) fn fail_record(&mut self, now: Instant, handle: Handle, failure: Failure) {
        if let Some(record) = self.records.remove(handle) {
            self.refused_open -= usize::from(record.refused_by != 0);
            self.counters.failed += 1;
            self.unposted_bytes[record.class as usize] -= record.landing.remaining() as u64;
            drop(record.retries);
            record.landing.abandon();
            if record.queued || record.in_retry_queue {
                self.sweep();
            }
            self.resolve(now, record.request, record.index, Err(failure));
        }
    }

    /// Takes ended records out of the queues, now and then: while every rail is away nobody takes
    /// anything out of them.
    pub(super) fn sweep(&mut self) {
        self.ended_in_queues += 1;
        let waiting: usize = self.rails.iter().map(RailBook::queued).sum();
        let again: usize = self.retry_queues.iter().map(VecDeque::len).sum();
        if self.ended_in_queues > 64 && 2 * self.ended_in_queues > waiting + again {
            self.ended_in_queues = 0;
            let records = &self.records;
            let queues = self.rails.iter_mut().flat_map(|b| &mut b.queues);
            for queue in queues.chain(&mut self.retry_queues) {
                queue.retain(|&h| records.get(h).is_some());
            }
        }
    }

    pub(super) fn fail_request(&mut self, now: Instant, request: Handle, failure: &Failure) {
        let mut i = 0;
        while let Some(record) = self.member(request, i) {
            self.fail_record(now, record, failure.clone());
            i += 1;
        }
    }

    /// A record of a request, ended or not; `None` once the request has ended.
    pub(super) fn member(&self, request: Handle, index: usize) -> Option<Handle> {
        self.requests.get(request)?.members.get(index).copied()
    }

    pub(super) fn resolve(
        &mut self,
        now: Instant,
        request: Handle,
        index: usize,
        result: Result<Committed, Failure>,
    ) {
        let Some(entry) = self.requests.get_mut(request) else {
            return;
        };
        if entry.results[index].replace(result).is_none() {
            entry.open -= 1;
        }
        if entry.open == 0 && entry.members.len() == entry.results.len() {
            self.finish(now, request);
        }
    }

    pub(super) fn finish(&mut self, now: Instant, request: Handle) {
        let Some(entry) = self.requests.remove(request) else {
            return;
        };
        self.inflight_bytes -= entry.bytes;
        self.counters.requests += 1;
        let mut stats = entry.stats;
        stats.total = now.saturating_duration_since(entry.submitted);
        stats.queued = entry.first_post.map_or(stats.total, |t| {
            t.saturating_duration_since(entry.submitted)
        });
        stats.wire = stats.total - stats.queued;
        self.close_account(now, request, &entry, &mut stats);
        self.finished.push_back(Finished {
            request,
            records: entry
                .results
                .into_iter()
                .map(|r| r.expect("a request ends when all its records have"))
                .collect(),
            stats,
        });
    }
}
