//! The agent's side: runs what a connection asks for, and ends what a connection leaves behind.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::protocol::{Ended, MAX_BLOB_BYTES, Message, Reply, Request, Signal};

/// Between two looks at a program or its output.
const LOOK: Duration = Duration::from_millis(10);

/// Serves until a connection asks to quit. Output of background programs goes to folders below `folder`.
///
/// # Errors
/// The thread that accepts could not be started.
pub fn serve(listener: TcpListener, folder: &Path) -> io::Result<()> {
    let (quit, asked_to_quit) = mpsc::channel();
    let folder = folder.to_path_buf();
    thread::Builder::new()
        .name("accept".into())
        .spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let Ok(stream) = stream else { continue };
                let folder = folder.join(format!("{number:03}"));
                let quit = quit.clone();
                // A connection that gets no thread is closed, which its client sees.
                let _ = thread::Builder::new()
                    .name(format!("connection {number}"))
                    .spawn(move || {
                        if Connection::new(folder).serve(&stream) {
                            let _ = quit.send(());
                        }
                    });
            }
        })?;
    // An error means that accepting ended, which ends the agent as well.
    let _ = asked_to_quit.recv();
    Ok(())
}

/// A program in the background. Dropping it kills its group.
struct Program {
    child: Child,
    ended: Option<Ended>,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Program {
    fn look(&mut self) -> io::Result<Option<Ended>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?.map(ended);
        }
        Ok(self.ended)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        kill_group(&mut self.child);
    }
}

struct Connection {
    folder: PathBuf,
    programs: HashMap<String, Program>,
}

type Answer = Result<Message<Reply>, String>;

impl Connection {
    fn new(folder: PathBuf) -> Self {
        let programs = HashMap::new();
        Self { folder, programs }
    }

    /// Answers until the client hangs up; true where it asked to quit.
    fn serve(mut self, stream: &TcpStream) -> bool {
        let _ = stream.set_nodelay(true);
        loop {
            let Ok(request) = Message::<Request>::read(stream) else {
                return false;
            };
            let quit = request.header == Request::Quit;
            if quit {
                self.programs.clear();
            }
            let reply = self
                .answer(request.header)
                .unwrap_or_else(|message| Reply::Refused { message }.into());
            if reply.write(stream).is_err() || quit {
                return quit;
            }
        }
    }

    fn answer(&mut self, request: Request) -> Answer {
        match request {
            Request::Hello { label } => {
                let label = label.replace(|c: char| !c.is_ascii_alphanumeric() && c != '_', "-");
                if !label.is_empty() {
                    self.folder.as_mut_os_string().push("-");
                    self.folder.as_mut_os_string().push(label);
                }
                Ok(Reply::Done.into())
            }
            Request::Run {
                command,
                timeout_ms,
            } => run(&command, Duration::from_millis(timeout_ms))
                .map_err(|e| format!("running '{command}': {e}")),
            Request::Spawn { name, command } => self.spawn(&name, &command),
            Request::Signal { name, signal } => self.signal(&name, signal),
            Request::Wait { name, timeout_ms } => {
                self.wait(&name, Duration::from_millis(timeout_ms))
            }
            Request::WaitLine {
                name,
                pattern,
                nth,
                timeout_ms,
            } => self.wait_line(&name, &pattern, nth, Duration::from_millis(timeout_ms)),
            Request::Output { name } => {
                let program = self.program(&name)?;
                with_output(Reply::Bytes, program)
            }
            Request::ReadFile { path } => read_file(&path),
            Request::Quit => Ok(Reply::Done.into()),
        }
    }

    fn program(&mut self, name: &str) -> Result<&mut Program, String> {
        self.programs
            .get_mut(name)
            .ok_or_else(|| format!("nothing was started as '{name}' on this connection"))
    }

    fn spawn(&mut self, name: &str, command: &str) -> Answer {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || !name.chars().all(plain) {
            return Err(format!("'{name}' is no name; use letters, digits, - and _"));
        }
        if let Some(program) = self.programs.get_mut(name) {
            match program.look() {
                Ok(Some(_)) => drop(self.programs.remove(name)),
                _ => return Err(format!("'{name}' still runs; end it or take another name")),
            }
        }
        let stdout = self.folder.join(format!("{name}.out"));
        let stderr = self.folder.join(format!("{name}.err"));
        let start = || -> io::Result<Child> {
            fs::create_dir_all(&self.folder)?;
            bash(command)
                .stdout(File::create(&stdout)?)
                .stderr(File::create(&stderr)?)
                .spawn()
        };
        let child = start().map_err(|e| format!("starting '{name}': {e}"))?;
        let pid = child.id();
        let program = Program {
            child,
            ended: None,
            stdout,
            stderr,
        };
        self.programs.insert(name.to_owned(), program);
        Ok(Reply::Started { pid }.into())
    }

    fn signal(&mut self, name: &str, signal: Signal) -> Answer {
        let program = self.program(name)?;
        if let Some(ended) = program.look().map_err(|e| e.to_string())? {
            return Err(format!("'{name}' has ended already: {ended:?}"));
        }
        let pid = rustix::process::Pid::from_child(&program.child);
        rustix::process::kill_process_group(pid, number(signal))
            .map_err(|e| format!("{signal:?} to '{name}' ({pid:?}): {e}"))?;
        Ok(Reply::Done.into())
    }

    fn wait(&mut self, name: &str, timeout: Duration) -> Answer {
        let program = self.program(name)?;
        let start = Instant::now();
        loop {
            if let Some(ended) = program.look().map_err(|e| e.to_string())? {
                return Ok(Reply::Ended(ended).into());
            }
            if start.elapsed() >= timeout {
                return with_output(Reply::TimedOut, program);
            }
            thread::sleep(LOOK);
        }
    }

    fn wait_line(&mut self, name: &str, pattern: &str, nth: usize, timeout: Duration) -> Answer {
        let program = self.program(name)?;
        let start = Instant::now();
        loop {
            // Asked first: what a program wrote is all there once it has ended.
            let ended = program.look().map_err(|e| e.to_string())?;
            let output = output(program).map_err(|e| format!("the output of '{name}': {e}"))?;
            let texts = output.map(|o| String::from_utf8_lossy(&o).into_owned());
            let mut lines = texts.iter().flat_map(|t| whole_lines(t, ended.is_some()));
            let wanted = nth.max(1) - 1;
            if let Some(line) = lines.by_ref().filter(|l| l.contains(pattern)).nth(wanted) {
                let text = line.to_owned();
                return Ok(Reply::Line { text }.into());
            }
            if let Some(ended) = ended {
                let what = texts.concat();
                return Err(format!(
                    "'{name}' ended ({ended:?}) without line {nth} with '{pattern}'; its output: {what}"
                ));
            }
            if start.elapsed() >= timeout {
                return with_output(Reply::TimedOut, program);
            }
            thread::sleep(LOOK * 2);
        }
    }
}

/// Lines that are complete: the last one may still be being written.
fn whole_lines(text: &str, ended: bool) -> impl Iterator<Item = &str> {
    let end = match text.rfind('\n') {
        Some(at) if !ended => at,
        None if !ended => 0,
        _ => text.len(),
    };
    text[..end].lines()
}

/// Runs to the end. Output goes through files: a pipe would stay open as long as any grandchild holds it.
fn run(command: &str, timeout: Duration) -> io::Result<Message<Reply>> {
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = bash(command)
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .spawn()?;
    let start = Instant::now();
    let header = loop {
        if let Some(status) = child.try_wait()? {
            break Reply::Ended(ended(status));
        }
        if start.elapsed() >= timeout {
            kill_group(&mut child);
            break Reply::TimedOut;
        }
        thread::sleep(LOOK);
    };
    let blobs = vec![last_bytes(&mut stdout)?, last_bytes(&mut stderr)?];
    Ok(Message { header, blobs })
}

fn bash(command: &str) -> Command {
    let mut bash = Command::new("bash");
    bash.args(["-c", command])
        .stdin(Stdio::null())
        .process_group(0);
    bash
}

fn kill_group(child: &mut Child) {
    let pid = rustix::process::Pid::from_child(child);
    // Fails where nobody is left in the group, which is what is wanted.
    let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
    let _ = child.wait();
}

fn with_output(header: Reply, program: &Program) -> Answer {
    let blobs = output(program).map_err(|e| format!("a program's output: {e}"))?;
    Ok(Message {
        header,
        blobs: blobs.into(),
    })
}

fn output(program: &Program) -> io::Result<[Vec<u8>; 2]> {
    let one = |path| last_bytes(&mut File::open(path)?);
    Ok([one(&program.stdout)?, one(&program.stderr)?])
}

fn last_bytes(file: &mut File) -> io::Result<Vec<u8>> {
    let end = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(end.saturating_sub(MAX_BLOB_BYTES as u64)))?;
    let mut bytes = Vec::new();
    // A program may write on meanwhile.
    file.take(MAX_BLOB_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Files of /proc and /sys tell no size, so the limit is checked on what was read.
fn read_file(path: &str) -> Answer {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?
            .take(MAX_BLOB_BYTES as u64 + 1)
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|e| format!("reading {path}: {e}"))?;
    if bytes.len() > MAX_BLOB_BYTES {
        return Err(format!("{path} is longer than {MAX_BLOB_BYTES} bytes"));
    }
    let blobs = vec![bytes];
    let header = Reply::Bytes;
    Ok(Message { header, blobs })
}

fn ended(status: ExitStatus) -> Ended {
    Ended {
        code: status.code(),
        signal: status.signal(),
    }
}

fn number(signal: Signal) -> rustix::process::Signal {
    use rustix::process::Signal as Number;
    match signal {
        Signal::Hup => Number::HUP,
        Signal::Int => Number::INT,
        Signal::Kill => Number::KILL,
        Signal::Term => Number::TERM,
        Signal::Stop => Number::STOP,
        Signal::Cont => Number::CONT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::{Agent, GuestError};

    const LONG: Duration = Duration::from_secs(20);

    fn gone(pid: u32) -> bool {
        let start = Instant::now();
        while Path::new(&format!("/proc/{pid}")).exists() {
            if start.elapsed() > LONG {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    #[test]
    fn a_command_gives_code_and_output_and_is_killed_when_time_is_up() {
        let folder = tempfile::tempdir().unwrap();
        let agent = Agent::local(folder.path()).unwrap();
        let output = agent.run("echo out; echo err >&2; exit 3", LONG).unwrap();
        assert_eq!(output.code, Some(3));
        assert_eq!((&*output.stdout, &*output.stderr), ("out\n", "err\n"));

        // A grandchild that keeps the output open does not keep the caller.
        let output = agent.run("sleep 30 & echo $!", LONG).unwrap();
        agent.run(&format!("kill {}", output.stdout), LONG).unwrap();

        let error = agent
            .run("echo $$; sleep 60; true", Duration::from_millis(300))
            .unwrap_err();
        let GuestError::TimedOut { output, .. } = error else {
            panic!("{error}")
        };
        assert!(gone(output.trim().parse().unwrap()), "still runs: {output}");
        assert_eq!(agent.run("true", LONG).unwrap().code, Some(0));
    }

    #[test]
    fn a_background_program_is_watched_signalled_and_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let agent = Agent::local(folder.path()).unwrap();
        let loop_on = "trap 'echo reloaded' HUP; echo ready; while :; do sleep 0.05; done";
        agent.spawn("peer", loop_on).unwrap();
        assert_eq!(agent.wait_line("peer", "rea", LONG).unwrap(), "ready");
        let error = agent.spawn("peer", "true").unwrap_err();
        assert!(error.to_string().contains("still runs"), "{error}");

        agent.kill("peer", Signal::Hup).unwrap();
        agent.wait_line("peer", "reloaded", LONG).unwrap();
        agent.kill("peer", Signal::Hup).unwrap();
        agent.wait_nth_line("peer", "reloaded", 2, LONG).unwrap();
        let short = Duration::from_millis(50);
        let error = agent.wait_line("peer", "nothing", short).unwrap_err();
        assert!(matches!(error, GuestError::TimedOut { .. }), "{error}");

        agent.kill("peer", Signal::Kill).unwrap();
        let ended = agent.wait("peer", LONG).unwrap();
        assert_eq!((ended.code, ended.signal), (None, Some(9)));
        assert!(agent.kill("peer", Signal::Term).is_err());
        assert!(agent.output("peer").unwrap().0.starts_with("ready\n"));

        agent.spawn("peer", "echo short-lived").unwrap();
        let error = agent.wait_line("peer", "nothing", LONG).unwrap_err();
        assert!(error.to_string().contains("short-lived"), "{error}");
    }

    #[test]
    fn a_connection_that_ends_takes_its_programs_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let agent = Agent::local(folder.path()).unwrap();
        let pid = agent.spawn("left", "sleep 60").unwrap();
        drop(agent);
        assert!(gone(pid), "process {pid} still runs");
    }

    #[test]
    fn files_come_back_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let agent = Agent::local(folder.path()).unwrap();
        let small = folder.path().join("small");
        fs::write(&small, [0, 255, 10]).unwrap();
        let bytes = agent.read_file(small.to_str().unwrap()).unwrap();
        assert_eq!(bytes, [0, 255, 10]);
        assert!(!agent.read_file("/proc/self/status").unwrap().is_empty());
        let error = agent.read_file("/dev/zero").unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }
}
