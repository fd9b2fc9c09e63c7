//! The built binaries, run as a user would.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What a program left when it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit code, `None` where a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Standard output as JSON.
    ///
    /// Panics where the program failed or printed something else.
    pub fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, Some(0), "{self:?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Panics unless the program succeeded.
    pub fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// The one line of the error of a program that failed with that code.
    ///
    /// Panics where it ended otherwise, panicked, or told more or less than one error.
    pub fn error(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        let mut errors = self.stderr.lines().filter(|l| l.starts_with("error: "));
        match (errors.next(), errors.next()) {
            (Some(error), None) => error,
            _ => panic!("not one error: {self:?}"),
        }
    }
}

/// Where a binary of the workspace lies: beside the folder of the test that runs.
///
/// Panics where it was not built.
pub fn path(name: &str) -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    let profile = exe
        .ancestors()
        .nth(2)
        .expect("a test lies in target/<profile>/deps");
    let path = profile.join(name);
    let flag = match profile.file_name().and_then(OsStr::to_str) {
        Some("release") => " --release",
        _ => "",
    };
    assert!(
        path.is_file(),
        "{} is not there; build it with `cargo build --bins{flag}` (and the same CARGO_TARGET_DIR)",
        path.display()
    );
    path
}

/// A command for a binary of the workspace, with nothing on its standard input.
pub fn command(name: &str, args: &[&dyn AsRef<OsStr>]) -> Command {
    let mut command = Command::new(path(name));
    command
        .args(args.iter().map(|a| a.as_ref()))
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("running {command:?}: {e}"));
    Output {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs `atlas-expert` to its end.
pub fn expert(args: &[&dyn AsRef<OsStr>]) -> Output {
    run(&mut command("atlas-expert", args))
}

/// `atlas-expert` below a shell that runs `setup` first, e.g. `ulimit -v 524288`.
pub fn expert_after(setup: &str, args: &[&dyn AsRef<OsStr>]) -> Output {
    let mut command = Command::new("bash");
    command
        .arg("-c")
        .arg(format!("{setup} && exec \"$@\""))
        .arg("bash")
        .arg(path("atlas-expert"))
        .args(args.iter().map(|a| a.as_ref()))
        .stdin(Stdio::null());
    run(&mut command)
}
