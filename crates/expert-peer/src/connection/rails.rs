//! Rails of a connection: all of it control traffic, READs never come through here.

use std::sync::Arc;

use expert_wire::frame::FrameKind;
use expert_wire::message::ErrorCode;
use expert_wire::v1_verbs::V1Endpoint;
use expert_wire::verbs::{OpenRail, RailOpened, encode_rails};
use tracing::{debug, warn};

use super::{Driver, End};
use crate::SourceError;
use crate::stats::add;
use crate::verbs::{self, OpenedRail, QpShare, Served, V1Offer, Verbs};

/// What a connection has of rails; its queue pairs end with it.
#[derive(Default)]
pub(super) enum Rails {
    #[default]
    None,
    /// v1: offered, not connected yet.
    Offered { offer: V1Offer, qps: QpShare },
    /// Connected.
    Open { opened: OpenedRail, _qps: QpShare },
}

impl Rails {
    /// Whether queue pairs lead to memory that is still registered.
    pub(super) fn is_alive(&self) -> bool {
        matches!(self, Self::Open { opened, .. } if !opened.is_closing())
    }
}

impl Driver<'_> {
    pub(super) fn list_rails(&mut self, id: u64) {
        add(&self.shared.counters.requests, 1);
        let infos = self.shared.verbs.as_ref().map(Verbs::infos);
        let payload = encode_rails(&infos.unwrap_or_default());
        self.session.reply(FrameKind::RailsReply, id, &payload);
    }

    pub(super) fn open_rail(&mut self, id: u64, request: &OpenRail) -> Result<(), End> {
        add(&self.shared.counters.requests, 1);
        match self.try_open(request) {
            Ok((opened, _qps, reply)) => {
                debug!(
                    "{}: rail {} open with {} queue pairs, MTU code {}, READ depth {}, {} regions",
                    self.connection.address,
                    request.rail,
                    reply.qps.len(),
                    reply.mtu_code,
                    reply.reads_max,
                    reply.regions.len()
                );
                self.rails = Rails::Open { opened, _qps };
                self.session
                    .reply(FrameKind::RailOpened, id, &reply.encode());
                Ok(())
            }
            Err(e) => {
                debug!("{}: {e}", self.connection.address);
                self.error(id, e)
            }
        }
    }

    fn try_open(
        &self,
        request: &OpenRail,
    ) -> Result<(OpenedRail, QpShare, RailOpened), SourceError> {
        let Some(verbs) = &self.shared.verbs else {
            return Err(SourceError::new(
                ErrorCode::NoSuchRail,
                "this peer offers no rails",
            ));
        };
        if request.epoch != self.epoch.number {
            return Err(SourceError::new(
                ErrorCode::StoreChanged,
                format!(
                    "the rail was asked for with epoch {}, this is epoch {}",
                    request.epoch, self.epoch.number
                ),
            ));
        }
        if !matches!(self.rails, Rails::None) {
            return Err(SourceError::new(
                ErrorCode::BadFrame,
                "this connection has opened a rail before; each rail takes a connection of its own",
            ));
        }
        let served = self.epoch.served().ok_or_else(verbs::withdrawn)?;
        let share = self
            .quota(verbs, request.qps.len())
            .map_err(|why| SourceError::new(ErrorCode::RailUnavailable, why))?;
        let (opened, reply) = verbs::open_rail(verbs, &served, request)?;
        Ok((opened, share, reply))
    }

    fn quota(&self, verbs: &Verbs, queue_pairs: usize) -> Result<QpShare, String> {
        let share = verbs.quota.take(self.connection.address, queue_pairs);
        if let Err(why) = &share {
            add(&self.shared.counters.qps_refused, 1);
            if self.shared.refusal_log.allows() {
                warn!("{why}");
            }
        }
        share
    }

    pub(super) fn offer_v1(&mut self, rails: u8) -> Result<(), End> {
        let (verbs, served) = self.v1_verbs()?;
        let qps = self.quota(verbs, rails.into()).map_err(End::NoRails)?;
        let source = &*self.epoch.source;
        let (offer, v1_rails) =
            verbs::v1_offer(verbs, &served, source, rails).map_err(End::NoRails)?;
        self.rails = Rails::Offered { offer, qps };
        self.session.offer_v1_rails(&v1_rails);
        Ok(())
    }

    pub(super) fn connect_v1(&mut self, remote: &[V1Endpoint]) -> Result<(), End> {
        let Rails::Offered { offer, qps } = std::mem::take(&mut self.rails) else {
            return Err(End::NoRails("nothing was offered".into()));
        };
        let (verbs, _) = self.v1_verbs()?;
        let opened = verbs::v1_connect(verbs, offer, remote).map_err(End::NoRails)?;
        debug!(
            "{}: v1 client with {} rails",
            self.connection.address,
            remote.len()
        );
        self.rails = Rails::Open { opened, _qps: qps };
        self.session.v1_rails_ready();
        self.handshake_done();
        Ok(())
    }

    /// The client works with the manifest of its greeting.
    fn v1_verbs(&self) -> Result<(&Verbs, Arc<Served>), End> {
        if self.greeted != self.epoch.number {
            return Err(End::Reloaded);
        }
        let verbs = self.shared.verbs.as_ref();
        verbs
            .zip(self.epoch.served())
            .ok_or_else(|| End::NoRails("the store is not registered now".into()))
    }
}
