//! Where records may come from.

use std::sync::Arc;

use expert_store::Store;

use crate::error::TierError;
use crate::rails::socket;

/// Most peers of one tier: each has a rail at least.
const PEERS_MAX: usize = 32;

/// Sources of one model. Peers are preferred to the store on this machine, which takes over where
/// they lack a record or none of them works.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// `host:port` of each peer.
    pub peers: Vec<String>,
    /// A store on this machine with the same content, or a part of it.
    pub local: Option<Arc<Store>>,
    /// Has the store on this machine carry a share all the time, as fast as it is.
    pub add_local: bool,
}

impl Sources {
    /// Peers from a list such as `10.0.0.2:9909,10.0.0.3:9909`.
    ///
    /// *Errors*: [`TierError::Config`] for an address that is none, or one that comes twice.
    pub fn of_peers(list: &str) -> Result<Self, TierError> {
        let sources = Self {
            peers: list.split(',').map(|p| p.trim().to_owned()).collect(),
            ..Self::default()
        };
        sources.check()?;
        Ok(sources)
    }

    /// All names, for people.
    pub(super) fn names(&self) -> String {
        let local = self.local.iter().map(|s| s.path().display().to_string());
        let names: Vec<String> = self.peers.iter().cloned().chain(local).collect();
        names.join(", ")
    }

    pub(super) fn check(&self) -> Result<(), TierError> {
        if self.peers.is_empty() {
            return Err(TierError::Config(
                "no peer is named; for a store on this machine alone there is the posix backend"
                    .into(),
            ));
        }
        if self.peers.len() > PEERS_MAX {
            return Err(TierError::Config(format!(
                "{} peers, the limit is {PEERS_MAX}",
                self.peers.len()
            )));
        }
        if self.add_local && self.local.is_none() {
            return Err(TierError::Config(
                "the local store is to take part and none is named".into(),
            ));
        }
        for (i, peer) in self.peers.iter().enumerate() {
            socket::check_addr(peer)?;
            if self.peers[..i].contains(peer) {
                return Err(TierError::Config(format!(
                    "peer {peer} is named twice; name each once"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_read_or_refused_with_its_fault() {
        let two = Sources::of_peers("a:1, [::1]:2").expect("a list");
        assert_eq!(two.peers, ["a:1", "[::1]:2"]);
        for (list, fault) in [
            ("", "host:port"),
            ("a:1,", "host:port"),
            ("a:1,b", "\"b\""),
            ("a:1,b:2,a:1", "a:1 is named twice"),
        ] {
            let error = Sources::of_peers(list).expect_err(list).to_string();
            assert!(error.contains(fault), "{list}: {error}");
        }
        let many: Vec<String> = (1..99).map(|port| format!("a:{port}")).collect();
        assert!(Sources::of_peers(&many.join(",")).is_err());
    }
}
