//! Which ports become rails, with which GID, and which rail of the other end each one talks to.
//!
//! Everything here is a function of what devices said of themselves: no I/O, no clock, no guesses from names or network
//! classes. The same input gives the same answer, and each answer says why.
//!
//! * [`RailSpec`]: what a user writes, `dev[:port[:gid]]`.
//! * [`choose_gid`]: the entry of one port's GID table.
//! * [`choose_rails`]: the ports, explicit or automatic.
//! * [`pair`]: rails of both ends, by subnet; what is left is a list of candidates to probe.
//! * [`shares_subnet`]: chosen rails that ARP may lead through one port.
//!
//! A GID table changes while a machine runs: read it and choose again at each connect.

mod gid;
mod pairing;
mod rails;
mod spec;
#[cfg(test)]
mod tests;

pub use gid::{GidChoice, GidRefusal, SkippedGid, choose_gid};
pub use pairing::{Endpoint, Pairing, pair, shares_subnet};
pub use rails::{ChooseError, PortView, RailChoice, Wanted, choose_rails};
pub(crate) use spec::is_device_name;
pub use spec::{RAILS_MAX, RailSpec, RailSpecError, parse_rails};
