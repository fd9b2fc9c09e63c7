//! From the parts of a READ to aligned reads of files and the copies out of them; pure.

use std::ops::Range;

/// Neighbours with a gap of at most so much between them are read at once: the gap costs less than another request.
const GAP_MAX_BYTES: u64 = 16 << 10;

/// Largest block of a disk that direct reads are aligned to.
pub(super) const BLOCK_MAX_BYTES: u64 = 64 << 10;

/// A part of a READ that lies in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) file: u32,
    /// First byte in the file.
    pub(super) offset: u64,
    /// First byte in the READ's range.
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// What is copied out of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CopyOut {
    pub(super) in_window: usize,
    /// First byte in the READ's range.
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// One read into a window. Offset and length are multiples of the file's block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) file: u32,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    /// Up to the last byte that is copied: the file may end there.
    pub(super) need_bytes: usize,
    /// Which of the plan's copies are out of this window.
    pub(super) copies: Range<usize>,
}

/// How a READ is done.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) spans: Vec<Span>,
    pub(super) copies: Vec<CopyOut>,
}

/// Bytes of a window for reads of `io_bytes`: one more block than those, so that a READ whose ends lie inside blocks
/// does not take one more read.
pub(super) fn window_bytes(io_bytes: usize) -> usize {
    io_bytes + BLOCK_MAX_BYTES as usize
}

/// Plans the reads of all `parts`, which it sorts. `io_bytes` is a multiple of every block, `block_of` says that of a
/// file (1: none).
pub(super) fn plan(
    parts: &mut [Part],
    io_bytes: usize,
    mut block_of: impl FnMut(u32) -> u64,
) -> Plan {
    let mut plan = Plan::default();
    parts.sort_unstable_by_key(|p| (p.file, p.offset, p.at));
    let mut rest = &*parts;
    while let Some(first) = rest.first() {
        let block = block_of(first.file).max(1);
        let mut end = first.offset + first.bytes as u64;
        let mut count = 1;
        for part in &rest[1..] {
            let reach = end.next_multiple_of(block) + GAP_MAX_BYTES;
            if part.file != first.file || floor(part.offset, block) > reach {
                break;
            }
            end = end.max(part.offset + part.bytes as u64);
            count += 1;
        }
        let (together, others) = rest.split_at(count);
        plan.add_run(together, end, io_bytes, block);
        rest = others;
    }
    plan
}

impl Plan {
    /// Adds the spans of neighbours in one file, the last of which ends at `end`.
    fn add_run(&mut self, parts: &[Part], end: u64, io_bytes: usize, block: u64) {
        let mut at = floor(parts[0].offset, block);
        while at < end {
            let left = end.next_multiple_of(block) - at;
            let bytes = match left <= window_bytes(io_bytes) as u64 {
                true => left,
                false => io_bytes as u64,
            };
            self.add_span(parts, at, at + bytes, block);
            at += bytes;
        }
    }

    fn add_span(&mut self, parts: &[Part], from: u64, to: u64, block: u64) {
        let first = self.copies.len();
        let mut need = from;
        for part in parts {
            let begin = part.offset.max(from);
            let end = (part.offset + part.bytes as u64).min(to);
            if begin >= end {
                continue;
            }
            self.copies.push(CopyOut {
                in_window: (begin - from) as usize,
                at: part.at + (begin - part.offset) as usize,
                bytes: (end - begin) as usize,
            });
            need = need.max(end);
        }
        if need > from {
            self.spans.push(Span {
                file: parts[0].file,
                offset: from,
                bytes: (need.next_multiple_of(block) - from) as usize,
                need_bytes: (need - from) as usize,
                copies: first..self.copies.len(),
            });
        }
    }
}

/// The multiple of `block` at or before `at`.
fn floor(at: u64, block: u64) -> u64 {
    at - at % block
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIB: usize = 1 << 10;

    fn part(offset: u64, at: usize, bytes: usize) -> Part {
        Part {
            file: 0,
            offset,
            at,
            bytes,
        }
    }

    #[test]
    fn a_megabyte_behind_a_header_takes_two_reads_of_half_of_it() {
        let mut parts = [part(256, 0, 1 << 20)];
        let plan = plan(&mut parts, 512 * KIB, |_| 4096);
        let spans: Vec<_> = plan.spans.iter().map(|s| (s.offset, s.bytes)).collect();
        assert_eq!(spans, [(0, 512 * KIB), (512 << 10, 516 * KIB)]);
        let copies = [
            CopyOut {
                in_window: 256,
                at: 0,
                bytes: 512 * KIB - 256,
            },
            CopyOut {
                in_window: 0,
                at: 512 * KIB - 256,
                bytes: 512 * KIB + 256,
            },
        ];
        assert_eq!(plan.copies, copies);
        assert_eq!(plan.spans[1].need_bytes, 512 * KIB + 256);
    }

    #[test]
    fn neighbours_are_read_at_once_in_any_order_and_what_is_far_is_not() {
        // As in most safetensors: down lies before gate and up, and comes last in the image.
        let mut parts = [
            part(100_000, 0, 10_000),
            part(110_100, 10_240, 10_000),
            part(80_000, 20_480, 10_000),
        ];
        let near = plan(&mut parts, 512 * KIB, |_| 512);
        assert_eq!(near.spans.len(), 1);
        assert_eq!(near.copies.len(), 3);
        parts[0].offset = 10_000;
        assert_eq!(plan(&mut parts, 512 * KIB, |_| 512).spans.len(), 2);
        parts[0].offset = 80_000;
        parts[0].file = 1;
        assert_eq!(plan(&mut parts, 512 * KIB, |_| 512).spans.len(), 2);
    }

    #[test]
    fn buffered_reads_take_what_is_wanted_and_no_more() {
        let plan = plan(&mut [part(1001, 0, 999)], 512 * KIB, |_| 1);
        assert_eq!((plan.spans[0].offset, plan.spans[0].bytes), (1001, 999));
    }

    /// Parts of one READ without gaps, each somewhere in one of a few files.
    fn parts() -> impl Strategy<Value = Vec<Part>> {
        let place = (0u32..3, 0u64..1 << 22, 1usize..600_000, any::<bool>());
        prop::collection::vec(place, 1..12).prop_map(|places| {
            let (mut at, mut last) = (0, (0, 0));
            let mut parts = Vec::new();
            for (file, offset, bytes, follows) in places {
                // Half of them lie right behind their neighbour, or within a small gap of it.
                let (file, offset) = match follows {
                    true => (last.0, last.1 + offset % 40_000),
                    false => (file, offset),
                };
                parts.push(Part {
                    file,
                    offset,
                    at,
                    bytes,
                });
                at += bytes;
                last = (file, offset + bytes as u64);
            }
            parts
        })
    }

    proptest! {
        // Each case looks at every byte of some megabytes.
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn every_byte_comes_once_from_its_place_and_reads_are_aligned(
            parts in parts(),
            power in 9u32..=16,
            io_power in 16u32..=20,
        ) {
            let (block, io_bytes) = (1u64 << power, 1usize << io_power);
            let plan = plan(&mut parts.clone(), io_bytes, |_| block);
            let total: usize = parts.iter().map(|p| p.bytes).sum();
            // What each byte of the READ comes from.
            let mut from: Vec<Option<(u32, u64)>> = vec![None; total];
            let mut next_copy = 0;
            for span in &plan.spans {
                prop_assert_eq!(span.offset % block, 0);
                prop_assert_eq!(span.bytes as u64 % block, 0);
                prop_assert!(span.bytes <= window_bytes(io_bytes));
                prop_assert!(span.need_bytes <= span.bytes);
                prop_assert!((span.bytes - span.need_bytes) < block as usize);
                prop_assert_eq!(span.copies.start, next_copy);
                next_copy = span.copies.end;
                for copy in &plan.copies[span.copies.clone()] {
                    prop_assert!(copy.in_window + copy.bytes <= span.need_bytes);
                    for i in 0..copy.bytes {
                        let place = (span.file, span.offset + (copy.in_window + i) as u64);
                        prop_assert!(from[copy.at + i].replace(place).is_none());
                    }
                }
            }
            prop_assert_eq!(next_copy, plan.copies.len());
            for part in &parts {
                for i in 0..part.bytes {
                    prop_assert_eq!(from[part.at + i], Some((part.file, part.offset + i as u64)));
                }
            }
        }
    }
}
