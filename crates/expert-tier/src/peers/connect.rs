//! The first meeting: every source is asked what it has, before a tier is made of them.

use std::sync::Arc;
use std::time::Instant;

use expert_arena::ExpertArena;
use expert_store::info::{StoreInfo, hex128};
use expert_wire::client::{Outcome, Protocol};

use super::{Sources, Union, Watch};
use crate::control::Control;
use crate::core::{Core, Refresh};
use crate::driver::Driver;
use crate::engine::later;
use crate::error::TierError;
use crate::notify::Notifier;
use crate::rail::ContentTag;
use crate::rails::tcp::v1_tag;
use crate::tier::{RdmaTier, TierBuilder, TierKind, check_content, no_resources};
use crate::view::View;

/// A peer that was asked.
pub(super) struct Met {
    pub(super) control: Arc<Control>,
    /// What it has; `None` where it does not answer yet.
    pub(super) view: Option<Arc<View>>,
    pub(super) has_answered: bool,
    pub(super) v1: bool,
}

/// What all of them are together.
enum Content {
    /// One peer, with what it has.
    Alone(Box<View>),
    Union(Arc<Union>),
}

/// All sources after the first meeting.
struct Meeting {
    peers: Vec<Met>,
    local: Option<Arc<View>>,
    content: Content,
}

impl TierBuilder {
    /// Asks peers what they have, without an arena: for sizing one. `addr` is `host:port`, or a list
    /// of these with commas.
    ///
    /// *Errors*: as [`TierBuilder::connect`].
    pub fn describe(&self, addr: &str) -> Result<StoreInfo, TierError> {
        self.describe_sources(&Sources::of_peers(addr)?)
    }

    /// The same for any sources.
    ///
    /// *Errors*: as [`TierBuilder::connect_sources`].
    pub fn describe_sources(&self, sources: &Sources) -> Result<StoreInfo, TierError> {
        let limit = later(Instant::now(), self.connect_timeout);
        Ok(match self.meet_all(sources, limit)?.content {
            Content::Alone(view) => view.info(),
            Content::Union(union) => union.info(),
        })
    }

    /// Connects to a peer, or to several (`host:port,host:port`), with records landing in `arena`.
    ///
    /// *Errors*: as [`TierBuilder::connect_sources`].
    pub fn connect(self, addr: &str, arena: Arc<ExpertArena>) -> Result<RdmaTier, TierError> {
        self.connect_sources(&Sources::of_peers(addr)?, arena)
    }

    /// Connects to peers, and to a store on this machine if there is one, with records landing in
    /// `arena`. Parts add up to a model, replicas share the load and take over from each other.
    ///
    /// A source that does not answer is warned of and tried again and again, where the others have
    /// all records.
    ///
    /// *Errors*: [`TierError::NoVerbs`] where verbs are required and cannot be had,
    /// [`TierError::Connect`], [`TierError::TimedOut`], [`TierError::NameTimedOut`],
    /// [`TierError::Handshake`], [`TierError::Catalogue`] where a peer says
    /// what cannot be true, [`TierError::OtherContent`], [`TierError::DifferentContents`] and
    /// [`TierError::Unproven`] where sources do not belong together, [`TierError::Missing`] where
    /// they lack records, each within the connect time-out, or twice that where there are several.
    pub fn connect_sources(
        self,
        sources: &Sources,
        arena: Arc<ExpertArena>,
    ) -> Result<RdmaTier, TierError> {
        let limit = later(Instant::now(), self.connect_timeout);
        self.check_streams()?;
        let required = self.verbs.as_ref().is_some_and(|o| o.require);
        if required && sources.local.is_some() {
            return Err(TierError::Config(
                "verbs are required, so the store on this machine cannot take part; drop one of the two".into(),
            ));
        }
        let met = self.meet_all(sources, limit)?;
        // A peer that does not answer may have used up the time; the others' rails need some.
        let limit = match sources.peers.len() {
            1 => limit,
            _ => later(Instant::now(), self.connect_timeout),
        };
        let notifier = Arc::new(Notifier::new().map_err(no_resources)?);
        let local = met.local.as_ref().map(|view| view.tag);
        let mut all = self.rails(sources, &met.peers, local, &arena, &notifier, limit)?;
        let views = met
            .peers
            .iter()
            .filter_map(|p| p.view.as_ref())
            .chain(&met.local);
        let holdings = match &met.content {
            Content::Alone(_) => Vec::new(),
            Content::Union(union) => views.map(|v| (v.tag, v.holding(union.tag()))).collect(),
        };
        let driver = Driver::start_knowing(
            "rdma-tier",
            self.engine.clone(),
            all.rails,
            holdings,
            notifier,
        )
        .map_err(no_resources)?;
        driver.wait_healthy(limit).map_err(|why| match required {
            true => TierError::NoVerbs { why },
            false => TierError::Connect {
                addr: sources.names(),
                why,
            },
        })?;
        if !driver.is_preferred() {
            all.takeovers = 1;
            let instead = match all.kind {
                TierKind::RdmaVerbs => "no verbs rail came up, records go over others",
                _ => "no peer answers, records come from this machine",
            };
            tracing::warn!("{instead} until one does: {}", driver.describe());
        }
        let expect = self.expect_content_id;
        let mut watch = None;
        let (view, refresh): (View, Refresh) = match met.content {
            Content::Alone(view) => {
                let control = met.peers[0].control.clone();
                let v1 = met.peers[0].v1;
                let refresh =
                    move |content: ContentTag, limit| alone(&control, v1, content, expect, limit);
                (*view, Box::new(refresh))
            }
            Content::Union(union) => {
                let controls = met.peers.iter().map(|p| p.control.clone()).collect();
                let watching = Watch::start(
                    controls,
                    met.local,
                    all.sources,
                    union.clone(),
                    driver.contents(),
                    expect,
                    self.connect_timeout,
                )
                .map_err(no_resources)?;
                let refresh = watching.refresh();
                watch = Some(watching);
                (View::of_union(union), refresh)
            }
        };
        Ok(RdmaTier {
            core: Core::new(driver, view, refresh, self.verify, self.deadline, arena)
                .replan_changed(self.replan_changed)
                .watched_by(watch),
            kind: all.kind,
            takeovers: all.takeovers,
        })
    }

    fn meet_all(&self, sources: &Sources, limit: Instant) -> Result<Meeting, TierError> {
        sources.check()?;
        let controls: Vec<Arc<Control>> = sources
            .peers
            .iter()
            .map(|addr| {
                let token = self.auth_token.clone();
                let id = rand::random();
                Arc::new(Control::new(addr, id, token, self.connect_timeout))
            })
            .collect();
        let asked = side_by_side(&controls, |control| self.meet(control, limit));
        let local = sources
            .local
            .as_ref()
            .map(|store| Arc::new(View::of_store(store)));
        if let ([control], None) = (&controls[..], &local) {
            let (view, v1) = asked.into_iter().next().expect("one was asked")?;
            let is_part = view.group(self.expect_content_id) != Some(view.tag);
            if v1 || !view.has_checksums || !is_part {
                check_content(&view, self.expect_content_id)?;
                if !view.has_checksums {
                    tracing::warn!(
                        addr = %control.addr(),
                        "the peer has no checksums for this store: bytes are not verified (index the store to have them)"
                    );
                }
                let peer = Met {
                    control: control.clone(),
                    view: None,
                    has_answered: true,
                    v1,
                };
                return Ok(Meeting {
                    peers: vec![peer],
                    local,
                    content: Content::Alone(Box::new(view)),
                });
            }
            let peers = vec![Met {
                control: control.clone(),
                view: Some(Arc::new(view)),
                has_answered: true,
                v1,
            }];
            return self.put_together(sources, peers, local);
        }
        let mut peers = Vec::new();
        let mut trouble = Vec::new();
        for (control, asked) in controls.into_iter().zip(asked) {
            let mut met = Met {
                control,
                view: None,
                has_answered: asked.is_ok(),
                v1: false,
            };
            match asked {
                Ok((_, true)) => {
                    return Err(TierError::Unproven {
                        name: met.control.addr().to_owned(),
                        why: "it speaks version 1 of the protocol, which names no content".into(),
                    });
                }
                Ok((view, false)) => met.view = Some(Arc::new(view)),
                Err(e) if e.is_retryable() => trouble.push(e),
                Err(e) => return Err(e),
            }
            peers.push(met);
        }
        if peers.iter().all(|p| p.view.is_none()) && local.is_none() {
            let why: Vec<String> = trouble.iter().map(TierError::to_string).collect();
            return Err(TierError::Connect {
                addr: sources.names(),
                why: why.join("; "),
            });
        }
        for error in trouble {
            tracing::warn!("{error}; it is tried again and again");
        }
        self.put_together(sources, peers, local)
    }

    /// Puts what was met into one content.
    fn put_together(
        &self,
        sources: &Sources,
        peers: Vec<Met>,
        local: Option<Arc<View>>,
    ) -> Result<Meeting, TierError> {
        let views: Vec<Option<Arc<View>>> = peers
            .iter()
            .map(|met| met.view.clone())
            .chain([local.clone()])
            .collect();
        let mut first: Option<(&Arc<View>, ContentTag)> = None;
        for view in views.iter().flatten() {
            let Some(group) = view.group(self.expect_content_id) else {
                return Err(TierError::Unproven {
                    name: view.name(),
                    why: "its store has no checksums (atlas-expert index computes them)".into(),
                });
            };
            check_group(view, group, self.expect_content_id)?;
            match first {
                Some((other, before)) if before != group => {
                    return Err(TierError::DifferentContents {
                        one: other.name(),
                        one_id: hex128(before.id),
                        other: view.name(),
                        other_id: hex128(group.id),
                    });
                }
                _ => first = Some((view, group)),
            }
        }
        let Some((_, group)) = first else {
            return Err(TierError::Config("no source answers".into()));
        };
        let union = Union::new(group, views)?;
        let missing = union.missing(|_| true);
        if !missing.is_empty() {
            let error = TierError::Missing {
                content: hex128(group.id),
                missing: missing.to_string(),
                sources: sources.names(),
            };
            match self.allow_missing {
                false => return Err(error),
                true => tracing::warn!("{error}"),
            }
        }
        Ok(Meeting {
            peers,
            local,
            content: Content::Union(Arc::new(union)),
        })
    }

    fn meet(&self, control: &Arc<Control>, limit: Instant) -> Result<(View, bool), TierError> {
        match control.hello(self.protocol, limit)? {
            Outcome::V1(manifest) => {
                let tag = v1_tag(&manifest, 0);
                Ok((View::of_v1(manifest, tag), true))
            }
            Outcome::V2(_) => Ok((proven(control, self.expect_content_id, limit)?, false)),
        }
    }
}

/// Asks a peer what it has; a part proves that it belongs to the whole that it names.
pub(super) fn proven(
    control: &Arc<Control>,
    expect: Option<u128>,
    limit: Instant,
) -> Result<View, TierError> {
    let view = View::of_peer(control, limit)?;
    if view.group(expect) != Some(view.tag) && view.has_checksums {
        view.prove(limit)?;
    }
    Ok(view)
}

/// Asks all of them at once.
pub(super) fn side_by_side<T: Send>(
    controls: &[Arc<Control>],
    ask: impl Fn(&Arc<Control>) -> Result<T, TierError> + Sync,
) -> Vec<Result<T, TierError>> {
    if let [one] = controls {
        return vec![ask(one)];
    }
    std::thread::scope(|scope| {
        let begin = |control| {
            let ask = &ask;
            std::thread::Builder::new().spawn_scoped(scope, move || ask(control))
        };
        let begun: Vec<_> = controls.iter().map(begin).collect();
        let ended = begun.into_iter().map(|thread| match thread {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|_| Err(TierError::Config("asking a peer panicked".into()))),
            Err(e) => Err(no_resources(e)),
        });
        ended.collect()
    })
}

/// *Errors*: [`TierError::OtherContent`] where a source is not of the content insisted on.
pub(super) fn check_group(
    view: &View,
    group: ContentTag,
    expect: Option<u128>,
) -> Result<(), TierError> {
    match expect {
        Some(want) if group.id != want => Err(TierError::OtherContent {
            addr: view.name(),
            got: hex128(group.id),
            want: hex128(want),
        }),
        _ => Ok(()),
    }
}

/// What a peer that is the only source has now.
fn alone(
    control: &Arc<Control>,
    v1: bool,
    content: ContentTag,
    expect: Option<u128>,
    limit: Instant,
) -> Result<View, TierError> {
    let view = match v1 {
        true => match control.hello(Protocol::V1, limit)? {
            Outcome::V1(manifest) => {
                let run = content.instance.map_or(0, |(run, _)| run);
                let tag = v1_tag(&manifest, run);
                View::of_v1(manifest, tag)
            }
            Outcome::V2(_) => unreachable!("v1 was insisted on"),
        },
        false => View::of_peer(control, limit)?,
    };
    check_content(&view, expect)?;
    Ok(view)
}
