//! How files are read, after what this machine refused.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Serialize;

/// How a [`UmaTier`](crate::UmaTier) reads its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoMode {
    /// Many reads at once, past the page cache.
    IoUringDirect,
    /// Many reads at once, some or all of them through the page cache.
    IoUringBuffered,
    /// One read at a time and thread, through the page cache.
    Pread,
}

impl IoMode {
    /// Its name in JSON and for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUringDirect => "io-uring-direct",
            Self::IoUringBuffered => "io-uring-buffered",
            Self::Pread => "pread",
        }
    }
}

/// How files are read now, and how often that became less than was wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct IoReport {
    /// The way of the plainest file and thread.
    pub mode: IoMode,
    /// Files that refused direct reads, and rings that were refused or broke; the first of each kind has a line in the
    /// log.
    pub fallbacks: u64,
}

/// What was refused so far; shared by the readers of a rail and those who ask.
#[derive(Debug, Default)]
pub(crate) struct IoState {
    is_buffered: AtomicBool,
    is_plain: AtomicBool,
    fallbacks: AtomicU64,
}

impl IoState {
    pub(super) fn new(direct: bool, ring: bool) -> Self {
        Self {
            is_buffered: AtomicBool::new(!direct),
            is_plain: AtomicBool::new(!ring),
            fallbacks: AtomicU64::new(0),
        }
    }

    /// Direct reads of one file are refused.
    pub(super) fn direct_refused(&self, path: &std::path::Path, why: &str) {
        self.fallbacks.fetch_add(1, Ordering::Relaxed);
        if !self.is_buffered.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{} cannot be read past the page cache ({why}); it is read through it, as are others that refuse",
                path.display()
            );
        }
    }

    /// A ring was refused, or broke.
    pub(super) fn ring_refused(&self, why: &std::io::Error) {
        self.fallbacks.fetch_add(1, Ordering::Relaxed);
        if !self.is_plain.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "no io_uring ({why}); files are read one piece at a time and thread. It needs Linux 5.6, kernel.io_uring_disabled=0 and a container policy that allows io_uring_setup"
            );
        }
    }

    pub(crate) fn report(&self) -> IoReport {
        let mode = match (
            self.is_plain.load(Ordering::Relaxed),
            self.is_buffered.load(Ordering::Relaxed),
        ) {
            (true, _) => IoMode::Pread,
            (false, true) => IoMode::IoUringBuffered,
            (false, false) => IoMode::IoUringDirect,
        };
        IoReport {
            mode,
            fallbacks: self.fallbacks.load(Ordering::Relaxed),
        }
    }
}
