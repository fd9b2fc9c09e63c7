"""Charts as SVG text: bars with ranges, and curves."""

import math
from xml.sax.saxutils import escape

OURS, THEIRS, FLOOR = "#1f5fa8", "#b9b9b9", "#e2d3b8"
COLOURS = ["#1f5fa8", "#d98032", "#4a9a5b", "#8a5ba8", "#a83232", "#666666"]
WIDTH = 760


def step(highest):
    """Distance of the grid's lines: 1, 2 or 5 times a power of ten, eight of them at most."""
    power = 10 ** math.floor(math.log10(max(highest, 1e-9) / 5))
    return next((f * power for f in (1, 2, 5) if highest / (f * power) <= 8), 10 * power)


def label(value):
    return f"{value:.6g}"


def line(points, colour, width=1.0):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def text(x, y, anchor, words, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def frame(height, title):
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>', text(16, 24, "start", title, ' font-size="15"')]


def bars(title, unit, rows):
    """rows: name, (median, least, most). A bar for each, a line for its range."""
    left, right, top, each = 300, 60, 56, 24
    height = top + each * len(rows) + 16
    highest = max((most for _, (_, _, most) in rows), default=1) or 1
    grid = step(highest)
    end = math.ceil(highest / grid) * grid
    x = lambda value: left + value / end * (WIDTH - left - right)
    out = frame(height, title)
    for i in range(round(end / grid) + 1):
        out.append(line([(x(i * grid), top - 6), (x(i * grid), height - 12)], "#e4e4e4"))
        out.append(text(x(i * grid), top - 10, "middle", label(i * grid)))
    out.append(text(left - 8, top - 10, "end", unit))
    for i, (name, (median, least, most)) in enumerate(rows):
        y = top + each * i
        colour = OURS if name.startswith("ours") else FLOOR if name.startswith("floor") else THEIRS
        out.append(f'<rect x="{left}" y="{y + 3}" width="{max(0.0, x(median) - left):.1f}" height="{each - 8}" fill="{colour}"/>')
        middle = y + each / 2 - 1
        out.append(line([(x(least), middle), (x(most), middle)], "#111111", 1.5))
        out += [line([(x(value), middle - 4), (x(value), middle + 4)], "#111111", 1.5) for value in (least, most)]
        out.append(text(left - 8, middle + 4, "end", name))
        out.append(text(x(most) + 6, middle + 4, "start", f"{median:.3g}"))
    return "\n".join([*out, "</svg>", ""])


def curves(title, x_label, y_label, series, names=None):
    """series: name to points (x, median, least, most). The x axis has one place for each x, in order."""
    left, right, top, bottom, height = 70, 20, 60 + 18 * len(series), 50, 420 + 18 * len(series)
    places = sorted({p[0] for points in series.values() for p in points})
    highest = max((p[3] for points in series.values() for p in points), default=1) or 1
    grid = step(highest)
    end = math.ceil(highest / grid) * grid
    x = lambda value: left + (places.index(value) + 0.5) / max(1, len(places)) * (WIDTH - left - right)
    y = lambda value: height - bottom - value / end * (height - top - bottom)
    out = frame(height, title)
    for i in range(round(end / grid) + 1):
        out.append(line([(left, y(i * grid)), (WIDTH - right, y(i * grid))], "#e4e4e4"))
        out.append(text(left - 8, y(i * grid) + 4, "end", label(i * grid)))
    for place in places:
        out.append(text(x(place), height - bottom + 18, "middle", (names or {}).get(place, label(place))))
    out.append(text(WIDTH / 2, height - 12, "middle", x_label))
    out.append(text(16, top - 12, "start", y_label))
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        key = 44 + 18 * i
        out += [line([(left, key - 4), (left + 30, key - 4)], colour, 2), text(left + 38, key, "start", name)]
        out.append(line([(x(p[0]), y(p[1])) for p in sorted(points)], colour, 2))
        for at, median, least, most in points:
            out.append(line([(x(at), y(least)), (x(at), y(most))], colour, 1))
            out.append(f'<circle cx="{x(at):.1f}" cy="{y(median):.1f}" r="3.5" fill="{colour}"/>')
    return "\n".join([*out, "</svg>", ""])
