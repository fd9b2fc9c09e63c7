//! A small chart: rates over the number of rails, as SVG.

use std::fmt::Write;

use crate::cli::svg::{escaped, line, step, text};

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) rails: u16,
    /// MB/s, as the others.
    pub(super) aggregate: f64,
    pub(super) balanced: f64,
    pub(super) theoretical: f64,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;

/// Name, colour, dash pattern, and what it shows.
type Line = (&'static str, &'static str, &'static str, fn(&Point) -> f64);

const LINES: [Line; 3] = [
    ("theoretical: sum of the rates", "#999999", "2 4", |p| {
        p.theoretical
    }),
    ("balanced: best for whole READs", "#d98032", "7 4", |p| {
        p.balanced
    }),
    ("aggregate", "#1f5fa8", "", |p| p.aggregate),
];

/// The chart as a file.
pub(super) fn draw(title: &str, points: &[Point]) -> String {
    let mut points = points.to_vec();
    points.sort_by_key(|p| p.rails);
    let rails_max = f64::from(points.iter().map(|p| p.rails).max().unwrap_or(1));
    let highest = points.iter().map(|p| p.theoretical.max(p.aggregate));
    let step = step(highest.fold(1.0, f64::max));
    let top = (points
        .iter()
        .map(|p| p.theoretical.max(p.aggregate))
        .fold(1.0, f64::max)
        / step)
        .ceil()
        * step;
    let x = |rails: f64| LEFT + rails / rails_max * (WIDTH - LEFT - RIGHT);
    let y = |rate: f64| HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>\n",
        escaped(title)
    );
    let mut rate = 0.0;
    while rate <= top + step / 2.0 {
        let at = y(rate);
        line(
            &mut out,
            &[(LEFT, at), (WIDTH - RIGHT, at)],
            "#e4e4e4",
            "",
            1.0,
        );
        let at = at + 4.0;
        text(&mut out, LEFT - 8.0, at, "end", &format!("{rate}"));
        rate += step;
    }
    for point in &points {
        let rails = point.rails.to_string();
        let at = x(f64::from(point.rails));
        text(&mut out, at, HEIGHT - BOTTOM + 20.0, "middle", &rails);
    }
    text(&mut out, WIDTH / 2.0, HEIGHT - 16.0, "middle", "rails");
    text(&mut out, 12.0, TOP - 10.0, "start", "MB/s");
    for (i, (name, colour, dash, value)) in LINES.into_iter().enumerate() {
        let path: Vec<(f64, f64)> = points
            .iter()
            .map(|p| (x(f64::from(p.rails)), y(value(p))))
            .collect();
        line(&mut out, &path, colour, dash, 2.0);
        if dash.is_empty() {
            for (x, y) in path {
                // A String takes everything.
                let _ = writeln!(
                    out,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>"
                );
            }
        }
        let at = TOP + 14.0 + 20.0 * i as f64;
        let key = [(LEFT + 12.0, at - 4.0), (LEFT + 44.0, at - 4.0)];
        line(&mut out, &key, colour, dash, 2.0);
        text(&mut out, LEFT + 52.0, at, "start", name);
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_has_a_line_for_each_rate_and_a_mark_for_each_row() {
        let point = |rails: u16, aggregate| Point {
            rails,
            aggregate,
            balanced: aggregate + 1.0,
            theoretical: 125.0 * f64::from(rails),
        };
        let svg = draw("a < b", &[point(2, 240.0), point(1, 124.0)]);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<circle").count(), 2);
        assert_eq!(svg.matches("stroke-width=\"2\"").count(), 6);
        assert!(svg.contains("a &lt; b") && !svg.contains("NaN"));
    }
}
