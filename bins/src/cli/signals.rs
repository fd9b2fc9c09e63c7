//! SIGINT and SIGTERM as a flag, so that work stops between two steps and cleans up after itself.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};

/// The flag that the first SIGINT or SIGTERM sets. A second signal of the same process ends it at
/// once, for the case that the work hangs in the operating system.
///
/// *Errors*: the handlers cannot be installed.
pub fn cancel_flag() -> io::Result<Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        return Ok(Arc::clone(flag));
    }
    let flag = Arc::new(AtomicBool::new(false));
    // A file size limit then shows as an error of the write, which cleans up, and not as a death.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    for signal in [SIGINT, SIGTERM] {
        // In this order: the second handler arms the first one.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&flag))?;
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(Arc::clone(FLAG.get_or_init(|| flag)))
}
