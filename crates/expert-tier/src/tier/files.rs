//! Tiers over the files of a store on this machine.

use std::sync::Arc;
use std::time::Instant;

use expert_arena::ExpertArena;
use expert_store::Store;

use super::{PosixTier, TierBuilder, TierKind, UmaTier, check_content, no_resources};
use crate::core::Core;
use crate::driver::Driver;
use crate::engine::later;
use crate::error::TierError;
use crate::notify::Notifier;
use crate::rail::Rail;
use crate::rails::local::LocalRail;
use crate::rails::uma::{DEPTH_MAX, UmaConfig, UmaRail};
use crate::view::View;

impl TierBuilder {
    /// Reads a store on this machine past the page cache and with many reads at once, with records landing in `arena`.
    /// What the machine refuses is done without: see [`UmaTier::io`].
    ///
    /// *Errors*: [`TierError::Config`] for a depth or a number of reader threads beyond its limits,
    /// [`TierError::OtherContent`], no threads.
    pub fn open_uma(
        self,
        store: Arc<Store>,
        arena: Arc<ExpertArena>,
    ) -> Result<UmaTier, TierError> {
        if self.uma_depth == 0 || self.uma_depth > DEPTH_MAX {
            return Err(TierError::Config(format!(
                "{} reads of files at once, the limits are 1 and {DEPTH_MAX}",
                self.uma_depth
            )));
        }
        let config = UmaConfig {
            threads: self.check_streams()?,
            depth: self.uma_depth,
            rank: 0,
            direct: self.uma_direct,
            ring: self.uma_ring,
        };
        let view = View::of_store(&store);
        check_content(&view, self.expect_content_id)?;
        let notifier = Arc::new(Notifier::new().map_err(no_resources)?);
        let rail = UmaRail::new(store.clone(), view.tag, &config, notifier.clone())
            .map_err(no_resources)?;
        let io = rail.state();
        let core = self.over_files("uma-tier", store, view, Box::new(rail), notifier, arena)?;
        Ok(UmaTier {
            core,
            kind: TierKind::Uma,
            takeovers: 0,
            io,
        })
    }

    /// Reads a store on this machine with plain reads, with records landing in `arena`.
    ///
    /// *Errors*: [`TierError::Config`] for a number of reader threads beyond its limits,
    /// [`TierError::OtherContent`], no threads.
    pub fn open_posix(
        self,
        store: Arc<Store>,
        arena: Arc<ExpertArena>,
    ) -> Result<PosixTier, TierError> {
        let threads = self.check_streams()?;
        let view = View::of_store(&store);
        check_content(&view, self.expect_content_id)?;
        let notifier = Arc::new(Notifier::new().map_err(no_resources)?);
        let rail = LocalRail::new(store.clone(), view.tag, threads, 0, notifier.clone())
            .map_err(no_resources)?;
        let core = self.over_files("posix-tier", store, view, Box::new(rail), notifier, arena)?;
        Ok(PosixTier {
            core,
            kind: TierKind::Posix,
            takeovers: 0,
        })
    }

    /// A driver over one rail that reads the files of a store.
    fn over_files(
        self,
        name: &str,
        store: Arc<Store>,
        view: View,
        rail: Box<dyn Rail>,
        notifier: Arc<Notifier>,
        arena: Arc<ExpertArena>,
    ) -> Result<Core, TierError> {
        let driver =
            Driver::start(name, self.engine, vec![rail], notifier).map_err(no_resources)?;
        driver
            .wait_healthy(later(Instant::now(), self.connect_timeout))
            .map_err(TierError::Config)?;
        let refresh = move |_, _| Ok(View::of_store(&store));
        Ok(Core::new(
            driver,
            view,
            Box::new(refresh),
            self.verify,
            self.deadline,
            arena,
        ))
    }
}
