//! What simulated peers serve: a few versions of a small model, made once per process.

use std::sync::{Arc, OnceLock};

use expert_store::Dtype;
use expert_store::catalogue::{
    CHUNK_BYTES, Class, Layer, Leaf, Records, Role, Stacking, Transform,
};
use expert_wire::Key;
use xxhash_rust::xxh3::xxh3_64;

use crate::mock::MockSource;
use crate::mock::rng::SplitMix;
use crate::rail::ContentTag;

/// Experts of each layer.
pub(super) const EXPERTS: u32 = 8;

/// Versions that a peer may change between.
pub(super) const VERSIONS: usize = 3;

/// Bytes of the only tensor of a record, one size per layer: from one byte to four chunks, at and
/// around the borders. Small ones are in the majority, because they make more happen per second.
pub(super) const LEAF_BYTES: [u64; 16] = [
    1,
    255,
    256,
    257,
    1000,
    4096,
    20_000,
    65_536,
    100_001,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + 1,
    300_000,
    2 * CHUNK_BYTES,
    3 * CHUNK_BYTES + 700,
    4 * CHUNK_BYTES,
];

/// Distance of two images in the common buffer: prime, so that no two look alike at any offset.
const IMAGE_DISTANCE: usize = 1009;

/// All versions.
pub(super) struct Contents {
    /// Random bytes; every image is a window on them.
    bytes: Vec<u8>,
    /// By version, then by layer.
    layers: Vec<Vec<Arc<Layer>>>,
}

impl Contents {
    pub(super) fn all() -> &'static Self {
        static ALL: OnceLock<Contents> = OnceLock::new();
        ALL.get_or_init(Self::make)
    }

    fn make() -> Self {
        let windows = VERSIONS * LEAF_BYTES.len() * EXPERTS as usize;
        let size = windows * IMAGE_DISTANCE + 5 * CHUNK_BYTES as usize;
        let mut rng = SplitMix::new(0x00c0_ffee);
        let bytes = std::iter::repeat_with(|| rng.next().to_le_bytes())
            .take(size / 8)
            .flatten()
            .collect();
        let mut contents = Self {
            bytes,
            layers: Vec::new(),
        };
        contents.layers = (0..VERSIONS)
            .map(|version| {
                (0..LEAF_BYTES.len())
                    .map(|layer| Arc::new(contents.make_layer(version, layer)))
                    .collect()
            })
            .collect();
        contents
    }

    fn make_layer(&self, version: usize, layer: usize) -> Layer {
        let class = class(layer);
        let sums = (0..EXPERTS)
            .flat_map(|expert| {
                self.window(version, layer, expert, class.image_bytes as usize)
                    .chunks(CHUNK_BYTES as usize)
                    .map(xxh3_64)
                    .collect::<Vec<_>>()
            })
            .collect();
        Layer::new(
            layer as u32,
            layer as u32,
            EXPERTS,
            0,
            vec![class],
            (0..EXPERTS).collect(),
            vec![],
            Records::Remote,
            Some(sums),
            vec![],
        )
        .expect("a sound layer")
    }

    fn window(&self, version: usize, layer: usize, expert: u32, bytes: usize) -> &[u8] {
        let index = (version * LEAF_BYTES.len() + layer) * EXPERTS as usize + expert as usize;
        &self.bytes[index * IMAGE_DISTANCE..][..bytes]
    }

    pub(super) fn layer(&self, version: usize, layer: u32) -> &Arc<Layer> {
        &self.layers[version][layer as usize]
    }

    pub(super) fn image_bytes(&self, layer: u32) -> usize {
        self.layer(0, layer).image_bytes_max() as usize
    }

    pub(super) fn image(&self, version: usize, key: Key) -> &[u8] {
        let bytes = self.image_bytes(key.layer);
        self.window(version, key.layer as usize, key.expert, bytes)
    }
}

fn class(layer: usize) -> Class {
    Class::layout(vec![Leaf {
        role: Role::Gate,
        leaf: "weight".into(),
        name: "l.{}".into(),
        stacking: Stacking::PerExpert,
        dtype: Dtype::from_name("U8").expect("in the table"),
        shape: vec![LEAF_BYTES[layer]],
        source_dim0: 0,
        image_offset: 0,
        bytes: LEAF_BYTES[layer],
        transform: Transform::None,
    }])
    .expect("a sound class")
}

/// The tag of a version.
pub(super) fn tag(version: usize) -> ContentTag {
    ContentTag {
        id: version as u128,
        instance: None,
    }
}

/// The version of a tag.
pub(super) fn version(tag: ContentTag) -> usize {
    tag.id as usize
}

/// A door to the contents for mock rails.
pub(super) struct Source;

impl MockSource for Source {
    fn record(&self, content: ContentTag, key: Key) -> Option<&[u8]> {
        let known = (key.layer as usize) < LEAF_BYTES.len() && key.expert < EXPERTS;
        known.then(|| Contents::all().image(version(content), key))
    }
}
