//! Notices what comes later: a peer that joins, one that comes back with other content, records that
//! nobody has any more.
//!
//! *Threads*: one, which sleeps until the rails serve other contents than before and asks peers over
//! their control connections; the driver and callers never wait for it. *Cleanup*: dropping it ends
//! the thread; one that is waiting for a peer's answer is left behind and ends with its deadline. It
//! has nothing of the arena.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use expert_store::info::hex128;

use super::Union;
use super::connect::{check_group, proven, side_by_side};
use crate::control::Control;
use crate::core::Refresh;
use crate::coverage::Coverage;
use crate::driver::Contents;
use crate::engine::later;
use crate::error::TierError;
use crate::rail::ContentTag;
use crate::view::View;

/// Longest sleep: a change that was missed is seen after it.
const NAP: Duration = Duration::from_secs(10);
/// Wait before a peer that did not answer is asked again; doubles up to the longest.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Verdicts that are remembered; a peer that changes its store for ever must not fill memory.
const VERDICTS_MAX: usize = 1024;
/// How long dropping waits for the thread.
const END_WAIT: Duration = Duration::from_millis(200);

/// What the thread and the tier share.
struct Shared {
    controls: Vec<Arc<Control>>,
    local: Option<Arc<View>>,
    /// The source of each rail.
    rail_sources: Vec<usize>,
    contents: Contents,
    expect: Option<u128>,
    connect_timeout: Duration,
    union: RwLock<Arc<Union>>,
    refused: AtomicU64,
    end: AtomicBool,
}

/// See the module.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    ended: std::sync::Mutex<mpsc::Receiver<()>>,
}

/// What was found of a source that serves some content.
enum Verdict {
    Joined,
    /// It takes no part with this content.
    Refused(String),
    /// It could not be asked.
    Later(String),
}

/// A question that is to be asked again.
struct Again {
    at: Instant,
    wait: Duration,
}

/// A source, what it serves, and what the tier fetched then.
type Case = (usize, ContentTag, ContentTag);

impl Watch {
    pub(super) fn start(
        controls: Vec<Arc<Control>>,
        local: Option<Arc<View>>,
        rail_sources: Vec<usize>,
        union: Arc<Union>,
        contents: Contents,
        expect: Option<u128>,
        connect_timeout: Duration,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            controls,
            local,
            rail_sources,
            contents,
            expect,
            connect_timeout,
            union: RwLock::new(union),
            refused: AtomicU64::new(0),
            end: AtomicBool::new(false),
        });
        let (end, ended) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("rdma-tier-peers".into())
            .spawn({
                let shared = shared.clone();
                move || {
                    shared.watch();
                    drop(end);
                }
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
            ended: std::sync::Mutex::new(ended),
        })
    }

    /// How the tier learns what its sources have now.
    pub(super) fn refresh(&self) -> Refresh {
        let shared = self.shared.clone();
        Box::new(move |content, limit| shared.refresh(content, limit))
    }

    /// Times that a source was refused because of what it serves.
    pub(crate) fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::SeqCst);
        self.shared.contents.wake();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(END_WAIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::debug!("a peer is still being asked; the thread ends with its answer");
        } else if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                tracing::error!("the thread that watches peers panicked");
            }
        }
    }
}

impl Shared {
    fn union(&self) -> Arc<Union> {
        let union = self.union.read().unwrap_or_else(PoisonError::into_inner);
        union.clone()
    }

    fn watch(&self) {
        let mut run = 0;
        let mut limit = Instant::now();
        let mut again: HashMap<Case, Again> = HashMap::new();
        let mut refused: Vec<Case> = Vec::new();
        let mut missing = self.union().missing(|_| true);
        while let Some((contents, now_run)) = self.contents.wait_change(run, limit, &self.end) {
            run = now_run;
            let mut served: Vec<(usize, ContentTag)> = Vec::new();
            for (rail, content) in contents {
                let source = self.rail_sources.get(rail.0).copied();
                let Some(source) = source.filter(|&s| !served.contains(&(s, content))) else {
                    continue;
                };
                served.push((source, content));
            }
            for &(source, content) in &served {
                let union = self.union();
                let case = (source, content, union.tag());
                // The store on this machine has no control connection, and stays what it is.
                let Some(control) = self.controls.get(source) else {
                    continue;
                };
                let is_due = again.get(&case).is_none_or(|a| a.at <= Instant::now());
                let is_known = union.content_of(source) == Some(content);
                if is_known || refused.contains(&case) || !is_due {
                    continue;
                }
                match self.look_at(source, control, content, &union) {
                    Verdict::Joined => {
                        again.remove(&case);
                    }
                    Verdict::Refused(why) => {
                        tracing::warn!(addr = %control.addr(), "{why}");
                        self.refused.fetch_add(1, Ordering::Relaxed);
                        again.remove(&case);
                        if refused.len() >= VERDICTS_MAX {
                            refused.clear();
                        }
                        refused.push(case);
                    }
                    Verdict::Later(why) => {
                        tracing::debug!(addr = %control.addr(), "asked again later: {why}");
                        let wait = again.get(&case).map_or(RETRY_FIRST, |a| a.wait * 2);
                        let wait = wait.min(RETRY_MAX);
                        let at = later(Instant::now(), wait);
                        again.insert(case, Again { at, wait });
                    }
                }
            }
            again.retain(|case, _| served.contains(&(case.0, case.1)));
            self.note_missing(&served, &mut missing);
            let now = Instant::now();
            let due = again.values().map(|a| a.at).min();
            limit = later(now, NAP).min(due.unwrap_or(later(now, NAP)));
        }
    }

    /// Asks a source that serves something new what that is.
    fn look_at(
        &self,
        source: usize,
        control: &Arc<Control>,
        content: ContentTag,
        union: &Union,
    ) -> Verdict {
        let limit = later(Instant::now(), self.connect_timeout);
        let view = match proven(control, self.expect, limit) {
            Ok(view) => view,
            Err(e @ TierError::Catalogue { .. }) => {
                union.set(source, None);
                return Verdict::Refused(format!("{e}: the peer gets no READs"));
            }
            Err(e) => return Verdict::Later(e.to_string()),
        };
        if view.tag != content {
            return Verdict::Later("its rail and it name different content".into());
        }
        let Some(group) = view.group(self.expect) else {
            union.set(source, None);
            return Verdict::Refused(
                "the peer serves a store without checksums now: nothing proves that it is the same, it gets no READs".into(),
            );
        };
        self.contents.learn(view.tag, view.holding(group));
        if group != union.tag() {
            union.set(source, None);
            return Verdict::Refused(format!(
                "the peer serves content {} while others serve {}: it gets no READs",
                hex128(group.id),
                hex128(union.tag().id)
            ));
        }
        let records = view.coverage().records();
        if union.set(source, Some(Arc::new(view))) {
            tracing::info!(addr = %control.addr(), "peer joined with {records} records");
        }
        Verdict::Joined
    }

    /// Says, once for each change, which records no working source has.
    fn note_missing(&self, served: &[(usize, ContentTag)], before: &mut Coverage) {
        let union = self.union();
        let works = |source| {
            let content = union.content_of(source);
            served
                .iter()
                .any(|&(s, c)| s == source && Some(c) == content)
        };
        let missing = union.missing(works);
        if missing == *before {
            return;
        }
        match missing.is_empty() {
            true => tracing::info!("working sources have all records again"),
            false => tracing::warn!("no working source has {missing}"),
        }
        *before = missing;
    }

    /// What all sources have of a content that rails went over to.
    ///
    /// *Errors*: nobody describes it.
    fn refresh(&self, content: ContentTag, limit: Instant) -> Result<View, TierError> {
        // One that does not answer must not use up the caller's time.
        let now = Instant::now();
        let ask_limit = later(now, limit.saturating_duration_since(now) / 2);
        let asked = side_by_side(&self.controls, |c| proven(c, self.expect, ask_limit));
        let mut trouble = Vec::new();
        let mut views: Vec<Option<Arc<View>>> = Vec::new();
        for view in asked {
            views.push(match view {
                Ok(view) => Some(Arc::new(view)),
                Err(e) => {
                    trouble.push(e.to_string());
                    None
                }
            });
        }
        views.push(self.local.clone());
        let group_of = |view: &View| view.group(self.expect);
        let found = views
            .iter()
            .flatten()
            .find(|v| v.tag == content || group_of(v) == Some(content));
        let Some(view) = found else {
            trouble.push("no source describes the content that its rail serves".into());
            return Err(TierError::Connect {
                addr: self.addrs(),
                why: trouble.join("; "),
            });
        };
        let Some(group) = group_of(view) else {
            return Err(TierError::Unproven {
                name: view.name(),
                why: "its store has no checksums (atlas-expert index computes them)".into(),
            });
        };
        check_group(view, group, self.expect)?;
        for view in &mut views {
            if view.as_ref().is_some_and(|v| group_of(v) != Some(group)) {
                *view = None;
            }
        }
        for view in views.iter().flatten() {
            self.contents.learn(view.tag, view.holding(group));
        }
        let union = Arc::new(Union::new(group, views)?);
        let missing = union.missing(|_| true);
        if !missing.is_empty() {
            tracing::warn!(
                "content {} is incomplete: no source has {missing}",
                hex128(group.id)
            );
        }
        *self.union.write().unwrap_or_else(PoisonError::into_inner) = union.clone();
        Ok(View::of_union(union))
    }

    fn addrs(&self) -> String {
        let addrs: Vec<&str> = self.controls.iter().map(|c| c.addr()).collect();
        addrs.join(", ")
    }
}
