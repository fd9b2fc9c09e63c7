//! From a READ to work requests: where its bytes lie in the peer's memory, and what no READ brings.
//!
//! Pure: catalogue and region table in, requests out. A work request reads one contiguous remote
//! range into one or several parts of the landing; pieces that are neighbours in the peer's file
//! share one, as its leaves need not be neighbours in the image.

use expert_arena::LandingRange;
use expert_store::catalogue::{INLINE_MAX_BYTES, Layer, Records, Segment};
use expert_wire::verbs::Region;

/// What one work request may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Bytes.
    pub(super) request_max_bytes: u64,
    /// Local parts.
    pub(super) parts_max: usize,
}

/// A contiguous remote range, and which of the plan's parts it goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    pub(super) first_part: usize,
    pub(super) parts: usize,
    pub(super) bytes: u64,
}

/// Work requests of one READ; kept for its memory.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) requests: Vec<Request>,
    /// Offset in the READ's range, and bytes.
    pub(super) parts: Vec<(usize, usize)>,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    file: u32,
    file_offset: u64,
    at: u64,
    bytes: u64,
}

/// Why a READ cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unplannable {
    /// The peer's memory does not hold it: the file below changed.
    NotRegistered,
    /// The peer's catalogue does not say where it lies.
    NotDescribed,
}

/// The regions of one opened rail.
#[derive(Debug, Default)]
pub(super) struct RegionTable(Vec<Region>);

impl RegionTable {
    /// Regions ascend by file and offset and are disjoint, as the wire's reader checked.
    pub(super) fn new(regions: Vec<Region>) -> Self {
        Self(regions)
    }

    pub(super) fn first(&self) -> Option<&Region> {
        self.0.first()
    }

    /// The region that holds a byte of a file.
    fn find(&self, file: u32, offset: u64) -> Option<&Region> {
        let after = self
            .0
            .partition_point(|r| (r.file, r.file_offset) <= (file, offset));
        let region = self.0.get(after.checked_sub(1)?)?;
        (region.file == file && offset - region.file_offset < region.bytes).then_some(region)
    }
}

impl Plan {
    /// Plans bytes `offset..offset + bytes` of the record image at `position` of the peer's layer.
    pub(super) fn of_image(
        &mut self,
        layer: &Layer,
        position: usize,
        offset: u64,
        bytes: u64,
        table: &RegionTable,
        limits: Limits,
    ) -> Result<(), Unplannable> {
        if matches!(layer.records, Records::Remote) {
            return Err(Unplannable::NotDescribed);
        }
        self.clear();
        let pieces = &mut self.pieces;
        for_each_part(layer, position, offset, bytes, |part| {
            if let Part::Remote(segment) = part {
                pieces.push(Piece {
                    file: segment.file,
                    file_offset: segment.file_offset,
                    at: segment.image_offset - offset,
                    bytes: segment.bytes,
                });
            }
        });
        pieces.sort_unstable_by_key(|p| (p.file, p.file_offset));
        for i in 0..self.pieces.len() {
            let mut piece = self.pieces[i];
            while piece.bytes > 0 {
                let region = table
                    .find(piece.file, piece.file_offset)
                    .ok_or(Unplannable::NotRegistered)?;
                let skip = piece.file_offset - region.file_offset;
                let take = piece.bytes.min(region.bytes - skip);
                self.push(region.addr + skip, region.rkey, piece.at, take, limits);
                piece.file_offset += take;
                piece.at += take;
                piece.bytes -= take;
            }
        }
        Ok(())
    }

    /// Plans a contiguous remote range into the whole of a READ's range.
    pub(super) fn of_range(&mut self, remote_addr: u64, rkey: u32, bytes: u64, limits: Limits) {
        self.clear();
        self.push(remote_addr, rkey, 0, bytes, limits);
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.parts.clear();
        self.pieces.clear();
    }

    fn push(&mut self, mut remote: u64, rkey: u32, mut at: u64, mut bytes: u64, limits: Limits) {
        while bytes > 0 {
            let joined = self.requests.last_mut().filter(|r| {
                r.rkey == rkey
                    && r.remote_addr + r.bytes == remote
                    && r.parts < limits.parts_max
                    && r.bytes < limits.request_max_bytes
            });
            let take = match joined {
                Some(request) => {
                    let take = bytes.min(limits.request_max_bytes - request.bytes);
                    request.bytes += take;
                    request.parts += 1;
                    take
                }
                None => {
                    let take = bytes.min(limits.request_max_bytes);
                    self.requests.push(Request {
                        remote_addr: remote,
                        rkey,
                        first_part: self.parts.len(),
                        parts: 1,
                        bytes: take,
                    });
                    take
                }
            };
            self.parts.push((at as usize, take as usize));
            remote += take;
            at += take;
            bytes -= take;
        }
    }
}

/// A part of a record image, as one-sided READs see it.
enum Part<'a> {
    /// In the peer's memory; offsets and length are those of the part asked for.
    Remote(Segment),
    /// In the catalogue: `bytes` belong at `image_offset`.
    Inline { image_offset: u64, bytes: &'a [u8] },
    /// Padding.
    Zeros { image_offset: u64, bytes: u64 },
}

/// Calls `f` for the parts of an image range, in order; they cover it exactly.
fn for_each_part<'a>(
    layer: &'a Layer,
    position: usize,
    offset: u64,
    bytes: u64,
    mut f: impl FnMut(Part<'a>),
) {
    let end = offset + bytes;
    let mut at = offset;
    layer.for_each_segment(position, |segment| {
        let from = segment.image_offset.max(at);
        let to = (segment.image_offset + segment.bytes).min(end);
        if from >= to {
            return;
        }
        if from > at {
            f(Part::Zeros {
                image_offset: at,
                bytes: from - at,
            });
        }
        at = to;
        let skip = from - segment.image_offset;
        let inline = (segment.bytes <= INLINE_MAX_BYTES)
            .then(|| inline_leaf(layer, position, segment.image_offset))
            .flatten();
        f(match inline {
            Some(value) => Part::Inline {
                image_offset: from,
                bytes: &value[skip as usize..(skip + (to - from)) as usize],
            },
            None => Part::Remote(Segment {
                file: segment.file,
                file_offset: segment.file_offset + skip,
                image_offset: from,
                bytes: to - from,
            }),
        });
    });
    if at < end {
        f(Part::Zeros {
            image_offset: at,
            bytes: end - at,
        });
    }
}

fn inline_leaf(layer: &Layer, position: usize, image_offset: u64) -> Option<&[u8]> {
    let leaves = &layer.class(position).leaves;
    let leaf = leaves
        .binary_search_by_key(&image_offset, |l| l.image_offset)
        .ok()?;
    layer.inline_value(position, leaf)
}

/// Writes what no READ brings: padding, and the small leaves that travel in the catalogue.
pub(super) fn fill_rest(range: &mut LandingRange, layer: &Layer, position: usize) {
    let offset = range.offset() as u64;
    let bytes = range.len() as u64;
    for_each_part(layer, position, offset, bytes, |part| match part {
        Part::Remote(_) => {}
        Part::Inline {
            image_offset,
            bytes,
        } => range.write((image_offset - offset) as usize, bytes),
        Part::Zeros {
            image_offset,
            bytes,
        } => range.fill_zero((image_offset - offset) as usize, bytes as usize),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use expert_store::Dtype;
    use expert_store::catalogue::{Class, Leaf, LeafSource, Role, Stacking, Transform};
    use proptest::prelude::*;

    fn leaf(i: usize, bytes: u64) -> Leaf {
        Leaf {
            role: Role::Other,
            leaf: format!("leaf{i:02}"),
            name: format!("x.{{}}.leaf{i:02}"),
            stacking: Stacking::PerExpert,
            dtype: Dtype::from_name("U8").unwrap(),
            shape: vec![bytes],
            source_dim0: 0,
            image_offset: 0,
            bytes,
            transform: Transform::None,
        }
    }

    /// One record whose leaves lie in one file in the order of `places`, with gaps, and small
    /// leaves in the catalogue where `inline` says so. Returns the file's bytes and the image, too.
    fn case(sizes: &[u64], places: &[usize], gap: u64, inline: bool) -> (Layer, Vec<u8>, Vec<u8>) {
        let leaves = sizes.iter().enumerate().map(|(i, &n)| leaf(i, n)).collect();
        let class = Class::layout(leaves).unwrap();
        let byte = |leaf: usize, i: u64| (leaf as u64 * 37 + i * 11 + 5) as u8;
        let mut image = vec![0; class.image_bytes as usize];
        let mut offsets = vec![0; sizes.len()];
        let mut file = vec![0xee; 3];
        for &place in places {
            offsets[place] = file.len() as u64;
            file.extend((0..sizes[place]).map(|i| byte(place, i)));
            file.extend(vec![0xee; gap as usize]);
        }
        let mut values = vec![vec![]; sizes.len()];
        for (i, leaf) in class.leaves.iter().enumerate() {
            let bytes: Vec<u8> = (0..leaf.bytes).map(|b| byte(i, b)).collect();
            image[leaf.image_offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            if inline && class.is_inline(i) {
                values[i] = bytes;
            }
        }
        let sources = vec![
            offsets
                .iter()
                .map(|&o| LeafSource::Column {
                    files: vec![0],
                    offsets: vec![o],
                })
                .collect(),
        ];
        let layer = Layer::new(
            0,
            0,
            1,
            0,
            vec![class],
            vec![0],
            vec![],
            Records::InPlace { sources },
            None,
            vec![values],
        )
        .unwrap();
        (layer, file, image)
    }

    /// Does what a card would do, and then what `fill_rest` does, on plain memory.
    fn carry_out(
        plan: &Plan,
        layer: &Layer,
        offset: u64,
        bytes: u64,
        file: &[u8],
        table: &RegionTable,
    ) -> Vec<u8> {
        let mut out = vec![0xaa; bytes as usize];
        for request in &plan.requests {
            let region = table.0.iter().find(|r| r.rkey == request.rkey).unwrap();
            let mut from = (request.remote_addr - region.addr + region.file_offset) as usize;
            let parts = &plan.parts[request.first_part..request.first_part + request.parts];
            assert_eq!(parts.iter().map(|p| p.1 as u64).sum::<u64>(), request.bytes);
            for &(at, len) in parts {
                out[at..at + len].copy_from_slice(&file[from..from + len]);
                from += len;
            }
            let end = request.remote_addr + request.bytes;
            assert!(end <= region.addr + region.bytes, "within its region");
        }
        for_each_part(layer, 0, offset, bytes, |part| match part {
            Part::Remote(_) => {}
            Part::Inline {
                image_offset,
                bytes,
            } => out[(image_offset - offset) as usize..][..bytes.len()].copy_from_slice(bytes),
            Part::Zeros {
                image_offset,
                bytes,
            } => out[(image_offset - offset) as usize..][..bytes as usize].fill(0),
        });
        out
    }

    fn table(file_bytes: u64, seam: u64) -> RegionTable {
        let cut = seam.clamp(1, file_bytes - 1);
        RegionTable::new(vec![
            Region {
                file: 0,
                rkey: 1,
                file_offset: 0,
                bytes: cut,
                addr: 0x10_0000,
            },
            Region {
                file: 0,
                rkey: 2,
                file_offset: cut,
                bytes: file_bytes - cut,
                addr: 0x77_0000,
            },
        ])
    }

    proptest! {
        #[test]
        fn every_byte_of_the_image_comes_from_the_right_place(
            sizes in proptest::collection::vec(prop_oneof![1u64..65, 200u64..900, Just(256), Just(512)], 1..7),
            order in any::<u64>(),
            gap in prop_oneof![Just(0u64), 0u64..9],
            inline in any::<bool>(),
            seam in 0u64..4000,
            from in 0u64..3000,
            len in 1u64..4000,
            request_max_bytes in prop_oneof![Just(u64::MAX), 1u64..700],
            parts_max in 1usize..5,
        ) {
            let mut places: Vec<usize> = (0..sizes.len()).collect();
            let mut seed = order;
            for i in (1..places.len()).rev() {
                places.swap(i, (seed % (i as u64 + 1)) as usize);
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            }
            let (layer, file, image) = case(&sizes, &places, gap, inline);
            let offset = from.min(image.len() as u64 - 1);
            let bytes = len.min(image.len() as u64 - offset);
            let table = table(file.len() as u64, seam);
            let limits = Limits { request_max_bytes, parts_max };
            let mut plan = Plan::default();
            plan.of_image(&layer, 0, offset, bytes, &table, limits).unwrap();
            for request in &plan.requests {
                prop_assert!(request.bytes >= 1 && request.bytes <= request_max_bytes);
                prop_assert!(request.parts >= 1 && request.parts <= parts_max);
            }
            let got = carry_out(&plan, &layer, offset, bytes, &file, &table);
            prop_assert_eq!(&got[..], &image[offset as usize..(offset + bytes) as usize]);
        }
    }

    #[test]
    fn leaves_that_touch_in_the_file_share_a_request_and_small_ones_are_not_fetched() {
        let (layer, file, _) = case(&[512, 4, 300, 700], &[0, 2, 3, 1], 0, true);
        let table = RegionTable::new(vec![Region {
            file: 0,
            rkey: 1,
            file_offset: 0,
            bytes: file.len() as u64,
            addr: 0,
        }]);
        let limits = Limits {
            request_max_bytes: 1 << 20,
            parts_max: 16,
        };
        let mut plan = Plan::default();
        let bytes = layer.image_bytes_max();
        plan.of_image(&layer, 0, 0, bytes, &table, limits).unwrap();
        assert_eq!(plan.requests.len(), 1);
        assert_eq!(plan.parts, [(0, 512), (768, 300), (1280, 700)]);
    }

    #[test]
    fn file_without_a_region_cannot_be_planned() {
        let (layer, _, _) = case(&[300], &[0], 0, false);
        let limits = Limits {
            request_max_bytes: 1 << 20,
            parts_max: 1,
        };
        let mut plan = Plan::default();
        let none = RegionTable::default();
        let planned = plan.of_image(&layer, 0, 0, 300, &none, limits);
        assert_eq!(planned, Err(Unplannable::NotRegistered));
        // The first of two regions ends before the bytes do.
        let short = RegionTable::new(vec![Region {
            file: 0,
            rkey: 1,
            file_offset: 0,
            bytes: 100,
            addr: 0,
        }]);
        let planned = plan.of_image(&layer, 0, 0, 300, &short, limits);
        assert_eq!(planned, Err(Unplannable::NotRegistered));
    }
}
