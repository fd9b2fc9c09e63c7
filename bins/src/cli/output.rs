//! What people and programs read: text on standard output, tables, sizes.

use std::io::{self, Write};

use anyhow::Context;

/// Writes text to standard output. A reader that went away (`| head`) is not an error: the exit
/// code tells of the work, not of who watched.
///
/// *Errors*: anything else that writing gives, e.g. a full disk behind a redirection.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(e).context("writing to standard output")
        }
        _ => Ok(()),
    }
}

/// Writes one JSON object and a newline to standard output.
///
/// *Errors*: as [`print()`].
pub fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value).context("writing JSON")?;
    text.push('\n');
    print(&text)
}

/// Prints what the library noticed to standard error.
pub fn print_warnings<T: AsRef<str>>(warnings: &[T]) {
    for warning in warnings {
        // Where standard error is closed there is nobody to tell.
        let _ = writeln!(io::stderr(), "warning: {}", warning.as_ref());
    }
}

/// Tells a person how far it is, on standard error.
pub fn print_note(note: &str) {
    // Where standard error is closed there is nobody to tell.
    let _ = writeln!(io::stderr(), "{note}");
}

/// Prints an error that does not end the work to standard error.
pub fn print_error(error: &impl std::fmt::Display) {
    // Where standard error is closed there is nobody to tell.
    let _ = writeln!(io::stderr(), "error: {error}");
}

/// Bytes in decimal units, as disks and networks count: `9.44 MB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    // 999.995 would be shown as 1000.00.
    while value >= 999.995 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

/// A number with its digits in groups of three: `9,437,184`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `[first, end)` ranges in few words: `0..128`, `0..16, 32..48`.
pub fn ranges_text(ranges: &[[u32; 2]]) -> String {
    const SHOWN: usize = 4;
    let mut words: Vec<String> = ranges
        .iter()
        .take(SHOWN)
        .map(|[first, end]| format!("{first}..{end}"))
        .collect();
    if ranges.len() > SHOWN {
        words.push(format!("and {} more", ranges.len() - SHOWN));
    }
    words.join(", ")
}

/// Bytes per second in GB/s, 0 where no time passed.
pub fn gb_per_s(bytes: u64, seconds: f64) -> f64 {
    match seconds > 0.0 {
        true => bytes as f64 / seconds / 1e9,
        false => 0.0,
    }
}

/// A table in columns; those whose cells all start with a digit are aligned to the right.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let is_number = |column: usize| {
        rows.iter().all(|row| {
            row.get(column)
                .is_some_and(|cell| cell.starts_with(|c: char| c.is_ascii_digit()))
        })
    };
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .chain([header[column].chars().count()])
            .max()
            .unwrap_or(0)
    };
    let columns: Vec<(bool, usize)> = (0..header.len())
        .map(|column| (!rows.is_empty() && is_number(column), width(column)))
        .collect();
    let mut out = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (cell, &(right, width)) in cells.zip(&columns) {
            match right {
                true => text.push_str(&format!("{cell:>width$}  ")),
                false => text.push_str(&format!("{cell:<width$}  ")),
            }
        }
        out.push_str(text.trim_end());
        out.push('\n');
    };
    line(&mut header.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    out
}

/// Name and value, a pair a line, values aligned.
pub fn pairs(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 1;
    pairs
        .iter()
        .map(|(name, value)| format!("{:<width$} {value}\n", format!("{name}:")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_decimal_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (9_437_184, "9.44 MB"),
            (999_999_999, "1.00 GB"),
            (u64::MAX, "18446.74 PB"),
        ] {
            assert_eq!(human_bytes(bytes), text);
        }
        assert_eq!(grouped(9_437_184), "9,437,184");
        assert_eq!(grouped(512), "512");
    }

    #[test]
    fn numbers_of_a_table_are_aligned_to_the_right() {
        let rows = vec![
            vec!["gate".to_string(), "9".to_string()],
            vec!["up".to_string(), "1000".to_string()],
        ];
        assert_eq!(
            table(&["role", "bytes"], &rows),
            "role  bytes\ngate      9\nup     1000\n"
        );
    }
}
