//! What identifies the state of a file: used to notice that it is not the one that was indexed.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// Size, identity and times of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    /// Length, bytes.
    pub bytes: u64,
    /// Device number.
    #[serde(default)]
    pub device: u64,
    /// Inode number.
    #[serde(default)]
    pub inode: u64,
    /// Time of the last change of content, nanoseconds since 1970.
    #[serde(default)]
    pub mtime_ns: i64,
    /// Time of the last change of content or attributes, nanoseconds since 1970.
    #[serde(default)]
    pub ctime_ns: i64,
}

impl FileStamp {
    /// The stamp of a file from its metadata.
    pub fn of(metadata: &Metadata) -> Self {
        let ns = |s: i64, n: i64| s.saturating_mul(1_000_000_000).saturating_add(n);
        Self {
            bytes: metadata.len(),
            device: metadata.dev(),
            inode: metadata.ino(),
            mtime_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Says how `now` differs in size or modification time, `None` where it does not.
    pub fn content_change(&self, now: &Self) -> Option<String> {
        if self.bytes != now.bytes {
            Some(format!("{} bytes, was {}", now.bytes, self.bytes))
        } else if self.mtime_ns != now.mtime_ns {
            Some(format!(
                "modified at {} ns, was {} ns",
                now.mtime_ns, self.mtime_ns
            ))
        } else {
            None
        }
    }

    /// Says how `now` differs at all, `None` where it does not: for a file that is open, where a change
    /// of attributes may hide one of content.
    pub fn change(&self, now: &Self) -> Option<String> {
        if (self.device, self.inode) != (now.device, now.inode) {
            return Some("another file has its name now".to_owned());
        }
        self.content_change(now).or_else(|| {
            (self.ctime_ns != now.ctime_ns).then(|| {
                format!(
                    "overwritten with its time put back, or its attributes or links changed, at {} ns",
                    now.ctime_ns
                )
            })
        })
    }
}
