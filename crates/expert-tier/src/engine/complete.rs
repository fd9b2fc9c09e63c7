//! What the end of a READ means: bytes that landed, or a range to be read again, or a record that fails.

use std::time::Instant;

use super::assign::has_other_reader;
use super::{Engine, Failure, Handle};
use crate::rail::{Completion, Landed, RailId, Read, ReadError, ReadId};

impl Engine {
    pub(super) fn handle_completion(&mut self, now: Instant, rail: RailId, completion: Completion) {
        let Completion { read, result } = completion;
        let bytes = read.bytes();
        self.rails[rail.0].unposted(bytes, read.class);
        let latency = now.saturating_duration_since(read.posted_at);
        let clock = self.machine.clock;
        let result = result.and_then(|mut landed| {
            // A rail that does not hash on its own threads leaves it to us.
            if read.verify && !landed.verified {
                let began = clock.map(|clock| clock());
                read.check_chunks(0, bytes).map_err(ReadError::Checksum)?;
                if let (Some(clock), Some(began)) = (clock, began) {
                    landed.verify_time += clock().saturating_duration_since(began);
                }
            }
            Ok(landed)
        });
        let result = match result {
            Err(ReadError::Flushed) if !self.guards.commit_rule => Ok(Landed::default()),
            result => result,
        };
        let handle = self.record_of(read.id);
        match result {
            Ok(landed) => {
                self.rails[rail.0].landed(bytes, latency, now, &self.config);
                let Some(record) = self.records.get_mut(handle) else {
                    return; // expired or cancelled: dropping the range frees the slot
                };
                record.landed_bytes += bytes;
                let done = record.landed_bytes == record.landing.image_bytes() as u64;
                let failed_before = record.was_flushed || record.attempts_failed > 0;
                if record.touched & !(1 << rail.0) != 0 && failed_before {
                    self.counters.fallbacks += 1;
                }
                let request = record.request;
                let verified_bytes = if read.verify { bytes } else { 0 };
                read.range.retire();
                if let Some(request) = self.requests.get_mut(request) {
                    request.stats.verify += landed.verify_time;
                    request.account.verify_bytes += verified_bytes;
                    request.account.reads += 1;
                    request.account.marks[rail.0].bytes += bytes;
                }
                if done {
                    self.commit(now, handle);
                }
            }
            Err(error) => self.handle_failed(now, rail, handle, read, error),
        }
    }

    fn handle_failed(
        &mut self,
        now: Instant,
        rail: RailId,
        handle: Handle,
        read: Read,
        error: ReadError,
    ) {
        let errors = &mut self.rails[rail.0].errors;
        match &error {
            ReadError::Flushed => errors.flushed += 1,
            ReadError::Checksum(_) => {
                errors.checksum += 1;
                self.counters.verify_failures += 1;
            }
            ReadError::ContentChanged => {}
            _ => errors.refused += 1,
        }
        let retries = self.config.retries;
        let Some(record) = self.records.get_mut(handle) else {
            return;
        };
        if let Some(request) = self.requests.get_mut(record.request) {
            request.account.reads += 1;
            request.stats.retries += 1;
            let refused = matches!(error, ReadError::Unavailable(_) | ReadError::Refused(_));
            request.account.refused_reads += u64::from(refused);
        }
        let is_verdict = !matches!(error, ReadError::Flushed | ReadError::ContentChanged);
        if is_verdict {
            self.refused_open += usize::from(record.refused_by == 0);
            record.refused_by |= 1 << rail.0;
        }
        // Another that has the record is asked before it fails.
        let has_other = is_verdict && has_other_reader(&self.rails, rail.0, record);
        let failure = match error {
            ReadError::Flushed => {
                // Not an attempt of its own: the rail failed, not the READ. The deadline bounds it.
                record.was_flushed = true;
                None
            }
            ReadError::ContentChanged => None,
            ReadError::Checksum(bad) => {
                record.attempts_failed += 1;
                (record.attempts_failed > retries).then_some(Failure::Checksum(bad))
            }
            ReadError::Unavailable(why) => {
                record.attempts_failed += 1;
                (record.attempts_failed > retries).then_some(Failure::Unavailable(why))
            }
            ReadError::WrongRecord(why) => Some(Failure::WrongRecord(why)),
            ReadError::Refused(why) => Some(Failure::Refused(why)),
        };
        match failure.filter(|_| !has_other) {
            Some(failure) => {
                drop(read);
                self.fail_record(now, handle, failure);
            }
            None => {
                self.requeue(read);
                self.check_served(now, handle);
            }
        }
    }

    pub(super) fn requeue(&mut self, read: Read) {
        let handle = self.record_of(read.id);
        if let Some(record) = self.records.get_mut(handle) {
            record.retries.push(read.range);
            if !record.in_retry_queue {
                record.in_retry_queue = true;
                self.retry_queues[record.class as usize].push_back(handle);
            }
        }
    }

    /// The record that a READ was posted for; nobody, when it ended since.
    fn record_of(&self, id: ReadId) -> Handle {
        let handle = Handle {
            index: id.record,
            reuse: id.reuse,
        };
        match self.guards.epoch {
            true => handle,
            false => self.records.newest(handle),
        }
    }
}
