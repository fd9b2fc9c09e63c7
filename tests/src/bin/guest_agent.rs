//! The agent of `make kernel-test`: serves in the peer's guest, and asks it from a shell in the other.
//!
//! ```text
//! guest_agent serve ADDR FOLDER     until someone asks it to quit
//! guest_agent call ADDR COMMAND     output and exit code of a shell command there
//! guest_agent wait ADDR SECONDS     exit 0 once it answers
//! guest_agent quit ADDR
//! ```
#![forbid(unsafe_code)]

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use atlas_expert_tests::guest::{Agent, serve};

type Error = Box<dyn std::error::Error>;

/// How long a command may take that was called from a shell; the guest's own limit is shorter.
const CALL: Duration = Duration::from_secs(3600);
const CONNECT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match act(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("guest_agent: {error}");
            ExitCode::from(125)
        }
    }
}

fn act(arguments: &[&str]) -> Result<ExitCode, Error> {
    match *arguments {
        ["serve", addr, folder] => serve(TcpListener::bind(addr)?, Path::new(folder))?,
        ["call", addr, command] => return call(addr.parse()?, command),
        ["wait", addr, seconds] => {
            Agent::connect(addr.parse()?, Duration::from_secs(seconds.parse()?))?;
        }
        ["quit", addr] => Agent::connect(addr.parse()?, CONNECT)?.quit()?,
        _ => {
            return Err(
                "usage: serve ADDR FOLDER | call ADDR COMMAND | wait ADDR SECONDS | quit ADDR"
                    .into(),
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn call(addr: SocketAddr, command: &str) -> Result<ExitCode, Error> {
    let output = Agent::connect(addr, CONNECT)?.run(command, CALL)?;
    print!("{}", output.stdout);
    eprint!("{}", output.stderr);
    let code = output.code.unwrap_or(124);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(124)))
}
