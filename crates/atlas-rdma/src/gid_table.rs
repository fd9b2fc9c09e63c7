//! The GID table of a port, from the library or, where that is too old, from sysfs.

use crate::attributes::{Gid, GidEntry, GidType, LinkLayer};
use crate::context::Context;
use crate::error::{RdmaError, os};
use crate::interfaces::{Interface, interfaces, name_of};
use crate::sys::bindings::{IBV_GID_TYPE_ROCE_V2, ibv_gid_entry};
use crate::sys::zeroed;
use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

/// Entries that one port has at most, against a library that counts wrong: cards have up to 256.
const ENTRIES_MAX: usize = 8192;

/// An entry as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RawEntry {
    index: u32,
    gid: Gid,
    kind: GidType,
    netdev: Option<String>,
}

impl Context {
    /// The entries of a port's GID table that are not empty, in the order of their indices.
    ///
    /// The table changes when addresses do: ask for it again before each connection. `netdev` is `None` where the
    /// interface is not in this network namespace; packets cannot be sent through such an entry.
    ///
    /// # Errors
    ///
    /// [`RdmaError::UnknownPort`]; [`RdmaError::Query`] where the device is going away.
    pub fn gid_table(&self, port: u8) -> Result<Vec<GidEntry>, RdmaError> {
        let attributes = self.port(port)?;
        let raw = match self.library_table(port)? {
            Some(raw) => raw,
            None => sysfs_table(Path::new("/"), self.name(), port, attributes.gid_table_len)
                .map_err(|source| RdmaError::Query {
                    device: self.name().to_owned(),
                    what: "its GID table in sysfs",
                    source,
                })?,
        };
        let interfaces = interfaces().map_err(|source| RdmaError::Query {
            device: self.name().to_owned(),
            what: "the interfaces of its GIDs",
            source,
        })?;
        Ok(place(raw, attributes.link_layer, &interfaces))
    }

    /// The table from the library; `None` where it cannot tell.
    fn library_table(&self, port: u8) -> Result<Option<Vec<RawEntry>>, RdmaError> {
        let Some(query) = self.functions().query_gid_table else {
            return Ok(None);
        };
        // It fills the entries of all ports, one after the other.
        let mut len = 0;
        for port in 1..=self.attributes().ports {
            len += self.port(port)?.gid_table_len as usize;
        }
        // SAFETY: integers and arrays of them alone.
        let empty: ibv_gid_entry = unsafe { zeroed() };
        let mut entries = vec![empty; len.clamp(1, ENTRIES_MAX)];
        // SAFETY: the context is open; the buffer has as many entries as are passed, each of the size that is passed.
        let got = unsafe {
            query(
                self.as_ptr(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<ibv_gid_entry>(),
            )
        };
        let Ok(got) = usize::try_from(got) else {
            let errno = i32::try_from(-got).unwrap_or(libc::EIO);
            if errno == libc::EOPNOTSUPP || errno == libc::ENOSYS {
                return Ok(None);
            }
            return Err(RdmaError::Query {
                device: self.name().to_owned(),
                what: "its GID table",
                source: os(errno),
            });
        };
        entries.truncate(got);
        let of_port = entries.iter().filter(|e| e.port_num == u32::from(port));
        Ok(Some(of_port.map(raw_entry).collect()))
    }
}

fn raw_entry(entry: &ibv_gid_entry) -> RawEntry {
    RawEntry {
        index: entry.gid_index,
        // SAFETY: both forms of the union are sixteen plain bytes.
        gid: Gid(unsafe { entry.gid.raw }),
        kind: if entry.gid_type == IBV_GID_TYPE_ROCE_V2 {
            GidType::RoceV2
        } else {
            GidType::RoceV1
        },
        netdev: match entry.ndev_ifindex {
            0 => None,
            index => name_of(index),
        },
    }
}

/// Leaves empty entries out and says which interface of this namespace each belongs to.
fn place(raw: Vec<RawEntry>, link_layer: LinkLayer, interfaces: &[Interface]) -> Vec<GidEntry> {
    let mut entries: Vec<GidEntry> = raw
        .into_iter()
        .filter(|entry| !entry.gid.is_empty())
        .map(|entry| {
            let interface = match link_layer {
                LinkLayer::InfiniBand => None,
                LinkLayer::Ethernet => interfaces
                    .iter()
                    .find(|i| entry.netdev.as_ref() == Some(&i.name) && i.owns(entry.gid)),
            };
            GidEntry {
                index: entry.index,
                gid: entry.gid,
                kind: match link_layer {
                    LinkLayer::InfiniBand => GidType::InfiniBand,
                    LinkLayer::Ethernet => entry.kind,
                },
                netdev: interface.map(|i| i.name.clone()),
                prefix_len: interface.and_then(|i| i.prefix_len(entry.gid)),
            }
        })
        .collect();
    entries.sort_by_key(|entry| entry.index);
    entries
}

/// The table below `root`/sys/class/infiniband; entries that cannot be read are not valid ones.
fn sysfs_table(root: &Path, device: &str, port: u8, len: u32) -> std::io::Result<Vec<RawEntry>> {
    let port = root.join(format!("sys/class/infiniband/{device}/ports/{port}"));
    let text = |name: &str, index: u32| {
        fs::read_to_string(port.join(name).join(index.to_string()))
            .ok()
            .map(|text| text.trim().to_owned())
    };
    // Fails for a device that is gone, where each file would only be absent.
    fs::metadata(port.join("gids"))?;
    let entry = |index| {
        let gid: Ipv6Addr = text("gids", index)?.parse().ok()?;
        Some(RawEntry {
            index,
            gid: Gid(gid.octets()),
            kind: match text("gid_attrs/types", index).as_deref() {
                Some("RoCE v2") => GidType::RoceV2,
                _ => GidType::RoceV1,
            },
            netdev: text("gid_attrs/ndevs", index).filter(|name| !name.is_empty()),
        })
    };
    Ok((0..len.min(ENTRIES_MAX as u32)).filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(root: &Path, entries: &[(u32, &str, &str, &str)]) {
        let port = root.join("sys/class/infiniband/mlx5_0/ports/1");
        for dir in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(port.join(dir)).unwrap();
        }
        for (index, gid, kind, netdev) in entries {
            fs::write(port.join(format!("gids/{index}")), format!("{gid}\n")).unwrap();
            fs::write(
                port.join(format!("gid_attrs/types/{index}")),
                format!("{kind}\n"),
            )
            .unwrap();
            fs::write(
                port.join(format!("gid_attrs/ndevs/{index}")),
                format!("{netdev}\n"),
            )
            .unwrap();
        }
    }

    #[test]
    fn sysfs_tells_the_table_where_the_library_cannot() {
        let root = tempfile::tempdir().unwrap();
        let mapped = "0000:0000:0000:0000:0000:ffff:0a4d:0001";
        table(
            root.path(),
            &[
                (
                    0,
                    "fe80:0000:0000:0000:0011:22ff:fe33:4455",
                    "IB/RoCE v1",
                    "eth0",
                ),
                (1, "0000:0000:0000:0000:0000:0000:0000:0000", "", ""),
                (2, mapped, "RoCE v2", "eth0"),
                (3, mapped, "RoCE v2", "eth9"),
                // Its interface was renamed to one of ours, its address was not.
                (
                    4,
                    "0000:0000:0000:0000:0000:ffff:0a4d:0063",
                    "RoCE v2",
                    "eth0",
                ),
            ],
        );
        let raw = sysfs_table(root.path(), "mlx5_0", 1, 16).unwrap();
        let interfaces = [Interface {
            name: "eth0".to_owned(),
            addresses: vec![("10.77.0.1".parse().unwrap(), 24)],
            mac: Some([0x02, 0x11, 0x22, 0x33, 0x44, 0x55]),
        }];
        let entries = place(raw.clone(), LinkLayer::Ethernet, &interfaces);
        let seen: Vec<_> = entries
            .iter()
            .map(|e| (e.index, e.kind, e.netdev.as_deref(), e.prefix_len))
            .collect();
        assert_eq!(
            seen,
            [
                (0, GidType::RoceV1, Some("eth0"), None),
                (2, GidType::RoceV2, Some("eth0"), Some(24)),
                (3, GidType::RoceV2, None, None),
                (4, GidType::RoceV2, None, None),
            ]
        );
        let entries = place(raw, LinkLayer::InfiniBand, &interfaces);
        assert!(
            entries
                .iter()
                .all(|e| e.kind == GidType::InfiniBand && e.netdev.is_none())
        );
    }

    #[test]
    fn a_device_that_is_gone_is_an_error_and_not_an_empty_table() {
        let root = tempfile::tempdir().unwrap();
        assert!(sysfs_table(root.path(), "mlx5_0", 1, 16).is_err());
    }
}
