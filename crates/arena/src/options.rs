//! Choices that a caller makes when an arena is built.

/// Which pages back the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Explicit huge pages when the pool has enough free ones, else transparent huge pages, else plain pages.
    #[default]
    Auto,
    /// Plain pages only.
    Never,
    /// Explicit huge pages, or an error that says how many are missing. Transparent huge pages do not satisfy this,
    /// because the kernel never promises them.
    Require,
}

/// Whether the arena is locked into memory with `mlock`.
///
/// Explicit huge pages are never swapped, so they count as locked without a system call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lock {
    /// Try; a failure is written to the log once per process and stands in the report.
    #[default]
    BestEffort,
    /// Locked, or an error that gives the limit, the need and the lines to change.
    Require,
    /// Do not try.
    Never,
}

/// How much of a slot is overwritten with 0xFF (NaN in bf16 and f32) before a landing.
///
/// The default is [`Poison::Full`] in builds with debug assertions and [`Poison::Marks`] otherwise, because filling a
/// record of 9 MB costs about as much as receiving it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// Every byte of the slot.
    Full,
    /// [`POISON_MARK_BYTES`] bytes at the start of each [`POISON_CHUNK_BYTES`] of the image, and as many at its end.
    Marks,
}

impl Default for Poison {
    fn default() -> Self {
        if cfg!(debug_assertions) {
            Self::Full
        } else {
            Self::Marks
        }
    }
}

/// The byte that poison is made of.
pub const POISON_BYTE: u8 = 0xFF;

/// Bytes of one poison mark: one cache line on every machine in sight, and long enough that no leaf starts with it by
/// chance.
pub const POISON_MARK_BYTES: usize = 64;

/// Distance of poison marks: the granule of checksums, so that no chunk can be missed whole without a mark showing.
pub const POISON_CHUNK_BYTES: usize = 256 * 1024;
