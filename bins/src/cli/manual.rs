//! `completions` and `man`: what a package installs beside the programs, from their flags.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, ArgAction, Command, CommandFactory};
use clap_complete::Shell;

use super::peer_args::PeerArgs;
use super::{Cli, UsageError, output};

/// A program whose flags are known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Program {
    /// The tools
    AtlasExpert,
    /// The server
    AtlasExpertPeer,
}

impl Program {
    fn command(self) -> Command {
        match self {
            Self::AtlasExpert => Cli::command(),
            Self::AtlasExpertPeer => PeerArgs::command(),
        }
    }
}

/// Print a shell's completion script
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell
    shell: Shell,
    /// Program that it completes
    #[arg(long, value_enum, default_value_t = Program::AtlasExpert)]
    program: Program,
}

/// Prints it.
///
/// *Errors*: those of writing.
pub fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    output::print(&completion_script(args.program, args.shell))?;
    Ok(ExitCode::SUCCESS)
}

fn completion_script(program: Program, shell: Shell) -> String {
    let mut command = program.command();
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Write the manual pages of both programs
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Folder to write to, e.g. `/usr/local/share/man/man1`; made if it is not there. Pages that are there are replaced
    #[arg(value_name = "DIR", required_unless_present = "markdown")]
    dir: Option<PathBuf>,
    /// Print all flags as Markdown instead
    #[arg(long, conflicts_with = "dir")]
    markdown: bool,
}

/// Runs it.
///
/// *Errors*: those of writing.
pub fn run(args: &ManArgs) -> anyhow::Result<ExitCode> {
    if args.markdown {
        output::print(&markdown())?;
        return Ok(ExitCode::SUCCESS);
    }
    let dir = args.dir.as_deref();
    let dir = dir.ok_or_else(|| UsageError("name a folder, or --markdown".into()))?;
    for path in write_pages(dir)? {
        output::print(&format!("{}\n", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn write_pages(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let writing = |path: &Path| format!("writing {}", path.display());
    fs::create_dir_all(dir).with_context(|| writing(dir))?;
    let mut written = Vec::new();
    for command in all_commands() {
        let man = clap_mangen::Man::new(command);
        let path = dir.join(man.get_filename());
        let mut page = Vec::new();
        man.render(&mut page).context("rendering a page")?;
        fs::write(&path, page).with_context(|| writing(&path))?;
        written.push(path);
    }
    Ok(written)
}

/// Both programs and their subcommands, each with its whole name; not those that are hidden.
fn all_commands() -> Vec<Command> {
    let mut all = Vec::new();
    for program in [Program::AtlasExpert, Program::AtlasExpertPeer] {
        let mut command = program.command().disable_help_subcommand(true);
        command.build();
        flatten(&command, &mut all);
    }
    all
}

fn flatten(command: &Command, all: &mut Vec<Command>) {
    all.push(command.clone());
    for sub in command.get_subcommands().filter(|s| !s.is_hide_set()) {
        flatten(sub, all);
    }
}

/// `docs/commands.md`.
fn markdown() -> String {
    let mut text = String::from(
        "# Commands and flags\n\n\
         Both programs, every subcommand, every flag. This page is made from the programs themselves: \
         `atlas-expert man --markdown > docs/commands.md`. `atlas-expert man DIR` writes the same as manual pages, and \
         `atlas-expert completions SHELL` (`--program atlas-expert-peer` for the server's) a completion script for bash, \
         zsh, fish, elvish or PowerShell.\n\n\
         Every command takes `--help`, and both programs take `--version`, which also says whether verbs and io_uring can \
         be used here.\n",
    );
    for command in all_commands() {
        let name = command.get_bin_name().unwrap_or(command.get_name());
        text.push_str(&format!("\n## {name}\n"));
        let about = command.get_long_about().or(command.get_about());
        if let Some(about) = about {
            text.push_str(&format!("\n{}\n", about.to_string().trim()));
        }
        let args: Vec<&Arg> = command.get_arguments().filter(|a| is_told(a)).collect();
        if !args.is_empty() {
            text.push_str("\n| flag | default | |\n|---|---|---|\n");
            for arg in args {
                text.push_str(&row(arg));
            }
        }
        if let Some(after) = command.get_after_help() {
            text.push_str(&format!("\n```text\n{}\n```\n", after.to_string().trim()));
        }
    }
    text
}

fn is_told(arg: &Arg) -> bool {
    !arg.is_hide_set()
        && !matches!(
            arg.get_action(),
            ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
        )
}

fn row(arg: &Arg) -> String {
    let mut names: Vec<String> = Vec::new();
    names.extend(arg.get_short().map(|short| format!("-{short}")));
    names.extend(arg.get_long().map(|long| format!("--{long}")));
    let values = arg.get_value_names().unwrap_or_default();
    let values = values.iter().map(|v| v.to_string()).collect::<Vec<_>>();
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let mut flag = names.join(", ");
    if takes_value && !values.is_empty() {
        let space = if flag.is_empty() { "" } else { " " };
        flag = format!("{flag}{space}{}", values.join(" "));
    }
    let defaults: Vec<_> = arg
        .get_default_values()
        .iter()
        .map(|v| v.to_string_lossy())
        .collect();
    let default = match takes_value && !defaults.is_empty() {
        true => format!("`{}`", defaults.join("`, `")),
        false => String::new(),
    };
    let mut help = arg.get_help().map(|h| h.to_string()).unwrap_or_default();
    let choices: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|v| takes_value && !v.is_hide_set())
        .map(|v| match v.get_help() {
            Some(help) => format!("`{}`: {help}", v.get_name()),
            None => format!("`{}`", v.get_name()),
        })
        .collect();
    if !choices.is_empty() {
        help = format!("{help}. {}", choices.join("; "));
    }
    let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
    format!(
        "| `{}` | {} | {} |\n",
        cell(&flag),
        cell(&default),
        cell(&help)
    )
}

#[cfg(test)]
mod tests;
