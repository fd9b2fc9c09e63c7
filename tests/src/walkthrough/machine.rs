//! One side's terminal, and a page run on both.

use std::path::Path;
use std::time::Duration;

use super::page::{Page, Side};
use crate::binary;
use crate::guest::Agent;

/// For a block: a guest under emulation copies, hashes and measures in it.
const PATIENCE: Duration = Duration::from_secs(120);
/// Name of what serves at its agent.
const SERVER: &str = "server";

/// Before each block: what the blocks before it left in their terminal. What a block left running ends with it.
const BEFORE: &str = "
set -e -o pipefail
unset ${!ATLAS_@}
known__=$(compgen -v)
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
. ~/.terminal
";

/// After each block: folder and variables, exported or not.
const AFTER: &str = "
{
    export -p
    for name__ in $(compgen -v); do
        case $name__ in
        [A-Z]*) grep -qxF \"$name__\" <<<\"$known__\" || declare -p \"$name__\" ;;
        esac
    done
    printf 'cd %q\\n' \"$PWD\"
} >~/.terminal
";

/// A machine with a home folder, a clone with built programs in `~/clone`, and one terminal, which is there.
pub struct Machine {
    agent: Agent,
    enter: String,
    home: String,
}

impl Machine {
    /// A machine that an agent runs commands on, in a home folder that is made.
    ///
    /// `enter` is the beginning of a command that runs what follows it on that machine; empty where the agent is on it.
    /// `scp` is a shell command that prints the peer's file `"$1"`.
    ///
    /// # Errors
    /// What could not be made.
    pub fn new(agent: Agent, enter: &str, home: &str, scp: &str) -> Result<Self, String> {
        let machine = Self {
            agent,
            enter: enter.to_owned(),
            home: home.to_owned(),
        };
        let programs = binary::path("atlas-expert");
        let programs = programs.parent().unwrap_or(Path::new("/")).display();
        machine.bash(&format!(
            r#"set -e
mkdir -p ~/bin ~/clone/target
ln -s {programs} ~/clone/target/release
cat >~/bin/sudo <<'END'
#!/bin/sh
exec "$@"
END
cat >~/bin/scp <<'END'
#!/bin/bash
# Stands in for ssh to the peer: scp -p ADDRESS:FILE TARGET, and nothing else.
set -e
[[ $# == 3 && $1 == -p && $2 == *:* ]]
target=$3
set -- "${{2#*:}}"
[ ! -d "$target" ] || target=$target/$(basename "$1")
umask 077
{scp} >"$target"
END
chmod 755 ~/bin/sudo ~/bin/scp
echo 'cd ~/clone' >~/.terminal
"#
        ))?;
        Ok(machine)
    }

    /// Runs a block, or a command in the terminal that the blocks left behind; what it prints.
    ///
    /// # Errors
    /// A line of it failed, or it took too long.
    pub fn run(&self, block: &str) -> Result<String, String> {
        self.bash(&format!("{BEFORE}\n{block}\n{AFTER}"))
    }

    /// Starts a block that runs on; what it has printed once it is ready. It ends with the machine.
    ///
    /// # Errors
    /// It ended, or was not ready in time.
    pub fn serve(&self, block: &str) -> Result<String, String> {
        let script = self.entered(&format!("{BEFORE}\n{block}"));
        let started = self.agent.spawn(SERVER, &script);
        started.map_err(|e| e.to_string())?;
        let ready = self.agent.wait_line(SERVER, "ready", PATIENCE);
        ready.map_err(|e| e.to_string())?;
        let (output, _) = self.agent.output(SERVER).map_err(|e| e.to_string())?;
        Ok(output)
    }

    fn bash(&self, script: &str) -> Result<String, String> {
        let output = self.agent.run(&self.entered(script), PATIENCE);
        let output = output.map_err(|e| e.to_string())?;
        match output.code {
            Some(0) => Ok(output.stdout),
            code => Err(format!(
                "it ended with {code:?}\n--- standard output:\n{}--- standard error:\n{}",
                output.stdout, output.stderr
            )),
        }
    }

    fn entered(&self, script: &str) -> String {
        const SYSTEM: &str = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin";
        let home = &self.home;
        let script = format!("export HOME='{home}' PATH='{home}/bin:{SYSTEM}'\n{script}");
        match self.enter.is_empty() {
            true => script,
            false => format!(
                "exec {} bash -c '{}'",
                self.enter,
                script.replace('\'', r"'\''")
            ),
        }
    }
}

/// What the blocks of a page printed, all of each machine's together.
#[derive(Debug, Default)]
pub struct Walked {
    /// On the peer.
    pub peer: String,
    /// On the client.
    pub client: String,
}

impl Walked {
    /// The digests that one side printed, in order.
    pub fn digests(output: &str) -> Vec<&str> {
        let lines = output.lines();
        let found = lines.filter_map(|l| l.strip_prefix("payload-digest:"));
        found.map(str::trim).collect()
    }

    /// The one digest that both sides printed, each at least once.
    ///
    /// # Errors
    /// One side printed none, or they differ.
    pub fn digest(&self) -> Result<&str, String> {
        let (peer, client) = (Self::digests(&self.peer), Self::digests(&self.client));
        // A page may use several stores: the last one is what was served.
        match (peer.last(), client.last()) {
            (Some(there), Some(here)) if client.iter().all(|d| d == there) => Ok(here),
            _ => Err(format!("digests {peer:?} on the peer, {client:?} fetched")),
        }
    }
}

/// Runs the blocks of a page that are for this way, each on its machines, with the reader's values.
///
/// # Errors
/// The place of the block that failed and why; a value that no line takes.
pub fn walk(
    page: &Page,
    way: &str,
    values: &[(&str, &str)],
    peer: &Machine,
    client: &Machine,
) -> Result<Walked, String> {
    let mut walked = Walked::default();
    let mut changed = Vec::new();
    for block in page.blocks(way)? {
        let text = block.with_values(values, &mut changed)?;
        for side in &block.sides {
            let (machine, output) = match side {
                Side::Peer => (peer, &mut walked.peer),
                Side::Client => (client, &mut walked.client),
            };
            let printed = match block.serves {
                true => machine.serve(&text),
                false => machine.run(&text),
            };
            let printed =
                printed.map_err(|e| format!("{}, on the {side:?}: {e}\n{text}", block.place))?;
            println!("--- {} on the {side:?}\n{text}{printed}", block.place);
            block.compare(&printed)?;
            output.push_str(&printed);
        }
    }
    match values.iter().find(|(n, _)| !changed.iter().any(|c| c == n)) {
        Some((name, _)) => Err(format!("no line of the page takes {name}")),
        None => Ok(walked),
    }
}
