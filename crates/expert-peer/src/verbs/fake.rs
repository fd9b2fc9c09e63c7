//! Rails without devices, which record what is done with them and in which order.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use atlas_rdma::Path;
use atlas_rdma::RdmaError;
use atlas_rdma::attributes::{LinkLayer, Mtu};
use expert_wire::verbs::{GID_ROCE_V2, LINK_ETHERNET, QpEndpoint, RailInfo, Region};

use super::fabric::{Fabric, PublishRequest, Published, RailState, Responder};
use crate::PeerError;

/// What tests see of fake rails and change in them.
#[derive(Default)]
pub(super) struct Knobs {
    pub(super) log: Mutex<Vec<String>>,
    /// Paths that queue pairs were connected by.
    pub(super) paths: Mutex<Vec<Path>>,
    /// Publications yet to fail.
    pub(super) failing_publications: AtomicU32,
    /// Connecting of queue pairs with this number fails; 0 for none.
    pub(super) failing_qpn: AtomicU32,
    /// The links have gone.
    pub(super) is_down: AtomicBool,
    /// Queue pairs that exist.
    pub(super) qps: AtomicU32,
    /// Publications made, for their names.
    publications: AtomicU32,
    next_qpn: AtomicU32,
    /// Regions are at most this long; 0 for no limit.
    pub(super) region_bytes_max: AtomicU32,
}

impl Knobs {
    pub(super) fn note(&self, what: impl Into<String>) {
        self.log.lock().unwrap().push(what.into());
    }

    /// What was recorded since the last call.
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

pub(super) struct FakeRails {
    pub(super) knobs: Arc<Knobs>,
    pub(super) rails: usize,
}

impl Fabric for FakeRails {
    fn names(&self) -> Vec<String> {
        (0..self.rails).map(|i| format!("fake{i}")).collect()
    }

    fn state(&self, rail: usize) -> Result<RailState, PeerError> {
        if self.knobs.is_down.load(Ordering::SeqCst) {
            return Err(PeerError::LinkDown {
                rail: format!("fake{rail}"),
                state: "down".into(),
            });
        }
        let mut gid = [0; 16];
        gid[15] = rail as u8 + 1;
        Ok(RailState {
            info: RailInfo {
                name: format!("fake{rail}"),
                link_layer: LINK_ETHERNET,
                gid_type: GID_ROCE_V2,
                mtu_code: Mtu::B4096.code() as u8,
                prefix_len: Some(24),
                lid: 0,
                reads_max: 32,
                qps_max: 1,
                link_mbit_per_s: 100_000,
                gid,
                ip: None,
            },
            port: 1,
            link_layer: LinkLayer::Ethernet,
            mtu: Mtu::B4096,
            gid_index: 3,
            reads_in_max: 32,
            reads_out_max: 32,
        })
    }

    fn publish(&self, request: &PublishRequest<'_>) -> Result<Box<dyn Published>, PeerError> {
        let knobs = &self.knobs;
        let failing = &knobs.failing_publications;
        if failing
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
            .is_ok()
        {
            knobs.note("publish fails");
            return Err(RdmaError::NoDevice.into());
        }
        let number = knobs.publications.fetch_add(1, Ordering::SeqCst) + 1;
        knobs.note(format!("publish {number}"));
        let max = match knobs.region_bytes_max.load(Ordering::SeqCst) {
            0 => u64::MAX,
            n => n.into(),
        };
        let mut regions = Vec::new();
        for file in request.files {
            for &(offset, bytes) in &file.extents {
                let mut at = offset;
                while at < offset + bytes {
                    let bytes = (offset + bytes - at).min(max);
                    regions.push(Region {
                        file: file.index,
                        rkey: number,
                        file_offset: at,
                        bytes,
                        addr: (u64::from(file.index + 1) << 32) + at,
                    });
                    at += bytes;
                }
            }
        }
        (request.progress)("registered", 1, 1);
        Ok(Box::new(FakePublication {
            knobs: knobs.clone(),
            number,
            regions,
        }))
    }

    fn responder(&self, rail: usize, _: u16) -> Result<Box<dyn Responder>, PeerError> {
        let knobs = self.knobs.clone();
        knobs.qps.fetch_add(1, Ordering::SeqCst);
        let qpn = knobs.next_qpn.fetch_add(1, Ordering::SeqCst) + 1;
        Ok(Box::new(FakeQp { knobs, rail, qpn }))
    }
}

struct FakePublication {
    knobs: Arc<Knobs>,
    number: u32,
    regions: Vec<Region>,
}

impl Published for FakePublication {
    fn regions(&self, rail: usize) -> Vec<Region> {
        let of_rail = |r: &Region| Region {
            rkey: r.rkey * 100 + rail as u32,
            ..*r
        };
        self.regions.iter().map(of_rail).collect()
    }

    fn mapping(&self) -> String {
        "nothing is mapped".into()
    }

    fn is_mapped(&self) -> bool {
        true
    }

    fn touches(&self, _: u32) -> bool {
        false
    }

    fn revoke(&mut self, file: u32) {
        self.knobs.note(format!("revoke {file} of {}", self.number));
        self.regions.retain(|r| r.file != file);
    }

    fn deregister(&mut self) {
        self.knobs.note(format!("deregister {}", self.number));
        self.regions.clear();
    }
}

impl Drop for FakePublication {
    fn drop(&mut self) {
        self.knobs.note(format!("unmap {}", self.number));
    }
}

struct FakeQp {
    knobs: Arc<Knobs>,
    rail: usize,
    qpn: u32,
}

impl Responder for FakeQp {
    fn local(&self) -> QpEndpoint {
        QpEndpoint {
            qpn: self.qpn,
            psn: 7,
        }
    }

    fn connect(&mut self, path: &Path) -> Result<(), PeerError> {
        if self.knobs.failing_qpn.load(Ordering::SeqCst) == self.qpn {
            return Err(RdmaError::NoDevice.into());
        }
        self.knobs.paths.lock().unwrap().push(path.clone());
        Ok(())
    }
}

impl Drop for FakeQp {
    fn drop(&mut self) {
        self.knobs.qps.fetch_sub(1, Ordering::SeqCst);
        self.knobs
            .note(format!("destroy {} on {}", self.qpn, self.rail));
    }
}
