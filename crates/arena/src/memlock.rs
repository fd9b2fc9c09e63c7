//! The limit on locked memory, and how to raise it.

use std::fmt;

/// The lines to change for each way in which a server is started; other crates that pin memory quote it too.
pub const MEMLOCK_ADVICE: &str = "shell 'ulimit -l unlimited' (or /etc/security/limits.conf '* - memlock unlimited'); \
     systemd 'LimitMEMLOCK=infinity'; Docker '--ulimit memlock=-1:-1' (or '--cap-add IPC_LOCK'); \
     Kubernetes 'securityContext: {capabilities: {add: [IPC_LOCK]}}'";

/// The limit on locked memory of this process (the soft `RLIMIT_MEMLOCK`), in bytes; `None` when there is none.
///
/// A process with `CAP_IPC_LOCK` may lock more than this.
///
/// *Source.* getrlimit(2).
pub fn memlock_limit_bytes() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid, writable rlimit for the whole call.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    // getrlimit fails only for a bad pointer or an unknown resource; neither can be, so 0 (the strictest) is never seen.
    (rc != 0 || limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Shows a limit, `None` as "unlimited".
pub(crate) struct LimitText(pub(crate) Option<u64>);

impl fmt::Display for LimitText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, "{bytes} bytes"),
            None => f.write_str("unlimited"),
        }
    }
}
