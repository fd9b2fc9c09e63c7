//! Switches for the simulation's negative controls.

use crate::rail::ContentTag;

/// Rules that the simulation can switch off, one at a time, to show that it sees what they prevent.
///
/// All are on; only [`Guards::without`] makes others. Each is looked at in one place: here, in the
/// engine, or in the mock rail.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guards {
    /// A completion counts only for the record that its READ was posted for.
    pub epoch: bool,
    /// A rail gives memory back only when it cannot write to it any more.
    pub memory_rule: bool,
    /// A record is committed only when all its READs came back with their bytes. (That READs are
    /// still out cannot be ignored: the arena refuses the commit.)
    pub commit_rule: bool,
    /// Checksums are compared.
    pub verify: bool,
    /// A READ goes only to a rail that serves the content that it was planned for.
    pub content: bool,
}

impl Guards {
    /// Everything on.
    pub const ON: Self = Self {
        epoch: true,
        memory_rule: true,
        commit_rule: true,
        verify: true,
        content: true,
    };

    /// What can be switched off.
    pub const NAMES: [&'static str; 5] =
        ["epoch", "memory-rule", "commit-rule", "verify", "content"];

    /// All but one; `None` if there is none of that name.
    pub fn without(name: &str) -> Option<Self> {
        let mut guards = Self::ON;
        let switch = match name {
            "epoch" => &mut guards.epoch,
            "memory-rule" => &mut guards.memory_rule,
            "commit-rule" => &mut guards.commit_rule,
            "verify" => &mut guards.verify,
            "content" => &mut guards.content,
            _ => return None,
        };
        *switch = false;
        Some(guards)
    }

    /// Whether a rail that serves one content may read for a record of another.
    pub(super) fn admit(self, serves: Option<ContentTag>, planned_for: ContentTag) -> bool {
        serves == Some(planned_for) || !self.content
    }
}
