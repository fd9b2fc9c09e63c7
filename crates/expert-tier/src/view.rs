//! What a tier knows of the content that its rails fetch: the description of the store, and its
//! layers as they are needed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use expert_store::catalogue::{
    Class, Container, Layer, Leaf, Records, Role, StackClass, Stacking, Transform,
};
use expert_store::codec;
use expert_store::info::{LayerInfo, StoreInfo, StoreKind, hex128, parse_hex128};
use expert_store::{Dtype, Store};
use expert_wire::Key;
use expert_wire::frame::FrameKind;
use expert_wire::message::{CatalogueRequest, SECTION_CHECKSUMS, SECTION_REST};
use expert_wire::v1::Manifest;

use crate::control::Control;
use crate::coverage::{Coverage, Holding};
use crate::error::TierError;
use crate::peers::Union;
use crate::rail::ContentTag;
use crate::sync::lock;

/// One content and what is known of it. Immutable but for the cache of layers.
pub(crate) struct View {
    pub(crate) tag: ContentTag,
    info: StoreInfo,
    /// Whether every chunk has a checksum.
    pub(crate) has_checksums: bool,
    source: Source,
    layers: Mutex<HashMap<u32, Arc<Layer>>>,
}

enum Source {
    Peer(Arc<Control>),
    Store(Arc<Store>),
    V1(Box<Manifest>),
    /// Several of these, put together.
    Union(Arc<Union>),
}

impl View {
    /// Asks a v2 peer for the description of its store.
    ///
    /// *Errors*: connection, or a description that does not hold together.
    pub(crate) fn of_peer(control: &Arc<Control>, limit: Instant) -> Result<Self, TierError> {
        let unsound = |why: String| TierError::Catalogue {
            addr: control.addr().to_owned(),
            why,
        };
        let (json, welcome) =
            control.ask(FrameKind::StoreInfo, &[], FrameKind::StoreInfoReply, limit)?;
        let info: StoreInfo = serde_json::from_slice(&json).map_err(|e| unsound(e.to_string()))?;
        info.check().map_err(unsound)?;
        let id = match &info.content_id {
            Some(id) => Some(parse_hex128(id).map_err(unsound)?),
            None => None,
        };
        if id != welcome.content_id || info.layout_id != hex128(welcome.layout_id) {
            return Err(unsound(
                "its description and its greeting name different content".into(),
            ));
        }
        Ok(Self {
            tag: ContentTag::of(&welcome),
            has_checksums: id.is_some(),
            info,
            source: Source::Peer(control.clone()),
            layers: Mutex::default(),
        })
    }

    /// A store on this machine.
    pub(crate) fn of_store(store: &Arc<Store>) -> Self {
        Self {
            tag: ContentTag {
                id: store.content_id().unwrap_or_else(|| store.layout_id()),
                instance: None,
            },
            has_checksums: store.content_id().is_some(),
            info: store.info().clone(),
            source: Source::Store(store.clone()),
            layers: Mutex::default(),
        }
    }

    /// What a v1 manifest says.
    pub(crate) fn of_v1(manifest: Box<Manifest>, tag: ContentTag) -> Self {
        let layers = manifest
            .moe_layer_to_model_layer
            .iter()
            .enumerate()
            .map(|(layer, &model_layer)| LayerInfo {
                layer: layer as u32,
                model_layer,
                num_experts: manifest.num_experts,
                identity_experts: 0,
                experts: vec![[0, manifest.num_experts]],
                image_bytes_max: manifest.record_stride,
                id: hex128(0),
            })
            .collect();
        Self {
            tag,
            has_checksums: false,
            info: StoreInfo {
                kind: StoreKind::V1,
                stack: "v1".into(),
                class: StackClass::Trunk,
                container: Container::V1,
                generation: 1,
                content_id: None,
                layout_id: hex128(tag.id),
                layers,
                whole: None,
            },
            source: Source::V1(manifest),
            layers: Mutex::default(),
        }
    }

    /// Several sources of one content.
    pub(crate) fn of_union(union: Arc<Union>) -> Self {
        Self {
            tag: union.tag(),
            has_checksums: true,
            info: union.info(),
            source: Source::Union(union),
            layers: Mutex::default(),
        }
    }

    /// What there is to fetch, as far as it is known now.
    pub(crate) fn info(&self) -> StoreInfo {
        match &self.source {
            Source::Union(union) => union.info(),
            _ => self.info.clone(),
        }
    }

    /// The same as it was at the beginning.
    pub(crate) fn first_info(&self) -> &StoreInfo {
        &self.info
    }

    /// Name of the source, for people.
    pub(crate) fn name(&self) -> String {
        match &self.source {
            Source::Peer(control) => control.addr().to_owned(),
            Source::Store(store) => store.path().display().to_string(),
            Source::V1(_) => "a v1 peer".into(),
            Source::Union(_) => "several peers".into(),
        }
    }

    /// The content that it is, or is a part of; `None` without checksums, because then nothing
    /// proves that two sources are of one. What the caller insists on is never a part.
    pub(crate) fn group(&self, expect: Option<u128>) -> Option<ContentTag> {
        let own = self.has_checksums.then_some(self.tag)?;
        let whole = self.info.whole.as_ref().filter(|_| Some(own.id) != expect);
        Some(match whole.and_then(|w| parse_hex128(&w.content_id).ok()) {
            Some(id) => ContentTag { id, instance: None },
            None => own,
        })
    }

    /// The records that it has.
    pub(crate) fn coverage(&self) -> Coverage {
        Coverage::of(&self.info)
    }

    /// What the engine is told of it as a source of `group`.
    pub(crate) fn holding(&self, group: ContentTag) -> Holding {
        match group == self.tag {
            true => Holding::default(),
            false => Holding {
                whole: Some(group),
                held: Some(Arc::new(self.coverage())),
            },
        }
    }

    /// Asks a part for all its layers: each must belong to the whole that it names.
    ///
    /// *Errors*: it does not, or the peer does not answer.
    pub(crate) fn prove(&self, limit: Instant) -> Result<(), TierError> {
        for layer in &self.info.layers {
            let key = Key::new(layer.layer, 0);
            self.layer(key, limit)?;
        }
        Ok(())
    }

    /// Whether a layer's catalogue is here, so that nobody has to be asked for it.
    pub(crate) fn has_layer(&self, layer: u32) -> bool {
        matches!(self.source, Source::Store(_)) || lock(&self.layers).contains_key(&layer)
    }

    /// Whether [`View::find`] asks nobody.
    pub(crate) fn knows(&self, key: Key) -> bool {
        match &self.source {
            Source::Union(union) => union.knows(key),
            Source::Store(_) | Source::V1(_) => true,
            Source::Peer(_) => {
                let is_there = self.info.layers.iter().any(|l| l.layer == key.layer);
                !is_there || self.has_layer(key.layer)
            }
        }
    }

    /// Finds a record: its layer and its position there.
    ///
    /// *Errors*: [`TierError::NoSuchRecord`], [`TierError::IdentityExpert`], or trouble in getting
    /// the layer's catalogue.
    pub(crate) fn find(&self, key: Key, limit: Instant) -> Result<(Arc<Layer>, usize), TierError> {
        if let Source::Union(union) = &self.source {
            return union.find(key, limit);
        }
        let layer = self.layer(key, limit)?;
        if let Some(position) = layer.position(key.expert) {
            return Ok((layer, position));
        }
        let all = layer.num_experts;
        if (all..all.saturating_add(layer.identity_experts)).contains(&key.expert) {
            return Err(TierError::IdentityExpert { key });
        }
        let why = match key.expert < all {
            true => format!(
                "this store holds {} of the layer's {all} experts, and not this one",
                layer.experts.len()
            ),
            false => format!("the layer has experts 0 to {}", all - 1),
        };
        Err(TierError::NoSuchRecord { key, why })
    }

    fn layer(&self, key: Key, limit: Instant) -> Result<Arc<Layer>, TierError> {
        let cached = || lock(&self.layers);
        if let Some(layer) = cached().get(&key.layer) {
            return Ok(layer.clone());
        }
        // Without the lock: others use what is there while a peer is asked. Two that ask for the
        // same layer at once both load it, and one copy stays.
        let Some(info) = self.info.layers.iter().find(|l| l.layer == key.layer) else {
            return Err(TierError::NoSuchRecord {
                key,
                why: describe_layers(&self.info),
            });
        };
        let layer = Arc::new(match &self.source {
            Source::Store(store) => {
                store.catalogue().layer(key.layer).cloned().ok_or_else(|| {
                    TierError::NoSuchRecord {
                        key,
                        why: describe_layers(&self.info),
                    }
                })?
            }
            Source::V1(manifest) => v1_layer(manifest, info).map_err(TierError::Config)?,
            Source::Peer(control) => self.load(control, key, info, limit)?,
            Source::Union(_) => unreachable!("found above"),
        });
        Ok(cached().entry(key.layer).or_insert(layer).clone())
    }

    fn load(
        &self,
        control: &Control,
        key: Key,
        info: &LayerInfo,
        limit: Instant,
    ) -> Result<Layer, TierError> {
        let unsound = |why: String| TierError::Catalogue {
            addr: control.addr().to_owned(),
            why: format!("layer {}: {why}", info.layer),
        };
        let request = CatalogueRequest {
            layer: info.layer,
            sections: match &self.info.whole {
                Some(_) => SECTION_CHECKSUMS | SECTION_REST,
                None => SECTION_CHECKSUMS,
            },
        };
        let answer = control.ask(
            FrameKind::Catalogue,
            &request.encode(),
            FrameKind::CatalogueReply,
            limit,
        );
        // A peer that restarted answers, or refuses, for what it serves now: no fault of its store.
        let served = match &answer {
            Ok((_, welcome)) => Some(ContentTag::of(welcome)),
            Err(_) => control.content(),
        };
        if served.is_some_and(|content| content != self.tag) {
            return Err(TierError::ContentChanged { key });
        }
        let (blob, _) = answer?;
        let mut layer = codec::decode_layer(&blob).map_err(unsound)?;
        let got = LayerInfo::of(&layer);
        if got != *info {
            return Err(unsound(
                "its catalogue does not fit the content id; the peer's store was damaged or changed".into(),
            ));
        }
        if layer.checksums.is_some() != self.has_checksums {
            return Err(unsound("checksums are missing".into()));
        }
        if let Some(whole) = &self.info.whole {
            let mut of_whole = whole.layers.iter().filter(|l| l.layer == info.layer);
            let id = layer.whole_id().map(hex128);
            if !of_whole.any(|l| Some(&l.id) == id.as_ref()) {
                return Err(unsound(format!(
                    "it is not a part of content {}, as the peer says; drop this peer",
                    whole.content_id
                )));
            }
            // Proven: they are of no more use.
            layer.set_rest(None).map_err(unsound)?;
        }
        Ok(layer)
    }
}

fn describe_layers(info: &StoreInfo) -> String {
    let first = info.layers.first().map_or(0, |l| l.layer);
    let last = info.layers.last().map_or(0, |l| l.layer);
    format!(
        "the store holds {} layers between {first} and {last}",
        info.layers.len()
    )
}

/// The catalogue's form of a v1 layer: one opaque leaf, the record as stored.
fn v1_layer(manifest: &Manifest, info: &LayerInfo) -> Result<Layer, String> {
    let class = Class::layout(vec![Leaf {
        role: Role::Other,
        leaf: "v1-record".into(),
        name: format!("v1.layers.{}.experts.{{}}", info.model_layer),
        stacking: Stacking::PerExpert,
        dtype: Dtype::from_name("U8").expect("in the table"),
        shape: vec![manifest.record_stride],
        source_dim0: 0,
        image_offset: 0,
        bytes: manifest.record_stride,
        transform: Transform::None,
    }])?;
    if class.image_bytes != manifest.record_stride {
        return Err(format!(
            "record stride {} of the v1 peer is no multiple of 256",
            manifest.record_stride
        ));
    }
    Layer::new(
        info.layer,
        info.model_layer,
        info.num_experts,
        0,
        vec![class],
        (0..info.num_experts).collect(),
        vec![],
        Records::Remote,
        None,
        vec![],
    )
}
