//! Whether `docs/troubleshooting.md` has a row for each error of each crate.

use super::*;

/// An error that a caller may see.
struct Variant {
    /// `TierError::Checksum`
    name: String,
    /// Its text up to the first semicolon, with `…` for what is put in.
    text: String,
}

impl Variant {
    /// Whether the text has words of its own to find it by.
    fn has_words(&self) -> bool {
        let words = self.text.split(|c: char| !c.is_ascii_alphabetic());
        words.filter(|word| word.len() >= 3).count() >= 2
    }
}

/// A string literal without its quotes: escapes and line continuations resolved.
fn literal(source: &str) -> Option<String> {
    let mut chars = source.trim_start().strip_prefix('"')?.chars();
    let mut text = String::new();
    loop {
        match chars.next()? {
            '"' => return Some(text),
            '\\' => match chars.next()? {
                '\n' => {
                    let rest = chars.as_str().trim_start();
                    chars = rest.chars();
                }
                escaped => text.push(escaped),
            },
            c => text.push(c),
        }
    }
}

/// `{key} is {state:?}; …` as `… is …`.
fn headline(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '{' | '}' if chars.peek() == Some(&c) => {
                chars.next();
                out.push(c);
            }
            '{' => {
                let _ = chars.find(|c| *c == '}');
                out.push('…');
            }
            c => out.push(c),
        }
    }
    let end = out.find("; ").unwrap_or(out.len());
    out[..end].replace('`', "'")
}

/// The variants of the public error enums of a source file.
fn variants(source: &str) -> Vec<Variant> {
    let mut found = Vec::new();
    for block in source.split("\n#[derive(").skip(1) {
        let derives = block.split(')').next().unwrap_or_default();
        let Some((head, body)) = block.split_once("pub enum ") else {
            continue;
        };
        // The next item's derive is in a block of its own.
        if !derives.split(", ").any(|d| d.ends_with("Error")) || head.contains("\n}") {
            continue;
        }
        let (name, body) = body.split_once(" {").expect("an enum with a body");
        let body = body.split("\n}\n").next().expect("a body");
        for attribute in body.split("#[error(").skip(1) {
            let (_, after) = attribute
                .split_once(")]\n")
                .expect("the end of an attribute");
            let line = after
                .lines()
                .map(str::trim)
                .find(|l| !l.starts_with("#[") && !l.starts_with("//"));
            let line = line.expect("a variant after its text");
            let variant = line.split(|c: char| !c.is_ascii_alphanumeric()).next();
            found.push(Variant {
                name: format!("{name}::{}", variant.expect("its name")),
                text: headline(&literal(attribute).unwrap_or_default()),
            });
        }
    }
    found
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_error_has_its_row_and_every_row_its_error() {
    let mut files = Vec::new();
    for entry in fs::read_dir(repository().join("crates")).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut files);
    }
    let all: Vec<Variant> = files
        .iter()
        .flat_map(|file| variants(&fs::read_to_string(file).unwrap()))
        .collect();
    for name in [
        "TierError::Deadline",
        "PeerError::Listen",
        "RdmaError::NoLibrary",
    ] {
        assert!(all.iter().any(|v| v.name == name), "{name} was not found");
    }
    let page = fs::read_to_string(repository().join("docs/troubleshooting.md")).unwrap();
    let first_cells: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .collect();
    let row = |v: &Variant| match v.has_words() {
        true => format!("`{}`", v.text),
        false => format!("<!-- {} -->", v.name),
    };
    let mut missing = Vec::new();
    for variant in &all {
        let row = row(variant);
        if !first_cells.iter().any(|cell| cell.ends_with(&row)) {
            missing.push(format!("{}: no row with {row}", variant.name));
        }
    }
    for cell in first_cells {
        let is_known = all.iter().any(|v| cell.ends_with(&row(v)));
        if !is_known && cell != "it says" {
            missing.push(format!("no error for the row {cell}"));
        }
    }
    assert_eq!(missing, [""; 0]);
}

#[test]
fn errors_are_read_from_source_text() {
    let source = r#"
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum E {
    /// One.
    #[error("{key} is \
             {{bad}} \"so\"; do something")]
    One { key: u8 },
    /// Two.
    #[error(transparent)]
    Two(#[from] F),
    /// Three.
    #[error("{}", words(*a))]
    #[cfg(x)]
    Three,
}

#[derive(Debug, thiserror::Error)]
pub enum F {
    /// Four.
    #[error("four: {0}")]
    Four(u8),
}

#[derive(Debug)]
pub enum NoError {
    A,
}
"#;
    let found: Vec<_> = variants(source)
        .into_iter()
        .map(|v| (v.name, v.text))
        .collect();
    let want = [
        ("E::One", "… is {bad} \"so\""),
        ("E::Two", ""),
        ("E::Three", "…"),
        ("F::Four", "four: …"),
    ];
    assert_eq!(
        found,
        want.map(|(name, text)| (name.to_owned(), text.to_owned()))
    );
}
