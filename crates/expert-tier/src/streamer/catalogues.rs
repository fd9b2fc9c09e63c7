//! Layers' catalogues, which a peer may have to be asked for: on threads of their own, so that one
//! that does not answer holds up its layer alone.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use expert_wire::Key;

use super::Inner;
use crate::error::TierError;
use crate::sync::lock;

/// Asked for at once: a peer answers them one after the other anyhow.
const LOADERS_MAX: usize = 4;

/// Ends of loads, for the streamer's thread.
pub(super) type Loaded = Arc<Mutex<Vec<(Key, Result<(), TierError>)>>>;

/// Catalogues that are asked for. The streamer's thread alone has it.
#[derive(Default)]
pub(super) struct Catalogues {
    waiting: VecDeque<(Key, Duration)>,
    running: usize,
    loaded: Loaded,
}

impl Catalogues {
    /// Asks for a record's catalogue, for so long.
    pub(super) fn ask(&mut self, inner: &Arc<Inner>, key: Key, time: Duration) {
        self.waiting.push_back((key, time));
        self.start(inner);
    }

    fn start(&mut self, inner: &Arc<Inner>) {
        while self.running < LOADERS_MAX {
            let Some((key, time)) = self.waiting.pop_front() else {
                return;
            };
            self.running += 1;
            let (asking, loaded) = (inner.clone(), self.loaded.clone());
            let load = move || {
                let result = asking.tier.find(key, time).map(drop);
                lock(&loaded).push((key, result));
                asking.signal.wake();
            };
            let thread = std::thread::Builder::new().name("expert-catalogue".into());
            if let Err(e) = thread.spawn(load) {
                let why = format!("no thread to ask for its layer's catalogue: {e}");
                lock(&self.loaded).push((key, Err(TierError::Unavailable { key, why })));
                inner.signal.wake();
            }
        }
    }

    /// What came since the last call.
    pub(super) fn take(&mut self, inner: &Arc<Inner>) -> Vec<(Key, Result<(), TierError>)> {
        let loaded = std::mem::take(&mut *lock(&self.loaded));
        self.running -= loaded.len();
        self.start(inner);
        loaded
    }
}
