"""What a guest left in its results share, as JSON, and the tables made of it."""

import json
import re
from pathlib import Path

BACKENDS = ("mock", "tcp", "verbs")
# What no kernel should say while a test runs. The first kind fails the run, the second is told.
KERNEL_FAILED = re.compile(r"Kernel panic|BUG: |Oops|general protection fault|KASAN")
KERNEL_WARNED = re.compile(r"WARNING: CPU|blocked for more than|soft lockup|refcount_t:")


def lines(path):
    """Whole lines of a file that may not be there; one that a guest was still writing is left out."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def word(path):
    """The content of a one-line file, or None."""
    found = lines(path)
    return found[0].strip() if found else None


def backend(name):
    """Which backend a test is of: a module `verbs::` or a name that starts with `verbs_`."""
    for part in name.split("::"):
        for one in BACKENDS:
            if part == one or part.startswith(one + "_"):
                return one
    return "other"


def cases(share):
    """Tests that ended, in order."""
    found = []
    for line in lines(share / "results.tsv"):
        target, name, outcome, seconds, log = line.split("\t")
        found.append({"target": target, "name": name, "backend": backend(name), "outcome": outcome,
                      "seconds": float(seconds), "log": log})
    return found


def counters(path):
    """{device: {counter: value}} of one snapshot."""
    found = {}
    for line in lines(path):
        device, counter, value = line.split()
        found.setdefault(device, {})[counter] = int(value)
    return found


def traffic(share, role):
    """What each device of a guest moved between its two snapshots; counters that stood still are left out."""
    before = counters(share / f"counters-{role}-before")
    after = counters(share / f"counters-{role}-after")
    moved = {}
    for device, values in sorted(after.items()):
        difference = {n: v - before.get(device, {}).get(n, 0) for n, v in values.items()}
        moved[device] = {n: d for n, d in difference.items() if d or n in ("sent_pkts", "rcvd_pkts")}
    return moved


def figures(share):
    """Figures as the tests told them; a line that is no JSON is a problem of its own."""
    found, broken = [], []
    for line in lines(share / "figures.jsonl"):
        try:
            found.append(json.loads(line))
        except ValueError:
            broken.append(f"figures.jsonl has a line that is no JSON: {line[:200]}")
    return found, broken


def kernel_words(share, role):
    """Lines of the kernel's log that fail a run, and those that are only told."""
    said = lines(share / f"dmesg-{role}")
    failed = [line for line in said if KERNEL_FAILED.search(line)]
    return failed, [line for line in said if KERNEL_WARNED.search(line)]


def summary(share, roles, planned, problems, seconds, kernel, rig):
    """The report of one kernel and rig. `problems` are the harness's own; each fails the run."""
    ran = cases(share)
    ended = {(c["target"], c["name"]) for c in ran}
    missing = [{"target": t, "name": n, "backend": backend(n), "outcome": "did-not-end", "seconds": None,
                "log": None} for t, n in planned if (t, n) not in ended]
    told, broken = figures(share)
    problems = [*problems, *broken]
    warned = []
    for role in roles:
        failed, only_told = kernel_words(share, role)
        problems += [f"the kernel of guest {role} said: {line}" for line in failed]
        warned += [f"{role}: {line}" for line in only_told]
    if not ran:
        problems.append("no test ran")
    every = [*ran, *missing]
    by_backend = {}
    for case in every:
        group = by_backend.setdefault(case["backend"], {"run": 0, "passed": 0, "failed": []})
        group["run"] += case["outcome"] != "did-not-end"
        if case["outcome"] == "ok":
            group["passed"] += 1
        else:
            group["failed"].append(case["name"])
    return {
        "kernel": kernel,
        "rig": rig,
        "uname": word(share / f"uname-{roles[-1]}"),
        "seconds": round(seconds, 1),
        "run": len(ran),
        "passed": sum(c["outcome"] == "ok" for c in ran),
        "failed": [f"{c['target']}: {c['name']} ({c['outcome']})" for c in every if c["outcome"] != "ok"],
        "problems": problems,
        "kernel_warnings": warned,
        "by_backend": by_backend,
        "traffic": {role: traffic(share, role) for role in roles},
        "figures": told,
        "tests": every,
    }


def cut_short(run, panic):
    """The report of guests of which one died of a fault of its kernel: what had not ended is not
    theirs any more, because it runs again elsewhere. Returns the names of that."""
    unfinished = {(c["target"], c["name"]) for c in run["tests"] if c["outcome"] == "did-not-end"}
    names = {name for _, name in unfinished}
    run["tests"] = [c for c in run["tests"] if c["outcome"] != "did-not-end"]
    run["failed"] = [f"{c['target']}: {c['name']} ({c['outcome']})" for c in run["tests"] if c["outcome"] != "ok"]
    for group in run["by_backend"].values():
        group["failed"] = [name for name in group["failed"] if name not in names]
    run["kernel_warnings"] += [panic]
    run["problems"] = []
    return unfinished


def good(run):
    """Whether a kernel and rig passed."""
    return not run["failed"] and not run["problems"] and run["passed"] > 0


def shown(value):
    """A figure's value for people."""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def table(runs):
    """Lines for people: one per kernel and rig, figures, traffic, what failed."""
    yield f"{'kernel':8}{'rig':5}{'uname':26}{'run':>5}{'passed':>8}{'failed':>8}{'seconds':>9}"
    for run in runs:
        yield (f"{run['kernel']:8}{run['rig']:5}{run['uname'] or '-':26}{run['run']:5}{run['passed']:8}"
               f"{len(run['failed']):8}{run['seconds']:9}")
        groups = run["by_backend"].items()
        yield "        " + ", ".join(f"{name} {g['passed']}/{g['passed'] + len(g['failed'])}" for name, g in groups)
    yield ""
    yield f"{'kernel':8}{'rig':5}{'guest':7}{'rail':7}{'packets sent':>14}{'received':>12}{'MB out':>10}{'MB in':>10}"
    for run in runs:
        for role, devices in run["traffic"].items():
            for device, moved in devices.items():
                out, into = moved.get("interface_tx_bytes", 0), moved.get("interface_rx_bytes", 0)
                yield (f"{run['kernel']:8}{run['rig']:5}{role:7}{device:7}{moved.get('sent_pkts', '-'):>14}"
                       f"{moved.get('rcvd_pkts', '-'):>12}{out / 1e6:10.1f}{into / 1e6:10.1f}")
    told = [(run, f) for run in runs for f in run["figures"]]
    if told:
        yield ""
    for run, figure in told:
        yield f"{run['kernel']:8}{run['rig']:5}{figure.get('name')} = {shown(figure.get('value'))}"
    for run in runs:
        for what in [*run["failed"], *run["problems"]]:
            yield f"FAILED {run['kernel']} {run['rig']}: {what}"
        for what in run["kernel_warnings"]:
            yield f"warning {run['kernel']} {run['rig']}: {what}"


def tail(path, count):
    """The last lines of a log without what a terminal would make of them."""
    text = Path(path).read_text(errors="replace") if Path(path).exists() else ""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1bc|\r", "", text)
    return [line for line in text.splitlines() if line.strip()][-count:]
