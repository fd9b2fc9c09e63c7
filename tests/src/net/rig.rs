//! One model behind one backend.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atlas_rdma::choose::{RailSpec, Wanted};
use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, SlotId};
use expert_peer::{Peer, PeerConfig, Transfer, VerbsOptions as PeerVerbs};
use expert_store::{Key, Store};
use expert_tier::{
    Deadline, EngineConfig, ExpertTier, RailsWanted, Record, TierBuilder, TierError, VerbsOptions,
};
use expert_wire::client::Protocol;

use super::SLACK;
use super::model::{self, Model, Records, Sizes};

/// A way for records to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// v2 frames, from a checkpoint where it lies.
    RdmaInPlace,
    /// v2 frames, from a packed store.
    RdmaPacked,
    /// The frozen protocol, from a v1 store.
    RdmaV1,
    /// Files on this machine.
    Posix,
    /// The same, many reads at once: a checkpoint where it lies.
    UmaInPlace,
    /// The same from a packed store.
    UmaPacked,
    /// One-sided READs on soft-RoCE, from a checkpoint where it lies: in a guest alone.
    VerbsInPlace,
    /// The same from a packed store.
    VerbsPacked,
    /// The frozen protocol's queue pairs, from a v1 store.
    VerbsV1,
}

impl Backend {
    /// Whether it needs a guest with soft-RoCE devices.
    pub fn is_verbs(self) -> bool {
        matches!(self, Self::VerbsInPlace | Self::VerbsPacked | Self::VerbsV1)
    }

    /// Whether it reads files on this machine, without a peer.
    pub fn is_local(self) -> bool {
        matches!(self, Self::Posix | Self::UmaInPlace | Self::UmaPacked)
    }

    /// Whether its peer serves a v1 store to v1 clients.
    pub fn is_v1(self) -> bool {
        matches!(self, Self::RdmaV1 | Self::VerbsV1)
    }
}

/// The first soft-RoCE device of a guest, for the peer and the client alike.
pub fn first_rail() -> RailSpec {
    "rxe0".parse().expect("a device name")
}

/// A model, its peer if the backend has one, and what must come out.
pub struct Rig {
    /// The backend.
    pub backend: Backend,
    /// What each record must be.
    pub records: Records,
    /// The store behind it.
    pub store: Arc<Store>,
    peer: Option<Peer>,
    _model: Model,
}

impl Rig {
    /// A small model behind a backend.
    pub fn new(backend: Backend) -> Self {
        match backend {
            Backend::RdmaV1 | Backend::VerbsV1 => Self::of(backend, Model::nvfp4(Sizes::V1)),
            _ => Self::of(backend, Model::bf16(Sizes::SMALL)),
        }
    }

    /// That model behind a backend.
    pub fn of(backend: Backend, model: Model) -> Self {
        let path = match backend {
            Backend::RdmaInPlace | Backend::VerbsInPlace | Backend::Posix | Backend::UmaInPlace => {
                model.index()
            }
            Backend::RdmaPacked | Backend::VerbsPacked | Backend::UmaPacked => model.pack(),
            Backend::RdmaV1 | Backend::VerbsV1 => model.pack_v1(),
        };
        let records = match backend.is_v1() {
            true => model::v1_records(&path),
            false => model.records(),
        };
        let store = model::open(&path);
        let peer = (!backend.is_local()).then(|| {
            serve_with(store.clone(), |config| {
                // By default this depends on where the client is: both ways are tried.
                config.transfer = match backend {
                    Backend::RdmaPacked => Transfer::Copy,
                    _ => Transfer::Sendfile,
                };
                if backend.is_verbs() {
                    let mut verbs = PeerVerbs::default();
                    verbs.rails = Some(Wanted::Explicit(vec![first_rail()]));
                    verbs.required = true;
                    config.verbs = Some(verbs);
                }
            })
        });
        Self {
            backend,
            records,
            store,
            peer,
            _model: model,
        }
    }

    /// Where the peer listens.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.peer.as_ref().map(Peer::local_addr)
    }

    /// The peer, where the backend has one.
    pub fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// A tier with these settings, records landing in `arena`. It gets an address or a store, never both.
    pub fn connect(
        &self,
        builder: TierBuilder,
        arena: Arc<ExpertArena>,
    ) -> Result<Box<dyn ExpertTier>, TierError> {
        let builder = match self.backend.is_v1() {
            true => builder.protocol(Protocol::V1),
            false => builder,
        };
        let builder = match self.backend.is_verbs() {
            true => builder.verbs(patient_verbs(vec![first_rail()])),
            false => builder,
        };
        Ok(match self.addr() {
            Some(addr) => Box::new(builder.connect(&addr.to_string(), arena)?),
            None if self.backend == Backend::Posix => {
                Box::new(builder.open_posix(self.store.clone(), arena)?)
            }
            None => Box::new(builder.open_uma(self.store.clone(), arena)?),
        })
    }

    /// A tier with patient defaults and that many slots of the largest record, in one slab.
    pub fn tier(&self, slots: u32) -> Box<dyn ExpertTier> {
        self.connect(patient(), self.arena(slots)).expect("a tier")
    }

    /// An arena with that many slots of the largest record, in one slab.
    pub fn arena(&self, slots: u32) -> Arc<ExpertArena> {
        arena_for(&self.records, slots)
    }

    /// All keys, in order.
    pub fn keys(&self) -> Vec<Key> {
        self.records.keys().copied().collect()
    }
}

/// Starts a peer on a port that the system chooses.
pub fn serve(store: Arc<Store>) -> Peer {
    serve_with(store, |_| ())
}

/// The same with other settings.
pub fn serve_with(store: Arc<Store>, change: impl FnOnce(&mut PeerConfig)) -> Peer {
    let mut config = PeerConfig::new(store);
    config.listen = vec!["127.0.0.1:0".into()];
    change(&mut config);
    Peer::start(config).expect("a peer")
}

/// A builder whose requests have all the time that a busy machine may need, with READs of one chunk, so that every
/// record takes several.
pub fn patient() -> TierBuilder {
    TierBuilder::new()
        .engine(EngineConfig {
            read_bytes: 256 << 10,
            ..EngineConfig::default()
        })
        .deadline(Deadline {
            base: SLACK,
            floor_bytes_per_s: 0,
        })
        .streams(1)
        .stall(Duration::from_secs(5))
}

/// Verbs on these rails, and nothing else, with time for a machine that emulates its processor.
pub fn patient_verbs(rails: Vec<RailSpec>) -> VerbsOptions {
    VerbsOptions {
        rails: RailsWanted::List(rails),
        require: true,
        stall: Duration::from_secs(5),
        ..VerbsOptions::default()
    }
}

/// An arena in memory that belongs to somebody else, with that many slots of the largest record.
pub fn arena_for(records: &Records, slots: u32) -> Arc<ExpertArena> {
    let bytes = largest(records).next_multiple_of(4096);
    let memory = ForeignMemory::heap(bytes * slots as usize).expect("memory");
    let arena = ArenaBuilder::new().slab(slots, bytes).foreign(memory);
    Arc::new(arena.build().expect("an arena"))
}

/// Bytes of the largest record.
pub fn largest(records: &Records) -> usize {
    records.values().map(Vec::len).max().expect("records")
}

/// A slot of the first slab.
pub fn slot(slot: u32) -> SlotId {
    SlotId { slab: 0, slot }
}

/// A batch of these keys, in slots from 0 on.
pub fn batch(keys: &[Key]) -> Vec<(Key, SlotId)> {
    (0..).zip(keys).map(|(i, &key)| (key, slot(i))).collect()
}

/// Panics unless a record is byte for byte what it must be, with nothing but zeros after it in its slot.
pub fn assert_right(record: &Record, records: &Records) {
    let key = record.key();
    assert!(record.bytes() == records[&key], "{key} has wrong bytes");
    let padding = &record.lease().padded()[record.bytes().len()..];
    assert!(padding.iter().all(|&b| b == 0), "{key} has a dirty tail");
}

/// Fetches all records, `slots` at a time, and panics unless each is right.
pub fn assert_all_right(tier: &dyn ExpertTier, records: &Records, slots: u32) {
    let keys: Vec<Key> = records.keys().copied().collect();
    for keys in keys.chunks(slots as usize) {
        let fetched = tier.fetch_many(&batch(keys), 0).expect("a batch");
        assert_eq!(fetched.len(), keys.len());
        for (record, key) in fetched.into_iter().zip(keys) {
            let record = record.unwrap_or_else(|e| panic!("{key}: {e}"));
            assert_eq!(record.key(), *key);
            assert_right(&record, records);
        }
    }
}

/// Slots that something is landing in, or may still write to.
pub fn unsettled(arena: &ExpertArena) -> u64 {
    let stats = arena.stats();
    stats.landing + stats.quarantined + stats.outstanding_ranges
}
