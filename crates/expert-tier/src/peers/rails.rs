//! The rails of all sources, in order of preference: verbs, TCP on a rail's own path, TCP, this
//! machine's disk.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use expert_arena::ExpertArena;

use super::Sources;
use super::connect::Met;
use crate::control::Control;
use crate::engine::RAILS_MAX;
use crate::error::TierError;
use crate::notify::Notifier;
use crate::rail::{ContentTag, Rail};
use crate::rails::tcp::{TcpConfig, TcpRail};
use crate::rails::uma::{UmaConfig, UmaRail};
use crate::rails::verbs::{
    OwnRail, V1Run, VerbsConfig, VerbsOptions, VerbsRail, find_rails, rails_of_peer,
};
use crate::tier::{TierBuilder, TierKind, no_resources};

/// Ranks: a rail works only while no preferred one does that has the record.
const VERBS: u8 = 0;
const TCP_ON_RAIL: u8 = 1;
const TCP: u8 = 2;
const LOCAL: u8 = 3;

/// See the module.
pub(super) struct Rails {
    pub(super) rails: Vec<Box<dyn Rail>>,
    /// The source of each.
    pub(super) sources: Vec<usize>,
    pub(super) kind: TierKind,
    /// Verbs were asked for and are not there.
    pub(super) takeovers: u64,
}

impl Rails {
    fn push(&mut self, source: usize, rail: Box<dyn Rail>) {
        self.rails.push(rail);
        self.sources.push(source);
    }
}

impl TierBuilder {
    /// Makes the rails of what was met; `local` is the content of the store on this machine.
    pub(super) fn rails(
        &self,
        sources: &Sources,
        met: &[Met],
        local: Option<ContentTag>,
        arena: &Arc<ExpertArena>,
        notifier: &Arc<Notifier>,
        limit: Instant,
    ) -> Result<Rails, TierError> {
        let mut all = Rails {
            rails: Vec::new(),
            sources: Vec::new(),
            kind: TierKind::Rdma,
            takeovers: 0,
        };
        let required = self.verbs.as_ref().is_some_and(|o| o.require);
        if let Some(options) = &self.verbs {
            match self.verbs_rails(options, met, arena, notifier, limit, &mut all) {
                Ok(()) => all.kind = TierKind::RdmaVerbs,
                Err(why) if required => return Err(TierError::NoVerbs { why }),
                Err(why) => {
                    all.takeovers = 1;
                    tracing::warn!("no verbs rail, records go over TCP: {why}");
                }
            }
        }
        if !required {
            let rank = match all.rails.is_empty() {
                true => VERBS,
                false => TCP,
            };
            for (source, met) in met.iter().enumerate() {
                let rail = self.tcp_rail(met.control.addr(), rank, met.v1, notifier);
                all.push(source, Box::new(rail));
            }
        }
        if let (Some(store), Some(content)) = (&sources.local, local) {
            let ranks = all.rails.iter().map(|r| r.capabilities().rank);
            let rank = match sources.add_local {
                true => ranks.min().unwrap_or(LOCAL),
                false => LOCAL,
            };
            let config = UmaConfig {
                threads: self.streams,
                depth: self.uma_depth,
                rank,
                direct: self.uma_direct,
                ring: self.uma_ring,
            };
            let rail = UmaRail::new(store.clone(), content, &config, notifier.clone())
                .map_err(no_resources)?;
            all.push(met.len(), Box::new(rail));
        }
        if all.rails.len() > RAILS_MAX {
            return Err(TierError::Config(format!(
                "{} rails to {}, the limit is {RAILS_MAX}; name fewer peers or fewer rails",
                all.rails.len(),
                sources.names()
            )));
        }
        Ok(all)
    }

    fn tcp_rail(&self, addr: &str, rank: u8, v1: bool, notifier: &Arc<Notifier>) -> TcpRail {
        TcpRail::new(
            TcpConfig {
                addr: addr.to_owned(),
                streams: self.streams,
                protocol: self.protocol,
                v1,
                client_id: rand::random(),
                token: self.auth_token.clone(),
                connect_timeout: self.connect_timeout,
                stall: self.stall,
                rank,
                read_bytes: self
                    .engine
                    .posted_bytes(u64::from(expert_wire::limits::READ_MAX_BYTES)),
                spin: self.engine.spin,
            },
            notifier.clone(),
        )
    }

    /// The verbs rails to each peer, and a TCP rail on the path of each where that may take over. A
    /// port of this machine is opened, and the arena registered on it, once for all peers.
    fn verbs_rails(
        &self,
        options: &VerbsOptions,
        met: &[Met],
        arena: &Arc<ExpertArena>,
        notifier: &Arc<Notifier>,
        limit: Instant,
        all: &mut Rails,
    ) -> Result<(), String> {
        options.check()?;
        let mut locals = Vec::new();
        let mut trouble = Vec::new();
        for found in find_rails(options)? {
            match OwnRail::open(&found, arena, options) {
                Ok(local) => locals.push(local),
                Err(e) => trouble.push(e.to_string()),
            }
        }
        if locals.is_empty() {
            return Err(trouble.join("; "));
        }
        for why in trouble {
            tracing::warn!("a rail is left out: {why}");
        }
        let locals = Arc::new(locals);
        let mut on_rails = Vec::new();
        for (source, peer) in met.iter().enumerate() {
            let addr = peer.control.addr();
            let addresses = match peer.v1 || !peer.has_answered {
                true => vec![None; locals.len()],
                false => match addresses_on_rails(&peer.control, &locals, limit) {
                    Ok(addresses) => addresses,
                    Err(e) if met.len() == 1 => return Err(e.to_string()),
                    Err(e) => {
                        tracing::warn!(%addr, "the peer does not name its rails: {e}");
                        vec![None; locals.len()]
                    }
                },
            };
            let run = peer.v1.then(|| Arc::new(V1Run::new()));
            let client_id = rand::random();
            for (index, on_rail) in addresses.iter().enumerate() {
                let config = VerbsConfig {
                    addr: addr.to_owned(),
                    addr_on_rail: on_rail.clone(),
                    client_id,
                    token: self.auth_token.clone(),
                    options: options.clone(),
                    rails: locals.clone(),
                    index,
                    name_peer: met.len() > 1,
                    v1: run.clone(),
                    connect_timeout: self.connect_timeout,
                };
                all.push(source, Box::new(VerbsRail::new(config, notifier.clone())));
            }
            on_rails.extend(addresses.into_iter().flatten().map(|a| (source, a)));
        }
        if !options.require {
            for (source, on_rail) in on_rails {
                let rail = self.tcp_rail(&on_rail, TCP_ON_RAIL, false, notifier);
                all.push(source, Box::new(rail));
            }
        }
        Ok(())
    }
}

/// For each port of this machine the peer's address on its path, where that is another than the one
/// it was named by.
fn addresses_on_rails(
    control: &Control,
    locals: &[OwnRail],
    limit: Instant,
) -> Result<Vec<Option<String>>, TierError> {
    let port = control.addr().rsplit_once(':').map_or("", |(_, port)| port);
    let on_rail = |ip: Option<std::net::IpAddr>| {
        let on_rail = SocketAddr::new(ip?, port.parse().ok()?).to_string();
        (on_rail != control.addr()).then_some(on_rail)
    };
    let ips = rails_of_peer(control, locals, limit)?;
    Ok(ips.into_iter().map(on_rail).collect())
}
