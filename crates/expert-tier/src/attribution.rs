//! What limited a request: a label, drawn from numbers that the engine takes anyway.
//!
//! [`classify`] is a pure function. It asks, in this order, and the first yes is the answer:
//!
//! | question | label |
//! |---|---|
//! | did the request wait for its first READ most of its time, with rails busy for others? | back-pressure |
//! | … or with rails idle or down? | network: a rail idle |
//! | did the peer refuse a large part of the READs? | peer |
//! | was the driver's thread, a rail's, or all processors busy? | software: client CPU, verification; memory bandwidth |
//! | was a rail idle while READs waited? | network: a rail idle |
//! | was the rail that worked longest one that reads files here? | disk |
//! | were all rails far below what each has carried before? | peer |
//! | otherwise | network: slowest rail |
//!
//! Times of rails are theirs while the request was open, work for other requests included.
//! What each label asks for is in `docs/rails.md`.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::rail::RailKind;

/// One rail while a request was open.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RailNumbers {
    /// Kind of rail.
    pub kind: RailKind,
    /// Threads or queue pairs that work side by side.
    pub lanes: u32,
    /// Bytes that it brought for this request.
    pub bytes: u64,
    /// Bytes that it brought for anybody.
    pub carried_bytes: u64,
    /// Time with READs posted.
    pub busy: Duration,
    /// Time without any, or down, while READs waited.
    pub idle: Duration,
    /// Time that its own threads ran or waited for a processor.
    pub cpu: Duration,
    /// Fastest that it was seen, 0 where nothing is known.
    pub best_bytes_per_s: u64,
}

impl RailNumbers {
    /// Nothing happened yet.
    pub fn new(kind: RailKind, lanes: u32) -> Self {
        Self {
            kind,
            lanes,
            bytes: 0,
            carried_bytes: 0,
            busy: Duration::ZERO,
            idle: Duration::ZERO,
            cpu: Duration::ZERO,
            best_bytes_per_s: 0,
        }
    }

    fn bytes_per_s(&self) -> u64 {
        per_s(self.carried_bytes, self.busy)
    }
}

/// Everything that is known of one request.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestNumbers {
    /// From submission to the end.
    pub total: Duration,
    /// From submission to the first READ posted.
    pub queued: Duration,
    /// Time spent in comparing checksums, over all threads.
    pub verify: Duration,
    /// Bytes whose checksums were compared.
    pub verify_bytes: u64,
    /// Fastest that checksums were compared so far, 0 where nothing is known.
    pub verify_best_bytes_per_s: u64,
    /// READs that came back, well or not.
    pub reads: u64,
    /// Those that the peer refused, or could not serve at that moment.
    pub refused_reads: u64,
    /// Time that the driver's thread ran or waited for a processor.
    pub driver_cpu: Duration,
    /// Processors of the machine.
    pub cpus: u32,
    /// Per rail, in order of configuration; those that may not help now are left out.
    pub rails: Vec<(usize, RailNumbers)>,
}

/// What limited a request, with the numbers that say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// No time passed.
    #[default]
    Unknown,
    /// All rails worked; this one was busy longest.
    NetworkSlowestRail {
        /// Index of the rail.
        rail: usize,
        /// How long it had READs posted.
        busy: Duration,
        /// What it carried meanwhile.
        bytes_per_s: u64,
    },
    /// A rail did nothing while READs waited: down, bound by the policy, or too slow to help.
    NetworkRailIdle {
        /// Index of the rail.
        rail: usize,
        /// How long.
        idle: Duration,
        /// Of which time.
        total: Duration,
    },
    /// The other side: it refused READs, or all paths to it were slow at once.
    Peer {
        /// READs that it refused or could not serve.
        refused_reads: u64,
        /// Of how many.
        reads: u64,
        /// What the rails carried together.
        bytes_per_s: u64,
        /// What they carried at their best.
        best_bytes_per_s: u64,
    },
    /// Files on this machine.
    Disk {
        /// Index of the rail.
        rail: usize,
        /// What it read.
        bytes_per_s: u64,
    },
    /// Processors were busy, with nothing but moving bytes to and from memory.
    MemoryBandwidth {
        /// Bytes that one second of processor time moved or hashed.
        bytes_per_cpu_s: u64,
        /// Time that threads ran or waited for a processor.
        cpu: Duration,
        /// Of which time.
        total: Duration,
    },
    /// Comparing checksums.
    SoftwareVerification {
        /// Time in it, over all threads.
        verify: Duration,
        /// Bytes compared per second of that.
        bytes_per_s: u64,
        /// Of which time.
        total: Duration,
    },
    /// Everything else that our threads do.
    SoftwareClientCpu {
        /// Time that threads ran or waited for a processor.
        cpu: Duration,
        /// Of which time.
        total: Duration,
        /// READs that came back meanwhile.
        reads: u64,
    },
    /// Earlier requests: their READs filled the windows.
    Backpressure {
        /// From submission to the first READ posted.
        queued: Duration,
        /// Of which time.
        total: Duration,
    },
}

impl Limit {
    /// Every name, in the order of [`LimitCounts`].
    pub const NAMES: [&'static str; 9] = [
        "unknown",
        "network-slowest-rail",
        "network-rail-idle",
        "peer",
        "disk",
        "memory-bandwidth",
        "software-verification",
        "software-client-cpu",
        "back-pressure",
    ];

    /// The label alone.
    pub fn name(&self) -> &'static str {
        Self::NAMES[self.index()]
    }

    fn index(&self) -> usize {
        match self {
            Self::Unknown => 0,
            Self::NetworkSlowestRail { .. } => 1,
            Self::NetworkRailIdle { .. } => 2,
            Self::Peer { .. } => 3,
            Self::Disk { .. } => 4,
            Self::MemoryBandwidth { .. } => 5,
            Self::SoftwareVerification { .. } => 6,
            Self::SoftwareClientCpu { .. } => 7,
            Self::Backpressure { .. } => 8,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |bytes_per_s: u64| bytes_per_s as f64 / 1e6;
        match self {
            Self::Unknown => f.write_str("unknown: no time passed"),
            Self::NetworkSlowestRail {
                rail,
                busy,
                bytes_per_s,
            } => write!(
                f,
                "network, slowest rail: rail {rail} was busy for {busy:.1?} at {:.1} MB/s",
                mb(*bytes_per_s)
            ),
            Self::NetworkRailIdle { rail, idle, total } => write!(
                f,
                "network, a rail idle: rail {rail} did nothing for {idle:.1?} of {total:.1?} while READs waited"
            ),
            Self::Peer {
                refused_reads,
                reads,
                bytes_per_s,
                best_bytes_per_s,
            } => write!(
                f,
                "peer: {refused_reads} of {reads} READs refused, {:.1} MB/s where {:.1} were seen",
                mb(*bytes_per_s),
                mb(*best_bytes_per_s)
            ),
            Self::Disk { rail, bytes_per_s } => write!(
                f,
                "disk: rail {rail} read {:.1} MB/s from files",
                mb(*bytes_per_s)
            ),
            Self::MemoryBandwidth {
                bytes_per_cpu_s,
                cpu,
                total,
            } => write!(
                f,
                "memory bandwidth: threads ran or waited for a processor for {cpu:.1?} in {total:.1?}, each second of it moved {:.1} MB",
                mb(*bytes_per_cpu_s)
            ),
            Self::SoftwareVerification {
                verify,
                bytes_per_s,
                total,
            } => write!(
                f,
                "software, verification: {verify:.1?} in {total:.1?}, at {:.1} MB/s",
                mb(*bytes_per_s)
            ),
            Self::SoftwareClientCpu { cpu, total, reads } => write!(
                f,
                "software, client CPU: threads ran or waited for a processor for {cpu:.1?} in {total:.1?}, {reads} READs"
            ),
            Self::Backpressure { queued, total } => write!(
                f,
                "back-pressure: {queued:.1?} of {total:.1?} behind earlier requests"
            ),
        }
    }
}

impl Serialize for Limit {
    /// The label alone.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Requests per label.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitCounts([u64; Limit::NAMES.len()]);

impl LimitCounts {
    /// Counts one request.
    pub fn count(&mut self, limit: &Limit) {
        self.0[limit.index()] += 1;
    }

    /// Name and count of each label.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Limit::NAMES.into_iter().zip(self.0)
    }

    /// Requests of one label; 0 where there is none of that name.
    pub fn get(&self, name: &str) -> u64 {
        self.iter().find(|(n, _)| *n == name).map_or(0, |(_, n)| n)
    }
}

impl Serialize for LimitCounts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

/// A thread, or all processors, that worked for this share of the time had no time left: the rest
/// is wake-ups and what else runs on the machine.
const CPU_BUSY: f64 = 0.8;

/// A wait of this share is what a request spent its time with.
const QUEUED_MOST: f64 = 0.5;

/// A rail that was idle for this share could have helped noticeably.
const IDLE_NOTICED: f64 = 0.1;

/// READs that a peer refuses are read again: from this share on they cost more than anything else.
const REFUSED_MANY: f64 = 0.2;

/// Below this share of what was seen before, something else is wrong than noise.
const FAR_BELOW_BEST: f64 = 0.5;

/// One processor that moves more than this each second does hardly anything else: copies through a
/// socket cost twice as much, work per READ far more.
const MOVES_ONLY_BYTES_PER_S: u64 = 4_000_000_000;

/// What limited a request; [`Limit::Unknown`] only where no time passed.
pub fn classify(numbers: &RequestNumbers) -> Limit {
    if numbers.total.is_zero() {
        return Limit::Unknown;
    }
    waited(numbers)
        .or_else(|| refused(numbers))
        .or_else(|| software(numbers))
        .or_else(|| idle(numbers))
        .or_else(|| busiest(numbers))
        .unwrap_or(Limit::Backpressure {
            queued: numbers.queued,
            total: numbers.total,
        })
}

/// The request waited for its first READ most of its time.
fn waited(numbers: &RequestNumbers) -> Option<Limit> {
    let (queued, total) = (numbers.queued, numbers.total);
    if share(queued, total) < QUEUED_MOST {
        return None;
    }
    // For others, or for a rail?
    Some(match most_idle(numbers) {
        Some((rail, n)) if n.idle >= queued / 2 => Limit::NetworkRailIdle {
            rail,
            idle: n.idle,
            total,
        },
        _ => Limit::Backpressure { queued, total },
    })
}

fn refused(numbers: &RequestNumbers) -> Option<Limit> {
    let many = numbers.refused_reads as f64 >= REFUSED_MANY * numbers.reads as f64;
    (many && numbers.refused_reads > 0).then(|| peer(numbers))
}

fn peer(numbers: &RequestNumbers) -> Limit {
    let used = || numbers.rails.iter().map(|(_, n)| n);
    Limit::Peer {
        refused_reads: numbers.refused_reads,
        reads: numbers.reads,
        bytes_per_s: used().map(RailNumbers::bytes_per_s).sum(),
        best_bytes_per_s: used().map(|n| n.best_bytes_per_s).sum(),
    }
}

/// The driver's thread, a rail's threads, or all processors had no time left.
fn software(numbers: &RequestNumbers) -> Option<Limit> {
    let total = numbers.total;
    let rails = || numbers.rails.iter().map(|(_, n)| n);
    let cpu = numbers.driver_cpu + rails().map(|n| n.cpu).sum::<Duration>();
    let machine = share(cpu, total) / f64::from(numbers.cpus.max(1));
    let driver = share(numbers.driver_cpu, total);
    let of_rail = |n: &RailNumbers| share(n.cpu, total) / f64::from(n.lanes.max(1));
    let rail = rails().map(of_rail).fold(0.0, f64::max);
    if machine.max(driver).max(rail) < CPU_BUSY {
        return None;
    }
    let verify_bytes_per_s = per_s(numbers.verify_bytes, numbers.verify);
    let carried: u64 = rails().map(|n| n.carried_bytes).sum();
    let bytes_per_cpu_s = per_s(carried, cpu);
    let is_far_below = is_far_below(verify_bytes_per_s, numbers.verify_best_bytes_per_s);
    Some(if 2 * numbers.verify >= cpu {
        match is_far_below {
            // The same code was twice as fast when the bytes were in a cache.
            true => Limit::MemoryBandwidth {
                bytes_per_cpu_s,
                cpu,
                total,
            },
            false => Limit::SoftwareVerification {
                verify: numbers.verify,
                bytes_per_s: verify_bytes_per_s,
                total,
            },
        }
    } else if bytes_per_cpu_s >= MOVES_ONLY_BYTES_PER_S {
        Limit::MemoryBandwidth {
            bytes_per_cpu_s,
            cpu,
            total,
        }
    } else {
        Limit::SoftwareClientCpu {
            cpu,
            total,
            reads: numbers.reads,
        }
    })
}

fn idle(numbers: &RequestNumbers) -> Option<Limit> {
    let (rail, n) = most_idle(numbers)?;
    (share(n.idle, numbers.total) >= IDLE_NOTICED).then_some(Limit::NetworkRailIdle {
        rail,
        idle: n.idle,
        total: numbers.total,
    })
}

/// Rails were busy: which of them longest, and were they what they used to be?
fn busiest(numbers: &RequestNumbers) -> Option<Limit> {
    let busy = || numbers.rails.iter().filter(|(_, n)| !n.busy.is_zero());
    let &(rail, n) = busy().max_by_key(|(_, n)| n.busy)?;
    if matches!(n.kind, RailKind::Local | RailKind::Uma) {
        return Some(Limit::Disk {
            rail,
            bytes_per_s: n.bytes_per_s(),
        });
    }
    // One slow rail is a slow path; all at once have their end in common. Of a single rail nobody
    // can tell, so its path is named.
    let all_slow = busy().count() > 1
        && busy().all(|(_, n)| is_far_below(n.bytes_per_s(), n.best_bytes_per_s));
    Some(match all_slow {
        true => peer(numbers),
        false => Limit::NetworkSlowestRail {
            rail,
            busy: n.busy,
            bytes_per_s: n.bytes_per_s(),
        },
    })
}

fn most_idle(numbers: &RequestNumbers) -> Option<(usize, RailNumbers)> {
    let idle = numbers.rails.iter().filter(|(_, n)| !n.idle.is_zero());
    idle.max_by_key(|(_, n)| n.idle).copied()
}

fn is_far_below(bytes_per_s: u64, best_bytes_per_s: u64) -> bool {
    (bytes_per_s as f64) < FAR_BELOW_BEST * best_bytes_per_s as f64
}

fn share(part: Duration, all: Duration) -> f64 {
    part.as_secs_f64() / all.as_secs_f64()
}

fn per_s(bytes: u64, time: Duration) -> u64 {
    match time.is_zero() {
        true => 0,
        false => (bytes as f64 / time.as_secs_f64()) as u64,
    }
}

#[cfg(test)]
mod tests;
