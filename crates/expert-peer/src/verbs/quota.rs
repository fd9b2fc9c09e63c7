//! Queue pairs of one client, over all its connections: a client is an address here, as the number
//! by which one names itself can be made up.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// See the module.
pub(crate) struct QpQuota {
    max: u32,
    open: Mutex<HashMap<IpAddr, u32>>,
}

/// Queue pairs that are counted until this is dropped.
pub(crate) struct QpShare {
    quota: Arc<QpQuota>,
    address: IpAddr,
    count: u32,
}

impl QpQuota {
    pub(crate) fn new(max: u32) -> Arc<Self> {
        Arc::new(Self {
            max,
            open: Mutex::default(),
        })
    }

    /// Counts `count` more queue pairs of an address; the error says why it may not have them.
    pub(crate) fn take(self: &Arc<Self>, address: IpAddr, count: usize) -> Result<QpShare, String> {
        let mut open = self.lock();
        let have = open.get(&address).copied().unwrap_or(0);
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let after = have.saturating_add(count);
        if after > self.max {
            return Err(format!(
                "{address} has {have} queue pairs and asks for {count} more, the limit is {} (--qps-per-client)",
                self.max
            ));
        }
        open.insert(address, after);
        drop(open);
        Ok(QpShare {
            quota: self.clone(),
            address,
            count,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, u32>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for QpShare {
    fn drop(&mut self) {
        let mut open = self.quota.lock();
        if let Some(have) = open.get_mut(&self.address) {
            *have = have.saturating_sub(self.count);
            if *have == 0 {
                open.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_of_an_address_are_bounded_over_its_connections_and_come_back() {
        let quota = QpQuota::new(8);
        let [one, two] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let first = quota.take(one, 5).unwrap();
        let why = quota.take(one, 4).err().unwrap();
        assert!(why.contains("has 5") && why.contains("limit is 8"), "{why}");
        let second = quota.take(one, 3).unwrap();
        quota.take(two, 8).unwrap();
        drop(first);
        let third = quota.take(one, 5).unwrap();
        assert!(quota.take(one, usize::MAX).is_err());
        drop((second, third));
        assert!(quota.lock().is_empty());
    }
}
