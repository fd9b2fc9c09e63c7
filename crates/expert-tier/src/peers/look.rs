//! What a peer says of itself before anything is fetched from it: for people who look for a fault.

use std::time::Instant;

use atlas_rdma::choose::Endpoint;
use expert_wire::client::Outcome;
use expert_wire::frame::FrameKind;
use expert_wire::message;
use expert_wire::verbs::{RailInfo, decode_rails};

use crate::control::Control;
use crate::engine::later;
use crate::error::TierError;
use crate::rails::verbs::endpoint;
use crate::tier::TierBuilder;

/// A peer's own words.
#[derive(Debug, Clone)]
pub struct PeerLook {
    /// The protocol version that both ends speak: 1 or 2.
    pub version: u16,
    /// Content id of its store; `None` where it has no checksums, or speaks v1.
    pub content_id: Option<u128>,
    /// Its rails; none where it serves TCP alone, or speaks v1, which does not tell.
    pub rails: Vec<PeerRail>,
}

/// A rail of a peer.
#[derive(Debug, Clone)]
pub struct PeerRail {
    /// Port, GID, limits.
    pub info: RailInfo,
    /// The same as pairing sees it.
    pub endpoint: Endpoint,
}

impl TierBuilder {
    /// Shakes hands with one peer (`host:port`) and asks for its rails.
    ///
    /// *Errors*: [`TierError::Connect`], [`TierError::TimedOut`], [`TierError::NameTimedOut`],
    /// [`TierError::Handshake`], [`TierError::Catalogue`] where the answer makes no sense, each within the connect time-out.
    pub fn look_at(&self, addr: &str) -> Result<PeerLook, TierError> {
        let limit = later(Instant::now(), self.connect_timeout);
        let token = self.auth_token.clone();
        let control = Control::new(addr, rand::random(), token, self.connect_timeout);
        let welcome = match control.hello(self.protocol, limit)? {
            Outcome::V1(_) => {
                return Ok(PeerLook {
                    version: 1,
                    content_id: None,
                    rails: Vec::new(),
                });
            }
            Outcome::V2(welcome) => welcome,
        };
        let (reply, _) = control.ask(FrameKind::Rails, &[], FrameKind::RailsReply, limit)?;
        let rails = decode_rails(&reply).map_err(|e| TierError::Catalogue {
            addr: addr.to_owned(),
            why: e.to_string(),
        })?;
        Ok(PeerLook {
            version: message::VERSION,
            content_id: welcome.content_id,
            rails: rails
                .into_iter()
                .map(|info| PeerRail {
                    endpoint: endpoint(&info),
                    info,
                })
                .collect(),
        })
    }
}
