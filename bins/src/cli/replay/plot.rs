//! A chart: hit rate and stall over the size of the arena, as SVG.

use std::fmt::Write;

use super::report::Row;
use crate::cli::svg::{escaped, line, step, text};

const WIDTH: f64 = 760.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 200.0;
const PANEL: f64 = 230.0;
const TOP: f64 = 60.0;
const GAP: f64 = 60.0;
const HEIGHT: f64 = TOP + 2.0 * PANEL + GAP + 60.0;

const COLOURS: [&str; 6] = [
    "#1f5fa8", "#d98032", "#3b8f4a", "#a83b6f", "#6b5bb0", "#7a6a4f",
];
/// Beyond six combinations colours come again, with another pattern.
const DASHES: [&str; 3] = ["", "7 4", "2 3"];
const BOUND: (&str, &str) = ("#999999", "2 4");

struct Line<'a> {
    name: String,
    colour: &'a str,
    dash: &'a str,
    points: Vec<(f64, f64)>,
}

struct Panel {
    top: f64,
    label: &'static str,
    highest: f64,
    slots_max: f64,
}

/// The chart as a file.
pub(super) fn draw(title: &str, rows: &[Row]) -> String {
    let slots_max = rows.iter().map(|row| row.slots).max().unwrap_or(1);
    let highest_ms = rows.iter().map(stall_ms).fold(0.0, f64::max);
    let hits = Panel {
        top: TOP,
        label: "hits, %",
        highest: 100.0,
        slots_max: f64::from(slots_max),
    };
    let stalls = Panel {
        top: TOP + PANEL + GAP,
        label: "mean stall of a step, ms",
        // Where nothing waits the line lies on the axis.
        highest: if highest_ms > 0.0 { highest_ms } else { 1.0 },
        slots_max: f64::from(slots_max),
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>\n",
        escaped(title)
    );
    let hit_lines = lines(rows, |row| 100.0 * row.replayed.hit_rate);
    let mut upper = vec![Line {
        name: "best without prefetch".to_owned(),
        colour: BOUND.0,
        dash: BOUND.1,
        points: bound(rows),
    }];
    upper.extend(hit_lines);
    for (at, shown) in upper.iter().enumerate() {
        let y = TOP + 14.0 + 20.0 * at as f64;
        let x = WIDTH - RIGHT + 16.0;
        line(
            &mut out,
            &[(x, y - 4.0), (x + 30.0, y - 4.0)],
            shown.colour,
            shown.dash,
            2.0,
        );
        text(&mut out, x + 36.0, y, "start", &shown.name);
    }
    hits.draw(&mut out, &upper);
    stalls.draw(&mut out, &lines(rows, stall_ms));
    text(
        &mut out,
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 16.0,
        "middle",
        "slots",
    );
    out.push_str("</svg>\n");
    out
}

fn stall_ms(row: &Row) -> f64 {
    row.replayed.stall_us.mean / 1e3
}

/// A line for each policy and rule.
fn lines(rows: &[Row], value: impl Fn(&Row) -> f64) -> Vec<Line<'static>> {
    let mut lines: Vec<Line<'static>> = Vec::new();
    for row in rows {
        let name = format!("{}, {}", row.policy, row.prefetch);
        let point = (f64::from(row.slots), value(row));
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line {
                name,
                colour: COLOURS[lines.len() % COLOURS.len()],
                dash: DASHES[lines.len() / COLOURS.len() % DASHES.len()],
                points: vec![point],
            }),
        }
    }
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines
}

fn bound(rows: &[Row]) -> Vec<(f64, f64)> {
    let point = |row: &Row| (f64::from(row.slots), 100.0 * row.optimal_hit_rate);
    let mut points: Vec<(f64, f64)> = rows.iter().map(point).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points.dedup();
    points
}

impl Panel {
    fn x(&self, slots: f64) -> f64 {
        LEFT + slots / self.slots_max * (WIDTH - LEFT - RIGHT)
    }

    fn draw(&self, out: &mut String, lines: &[Line<'_>]) {
        let step = step(self.highest);
        let top = (self.highest / step).ceil() * step;
        let y = |value: f64| self.top + PANEL * (1.0 - value / top);
        for at in 0..=(top / step).round() as u32 {
            let value = f64::from(at) * step;
            let grid = [(LEFT, y(value)), (WIDTH - RIGHT, y(value))];
            line(out, &grid, "#e4e4e4", "", 1.0);
            // The distance of the lines has one digit that counts.
            let digits = (-step.log10().floor()).max(0.0) as usize;
            text(
                out,
                LEFT - 8.0,
                y(value) + 4.0,
                "end",
                &format!("{value:.digits$}"),
            );
        }
        text(out, 12.0, self.top - 12.0, "start", self.label);
        let slots_step = slots_step(self.slots_max);
        for at in 0..=(self.slots_max / slots_step) as u32 {
            let slots = f64::from(at) * slots_step;
            let below = self.top + PANEL + 18.0;
            text(out, self.x(slots), below, "middle", &format!("{slots}"));
        }
        for shown in lines {
            let path: Vec<(f64, f64)> = shown
                .points
                .iter()
                .map(|&(slots, value)| (self.x(slots), y(value)))
                .collect();
            line(out, &path, shown.colour, shown.dash, 2.0);
            if shown.dash == BOUND.1 {
                continue;
            }
            for (x, y) in path {
                // A String takes everything.
                let _ = writeln!(
                    out,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{}\"/>",
                    shown.colour
                );
            }
        }
    }
}

fn slots_step(slots_max: f64) -> f64 {
    step(slots_max).max(1.0)
}
