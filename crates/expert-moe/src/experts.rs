//! Where the block's experts come from.

use std::collections::HashMap;
use std::time::Duration;

use expert_store::catalogue::Class;
use expert_store::info::StoreInfo;
use expert_store::{Key, Store};
use expert_tier::ExpertStreamer;

use crate::MoeError;

/// One expert's record, readable as long as it is held.
#[derive(Debug, Clone, Copy)]
pub struct Expert<'a> {
    /// Its name.
    pub key: Key,
    /// What its image is made of.
    pub class: &'a Class,
    /// The record image.
    pub image: &'a [u8],
}

/// Records of experts, held while something is computed from them.
pub trait Experts {
    /// What there is.
    fn info(&self) -> StoreInfo;

    /// What the records of one expert's kind are made of.
    ///
    /// *Errors*: there is no such expert, or it could not be asked for.
    fn class(&self, key: Key) -> Result<Class, MoeError>;

    /// Holds some experts of a layer, in the order of `experts`, for as long as `work` runs.
    ///
    /// *Errors*: one of them could not be had; what `work` returned.
    fn hold(
        &mut self,
        layer: u32,
        experts: &[u32],
        work: &mut dyn FnMut(&[Expert<'_>]) -> Result<(), MoeError>,
    ) -> Result<(), MoeError>;
}

/// All records of a store, read once into memory: the reference.
#[derive(Debug)]
pub struct Resident<'a> {
    store: &'a Store,
    images: HashMap<Key, Box<[u8]>>,
}

impl<'a> Resident<'a> {
    /// Reads all records of a store with plain reads.
    ///
    /// *Errors*: a file that cannot be read; [`MoeError::Memory`].
    pub fn load(store: &'a Store) -> Result<Self, MoeError> {
        let mut images = HashMap::new();
        let mut before = 0;
        for layer in &store.catalogue().layers {
            for (position, &expert) in layer.experts.iter().enumerate() {
                let key = Key::new(layer.layer, expert);
                let bytes = layer.class(position).image_bytes;
                let mut image = Vec::new();
                // No fault of the program where a model is larger than the machine.
                image
                    .try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX))
                    .map_err(|_| MoeError::Memory { key, bytes, before })?;
                image.resize(bytes as usize, 0);
                store.read_image(key, 0, &mut image)?;
                images.insert(key, image.into_boxed_slice());
                before += bytes;
            }
        }
        Ok(Self { store, images })
    }
}

impl Experts for Resident<'_> {
    fn info(&self) -> StoreInfo {
        self.store.info().clone()
    }

    fn class(&self, key: Key) -> Result<Class, MoeError> {
        let (layer, position) = self.store.locate(key)?;
        Ok(layer.class(position).clone())
    }

    fn hold(
        &mut self,
        layer: u32,
        experts: &[u32],
        work: &mut dyn FnMut(&[Expert<'_>]) -> Result<(), MoeError>,
    ) -> Result<(), MoeError> {
        let mut held = Vec::with_capacity(experts.len());
        for &expert in experts {
            let key = Key::new(layer, expert);
            let (layer, position) = self.store.locate(key)?;
            // What the store has was read, all of it.
            held.extend(self.images.get(&key).map(|image| Expert {
                key,
                class: layer.class(position),
                image,
            }));
        }
        work(&held)
    }
}

/// Records leased from a streamer. The block reads the slots that they landed in.
#[derive(Debug)]
pub struct Streamed<'a> {
    streamer: &'a ExpertStreamer,
    time: Duration,
    missed_bytes: u64,
}

impl<'a> Streamed<'a> {
    /// Leases from a streamer that nobody else uses; each layer's experts must be there within `time`.
    pub fn new(streamer: &'a ExpertStreamer, time: Duration) -> Self {
        Self {
            streamer,
            time,
            missed_bytes: 0,
        }
    }

    /// Bytes of the records that were not in memory when they were needed: misses times the bytes of a record.
    pub fn missed_bytes(&self) -> u64 {
        self.missed_bytes
    }
}

impl Experts for Streamed<'_> {
    fn info(&self) -> StoreInfo {
        self.streamer.tier().info()
    }

    fn class(&self, key: Key) -> Result<Class, MoeError> {
        let (layer, position) = self.streamer.tier().find(key, self.time)?;
        Ok(layer.class(position).clone())
    }

    fn hold(
        &mut self,
        layer: u32,
        experts: &[u32],
        work: &mut dyn FnMut(&[Expert<'_>]) -> Result<(), MoeError>,
    ) -> Result<(), MoeError> {
        let before = self.streamer.stats();
        let leases = self.streamer.lease_many(layer, experts, self.time)?;
        let after = self.streamer.stats();
        let sizes = || leases.iter().map(|lease| lease.len() as u64);
        self.missed_bytes += match sizes().max() == sizes().min() {
            true => (after.misses - before.misses) * sizes().max().unwrap_or(0),
            // Which of them were missing is not told where they differ.
            false => after.fetched_bytes - before.fetched_bytes,
        };
        let held: Vec<Expert<'_>> = leases
            .iter()
            .map(|lease| Expert {
                key: lease.key(),
                class: lease.class(),
                image: lease,
            })
            .collect();
        work(&held)
    }
}
