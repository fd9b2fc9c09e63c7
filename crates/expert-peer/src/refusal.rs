//! Why connections are turned away.

use std::sync::atomic::AtomicU64;

/// Why a connection ended before it was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// There are as many as there may be.
    LimitTotal,
    /// There are as many from its address as there may be.
    LimitAddress,
    /// Too many handshakes are under way, in all or from its address.
    LimitHandshakes,
    /// The system has no descriptors, threads or random numbers left.
    Resources,
    /// Its handshake was not done in time.
    HandshakeTimeout,
    /// It did not prove that it knows the token.
    Auth,
    /// It speaks another version, or something else altogether.
    Protocol,
    /// A version 1 client wanted rails that it could not get.
    Rails,
}

impl Refusal {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 8] = [
        Self::LimitTotal,
        Self::LimitAddress,
        Self::LimitHandshakes,
        Self::Resources,
        Self::HandshakeTimeout,
        Self::Auth,
        Self::Protocol,
        Self::Rails,
    ];

    /// The label `reason` of the metric.
    pub fn name(self) -> &'static str {
        match self {
            Self::LimitTotal => "limit_total",
            Self::LimitAddress => "limit_address",
            Self::LimitHandshakes => "limit_handshakes",
            Self::Resources => "resources",
            Self::HandshakeTimeout => "handshake_timeout",
            Self::Auth => "auth",
            Self::Protocol => "protocol",
            Self::Rails => "rails",
        }
    }
}

/// How often each happened.
pub(crate) type Counts = [AtomicU64; Refusal::ALL.len()];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_place_and_a_name_of_its_own() {
        for (i, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, i);
            let same = Refusal::ALL.iter().filter(|r| r.name() == refusal.name());
            assert_eq!(same.count(), 1);
        }
    }
}
