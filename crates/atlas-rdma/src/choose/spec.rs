//! What a user writes to name a rail.

use std::fmt;
use std::str::FromStr;

/// Most rails of one connection, as the protocol has it.
pub const RAILS_MAX: usize = 8;

/// Longest device name that the kernel gives (`IB_DEVICE_NAME_MAX` less the zero).
const DEVICE_NAME_BYTES_MAX: usize = 63;

/// A rail as written: `dev[:port[:gid]]`.
///
/// The device is an exact name, never a pattern. What is left out is chosen from what the device says. The port may be
/// empty before a GID index (`rxe0::3`): the port that would be chosen anyway, and that index.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RailSpec {
    /// Name of the device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: Option<u8>,
    /// Index in the port's GID table.
    pub gid_index: Option<u32>,
}

/// A text that names no rail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RailSpecError {
    /// Nothing at all where a rail was expected.
    #[error("rail {position} of '{list}' is empty; write dev[:port[:gid]], separated by commas")]
    EmptyEntry {
        /// Which of the list, from 1.
        position: usize,
        /// The list.
        list: String,
    },
    /// No device name.
    #[error("rail '{text}' has no device; write dev[:port[:gid]], 'ibv_devices' lists the names")]
    NoDevice {
        /// What was written.
        text: String,
    },
    /// A device name that no device can have.
    #[error(
        "device '{device}' of rail '{text}' cannot be a device name: at most 63 bytes, and no blanks, control \
         characters or slashes; 'ibv_devices' lists the names"
    )]
    BadDevice {
        /// The device part.
        device: String,
        /// What was written.
        text: String,
    },
    /// A port that is no number from 1 to 255.
    #[error(
        "port '{port}' of rail '{text}' is not a number from 1 to 255; ports are counted from 1"
    )]
    BadPort {
        /// The port part.
        port: String,
        /// What was written.
        text: String,
    },
    /// A GID index that is no number.
    #[error(
        "GID index '{gid}' of rail '{text}' is not a number from 0 to 4294967295; leave it out to have it chosen"
    )]
    BadGid {
        /// The GID part.
        gid: String,
        /// What was written.
        text: String,
    },
    /// More parts than there are.
    #[error("rail '{text}' has {parts} parts, at most 3 are known; write dev[:port[:gid]]")]
    TooManyParts {
        /// What was written.
        text: String,
        /// Parts found.
        parts: usize,
    },
    /// More rails than a connection has.
    #[error("{count} rails were given, the limit is {RAILS_MAX}; leave some out")]
    TooMany {
        /// Rails found.
        count: usize,
    },
    /// The same port twice: two rails there share one path.
    #[error(
        "rails '{first}' and '{second}' are the same port; a rail is a path of its own, leave one out"
    )]
    Duplicate {
        /// The first one.
        first: RailSpec,
        /// The one that repeats it.
        second: RailSpec,
    },
}

impl FromStr for RailSpec {
    type Err = RailSpecError;

    fn from_str(text: &str) -> Result<Self, RailSpecError> {
        let parts: Vec<&str> = text.split(':').collect();
        let written = || text.to_owned();
        let (device, port, gid) = match parts[..] {
            [device] => (device, None, None),
            [device, port] => (device, Some(port), None),
            [device, port, gid] => (device, Some(port), Some(gid)),
            _ => {
                return Err(RailSpecError::TooManyParts {
                    text: written(),
                    parts: parts.len(),
                });
            }
        };
        if device.is_empty() {
            return Err(RailSpecError::NoDevice { text: written() });
        }
        if !is_device_name(device) {
            return Err(RailSpecError::BadDevice {
                device: device.to_owned(),
                text: written(),
            });
        }
        let port = match port {
            None => None,
            Some("") if gid.is_some() => None,
            Some(port) => match number(port) {
                Some(port @ 1..) => Some(port),
                _ => {
                    return Err(RailSpecError::BadPort {
                        port: port.to_owned(),
                        text: written(),
                    });
                }
            },
        };
        let gid_index = match gid {
            None => None,
            Some(gid) => Some(number(gid).ok_or_else(|| RailSpecError::BadGid {
                gid: gid.to_owned(),
                text: written(),
            })?),
        };
        Ok(Self {
            device: device.to_owned(),
            port,
            gid_index,
        })
    }
}

impl fmt::Display for RailSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        match (self.port, self.gid_index) {
            (None, None) => Ok(()),
            (Some(port), None) => write!(f, ":{port}"),
            (None, Some(gid)) => write!(f, "::{gid}"),
            (Some(port), Some(gid)) => write!(f, ":{port}:{gid}"),
        }
    }
}

/// The rails of a list with commas, 1 to [`RAILS_MAX`] of them, in the order written.
///
/// # Errors
///
/// Whatever [`RailSpec`] refuses, an empty entry, too many, and a port named twice.
pub fn parse_rails(list: &str) -> Result<Vec<RailSpec>, RailSpecError> {
    let count = list.split(',').count();
    if count > RAILS_MAX {
        return Err(RailSpecError::TooMany { count });
    }
    let mut rails: Vec<RailSpec> = Vec::with_capacity(count);
    for (i, text) in list.split(',').enumerate() {
        let text = text.trim();
        if text.is_empty() {
            return Err(RailSpecError::EmptyEntry {
                position: i + 1,
                list: list.to_owned(),
            });
        }
        let rail: RailSpec = text.parse()?;
        let same = |other: &&RailSpec| other.device == rail.device && other.port == rail.port;
        if let Some(first) = rails.iter().find(same) {
            return Err(RailSpecError::Duplicate {
                first: first.clone(),
                second: rail,
            });
        }
        rails.push(rail);
    }
    Ok(rails)
}

/// Whether a device can have this name, which also becomes part of a path below `/sys`.
pub(crate) fn is_device_name(name: &str) -> bool {
    let fits = (1..=DEVICE_NAME_BYTES_MAX).contains(&name.len());
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '/' | ':' | ',');
    fits && name != "." && name != ".." && name.chars().all(plain)
}

/// A decimal number of digits alone: no sign, no blanks.
fn number<T: FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}
