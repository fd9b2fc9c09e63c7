//! Ports of this machine: found, chosen, opened, and with the arena registered.

use std::sync::Arc;

use atlas_rdma::attributes::LinkLayer;
use atlas_rdma::choose::{
    ChooseError, PortView, RailChoice, RailSpec, Wanted, choose_rails, shares_subnet,
};
use atlas_rdma::sysfs::Sysfs;
use atlas_rdma::{Context, LandingRegions, Pd, RdmaError, ReadQueueOptions};
use expert_arena::ExpertArena;

use super::options::{RailSlot, RailsWanted, VerbsOptions};
use super::{PARTS_MAX, POSTS_MAX, WORK_REQUESTS_MAX};

/// A port that became a rail. *Field order is drop order*: registrations, domain, device.
pub(crate) struct OwnRail {
    landing: Arc<LandingRegions>,
    context: Arc<Context>,
    port: u8,
    gid_index: Option<u32>,
    is_soft: bool,
}

/// A port that is to become a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundRail {
    device: String,
    port: u8,
    /// Index that was asked for.
    gid_index: Option<u32>,
}

/// Chooses rails among the ports of this machine. Opens devices to look at them, no more.
///
/// A named port that does not work now is a rail all the same: it comes up when the port does.
///
/// *Errors*: no library, no kernel, no device, no port of that name, or none that fits; text with
/// what there is.
pub(crate) fn find_rails(options: &VerbsOptions) -> Result<Vec<FoundRail>, String> {
    let (views, trouble) = views()?;
    let mut choices: Vec<RailChoice> = Vec::new();
    let mut found: Vec<FoundRail> = Vec::new();
    let wants: Vec<(Wanted, Option<u32>)> = match &options.rails {
        RailsWanted::List(specs) => specs
            .iter()
            .map(|spec| (Wanted::Explicit(vec![spec.clone()]), spec.gid_index))
            .collect(),
        RailsWanted::Slots(slots) => slots
            .iter()
            .map(|slot| (wanted_of(slot), slot.gid_index))
            .collect(),
    };
    for (wanted, gid_index) in wants {
        let is_free = |v: &&PortView| {
            !found
                .iter()
                .any(|f| f.device == v.device && f.port == v.port)
        };
        let free: Vec<PortView> = views.iter().filter(is_free).cloned().collect();
        let is_named = matches!(wanted, Wanted::Explicit(_));
        match choose_rails(&free, wanted) {
            Ok(mut more) => {
                found.extend(more.iter().map(|c| FoundRail {
                    device: c.device.clone(),
                    port: c.port,
                    gid_index,
                }));
                choices.append(&mut more);
            }
            Err(error @ (ChooseError::NotActive { .. } | ChooseError::Gid { .. })) => {
                tracing::warn!("{error}; it is tried again and again");
                if let ChooseError::NotActive { spec, .. } | ChooseError::Gid { spec, .. } = error {
                    found.push(FoundRail {
                        port: spec.port.unwrap_or(1),
                        gid_index: spec.gid_index,
                        device: spec.device,
                    });
                }
            }
            Err(error) if is_named || found.is_empty() || options.require => {
                return Err(match trouble.is_empty() {
                    true => error.to_string(),
                    false => format!("{error} ({})", trouble.join("; ")),
                });
            }
            Err(error) => tracing::warn!("one rail less than was asked for: {error}"),
        }
    }
    for (a, b) in shares_subnet(&choices) {
        tracing::warn!(
            "rails {} and {} are in one subnet: ARP may send both through one port; give each its own subnet, or set arp_ignore=1 and arp_announce=2 and check the port counters",
            choices[a].device,
            choices[b].device
        );
    }
    for choice in &choices {
        tracing::info!(
            "rail {} port {}: {}; GID {} ({}) index {}: {}",
            choice.device,
            choice.port,
            choice.why,
            choice.gid.entry.gid,
            choice.gid.entry.kind,
            choice.gid.entry.index,
            choice.gid.why
        );
    }
    Ok(found)
}

fn wanted_of(slot: &RailSlot) -> Wanted {
    match &slot.device {
        Some(device) => Wanted::Explicit(vec![RailSpec {
            device: device.clone(),
            port: None,
            gid_index: slot.gid_index,
        }]),
        None => Wanted::Automatic {
            count: 1,
            preferred: slot.preferred.iter().cloned().collect(),
        },
    }
}

/// All ports, and what was wrong with the others.
fn views() -> Result<(Vec<PortView>, Vec<String>), String> {
    let devices = atlas_rdma::devices().map_err(|e| e.to_string())?;
    let mut views = Vec::new();
    let mut trouble = Vec::new();
    for device in devices {
        match Context::open(&device.name) {
            Ok(context) => {
                for port in 1..=context.attributes().ports {
                    match view(&context, port) {
                        Ok(view) => views.push(view),
                        Err(e) => trouble.push(e.to_string()),
                    }
                }
            }
            Err(e) => trouble.push(e.to_string()),
        }
    }
    if views.is_empty() {
        return Err(trouble.join("; "));
    }
    for why in &trouble {
        tracing::warn!("an RDMA device is left out: {why}");
    }
    Ok((views, trouble))
}

fn view(context: &Arc<Context>, port: u8) -> Result<PortView, RdmaError> {
    Ok(PortView {
        device: context.name().to_owned(),
        port,
        attributes: context.port(port)?,
        gids: context.gid_table(port)?,
    })
}

impl OwnRail {
    /// Opens the device of a rail and registers the arena on it.
    pub(crate) fn open(
        found: &FoundRail,
        arena: &Arc<ExpertArena>,
        options: &VerbsOptions,
    ) -> Result<Self, RdmaError> {
        let context = Context::open(&found.device)?;
        let pd = Pd::new(&context)?;
        let landing = LandingRegions::register(&pd, arena, options.slice_max_bytes)?;
        Ok(Self {
            landing,
            context,
            port: found.port,
            gid_index: found.gid_index,
            is_soft: Sysfs::default().is_soft(&found.device),
        })
    }

    /// Whether there is no card behind it: soft-RoCE.
    pub(super) fn is_soft(&self) -> bool {
        self.is_soft
    }

    /// Device, and port where it is not the first.
    pub(crate) fn name(&self) -> String {
        match self.port {
            1 => self.context.name().to_owned(),
            port => format!("{}:{port}", self.context.name()),
        }
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn port(&self) -> u8 {
        self.port
    }

    pub(super) fn landing(&self) -> &Arc<LandingRegions> {
        &self.landing
    }

    /// The port and its GID as they are now: a GID's index moves when addresses change.
    pub(super) fn look(&self) -> Result<RailChoice, String> {
        let view = view(&self.context, self.port).map_err(|e| e.to_string())?;
        let spec = RailSpec {
            device: self.context.name().to_owned(),
            port: Some(self.port),
            gid_index: self.gid_index,
        };
        choose_rails(&[view], Wanted::Explicit(vec![spec]))
            .map_err(|e| e.to_string())?
            .pop()
            .ok_or_else(|| "no rail was chosen".into())
    }

    pub(super) fn queue_options(&self, options: &VerbsOptions) -> ReadQueueOptions {
        ReadQueueOptions {
            port: self.port,
            pkey_index: options.pkey_index,
            posts_max: POSTS_MAX,
            work_requests_max: WORK_REQUESTS_MAX,
            sge_max: PARTS_MAX,
        }
        .limited_to(self.context.attributes())
    }
}

/// The wire's number of a link layer.
pub(super) fn link_code(link_layer: LinkLayer) -> u8 {
    match link_layer {
        LinkLayer::InfiniBand => expert_wire::verbs::LINK_INFINIBAND,
        LinkLayer::Ethernet => expert_wire::verbs::LINK_ETHERNET,
    }
}
