//! The network interfaces of this network namespace, and which of them a GID belongs to.

use crate::attributes::Gid;
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// An interface that this process sees.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    /// Its addresses, each with the length of its prefix.
    pub(crate) addresses: Vec<(IpAddr, u8)>,
    /// Its link address, where it has one of six bytes.
    pub(crate) mac: Option<[u8; 6]>,
}

impl Interface {
    /// Whether a GID is one of this interface: its index and name alone do not tell, because a device of another
    /// network namespace reports those of that namespace.
    pub(crate) fn owns(&self, gid: Gid) -> bool {
        self.prefix_len(gid).is_some() || self.mac.is_some_and(|mac| link_local_of(mac) == gid.0)
    }

    /// The prefix length of the address that a GID carries.
    pub(crate) fn prefix_len(&self, gid: Gid) -> Option<u8> {
        let ip = gid.ip();
        let found = self.addresses.iter().find(|(address, _)| *address == ip);
        found.map(|&(_, prefix_len)| prefix_len)
    }
}

/// The default GID of an interface: fe80::/64 and its link address as EUI-64.
fn link_local_of(mac: [u8; 6]) -> [u8; 16] {
    let [a, b, c, d, e, f] = mac;
    [
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ]
}

/// The interfaces of this namespace; those without any address included.
pub(crate) fn interfaces() -> io::Result<Vec<Interface>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` is writable for the whole call.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let list = AddressList(first);
    let mut found: Vec<Interface> = Vec::new();
    let mut next = list.0;
    while !next.is_null() {
        // SAFETY: entries of the list are valid until it is freed, at the end of this function.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        // SAFETY: every entry has a name, which is a C string of the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        let name = name.to_string_lossy();
        let index = found.iter().position(|i| i.name == name);
        let interface = match index {
            Some(index) => &mut found[index],
            None => {
                found.push(Interface {
                    name: name.clone().into_owned(),
                    addresses: Vec::new(),
                    mac: mac_of(&name),
                });
                found.last_mut().expect("it was just pushed")
            }
        };
        let Some(ip) = ip_of(entry.ifa_addr) else {
            continue;
        };
        let prefix_len = match ip_of(entry.ifa_netmask) {
            Some(IpAddr::V4(mask)) => mask.to_bits().leading_ones(),
            Some(IpAddr::V6(mask)) => mask.to_bits().leading_ones(),
            None => continue,
        };
        // At most 128.
        interface
            .addresses
            .push((ip, u8::try_from(prefix_len).unwrap_or(u8::MAX)));
    }
    Ok(found)
}

/// The interface of an index in this namespace.
pub(crate) fn name_of(ifindex: u32) -> Option<String> {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the size that the function asks for.
    let found = unsafe { libc::if_indextoname(ifindex, name.as_mut_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: the function wrote a C string into the buffer.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Some(name.to_string_lossy().into_owned())
}

fn mac_of(name: &str) -> Option<[u8; 6]> {
    let path = Path::new("/sys/class/net").join(name).join("address");
    let text = std::fs::read_to_string(path).ok()?;
    let mut bytes = text.trim().split(':').map(|b| u8::from_str_radix(b, 16));
    let mut mac = [0; 6];
    for byte in &mut mac {
        *byte = bytes.next()?.ok()?;
    }
    bytes.next().is_none().then_some(mac)
}

/// The IP address of a socket address of a list, if it is one.
fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, so it is a socket address of the list, which has at least a family.
    let family = unsafe { (*address).sa_family };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is this struct; the list aligns its entries for it.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(IpAddr::V4(Ipv4Addr::from_bits(u32::from_be(
                v4.sin_addr.s_addr,
            ))))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            Some(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)))
        }
        _ => None,
    }
}

/// Frees what getifaddrs made.
struct AddressList(*mut libc::ifaddrs);

impl Drop for AddressList {
    fn drop(&mut self) {
        // SAFETY: the list came from getifaddrs and is freed once, here.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_with_its_address_and_index() {
        let all = interfaces().unwrap();
        let lo = all.iter().find(|i| i.name == "lo").unwrap();
        assert!(
            lo.addresses.contains(&(Ipv4Addr::LOCALHOST.into(), 8)),
            "{lo:?}"
        );
        assert_eq!(name_of(1).as_deref(), Some("lo"));
        assert_eq!(name_of(u32::MAX), None);
    }

    #[test]
    fn a_gid_belongs_to_its_address_or_its_link_address_alone() {
        let interface = Interface {
            name: "eth0".to_owned(),
            addresses: vec![(Ipv4Addr::new(10, 1, 2, 3).into(), 24)],
            mac: Some([0x02, 0x11, 0x22, 0x33, 0x44, 0x55]),
        };
        let v4 = |last| Gid::of(Ipv4Addr::new(10, 1, 2, last).into());
        assert!(interface.owns(v4(3)));
        assert_eq!(interface.prefix_len(v4(3)), Some(24));
        assert!(!interface.owns(v4(4)));
        let eui: Ipv6Addr = "fe80::11:22ff:fe33:4455".parse().unwrap();
        assert!(interface.owns(Gid(eui.octets())));
        let other: Ipv6Addr = "fe80::11:22ff:fe33:4456".parse().unwrap();
        assert!(!interface.owns(Gid(other.octets())));
    }
}
