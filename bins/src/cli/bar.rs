//! Progress on a terminal, nothing elsewhere.

use std::io::IsTerminal;
use std::sync::Arc;

use expert_store::progress::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error, `None` where that is not a terminal or where `quiet` is asked for.
pub fn progress(quiet: bool) -> Option<Arc<dyn Progress>> {
    if quiet || !std::io::stderr().is_terminal() {
        return None;
    }
    let bar = ProgressBar::hidden();
    if let Ok(style) = ProgressStyle::with_template(
        "{msg:24} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
    ) {
        bar.set_style(style);
    }
    Some(Arc::new(Bar { bar }))
}

struct Bar {
    bar: ProgressBar,
}

impl Progress for Bar {
    fn start(&self, what: &str, total_bytes: u64) {
        self.bar.reset();
        self.bar.set_length(total_bytes);
        self.bar.set_message(what.to_owned());
        self.bar
            .set_draw_target(indicatif::ProgressDrawTarget::stderr());
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
