//! The rails: what moves bytes below the engine.

pub(crate) mod local;
pub(crate) mod resolve;
pub(crate) mod socket;
pub(crate) mod tcp;
pub(crate) mod uma;
pub(crate) mod verbs;

use std::time::Duration;

use crate::rail::Capabilities;

/// What rails that read files of this machine can do, however they read them.
fn disk_capabilities(lanes: u32, rank: u8) -> Capabilities {
    Capabilities {
        read_max_bytes: 16 << 20,
        whole_records: false,
        lanes,
        pieces: 1,
        // A disk that does not answer cannot be reset by us: only the request's deadline acts.
        stall: Duration::from_secs(3600),
        rank,
    }
}
