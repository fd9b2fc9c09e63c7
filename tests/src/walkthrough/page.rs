//! The marked blocks of a page.

use std::fs;
use std::path::Path;

/// Links that a page tells apart: a block for some of them is left out on the others.
pub const WAYS: [&str; 4] = ["ethernet", "cards", "spark", "soft-roce"];

/// Ends a line whose value the reader changes; an explanation may follow.
const CHANGE: &str = "# change";

/// One of the two machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It has the memory.
    Peer,
    /// It runs the model.
    Client,
}

/// A block to be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Its place, `file:line`.
    pub place: String,
    /// The machines that it is for.
    pub sides: Vec<Side>,
    /// Whether it runs until it is ended.
    pub serves: bool,
    /// The ways that it is for; empty: all.
    pub ways: Vec<String>,
    /// Its lines.
    pub text: String,
    /// What it prints, in part.
    pub shown: String,
}

impl Block {
    /// Its lines with the reader's values in those to be changed. Names that were changed are added to `changed`.
    ///
    /// # Errors
    /// A line is to be changed and there is no value for it.
    pub fn with_values(
        &self,
        values: &[(&str, &str)],
        changed: &mut Vec<String>,
    ) -> Result<String, String> {
        let mut text = String::new();
        for line in self.text.lines() {
            let assigned = line.split_once('=').filter(|_| line.contains(CHANGE));
            match assigned {
                None => text.push_str(line),
                Some((name, _)) => {
                    let value = values.iter().find(|(n, _)| *n == name);
                    let (_, value) = value
                        .ok_or_else(|| format!("{}: nothing to change '{line}' to", self.place))?;
                    text.push_str(&format!("{name}='{value}'"));
                    changed.push(name.to_owned());
                }
            }
            text.push('\n');
        }
        Ok(text)
    }

    /// Whether all lines that the page shows are in the output, in this order. Numbers may differ, digests may not.
    ///
    /// # Errors
    /// The line that is missing.
    pub fn compare(&self, output: &str) -> Result<(), String> {
        let mut lines = output.lines();
        for shown in self.shown.lines().filter(|l| !l.trim().is_empty()) {
            let words: Vec<String> = shown.split_whitespace().map(without_numbers).collect();
            let is_it = |line: &str| {
                let found: Vec<String> = line.split_whitespace().map(without_numbers).collect();
                found.starts_with(&words)
            };
            if !lines.any(is_it) {
                return Err(format!(
                    "{}: the page shows '{shown}', which is not in (the rest of) the output:\n{output}",
                    self.place
                ));
            }
        }
        Ok(())
    }
}

/// A word without its numbers; one of 32 hexadecimal digits as it is.
fn without_numbers(word: &str) -> String {
    if word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit()) {
        return word.to_owned();
    }
    word.chars()
        .filter(|c| !c.is_ascii_digit() && !matches!(c, '.' | ','))
        .collect()
}

/// The marked blocks of a page, in order.
#[derive(Debug, Clone)]
pub struct Page {
    blocks: Vec<Block>,
}

impl Page {
    /// Those of a file of the repository.
    ///
    /// # Errors
    /// It cannot be read; a mark is none that is known; what is shown belongs to no block.
    pub fn read(path: &str) -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let text = fs::read_to_string(root.join(path)).map_err(|e| format!("{path}: {e}"))?;
        Self::parse(path, &text)
    }

    /// Those of a text, which errors call `name`.
    ///
    /// # Errors
    /// As those of [`read`](Self::read).
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut lines = text.lines().enumerate();
        // Whether nothing but text came since the last block.
        let mut follows = false;
        while let Some((number, line)) = lines.next() {
            let Some(info) = line.strip_prefix("```") else {
                continue;
            };
            let place = format!("{name}:{}", number + 1);
            let content: Vec<&str> = lines
                .by_ref()
                .map(|(_, l)| l)
                .take_while(|l| !l.starts_with("```"))
                .collect();
            let content = content.join("\n");
            let words: Vec<&str> = info.split_whitespace().collect();
            match words[..] {
                ["sh", ref marks @ ..] if !marks.is_empty() => {
                    blocks.push(block(place, marks, content)?);
                    follows = true;
                }
                ["text", "shown"] => match blocks.last_mut().filter(|_| follows) {
                    Some(block) => {
                        block.shown = content;
                        follows = false;
                    }
                    None => return Err(format!("{place}: no marked block prints this")),
                },
                _ => follows = false,
            }
        }
        Ok(Self { blocks })
    }

    /// The blocks of one way.
    ///
    /// # Errors
    /// There are none.
    pub fn blocks(&self, way: &str) -> Result<Vec<&Block>, String> {
        let is_on_it = |b: &&Block| b.ways.is_empty() || b.ways.iter().any(|w| w == way);
        let found: Vec<&Block> = self.blocks.iter().filter(is_on_it).collect();
        match found.is_empty() {
            true => Err(format!("no block is marked for '{way}'")),
            false => Ok(found),
        }
    }
}

fn block(place: String, marks: &[&str], text: String) -> Result<Block, String> {
    let mut block = Block {
        place,
        sides: Vec::new(),
        serves: false,
        ways: Vec::new(),
        text,
        shown: String::new(),
    };
    for mark in marks {
        match *mark {
            "peer" => block.sides.push(Side::Peer),
            "client" => block.sides.push(Side::Client),
            "serve" => block.serves = true,
            way if WAYS.contains(&way) => block.ways.push(way.to_owned()),
            other => return Err(format!("{}: '{other}' is no mark", block.place)),
        }
    }
    match block.sides.is_empty() {
        true => Err(format!("{}: marked for no machine", block.place)),
        false => Ok(block),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
text
```sh
cargo build
```
```sh peer client
ADDR=1.2.3.4    # change: the address
say hello
```
```text shown
hello 5 worlds
digest: 00b64310cfa66f963ef2e85381b70ae7
```
```sh client spark soft-roce
more
```
";

    #[test]
    fn marked_blocks_are_taken_with_what_they_show() {
        let page = Page::parse("page", PAGE).unwrap();
        let plain = page.blocks("ethernet").unwrap();
        assert_eq!(plain.len(), 1);
        assert_eq!(plain[0].place, "page:5");
        assert_eq!(plain[0].sides, [Side::Peer, Side::Client]);
        assert_eq!(page.blocks("spark").unwrap().len(), 2);
        let mut changed = vec![];
        let text = plain[0].with_values(&[("ADDR", "5.6.7.8")], &mut changed);
        assert_eq!(text.unwrap(), "ADDR='5.6.7.8'\nsay hello\n");
        assert_eq!(changed, ["ADDR"]);
        let error = plain[0].with_values(&[], &mut changed).unwrap_err();
        assert!(error.contains("page:5"), "{error}");
    }

    #[test]
    fn numbers_of_what_is_shown_may_differ_and_nothing_else() {
        let page = Page::parse("page", PAGE).unwrap();
        let block = page.blocks("ethernet").unwrap()[0];
        let digest = "digest: 00b64310cfa66f963ef2e85381b70ae7";
        block
            .compare(&format!("first\nhello 1,234 worlds, more\n{digest}\n"))
            .unwrap();
        for wrong in [
            format!("{digest}\nhello 5 worlds\n"),
            "hello 5 worlds\ndigest: 10b64310cfa66f963ef2e85381b70ae7\n".into(),
            format!("hello 5 towns\n{digest}\n"),
            String::new(),
        ] {
            block.compare(&wrong).unwrap_err();
        }
    }

    #[test]
    fn marks_that_are_not_known_are_errors() {
        for page in [
            "```sh pear\n```",
            "```sh serve\n```",
            "```text shown\nx\n```",
        ] {
            let error = Page::parse("page", page).unwrap_err();
            assert!(error.starts_with("page:1"), "{error}");
        }
    }
}
