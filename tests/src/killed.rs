//! Programs that are killed (SIGKILL) at random moments of their work.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use crate::net::{Random, SLACK};

/// A run that is measured must not have been held up: the shortest of so many is taken.
const MEASURED: usize = 3;

/// Random moments of something that takes a known time, and a little after its end.
///
/// Seeded by `KILLED_SEED`, or by the clock; the seed is printed.
#[derive(Debug)]
pub struct Moments {
    random: Random,
    took: Duration,
}

impl Moments {
    /// Of what `run` does undisturbed. `name` is the test's.
    pub fn of(name: &str, mut run: impl FnMut()) -> Self {
        let took = (0..MEASURED).map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        });
        let took = took.min().expect("several runs");
        let seed = match std::env::var("KILLED_SEED") {
            Ok(text) => text.parse().expect("KILLED_SEED is a number"),
            Err(_) => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                now.expect("a clock").as_nanos() as u64 >> 10
            }
        };
        eprintln!(
            "{name}: KILLED_SEED={seed} repeats these moments; undisturbed it takes {took:?}"
        );
        Self {
            random: Random(seed),
            took,
        }
    }

    /// The next one, from the start on: up to a tenth after the end.
    pub fn moment(&mut self) -> Duration {
        let most = self.took.as_micros() as usize * 11 / 10;
        Duration::from_micros(self.random.below(most.max(1)) as u64)
    }

    /// The next one, up to `most`.
    pub fn below(&mut self, most: Duration) -> Duration {
        Duration::from_micros(self.random.below(most.as_micros() as usize) as u64)
    }
}

/// Starts a program whose words nobody wants.
pub fn start(command: &mut Command) -> Child {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

/// Kills it and waits for its end. Whether it had not ended before.
pub fn kill(mut child: Child) -> bool {
    child.kill().expect("killing a child");
    child.wait().expect("its end").signal() == Some(9)
}

/// Starts a program and kills it after that time. Whether it had not ended before.
pub fn run_and_kill(command: &mut Command, after: Duration) -> bool {
    let child = start(command);
    std::thread::sleep(after);
    kill(child)
}

/// Starts a program and kills it that time after something is so. Whether it had not ended before.
pub fn run_and_kill_when(
    command: &mut Command,
    mut is_so: impl FnMut() -> bool,
    after: Duration,
) -> bool {
    let mut child = start(command);
    let limit = Instant::now() + SLACK;
    while !is_so() && child.try_wait().expect("waiting for a child").is_none() {
        assert!(Instant::now() < limit, "{command:?} does not end");
        std::thread::sleep(Duration::from_micros(100));
    }
    if !after.is_zero() {
        std::thread::sleep(after);
    }
    kill(child)
}
