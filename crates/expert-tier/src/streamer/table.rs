//! A layer's table that never moves: where each expert's leaves are now, for readers that were set
//! up once (captured graphs, unmodified kernels).

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use expert_store::catalogue::Layer;

use super::residents::Held;

/// Addresses, slots and small scalars of a layer's experts. The arrays keep their place from the
/// first record of the layer to the end of the streamer.
///
/// *Shapes and units*: `leaves` x `experts`, leaf-major: the entry of leaf `l` of expert `e` is at
/// `l * experts + e`. An expert that is not in memory has slot -1 and addresses 0.
///
/// An entry is true while a lease on its expert is held; without one it may change at any moment.
#[derive(Debug)]
pub struct LayerTable {
    experts: usize,
    leaves: usize,
    slots: Box<[AtomicI32]>,
    host: Box<[AtomicU64]>,
    device: Box<[AtomicU64]>,
    scalars: Box<[AtomicU32]>,
}

fn filled<T>(count: usize, make: impl Fn() -> T) -> Box<[T]> {
    (0..count).map(|_| make()).collect()
}

impl LayerTable {
    pub(super) fn new(layer: &Layer) -> Self {
        let experts = layer.num_experts as usize;
        let leaves = layer.classes.iter().map(|c| c.leaves.len()).max();
        let leaves = leaves.unwrap_or(0);
        Self {
            experts,
            leaves,
            slots: filled(experts, || AtomicI32::new(-1)),
            host: filled(leaves * experts, AtomicU64::default),
            device: filled(leaves * experts, AtomicU64::default),
            scalars: filled(leaves * experts, || AtomicU32::new(f32::NAN.to_bits())),
        }
    }

    /// Whether all of a layer has its place.
    pub(super) fn fits(&self, layer: &Layer) -> bool {
        let leaves = layer.classes.iter().map(|c| c.leaves.len()).max();
        layer.num_experts as usize <= self.experts && leaves.unwrap_or(0) <= self.leaves
    }

    /// Experts of the layer, in memory or not.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Leaves of an expert; those of a class with fewer leave the rest at 0.
    pub fn leaves(&self) -> usize {
        self.leaves
    }

    /// Slot of each expert, counted over all slabs; -1 where it is not in memory.
    pub fn slots(&self) -> &[AtomicI32] {
        &self.slots
    }

    /// Host address of each leaf's first byte.
    pub fn host_addresses(&self) -> &[AtomicU64] {
        &self.host
    }

    /// Device address of each leaf's first byte; 0 where nobody supplied a device base.
    pub fn device_addresses(&self) -> &[AtomicU64] {
        &self.device
    }

    /// Value of each leaf that is one 32-bit float (a scale), as its bits; not-a-number for others.
    pub fn scalars(&self) -> &[AtomicU32] {
        &self.scalars
    }

    pub(super) fn set(&self, held: &Held) {
        let lease = held.record.lease();
        let expert = held.record.key().expert as usize;
        let (host, device) = (lease.host_ptr() as u64, lease.dev_va());
        for (leaf, what) in held.record.class().leaves.iter().enumerate() {
            let at = leaf * self.experts + expert;
            let device = device.map_or(0, |base| base + what.image_offset);
            self.host[at].store(host + what.image_offset, Ordering::Relaxed);
            self.device[at].store(device, Ordering::Relaxed);
            let offset = what.image_offset as usize;
            if what.bytes == 4 && what.dtype.name() == "F32" {
                let bytes = held.record.bytes()[offset..offset + 4].try_into();
                let bits = bytes.map_or(f32::NAN.to_bits(), u32::from_le_bytes);
                self.scalars[at].store(bits, Ordering::Relaxed);
            }
        }
        // Whoever sees the slot sees the addresses.
        self.slots[expert].store(held.entry as i32, Ordering::Release);
    }

    pub(super) fn clear(&self, expert: u32) {
        let expert = expert as usize;
        self.slots[expert].store(-1, Ordering::Release);
        for leaf in 0..self.leaves {
            let at = leaf * self.experts + expert;
            self.host[at].store(0, Ordering::Relaxed);
            self.device[at].store(0, Ordering::Relaxed);
            self.scalars[at].store(f32::NAN.to_bits(), Ordering::Relaxed);
        }
    }
}
