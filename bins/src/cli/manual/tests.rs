mod errors;

use std::collections::{BTreeMap, BTreeSet};

use super::*;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Long flags of a command that are told of.
fn longs(command: &Command) -> Vec<String> {
    let args = command.get_arguments().filter(|a| is_told(a));
    args.filter_map(|a| Some(format!("--{}", a.get_long()?)))
        .collect()
}

#[test]
fn every_command_has_a_manual_page_that_names_its_flags() {
    let dir = std::env::temp_dir().join(format!("atlas-man-{}", std::process::id()));
    let written = write_pages(&dir).unwrap();
    let mut pages = BTreeMap::new();
    for path in &written {
        let page = fs::read_to_string(path).unwrap().replace("\\-", "-");
        pages.insert(
            path.file_stem().unwrap().to_string_lossy().into_owned(),
            page,
        );
    }
    fs::remove_dir_all(&dir).unwrap();
    assert!(pages.contains_key("atlas-expert") && pages.contains_key("atlas-expert-peer"));
    for command in all_commands() {
        let name = command.get_display_name().unwrap_or(command.get_name());
        let page = &pages[name];
        for flag in longs(&command) {
            assert!(page.contains(&flag), "{name}: {flag}\n{page}");
        }
    }
    assert!(pages["atlas-expert-pack"].contains("--output"));
}

#[test]
fn completions_name_every_flag_in_every_shell() {
    for program in [Program::AtlasExpert, Program::AtlasExpertPeer] {
        let mut command = program.command();
        command.build();
        let mut all = Vec::new();
        flatten(&command, &mut all);
        for shell in [
            Shell::Bash,
            Shell::Zsh,
            Shell::Fish,
            Shell::Elvish,
            Shell::PowerShell,
        ] {
            let script = completion_script(program, shell);
            for flag in all.iter().flat_map(longs) {
                let name = flag.trim_start_matches('-');
                assert!(script.contains(name), "{shell}: {flag}");
            }
        }
    }
}

#[test]
fn commands_page_is_what_the_programs_say() {
    let page = fs::read_to_string(repository().join("docs/commands.md")).unwrap_or_default();
    assert!(
        page == markdown(),
        "docs/commands.md is not up to date: cargo run -p atlas-expert -- man --markdown > docs/commands.md"
    );
}

/// Flags of other programs that our texts name: container tools and cargo.
const FOREIGN: [&str; 19] = [
    "--device",
    "--network",
    "--ulimit",
    "--bench",
    "--bins",
    "--bs",
    "--direct",
    "--filter",
    "--fixedbufs",
    "--ioengine",
    "--no-create-home",
    "--now",
    "--rig",
    "--shell",
    "--system",
    "--nocapture",
    "--release",
    "--test",
    "--workspace",
];

/// Our texts with flags in them, README first.
fn texts() -> Vec<(String, String)> {
    let docs = fs::read_dir(repository().join("docs")).unwrap();
    let mut paths: Vec<PathBuf> = docs.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "md"));
    paths.push(repository().join("README.md"));
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            (
                path.file_name().unwrap().to_string_lossy().into_owned(),
                text,
            )
        })
        .collect()
}

/// The long flags that a text has in code: between backticks, or in a fenced block.
fn flags_in_code(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut is_fenced = false;
    for line in text.lines() {
        if line.starts_with("```") {
            is_fenced = !is_fenced;
            continue;
        }
        let code: Vec<&str> = match is_fenced {
            true => vec![line],
            false => line.split('`').skip(1).step_by(2).collect(),
        };
        for word in code
            .iter()
            .flat_map(|c| c.split([' ', ',', '(', ')', '[', ']', '|', '=', '\'']))
        {
            let is_flag = word.strip_prefix("--").is_some_and(|name| {
                name.starts_with(|c: char| c.is_ascii_lowercase())
                    && name
                        .chars()
                        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            });
            if is_flag {
                found.insert(word.to_owned());
            }
        }
    }
    found
}

#[test]
fn no_text_names_a_flag_that_is_not_there() {
    let mut known: BTreeSet<String> = all_commands().iter().flat_map(longs).collect();
    known.extend(["--help", "--version"].map(String::from));
    known.extend(FOREIGN.map(String::from));
    let mut unknown = Vec::new();
    for (name, text) in texts() {
        let flags = flags_in_code(&text);
        unknown.extend(
            flags
                .difference(&known)
                .map(|flag| format!("{name}: {flag}")),
        );
    }
    assert_eq!(unknown, [""; 0], "add those of other programs to FOREIGN");
}

#[test]
fn flags_are_found_in_code_and_nowhere_else() {
    let text =
        "`x --one=2` and --two `[--three]`\n```sh\ny --four --\n# --FIVE\n```\n`--six-7`, `--`";
    let found: Vec<String> = flags_in_code(text).into_iter().collect();
    assert_eq!(found, ["--four", "--one", "--six-7", "--three"]);
}
