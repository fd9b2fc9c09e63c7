"""Samples, what is made of them, and the goals they are held against."""

import statistics

# Label of the ratio, what is compared (above, below), the field, whether the ratio has to be high or low, the goal.
HIGH, LOW = ">=", "<="
GOALS = [
    ("ours off / bare sendfile pair, same streams", "ours, checksums off, batch 8", "bare pair, sendfile, batch 8", "gb_per_s", HIGH, 0.95),
    ("ours on / bare sendfile pair, same streams", "ours, checksums on, batch 8", "bare pair, sendfile, batch 8", "gb_per_s", HIGH, 0.85),
    ("ours off / bare pread-and-send pair", "ours, checksums off, batch 8", "bare pair, pread and send, batch 8", "gb_per_s", HIGH, None),
    ("ours on / iperf3, one stream", "ours, checksums on, batch 8", "iperf3, one stream", "gb_per_s", HIGH, 1.2),
    ("ours off, depth 2 / bare sendfile pair", "ours, checksums off, batch 8, depth 2", "bare pair, sendfile, batch 8", "gb_per_s", HIGH, None),
    ("ours on / Mooncake TCP, batch 8", "ours, checksums on, batch 8", "Mooncake TCP, batch 8", "gb_per_s", HIGH, 1.8),
    ("ours on / Mooncake TCP, batch 1", "ours, checksums on, batch 1", "Mooncake TCP, batch 1", "gb_per_s", HIGH, 1.8),
    ("ours on / NIXL UCX-TCP, batch 8", "ours, checksums on, batch 8", "NIXL UCX-TCP, batch 8", "gb_per_s", HIGH, 4.0),
    ("ours on / NIXL UCX-TCP, batch 1", "ours, checksums on, batch 1", "NIXL UCX-TCP, batch 1", "gb_per_s", HIGH, 4.0),
    ("ours on / NIXL, 1 MiB segments, batch 8", "ours, checksums on, batch 8", "NIXL UCX-TCP, 1 MiB segments, batch 8", "gb_per_s", HIGH, None),
    ("ours on / NIXL, 1 MiB segments, batch 1", "ours, checksums on, batch 1", "NIXL UCX-TCP, 1 MiB segments, batch 1", "gb_per_s", HIGH, None),
    ("client CPU, ours off / Mooncake TCP", "ours, checksums off, batch 8", "Mooncake TCP, batch 8", "client_cpu", LOW, 0.6),
    ("latency of one record, ours off / bare pair", "ours, checksums off, one record", "bare pair, sendfile, one record", "p50_us", LOW, 1.15),
    ("latency of one record, ours on / bare pair", "ours, checksums on, one record", "bare pair, sendfile, one record", "p50_us", LOW, 1.15),
    ("uma, checksums off / fio", "ours, uma, checksums off", "fio, the same, fixed buffers in huge pages", "gb_per_s", HIGH, 0.95),
    ("uma, checksums on / fio", "ours, uma, checksums on", "fio, the same, fixed buffers in huge pages", "gb_per_s", HIGH, 0.95),
    ("pack --no-sync / cp", "ours, pack --no-sync", "cp", "gb_per_s", HIGH, 0.9),
    ("pack / cp and fsync", "ours, pack", "cp and fsync", "gb_per_s", HIGH, 0.9),
    ("pack / cp", "ours, pack", "cp", "gb_per_s", HIGH, None),
    ("verify / read and discard", "ours, verify", "read and discard, 8 MiB reads", "gb_per_s", HIGH, 0.9),
    ("index / read and discard", "ours, index", "read and discard, 8 MiB reads", "gb_per_s", HIGH, None),
]


def take_turns(steps, rounds, samples, failed, tell):
    """Measures all once to warm up, and then so many rounds: A B C A B C. Who fails is left out from then on."""
    from .process import Failed

    for number in range(rounds + 1):
        tell(f"round {number} of {rounds}" if number else "warming up")
        for name, measure in steps.items():
            if name in failed:
                continue
            try:
                found = measure()
            except Failed as e:
                failed[name] = str(e)
                tell(f"{name} is left out: {e}")
                continue
            if number:
                samples.setdefault(name, []).append(found)


def values(samples, name, field):
    return [one[field] for one in samples.get(name, ()) if one.get(field) is not None]


def spread(samples, name, field):
    """Median, least and most; None where nothing was measured."""
    found = values(samples, name, field)
    return (statistics.median(found), min(found), max(found)) if found else None


def ratios(samples):
    """Ratios of medians, with the least and the most of the rounds' own, whether or not there is a goal."""
    made = []
    for label, above, below, field, sense, goal in GOALS:
        ours, theirs = (values(samples, name, field) for name in (above, below))
        if not ours or not theirs or not all(theirs):
            continue
        here = statistics.median(ours) / statistics.median(theirs)
        rounds = [a / b for a, b in zip(ours, theirs)]
        met = None if goal is None else (here >= goal if sense == HIGH else here <= goal)
        made.append({"ratio": label, "here": here, "least": min(rounds), "most": max(rounds),
                     "sense": sense, "goal": goal, "met": met})
    return made


def columns(header, rows):
    """Text in columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def number(found, digits):
    return "-" if found is None else f"{found[0]:.{digits}f}"


def rates_text(samples, names):
    """GB/s with its range, and processor time of both sides."""
    rows = []
    for name in names:
        rate = spread(samples, name, "gb_per_s")
        if rate is None:
            continue
        rows.append([name, f"{rate[0]:.2f}", f"{rate[1]:.2f} to {rate[2]:.2f}",
                     number(spread(samples, name, "client_cpu"), 2), number(spread(samples, name, "server_cpu"), 2)])
    header = ["", "GB/s", "range", "client s/GiB", "server s/GiB"]
    while rows and all(row[-1] == "-" for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return columns(header, rows)


def latencies_text(samples, names):
    rows = []
    for name in names:
        p50 = spread(samples, name, "p50_us")
        if p50 is None:
            continue
        rows.append([name, f"{p50[0]:.1f}", f"{p50[1]:.1f} to {p50[2]:.1f}", number(spread(samples, name, "p99_us"), 1)])
    return columns(["microseconds", "p50", "range", "p99"], rows)


def ratios_text(made):
    rows = []
    for one in made:
        goal = "-" if one["goal"] is None else f"{one['sense']} {one['goal']:.2f}"
        verdict = {None: "", True: "met", False: "missed"}[one["met"]]
        rows.append([one["ratio"], f"{one['here']:.3f}", f"{one['least']:.2f} to {one['most']:.2f}", goal, verdict])
    return columns(["ratio of medians", "here", "in single rounds", "goal", ""], rows)
