//! READ requests as the library wants them: a chain in memory that is reused.

use crate::in_flight::{MARKER, PROBE, REQUESTS_MAX, WrId};
use crate::mr::{LocalKey, RemoteKey};
use crate::sys::bindings::{IBV_SEND_SIGNALED, IBV_WR_RDMA_READ, ibv_send_wr, ibv_sge};
use crate::sys::zeroed;
use std::ptr;

/// One READ of one contiguous remote range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRead {
    /// Its first byte.
    pub remote_addr: u64,
    /// The other end's region.
    pub rkey: RemoteKey,
    /// How many of the local parts it fills, in their order.
    pub part_count: usize,
}

/// Where bytes of a READ land.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPart {
    /// First byte, from the start of the range.
    pub at: usize,
    /// Count of bytes.
    pub bytes: usize,
}

/// Checks READs into a range of so many bytes; says what is wrong.
pub(crate) fn check_requests(
    range_bytes: usize,
    requests: &[RemoteRead],
    parts: &[LocalPart],
    sge_max: u32,
    max_message_bytes: u32,
) -> Result<(), &'static str> {
    if requests.is_empty() {
        return Err("a post without a request");
    }
    if requests.len() > REQUESTS_MAX {
        return Err("more requests than a post may have");
    }
    let mut rest = parts;
    for request in requests {
        if request.part_count == 0 || request.part_count > sge_max as usize {
            return Err("a request without a local part, or with more than the queue was made for");
        }
        let Some((own, others)) = rest.split_at_checked(request.part_count) else {
            return Err("fewer local parts than the requests name");
        };
        rest = others;
        let mut bytes = 0_u64;
        for part in own {
            let inside = part
                .at
                .checked_add(part.bytes)
                .is_some_and(|end| end <= range_bytes);
            if !inside {
                return Err("a local part outside the range");
            }
            if part.bytes == 0 {
                return Err("a local part without bytes");
            }
            bytes += part.bytes as u64;
        }
        if bytes > u64::from(max_message_bytes) {
            return Err("a request larger than the port's largest message");
        }
        if request.remote_addr.checked_add(bytes).is_none() {
            return Err("a remote range beyond the address space");
        }
    }
    if !rest.is_empty() {
        return Err("more local parts than the requests name");
    }
    Ok(())
}

/// Bytes after which a request of a longer chain asks for a completion of its own, which shows that the chain gets on.
pub(crate) const SIGNAL_STEP_BYTES: usize = 256 << 10;

/// Memory for one chain at a time.
pub(crate) struct ReadChain {
    requests: Vec<ibv_send_wr>,
    parts: Vec<ibv_sge>,
}

// SAFETY: the pointers in it lead into its own two buffers and to landing memory; they are written by `build` and read
// by the call to the device right after it, under the queue's lock, and mean nothing at other times.
unsafe impl Send for ReadChain {}

impl ReadChain {
    pub(crate) fn with_capacity(requests: usize, parts_of_each: usize) -> Self {
        Self {
            requests: Vec::with_capacity(requests),
            // Most requests have one part; more room comes with the first chain that needs it.
            parts: Vec::with_capacity(requests.max(parts_of_each)),
        }
    }

    /// Writes the chain of these requests, which were checked, and returns its first one. The last asks for a
    /// completion, and others where so many bytes came since the last one that did.
    pub(crate) fn build(
        &mut self,
        first: WrId,
        start: *mut u8,
        lkey: LocalKey,
        requests: &[RemoteRead],
        parts: &[LocalPart],
    ) -> *mut ibv_send_wr {
        self.parts.clear();
        self.parts.extend(parts.iter().map(|part| ibv_sge {
            addr: start.wrapping_add(part.at).expose_provenance() as u64,
            // The parts of a request are no more than a message, whose size is a u32.
            length: part.bytes as u32,
            lkey: lkey.0,
        }));
        let mut sg_list = self.parts.as_mut_ptr();
        let first_request = self.room_for(requests.len());
        let mut parts = parts;
        let mut unsignalled_bytes = 0;
        for (position, request) in requests.iter().enumerate() {
            let (own, rest) = parts.split_at(request.part_count);
            parts = rest;
            unsignalled_bytes += own.iter().map(|part| part.bytes).sum::<usize>();
            let id = WrId {
                // Fewer than REQUESTS_MAX.
                position: position as u16,
                ..first
            };
            let mut wr = read(id.encode());
            wr.sg_list = sg_list;
            // No more than sge_max.
            wr.num_sge = request.part_count as i32;
            wr.wr.rdma.remote_addr = request.remote_addr;
            wr.wr.rdma.rkey = request.rkey.0;
            if position + 1 < requests.len() {
                wr.next = first_request.wrapping_add(position + 1);
            }
            if position + 1 == requests.len() || unsignalled_bytes >= SIGNAL_STEP_BYTES {
                wr.send_flags = IBV_SEND_SIGNALED;
                unsignalled_bytes = 0;
            }
            self.requests.push(wr);
            sg_list = sg_list.wrapping_add(request.part_count);
        }
        first_request
    }

    /// Writes one request without local ranges, for a queue pair in the error state: it is flushed after everything
    /// that was posted before it.
    pub(crate) fn build_marker(&mut self) -> *mut ibv_send_wr {
        let first = self.room_for(1);
        let mut marker = read(MARKER);
        marker.send_flags = IBV_SEND_SIGNALED;
        self.requests.push(marker);
        first
    }

    /// Writes one request of one byte, outside the table.
    pub(crate) fn build_probe(
        &mut self,
        target: u64,
        lkey: LocalKey,
        remote_addr: u64,
        rkey: RemoteKey,
    ) -> *mut ibv_send_wr {
        self.parts.clear();
        self.parts.push(ibv_sge {
            addr: target,
            length: 1,
            lkey: lkey.0,
        });
        let sg_list = self.parts.as_mut_ptr();
        let first = self.room_for(1);
        let mut wr = read(PROBE);
        wr.sg_list = sg_list;
        wr.num_sge = 1;
        wr.wr.rdma.remote_addr = remote_addr;
        wr.wr.rdma.rkey = rkey.0;
        wr.send_flags = IBV_SEND_SIGNALED;
        self.requests.push(wr);
        first
    }

    /// The position of a request of the chain.
    pub(crate) fn index_of(&self, request: *mut ibv_send_wr) -> Option<usize> {
        self.requests
            .iter()
            .position(|own| ptr::eq(own, request.cast_const()))
    }

    /// Empties the requests and makes room for so many; where the first will be. The pushes after it move nothing.
    fn room_for(&mut self, requests: usize) -> *mut ibv_send_wr {
        self.requests.clear();
        self.requests.reserve(requests);
        self.requests.as_mut_ptr()
    }
}

fn read(wr_id: u64) -> ibv_send_wr {
    // SAFETY: integers, raw pointers, and unions of them.
    let mut wr: ibv_send_wr = unsafe { zeroed() };
    wr.wr_id = wr_id;
    wr.opcode = IBV_WR_RDMA_READ;
    wr
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RemoteKey = RemoteKey(7);

    fn request(part_count: usize) -> RemoteRead {
        RemoteRead {
            remote_addr: 0x1000,
            rkey: KEY,
            part_count,
        }
    }

    fn part(at: usize, bytes: usize) -> LocalPart {
        LocalPart { at, bytes }
    }

    #[test]
    fn requests_that_cannot_be_are_refused() {
        let check = |requests: &[RemoteRead], parts: &[LocalPart]| {
            check_requests(100, requests, parts, 2, 64)
        };
        assert_eq!(
            check(
                &[request(2), request(1)],
                &[part(0, 10), part(20, 10), part(90, 10)]
            ),
            Ok(())
        );
        let high = RemoteRead {
            remote_addr: u64::MAX - 3,
            ..request(1)
        };
        for (requests, parts) in [
            (&[][..], &[][..]),
            (&[request(0)], &[]),
            (&[request(1)], &[part(0, 0)]),
            (&[request(1)], &[part(91, 10)]),
            (&[request(1)], &[part(usize::MAX, 2)]),
            (&[request(3)], &[part(0, 1), part(1, 1), part(2, 1)]),
            (&[request(2)], &[part(0, 1)]),
            (&[request(1)], &[part(0, 1), part(1, 1)]),
            (&[request(2)], &[part(0, 60), part(60, 5)]),
            (&[high], &[part(0, 5)]),
        ] {
            assert!(check(requests, parts).is_err(), "{requests:?} {parts:?}");
        }
    }

    #[test]
    fn a_chain_has_each_request_with_its_parts_and_signals_the_last_alone() {
        let mut chain = ReadChain::with_capacity(4, 4);
        let mut memory = [0_u8; 64];
        let start = memory.as_mut_ptr();
        let id = WrId {
            index: 3,
            generation: 9,
            position: 0,
        };
        let requests = [request(2), request(1), request(1)];
        let parts = [part(0, 4), part(8, 4), part(16, 8), part(32, 1)];
        let first = chain.build(id, start, LocalKey(5), &requests, &parts);
        assert_eq!(chain.index_of(first), Some(0));
        let chained = &chain.requests;
        assert_eq!(chained.len(), 3);
        for (position, wr) in chained.iter().enumerate() {
            let last = position == 2;
            assert_eq!(
                WrId::decode(wr.wr_id),
                WrId {
                    position: position as u16,
                    ..id
                }
            );
            assert_eq!(wr.send_flags == IBV_SEND_SIGNALED, last);
            assert_eq!(wr.next.is_null(), last);
            assert_eq!(chain.index_of(wr.next), (!last).then_some(position + 1));
            assert_eq!(wr.num_sge as usize, requests[position].part_count);
        }
        let offsets: Vec<_> = chain
            .parts
            .iter()
            .map(|sge| (sge.addr - start.addr() as u64, sge.length, sge.lkey))
            .collect();
        assert_eq!(offsets, [(0, 4, 5), (8, 4, 5), (16, 8, 5), (32, 1, 5)]);
        assert!(std::ptr::eq(chained[1].sg_list, &raw const chain.parts[2]));
    }
}
