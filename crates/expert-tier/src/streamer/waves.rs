//! A layer in waves: some of its experts are read while the next ones arrive.

use std::time::Duration;

use expert_wire::Key;

use super::ticket::from_now;
use super::{ExpertLease, ExpertStreamer, Ticket};
use crate::config::Class;
use crate::error::TierError;

/// See [`ExpertStreamer::waves`]. Drop a wave's leases before asking for the next one: its slots
/// are needed for the one after.
#[derive(Debug)]
pub struct Waves<'a> {
    streamer: &'a ExpertStreamer,
    layer: u32,
    /// Not asked for yet.
    experts: std::vec::IntoIter<u32>,
    per_wave: usize,
    time: Duration,
    next: Option<Ticket>,
}

impl<'a> Waves<'a> {
    pub(super) fn new(
        streamer: &'a ExpertStreamer,
        layer: u32,
        experts: &[u32],
        max_slots: usize,
        time: Duration,
    ) -> Self {
        Self {
            streamer,
            layer,
            experts: Vec::from(experts).into_iter(),
            per_wave: (max_slots / 2).max(1),
            time,
            next: None,
        }
    }

    fn ask(&mut self) -> Result<Option<Ticket>, TierError> {
        let wave = self.experts.by_ref().take(self.per_wave);
        let keys: Vec<Key> = wave.map(|expert| Key::new(self.layer, expert)).collect();
        if keys.is_empty() {
            return Ok(None);
        }
        // Twice the time: it begins while the wave before is still read.
        let time = self.time.saturating_mul(2);
        self.streamer.submit(&keys, Class::Stream, time).map(Some)
    }

    fn wave(&mut self) -> Result<Option<Vec<ExpertLease>>, TierError> {
        let ticket = match self.next.take() {
            Some(ticket) => ticket,
            None => match self.ask()? {
                Some(ticket) => ticket,
                None => return Ok(None),
            },
        };
        self.next = self.ask()?;
        ticket.all(from_now(self.time)).map(Some)
    }
}

impl Iterator for Waves<'_> {
    type Item = Result<Vec<ExpertLease>, TierError>;

    /// The next wave, in the order of the experts; an error ends the walk.
    fn next(&mut self) -> Option<Self::Item> {
        let wave = self.wave();
        if wave.is_err() {
            self.experts = Vec::new().into_iter();
            self.next = None;
        }
        wave.transpose()
    }
}
