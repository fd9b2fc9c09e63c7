//! Which source has which record of one content. It changes as sources join and leave.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use expert_store::catalogue::Layer;
use expert_store::info::StoreInfo;
use expert_wire::Key;

use crate::coverage::Coverage;
use crate::engine::later;
use crate::error::TierError;
use crate::rail::ContentTag;
use crate::view::View;

/// See the module. Sources are counted as they were named, the store on this machine last.
pub(crate) struct Union {
    tag: ContentTag,
    /// The whole, with all of its records.
    whole: StoreInfo,
    members: RwLock<Vec<Option<Arc<View>>>>,
    /// The member that answered last: it is asked first.
    answered: AtomicUsize,
}

impl Union {
    /// Sources of one content: for each source what it has of it, if anything.
    ///
    /// *Errors*: nobody has anything.
    pub(crate) fn new(tag: ContentTag, members: Vec<Option<Arc<View>>>) -> Result<Self, TierError> {
        let mut known = members.iter().flatten();
        let Some(any) = known.clone().next() else {
            return Err(TierError::Config("a model without sources".into()));
        };
        let mut whole = known
            .find(|view| view.tag == tag)
            .unwrap_or(any)
            .first_info()
            .clone();
        // Each part proved that it belongs to this whole, so they all name the same.
        if let Some(named) = whole.whole.take().filter(|_| any.tag != tag) {
            whole.content_id = Some(named.content_id);
            whole.layout_id = named.layout_id;
            whole.layers = named.layers;
        }
        Ok(Self {
            tag,
            whole,
            members: RwLock::new(members),
            answered: AtomicUsize::new(0),
        })
    }

    pub(crate) fn tag(&self) -> ContentTag {
        self.tag
    }

    /// The whole, each layer with the experts that somebody has: maybe none yet.
    pub(crate) fn info(&self) -> StoreInfo {
        let covered = self.covered(|_| true);
        let mut info = self.whole.clone();
        for layer in &mut info.layers {
            layer.experts = covered.ranges(layer.layer).to_vec();
        }
        info
    }

    /// Records that none of these sources has.
    pub(crate) fn missing(&self, of: impl Fn(usize) -> bool) -> Coverage {
        Coverage::of(&self.whole).without(&self.covered(of))
    }

    fn covered(&self, of: impl Fn(usize) -> bool) -> Coverage {
        let mut covered = Coverage::default();
        for (source, member) in self.members().iter().enumerate() {
            if let Some(view) = member.as_ref().filter(|_| of(source)) {
                covered.add(&view.coverage());
            }
        }
        covered
    }

    fn members(&self) -> Vec<Option<Arc<View>>> {
        let members = self.members.read();
        members.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The content that a source takes part with.
    pub(crate) fn content_of(&self, source: usize) -> Option<ContentTag> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.get(source)?.as_ref().map(|view| view.tag)
    }

    /// A source has this of the content from now on, or nothing; whether that is news.
    pub(crate) fn set(&self, source: usize, view: Option<Arc<View>>) -> bool {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = members.get_mut(source) else {
            return false;
        };
        let tag = view.as_ref().map(|v| v.tag);
        std::mem::replace(place, view).map(|v| v.tag) != tag
    }

    /// Finds a record: a layer's catalogue that has it, and its position there. The catalogues of
    /// two sources say the same of a record: both make the same ids.
    ///
    /// *Errors*: as [`View::find`]; [`TierError::Unavailable`] where no source has it now.
    pub(crate) fn find(&self, key: Key, limit: Instant) -> Result<(Arc<Layer>, usize), TierError> {
        self.check_key(key)?;
        let members = self.members();
        let answered = self.answered.load(Ordering::Relaxed);
        let mut having: Vec<(usize, &Arc<View>)> = members
            .iter()
            .enumerate()
            .filter_map(|(i, m)| Some((i, m.as_ref().filter(|view| has_record(view, key))?)))
            .collect();
        having.sort_by_key(|(i, view)| (!view.has_layer(key.layer), *i != answered));
        let mut trouble = Vec::new();
        for (asked, &(source, view)) in having.iter().enumerate() {
            // One that does not answer must not use up the time of the others.
            let left = limit.saturating_duration_since(Instant::now());
            let share = left / (having.len() - asked) as u32;
            match view.find(key, later(Instant::now(), share)) {
                Ok(found) => {
                    self.answered.store(source, Ordering::Relaxed);
                    return Ok(found);
                }
                Err(e @ (TierError::NoSuchRecord { .. } | TierError::IdentityExpert { .. })) => {
                    return Err(e);
                }
                Err(e) => trouble.push(e.to_string()),
            }
        }
        Err(TierError::Unavailable {
            key,
            why: match trouble.is_empty() {
                true => "no source has it now; start a peer that holds it".into(),
                false => trouble.join("; "),
            },
        })
    }

    /// Whether [`Union::find`] asks nobody.
    pub(crate) fn knows(&self, key: Key) -> bool {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let mut having = members
            .iter()
            .flatten()
            .filter(|view| has_record(view, key));
        let is_here = having.clone().any(|view| view.has_layer(key.layer));
        is_here || having.next().is_none()
    }

    fn check_key(&self, key: Key) -> Result<(), TierError> {
        let layers = &self.whole.layers;
        let Ok(i) = layers.binary_search_by_key(&key.layer, |l| l.layer) else {
            let (first, last) = (layers.first(), layers.last());
            return Err(TierError::NoSuchRecord {
                key,
                why: format!(
                    "the model has {} layers between {} and {}",
                    layers.len(),
                    first.map_or(0, |l| l.layer),
                    last.map_or(0, |l| l.layer)
                ),
            });
        };
        let layer = &layers[i];
        let all = layer.num_experts;
        if (all..all.saturating_add(layer.identity_experts)).contains(&key.expert) {
            return Err(TierError::IdentityExpert { key });
        }
        let mut held = layer.experts.iter();
        if held.any(|r| (r[0]..r[1]).contains(&key.expert)) {
            return Ok(());
        }
        Err(TierError::NoSuchRecord {
            key,
            why: match key.expert < all {
                true => "the model is itself a part, which does not have this expert".into(),
                false => format!("the layer has experts 0 to {}", all - 1),
            },
        })
    }
}

fn has_record(view: &View, key: Key) -> bool {
    let layers = &view.first_info().layers;
    let found = layers.binary_search_by_key(&key.layer, |l| l.layer);
    found.is_ok_and(|i| {
        let ranges = &layers[i].experts;
        ranges.iter().any(|r| (r[0]..r[1]).contains(&key.expert))
    })
}
