//! A replay in earnest: one streamer per row.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use expert_arena::ArenaBuilder;
use expert_tier::replay::{self, Drive, Prefetch, Trace};
use expert_tier::{Eviction, StreamerBuilder, largest_image_bytes};

use super::Args;
use crate::cli::signals;
use crate::cli::source::How;

pub(super) struct Real<'a> {
    args: &'a Args,
    cancel: Arc<AtomicBool>,
    /// Of the largest record; 0 until the first row.
    record_bytes: u64,
}

impl<'a> Real<'a> {
    pub(super) fn new(args: &'a Args) -> anyhow::Result<Self> {
        Ok(Self {
            args,
            cancel: signals::cancel_flag().context("installing signal handlers")?,
            record_bytes: 0,
        })
    }

    pub(super) fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    pub(super) fn backend(&self) -> &'static str {
        self.args.source.backend_name()
    }

    /// An arena of its own, so that each row begins with nothing in memory.
    pub(super) fn replay(
        &mut self,
        trace: &Trace,
        slots: u32,
        eviction: Eviction,
        prefetch: Prefetch,
    ) -> anyhow::Result<replay::Report> {
        let (args, mut record_bytes) = (self.args, 0);
        let how = How {
            quiet: args.json,
            ..How::default()
        };
        let tier = args.source.open(&how, &self.cancel, &mut |info| {
            record_bytes = largest_image_bytes(info);
            let arena = ArenaBuilder::new().slab(slots, record_bytes as usize);
            args.source.build_arena(arena)
        })?;
        self.record_bytes = record_bytes;
        let streamer = StreamerBuilder::new().eviction(eviction).start(tier)?;
        let drive = Drive {
            prefetch,
            compute: Duration::from_micros(args.model.compute_us),
            warm_up_steps: args.model.warm_up_steps,
            seed: args.model.seed,
            deadline: Duration::from_millis(args.deadline_ms),
        };
        Ok(replay::drive(trace, &streamer, &drive)?)
    }
}
