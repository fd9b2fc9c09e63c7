//! The oracle: what must hold in every round, of every request, and at the end.

use expert_arena::{Lease, SlotState};
use expert_wire::Key;

use super::{Checked, Contents, Open, Resident, World, note};
use crate::config::{OnFailure, Verify};
use crate::engine::{Committed, Failure, Finished};
use crate::rail::Rail;
use crate::seen::Run;
use crate::sim::TICK;
use crate::stats::RailErrors;

impl World {
    pub(super) fn check_finished(&mut self, finished: Finished) -> Checked {
        let request = finished.request;
        let Some(open) = self.open.remove(&request) else {
            return Err(format!("{request:?} ended twice"));
        };
        self.report.requests += 1;
        if finished.records.len() != open.keys.len() {
            return Err(format!("{request:?} lost records"));
        }
        let orders = open.keys.iter().zip(&open.verify);
        for ((&key, &verify), record) in orders.zip(finished.records) {
            match record {
                Ok(committed) => {
                    note(self, format_args!("{key} of {request:?} is committed"));
                    self.check_committed(key, verify, &open, committed)?;
                }
                Err(failure) => {
                    note(self, format_args!("{key} of {request:?}: {failure:?}"));
                    self.report.failed += 1;
                    self.check_failure(verify, &open, &failure)
                        .map_err(|why| format!("{key} failed with {failure:?}, but {why}"))?;
                }
            }
        }
        Ok(())
    }

    fn check_committed(
        &mut self,
        key: Key,
        verify: bool,
        open: &Open,
        committed: Committed,
    ) -> Checked {
        let what = Resident {
            key,
            version: open.version,
        };
        self.report.records += 1;
        self.report.bytes += committed.lease.len() as u64;
        if committed.verified != verify {
            return Err(format!("{key}: verified is {}", committed.verified));
        }
        let right = check_bytes(&committed.lease, what, "when it was committed");
        if committed.verified {
            right?;
            self.compared.insert((open.run, key));
            self.seen.insert(open.run, key);
        } else {
            self.report.unverified += 1;
            if right.is_err() {
                // Nobody compared them: whoever asked for that takes what the fault left.
                if !self.damaged.contains(&committed.lease.slot()) {
                    return right;
                }
                self.report.damaged += 1;
                return self.give_up(committed.lease);
            }
        }
        self.hold(committed.lease, what);
        Ok(())
    }

    /// Whether checksums are compared when the policy says so, by the oracle's own books: at the
    /// first fetch of each record of a content in a run of the rails, and at no other.
    pub(super) fn check_verify(&self, keys: &[Key], verify: &[bool], run: Run) -> Checked {
        for (&key, &verify) in keys.iter().zip(verify) {
            let must = match self.plan.verify {
                Verify::Always => true,
                Verify::First => !self.compared.contains(&(run, key)),
                Verify::Off => false,
            };
            if verify != must {
                return Err(format!("{key} of {run:?}: to be compared is {verify}"));
            }
        }
        Ok(())
    }

    fn give_up(&mut self, lease: Lease) -> Checked {
        let residency = lease.residency();
        drop(lease);
        match self.arena.evict(&residency) {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("{residency} is read by nobody known")),
            Err(other) => Err(other.to_string()),
        }
    }

    /// A failure needs a cause that the simulation knows of.
    fn check_failure(&self, verify: bool, open: &Open, failure: &Failure) -> Checked {
        let had = |kinds: &[&str]| kinds.iter().any(|k| self.report.faults.contains_key(k));
        let may_be = match failure {
            _ if open.is_calm => return Err("nothing disturbed it".into()),
            Failure::Checksum(_) => verify && had(&["corrupt-chunk", "under-delivery"]),
            Failure::Unavailable(_) => had(&["unavailable"]),
            // Planned for content 0 before anything was known, or for what one of the peers had.
            Failure::ContentChanged => {
                let mixed = self.plan.versions.iter().any(|v| *v != open.version);
                mixed || had(&["content-change"])
            }
            Failure::Deadline(_) => self.now >= open.deadline,
            Failure::RailFailed(_) => self.plan.engine.on_failure == OnFailure::FailFast,
            Failure::Cancelled => open.is_cancelled,
            Failure::WrongRecord(_) | Failure::Refused(_) => false,
        };
        match may_be {
            true => Ok(()),
            false => Err("it has no cause".into()),
        }
    }

    pub(super) fn check_round(&self) -> Checked {
        if self.engine.commits_refused() > 0 {
            return Err("the engine would have committed an incomplete record".into());
        }
        for (request, open) in &self.open {
            if self.now > open.deadline + TICK {
                return Err(format!("{request:?} is open after its deadline"));
            }
        }
        for held in &self.held {
            let slot = held.lease.slot();
            let state = self.arena.slot_state(slot);
            if !matches!(state, Some(SlotState::Committed | SlotState::Draining)) {
                return Err(format!("{slot} is leased and {state:?}"));
            }
        }
        for (rail, spec) in self.rails.iter().zip(&self.plan.rails) {
            let lanes = spec.capabilities.lanes as usize;
            // Whole records may be larger than any window: two per lane may always be out.
            let always = match spec.capabilities.whole_records {
                true => 2 * lanes,
                false => 1,
            };
            let (reads, bytes) = rail.in_flight();
            if reads > always && bytes > self.plan.engine.window_bytes * lanes as u64 {
                return Err(format!(
                    "{} has {bytes} bytes in flight, beyond its window",
                    rail.name()
                ));
            }
        }
        Ok(())
    }

    pub(super) fn check_counters(&self) -> Checked {
        let stats = self.engine.stats();
        let report = &self.report;
        let in_flight: u64 = stats.rails.iter().map(|r| r.in_flight_bytes).sum();
        let errors = |cause: fn(&RailErrors) -> u64| -> u64 {
            stats.rails.iter().map(|r| cause(&r.errors_by_cause)).sum()
        };
        let pairs = [
            ("requests", stats.requests, report.requests),
            ("records", stats.records, report.records),
            ("failed", stats.failed, report.failed),
            ("bytes", stats.bytes, report.bytes),
            ("back-pressure", stats.backpressure, report.refused),
            ("unverified", stats.unverified, report.unverified),
            ("bytes in flight", in_flight, 0),
            ("open requests", self.engine.open_requests() as u64, 0),
            (
                "checksum failures",
                stats.verify_failures,
                errors(|e| e.checksum),
            ),
        ];
        match pairs.iter().find(|(_, got, want)| got != want) {
            Some((what, got, want)) => Err(format!("counted {got} {what}, saw {want}")),
            None => Ok(()),
        }
    }
}

pub(super) fn check_bytes(lease: &Lease, what: Resident, when: &str) -> Checked {
    let image = Contents::all().image(what.version, what.key);
    let Some(at) = first_difference(lease, image) else {
        return Ok(());
    };
    Err(format!(
        "wrong bytes in {} {when}: {} of content {} differs at byte {at} of {}",
        lease.slot(),
        what.key,
        what.version,
        image.len()
    ))
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b {
        return None;
    }
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    Some(same)
}
