//! The machine's devices as the peer's rails.

use std::fs;
use std::net::IpAddr;
use std::sync::Arc;

use atlas_rdma::attributes::{GidType, LinkLayer, PortState};
use atlas_rdma::choose::{
    ChooseError, PortView, RAILS_MAX, RailChoice, Wanted, choose_gid, choose_rails, shares_subnet,
};
use atlas_rdma::mapping::MappingMode;
use atlas_rdma::publish::{self, Phase, Publication, PublishOptions};
use atlas_rdma::{Context, Path, Pd, RdmaError};
use expert_wire::verbs::{
    GID_INFINIBAND, GID_ROCE_V1, GID_ROCE_V2, LINK_ETHERNET, LINK_INFINIBAND, QpEndpoint, RailInfo,
    Region,
};
use tracing::{debug, info, warn};

use super::fabric::{Fabric, PublishRequest, Published, RailState, Responder};
use crate::{PeerError, VerbsOptions};

/// The chosen ports, each with a protection domain for as long as the peer lives.
pub(super) struct Devices {
    rails: Vec<DeviceRail>,
}

struct DeviceRail {
    name: String,
    pd: Arc<Pd>,
    port: u8,
    /// Index of the GID where the caller named one; else it is looked up each time.
    gid_index: Option<u32>,
}

/// Whether this machine has no device at all, so that nobody expects verbs of it.
pub(super) fn is_absent() -> bool {
    fs::read_dir("/sys/class/infiniband").map_or(true, |mut devices| devices.next().is_none())
}

impl Devices {
    /// Opens the devices of the rails that are wanted.
    pub(super) fn open(options: &VerbsOptions) -> Result<Self, PeerError> {
        let mut contexts = Vec::new();
        for device in atlas_rdma::devices()? {
            match Context::open(&device.name) {
                Ok(context) => contexts.push(context),
                // Named ones are missed by the choice, which says what there is.
                Err(e) if is_named(options, &device.name) => return Err(e.into()),
                Err(e) => debug!("{}: {e}", device.name),
            }
        }
        let views = views(&contexts)?;
        let choices = match &options.rails {
            Some(wanted) => choose_rails(&views, wanted.clone())?,
            None => every_rail(&views)?,
        };
        for (a, b) in shares_subnet(&choices) {
            warn!(
                "{} and {} are in one subnet: without rules for routing and ARP both may use one port; watch the counters of both",
                choices[a].device, choices[b].device
            );
        }
        let rails = choices
            .iter()
            .enumerate()
            .map(|(i, choice)| {
                let name = rail_name(choice);
                info!("rail {i}: {name}, {}, GID {}", choice.why, choice.gid.why);
                let context = contexts.iter().find(|c| c.name() == choice.device);
                let context = context.ok_or(RdmaError::NoDevice)?;
                Ok(DeviceRail {
                    name,
                    pd: Pd::new(context)?,
                    port: choice.port,
                    gid_index: match &options.rails {
                        Some(Wanted::Explicit(specs)) => specs.get(i).and_then(|s| s.gid_index),
                        _ => None,
                    },
                })
            })
            .collect::<Result<_, PeerError>>()?;
        Ok(Self { rails })
    }
}

fn is_named(options: &VerbsOptions, device: &str) -> bool {
    match &options.rails {
        Some(Wanted::Explicit(specs)) => specs.iter().any(|s| s.device == device),
        _ => false,
    }
}

fn views(contexts: &[Arc<Context>]) -> Result<Vec<PortView>, RdmaError> {
    let mut views = Vec::new();
    for context in contexts {
        for port in 1..=context.attributes().ports {
            views.push(view(context, port)?);
        }
    }
    Ok(views)
}

fn view(context: &Context, port: u8) -> Result<PortView, RdmaError> {
    Ok(PortView {
        device: context.name().to_owned(),
        port,
        attributes: context.port(port)?,
        gids: context.gid_table(port)?,
    })
}

/// All ports that can be used, the best [`RAILS_MAX`] of them.
fn every_rail(views: &[PortView]) -> Result<Vec<RailChoice>, ChooseError> {
    let choose = |count| {
        let preferred = Vec::new();
        choose_rails(views, Wanted::Automatic { count, preferred })
    };
    match choose(RAILS_MAX) {
        Err(ChooseError::TooFew { usable, .. }) => choose(usable.max(1)),
        other => other,
    }
}

fn rail_name(choice: &RailChoice) -> String {
    match choice.port {
        1 => choice.device.clone(),
        port => format!("{}:{port}", choice.device),
    }
}

impl Fabric for Devices {
    fn names(&self) -> Vec<String> {
        self.rails.iter().map(|r| r.name.clone()).collect()
    }

    fn state(&self, rail: usize) -> Result<RailState, PeerError> {
        let rail = &self.rails[rail];
        let context = rail.pd.context();
        let view = view(context, rail.port)?;
        let port = &view.attributes;
        if port.state != PortState::Active {
            return Err(PeerError::LinkDown {
                rail: rail.name.clone(),
                state: format!("{:?}", port.state).to_lowercase(),
            });
        }
        let gid = choose_gid(&view, rail.gid_index).map_err(|source| PeerError::Gid {
            rail: rail.name.clone(),
            source,
        })?;
        let limits = context.attributes();
        let depth = |max: u32| u8::try_from(max).unwrap_or(u8::MAX).max(1);
        let entry = &gid.entry;
        let is_ethernet = port.link_layer == LinkLayer::Ethernet;
        let has_address = is_ethernet && entry.gid.is_routable();
        let info = RailInfo {
            name: rail.name.clone(),
            link_layer: match port.link_layer {
                LinkLayer::Ethernet => LINK_ETHERNET,
                LinkLayer::InfiniBand => LINK_INFINIBAND,
            },
            gid_type: match entry.kind {
                GidType::InfiniBand => GID_INFINIBAND,
                GidType::RoceV1 => GID_ROCE_V1,
                GidType::RoceV2 => GID_ROCE_V2,
            },
            mtu_code: port.active_mtu.code() as u8,
            prefix_len: entry.prefix_len.filter(|_| has_address),
            lid: port.lid,
            reads_max: depth(limits.max_qp_rd_atom),
            qps_max: 1,
            link_mbit_per_s: u32::try_from(port.link_mbit_per_s).unwrap_or(u32::MAX),
            gid: entry.gid.0,
            ip: has_address.then(|| -> IpAddr { entry.gid.ip() }),
        };
        Ok(RailState {
            info,
            port: rail.port,
            link_layer: port.link_layer,
            mtu: port.active_mtu,
            gid_index: entry.index,
            reads_in_max: depth(limits.max_qp_rd_atom),
            reads_out_max: depth(limits.max_qp_init_rd_atom),
        })
    }

    fn publish(&self, request: &PublishRequest<'_>) -> Result<Box<dyn Published>, PeerError> {
        let files: Vec<publish::PublishFile> = request
            .files
            .iter()
            .map(|file| publish::PublishFile {
                label: file.path.display().to_string(),
                file: file.file.clone(),
                extents: file.extents.clone(),
            })
            .collect();
        let options = PublishOptions {
            allow_rw_map: request.allow_rw_map,
            max_copy_bytes: request.copy_bytes_max,
            threads: request.threads,
            stop: request.cancel.clone(),
            ..PublishOptions::default()
        };
        let rails: Vec<Arc<Pd>> = self.rails.iter().map(|r| r.pd.clone()).collect();
        let progress = |p: publish::Progress| {
            let what = match p.phase {
                Phase::Reading => "read",
                Phase::Registering => "registered",
            };
            (request.progress)(what, p.done_bytes, p.total_bytes);
        };
        let publication = publish::publish(&rails, &files, &options, &progress)?;
        Ok(Box::new(DevicePublication {
            indexes: request.files.iter().map(|f| f.index).collect(),
            modes: publication.modes().iter().map(|m| m.mode).collect(),
            publication: Some(publication),
        }))
    }

    fn responder(&self, rail: usize, pkey_index: u16) -> Result<Box<dyn Responder>, PeerError> {
        let rail = &self.rails[rail];
        let responder = atlas_rdma::Responder::new(&rail.pd, rail.port, pkey_index)?;
        Ok(Box::new(responder))
    }
}

/// Registered memory of devices; files have the source's indexes for the outside.
struct DevicePublication {
    publication: Option<Publication>,
    /// The source's index of each published file, ascending.
    indexes: Vec<u32>,
    /// Each file's.
    modes: Vec<MappingMode>,
}

impl Published for DevicePublication {
    fn regions(&self, rail: usize) -> Vec<Region> {
        let regions = self.publication.as_ref().map(|p| p.regions(rail));
        let of_source = |r: &publish::Region| Region {
            file: self.indexes[r.file as usize],
            rkey: r.rkey,
            file_offset: r.file_offset,
            bytes: r.bytes,
            addr: r.addr,
        };
        regions.unwrap_or_default().iter().map(of_source).collect()
    }

    fn mapping(&self) -> String {
        let mut kinds: Vec<(String, u64)> = Vec::new();
        let reports = self.publication.as_ref().map(Publication::modes);
        for report in reports.unwrap_or_default() {
            let pages = match report.pages {
                Some(pages) => format!(" in {pages}"),
                None => String::new(),
            };
            let kind = format!(
                "{}{pages} of files on {}, because {}",
                report.mode, report.file_system, report.why
            );
            match kinds.iter_mut().find(|(k, _)| *k == kind) {
                Some((_, bytes)) => *bytes += report.bytes,
                None => kinds.push((kind, report.bytes)),
            }
        }
        let lines = kinds.iter().map(|(kind, n)| format!("{n} bytes by {kind}"));
        lines.collect::<Vec<_>>().join("; ")
    }

    fn is_mapped(&self) -> bool {
        self.modes.iter().all(|m| *m != MappingMode::Copy)
    }

    fn touches(&self, file: u32) -> bool {
        let published = self.indexes.binary_search(&file);
        published.is_ok_and(|i| self.modes[i] == MappingMode::SharedReadWrite)
    }

    fn revoke(&mut self, file: u32) {
        if let (Ok(i), Some(publication)) =
            (self.indexes.binary_search(&file), &mut self.publication)
        {
            publication.revoke(i as u32);
        }
    }

    fn deregister(&mut self) {
        // The memory goes with the drop, after the queue pairs.
        if let Some(publication) = &mut self.publication {
            publication.deregister();
        }
    }
}

impl Responder for atlas_rdma::Responder {
    fn local(&self) -> QpEndpoint {
        let local = self.local();
        QpEndpoint {
            qpn: local.qpn,
            psn: local.psn,
        }
    }

    fn connect(&mut self, path: &Path) -> Result<(), PeerError> {
        Ok(atlas_rdma::Responder::connect(self, path)?)
    }
}
