//! The ports that become rails.

use super::gid::{self, GidChoice, GidRefusal, choose_gid};
use super::pairing::Endpoint;
use super::spec::{RAILS_MAX, RailSpec};
use crate::attributes::{GidEntry, LinkLayer, PortAttributes, PortState};
use std::cmp::Reverse;
use std::fmt;

/// A port and its GID table as they are now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortView {
    /// Name of the device.
    pub device: String,
    /// Port, from 1.
    pub port: u8,
    /// What the port says of itself.
    pub attributes: PortAttributes,
    /// The entries of its GID table that are not empty, in any order.
    pub gids: Vec<GidEntry>,
}

/// Which rails are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Exactly these, in this order.
    Explicit(Vec<RailSpec>),
    /// So many, chosen by what the ports say.
    Automatic {
        /// Rails.
        count: usize,
        /// Devices to take first, in this order, where they exist and work.
        preferred: Vec<String>,
    },
}

/// A port that becomes a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailChoice {
    /// Name of the device.
    pub device: String,
    /// Port, from 1.
    pub port: u8,
    /// What the port says of itself.
    pub attributes: PortAttributes,
    /// Its GID.
    pub gid: GidChoice,
    /// Why this port.
    pub why: String,
}

impl RailChoice {
    /// This rail as the other end sees it.
    pub fn endpoint(&self) -> Endpoint {
        let entry = &self.gid.entry;
        match self.attributes.link_layer {
            LinkLayer::Ethernet => Endpoint::ethernet(entry.gid, entry.prefix_len),
            LinkLayer::InfiniBand => Endpoint::infiniband(entry.gid, self.attributes.lid),
        }
    }
}

/// No rails as wanted. The texts list what there is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChooseError {
    /// A count of rails that cannot be.
    #[error("{count} rails were asked for, 1 to {RAILS_MAX} are possible; change the count")]
    Count {
        /// Rails asked for.
        count: usize,
    },
    /// No device of this name.
    #[error("rail '{spec}': there is no device '{}'; there is {present}; use one of these names", spec.device)]
    UnknownDevice {
        /// The rail.
        spec: RailSpec,
        /// What there is.
        present: Ports,
    },
    /// The device has no such port.
    #[error(
        "rail '{spec}': the device has no such port; there is {present}; use one of these ports"
    )]
    UnknownPort {
        /// The rail.
        spec: RailSpec,
        /// The ports of the device.
        present: Ports,
    },
    /// The port, or every port of the device, does not work now.
    #[error(
        "rail '{spec}': no active port; there is {present}; connect the link, bring its interface up (ip link set … \
         up), or use another device"
    )]
    NotActive {
        /// The rail.
        spec: RailSpec,
        /// The port asked for, or the ports of the device.
        present: Ports,
    },
    /// The port works, but has no GID to use.
    #[error("rail '{spec}': {source}")]
    Gid {
        /// The rail.
        spec: RailSpec,
        /// What is wrong.
        source: GidRefusal,
    },
    /// Two rails that turn out to be the same port.
    #[error(
        "rails '{first}' and '{second}' are both {device} port {port}; a rail is a path of its own, leave one out or \
         name the ports"
    )]
    SamePort {
        /// One rail.
        first: RailSpec,
        /// The other.
        second: RailSpec,
        /// Their device.
        device: String,
        /// Their port.
        port: u8,
    },
    /// Fewer usable ports than rails.
    #[error(
        "{count} rails were asked for and {usable} ports can be used: {present}; ask for at most {usable}, or bring \
         another port up"
    )]
    TooFew {
        /// Rails asked for.
        count: usize,
        /// Ports that could be used.
        usable: usize,
        /// All ports, each with the reason where it cannot be used.
        present: Ports,
    },
}

/// Ports in words, for errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ports(Vec<String>);

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            f.write_str("no port at all")
        } else {
            f.write_str(&self.0.join("; "))
        }
    }
}

impl Ports {
    fn of<'a>(views: impl IntoIterator<Item = &'a PortView>) -> Self {
        Self(views.into_iter().map(describe).collect())
    }
}

/// The ports that become rails, in the order of the rails.
///
/// Explicit rails are matched by exact name; a missing port is the device's first active one. Automatic rails are
/// active ports with a usable GID: preferred devices first, then RoCE v2 or InfiniBand before RoCE v1, routable before
/// link-local, fast links before slow ones, and names and ports in their order.
///
/// # Errors
///
/// An explicit rail that does not exist or does not work, or fewer usable ports than rails. Nothing is substituted; a
/// caller that can do with fewer rails asks again.
pub fn choose_rails(views: &[PortView], wanted: Wanted) -> Result<Vec<RailChoice>, ChooseError> {
    let count = match &wanted {
        Wanted::Explicit(specs) => specs.len(),
        Wanted::Automatic { count, .. } => *count,
    };
    if !(1..=RAILS_MAX).contains(&count) {
        return Err(ChooseError::Count { count });
    }
    match wanted {
        Wanted::Explicit(specs) => explicit_rails(views, &specs),
        Wanted::Automatic { count, preferred } => automatic_rails(views, count, &preferred),
    }
}

fn explicit_rails(views: &[PortView], specs: &[RailSpec]) -> Result<Vec<RailChoice>, ChooseError> {
    let mut rails: Vec<RailChoice> = Vec::with_capacity(specs.len());
    for spec in specs {
        let rail = explicit_rail(views, spec)?;
        let same = |other: &RailChoice| other.device == rail.device && other.port == rail.port;
        if let Some(i) = rails.iter().position(same) {
            return Err(ChooseError::SamePort {
                first: specs[i].clone(),
                second: spec.clone(),
                device: rail.device,
                port: rail.port,
            });
        }
        rails.push(rail);
    }
    Ok(rails)
}

fn explicit_rail(views: &[PortView], spec: &RailSpec) -> Result<RailChoice, ChooseError> {
    let mut ports: Vec<&PortView> = views.iter().filter(|v| v.device == spec.device).collect();
    ports.sort_by_key(|view| view.port);
    if ports.is_empty() {
        return Err(ChooseError::UnknownDevice {
            spec: spec.clone(),
            present: Ports::of(views),
        });
    }
    if let Some(port) = spec.port {
        let present = Ports::of(ports.iter().copied());
        ports.retain(|view| view.port == port);
        if ports.is_empty() {
            return Err(ChooseError::UnknownPort {
                spec: spec.clone(),
                present,
            });
        }
    }
    let Some(view) = ports.iter().find(|view| is_active(view)) else {
        return Err(ChooseError::NotActive {
            spec: spec.clone(),
            present: Ports::of(ports),
        });
    };
    let gid = choose_gid(view, spec.gid_index).map_err(|source| ChooseError::Gid {
        spec: spec.clone(),
        source,
    })?;
    let why = match spec.port {
        Some(_) => format!("asked for as '{spec}'"),
        None => format!("asked for as '{spec}', its first active port"),
    };
    Ok(rail(view, gid, why))
}

fn automatic_rails(
    views: &[PortView],
    count: usize,
    preferred: &[String],
) -> Result<Vec<RailChoice>, ChooseError> {
    let mut usable: Vec<(&PortView, GidChoice)> = Vec::new();
    let mut present = Vec::with_capacity(views.len());
    for view in views {
        let mut words = describe(view);
        if is_active(view) {
            match choose_gid(view, None) {
                Ok(gid) => usable.push((view, gid)),
                Err(refusal) => words = format!("{words} ({refusal})"),
            }
        }
        present.push(words);
    }
    if usable.len() < count {
        return Err(ChooseError::TooFew {
            count,
            usable: usable.len(),
            present: Ports(present),
        });
    }
    usable.sort_by_key(|(view, gid)| {
        let speed = Reverse(view.attributes.link_mbit_per_s);
        (gid::standing(&gid.entry), speed, &view.device, view.port)
    });
    // A preferred device gives one port, the best of those that it has.
    let mut taken: Vec<usize> = Vec::with_capacity(count);
    for name in preferred {
        let next = (0..usable.len()).find(|i| !taken.contains(i) && usable[*i].0.device == *name);
        taken.extend(next);
    }
    taken.truncate(count);
    let preferred_count = taken.len();
    for i in 0..usable.len() {
        if taken.len() < count && !taken.contains(&i) {
            taken.push(i);
        }
    }
    let choose = |(order, i): (usize, usize)| {
        let (view, gid) = &usable[i];
        let why = if order < preferred_count {
            "a preferred device".to_owned()
        } else {
            format!(
                "the best of {} usable ports that were left: {}, {} Mbit/s",
                usable.len() - order,
                gid.why,
                view.attributes.link_mbit_per_s
            )
        };
        rail(view, gid.clone(), why)
    };
    Ok(taken.into_iter().enumerate().map(choose).collect())
}

fn rail(view: &PortView, gid: GidChoice, why: String) -> RailChoice {
    RailChoice {
        device: view.device.clone(),
        port: view.port,
        attributes: view.attributes.clone(),
        gid,
        why,
    }
}

fn is_active(view: &PortView) -> bool {
    view.attributes.state == PortState::Active
}

/// One port in words: `rxe0 port 1 (Ethernet, active)`.
fn describe(view: &PortView) -> String {
    let link = match view.attributes.link_layer {
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::InfiniBand => "InfiniBand",
    };
    let state = match view.attributes.state {
        PortState::Down => "down".to_owned(),
        PortState::Initializing => "initializing".to_owned(),
        PortState::Armed => "armed".to_owned(),
        PortState::Active => "active".to_owned(),
        PortState::ActiveDefer => "active, link lost".to_owned(),
        PortState::Unknown(code) => format!("state {code}"),
    };
    format!("{} port {} ({link}, {state})", view.device, view.port)
}
