//! Many cases in one test: all run, on all CPUs, and all that failed are reported.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What was found wrong with one case.
#[derive(Debug, Default)]
pub struct Problems(Vec<String>);

impl Problems {
    /// Notes where two things differ that should not.
    pub fn same<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, got: &T, want: &T) {
        if got != want {
            self.note(format!("{what}: got {got:?}, want {want:?}"));
        }
    }

    /// Notes something.
    pub fn note(&mut self, what: String) {
        self.0.push(what);
    }
}

/// Runs `check` for each case and panics at the end with the name and the problems of each that failed.
pub fn each<T: Sync>(
    cases: &[T],
    name: impl Fn(&T) -> &str + Sync,
    check: impl Fn(&T, &mut Problems) + Sync,
) {
    assert!(!cases.is_empty(), "no cases");
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads.min(cases.len()) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut problems = Problems::default();
                    let run = AssertUnwindSafe(|| check(case, &mut problems));
                    if let Err(panic) = catch_unwind(run) {
                        problems.note(format!("panicked: {}", message(panic.as_ref())));
                    }
                    if !problems.0.is_empty() {
                        let mut list = failed.lock().unwrap_or_else(PoisonError::into_inner);
                        list.push(format!(
                            "{}:\n    {}",
                            name(case),
                            problems.0.join("\n    ")
                        ));
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.sort();
    assert!(
        failed.is_empty(),
        "{} of {} failed:\n{}",
        failed.len(),
        cases.len(),
        failed.join("\n")
    );
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("something")
}
