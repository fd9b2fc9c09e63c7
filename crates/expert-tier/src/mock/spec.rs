//! What a mock rail is like, and what goes wrong on it.

use std::time::Duration;

use crate::rail::Capabilities;

/// What a mock rail is like.
#[derive(Debug, Clone)]
pub struct MockSpec {
    /// Rate of the wire, at least 1.
    pub bytes_per_s: u64,
    /// From post to the first byte on an idle rail.
    pub latency: Duration,
    /// Up to this much is added to each READ's time on the wire.
    pub jitter: Duration,
    /// Completions may be told this much later than the bytes landed, and so in another order.
    pub reorder: Duration,
    /// READs that it takes at a time; more are refused.
    pub depth: usize,
    /// Time that a probe takes.
    pub connect: Duration,
    /// Time that a flush takes; until then, READs go on landing.
    pub flush: Duration,
    /// Who compares checksums.
    pub verifies: Verifies,
    /// What it says of itself.
    pub capabilities: Capabilities,
}

/// Where checksums are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verifies {
    /// The engine, on the driver's thread, when the READ is back: as with a network card, which
    /// leaves the bytes in memory.
    #[default]
    Engine,
    /// The rail, chunk by chunk as they arrive: as with a thread that receives from a socket, when
    /// the bytes are still in its cache.
    Rail,
}

impl MockSpec {
    /// A rail of a rate, with what a good local network has besides: 20 us of latency, nothing else.
    pub fn steady(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s: bytes_per_s.max(1),
            latency: Duration::from_micros(20),
            jitter: Duration::ZERO,
            reorder: Duration::ZERO,
            depth: 4096,
            connect: Duration::from_micros(100),
            flush: Duration::from_micros(10),
            verifies: Verifies::Engine,
            capabilities: Capabilities {
                read_max_bytes: 1 << 30,
                whole_records: false,
                lanes: 1,
                pieces: 1,
                stall: Duration::from_millis(200),
                rank: 0,
            },
        }
    }
}

/// What goes wrong with one READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFault {
    /// One byte arrives wrong; the completion says success.
    Corrupt,
    /// Only a part is written; the completion says success.
    Short,
    /// It takes that much longer, and so does everything behind it.
    Late(Duration),
    /// The peer cannot read its file now.
    Unavailable,
}

impl ReadFault {
    /// Whether wrong bytes are in memory although the completion says success.
    pub fn is_damage(self) -> bool {
        matches!(self, Self::Corrupt | Self::Short)
    }
}
