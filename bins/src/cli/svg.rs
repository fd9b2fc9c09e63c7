//! What charts are made of.

use std::fmt::Write;

/// Distance of the grid's lines: 1, 2 or 5 times a power of ten, five to ten of them.
pub(super) fn step(highest: f64) -> f64 {
    let power = 10f64.powf((highest / 5.0).log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0];
    let enough = factor.iter().find(|f| highest / (*f * power) <= 8.0);
    enough.unwrap_or(&10.0) * power
}

/// A line through points; `dash` is a pattern as SVG has it, empty for none.
pub(super) fn line(out: &mut String, path: &[(f64, f64)], colour: &str, dash: &str, width: f64) {
    let points: Vec<String> = path.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let dash = match dash {
        "" => String::new(),
        dash => format!(" stroke-dasharray=\"{dash}\""),
    };
    let _ = writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{dash}/>",
        points.join(" ")
    );
}

/// One line of text; `anchor` is start, middle or end.
pub(super) fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(text)
    );
}

/// Text as XML takes it.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grid_has_some_lines() {
        for highest in [0.001, 1.0, 3.0, 125.0, 999.0, 1000.0, 32_000.0] {
            let lines = highest / step(highest);
            assert!((1.5..=8.0).contains(&lines), "{highest}: {lines}");
        }
    }
}
