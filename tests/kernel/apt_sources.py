#!/usr/bin/env python3
"""Prints apt sources (deb822) for one suite of this machine's release, derived from its own sources.

  apt_sources.py CODENAME [SUFFIX] [--root DIR]     SUFFIX: "", "-backports", ...

The archive that serves the release also serves its backports, so an entry for CODENAME names the
host for CODENAME-backports, its keyring and whatever else it was told (a proxy's address, a
snapshot). An entry for the suite itself wins. Both formats of apt are understood. No host is
written down here: a machine behind a mirror keeps using that mirror.

Exit 1: no such entry.
"""

import re
import sys
from pathlib import Path

# What the release is called over the years; a sources file may use any of these.
ALIASES = {"stable", "oldstable", "oldoldstable"}
# Options of the one-line format and the fields they are in the other.
FIELDS = {
    "signed-by": "Signed-By",
    "trusted": "Trusted",
    "check-valid-until": "Check-Valid-Until",
    "allow-insecure": "Allow-Insecure",
    "by-hash": "By-Hash",
}


def one_line_entries(text):
    """Entries of a `.list` file: (uris, suites, components, fields)."""
    for line in text.splitlines():
        line = line.split("#", 1)[0].strip()
        found = re.match(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+(\S.*)$", line)
        if not found:
            continue
        options, uri, suite, components = found.groups()
        fields = {}
        for option in (options or "").split():
            name, _, value = option.partition("=")
            if name.lower() in FIELDS:
                fields[FIELDS[name.lower()]] = value.replace(",", " ")
        yield [uri], [suite], components.split(), fields


def deb822_entries(text):
    """Entries of a `.sources` file, in the same shape. A key inside `Signed-By` keeps its lines."""
    for stanza in re.split(r"\n\s*\n", text):
        fields, last = {}, None
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and last:
                fields[last] += "\n" + line
            elif ":" in line:
                last, value = line.split(":", 1)
                last = last.strip().lower()
                fields[last] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        if "deb" not in fields.get("types", "").split():
            continue
        kept = {shown: fields[name] for name, shown in FIELDS.items() if name in fields}
        yield (fields.get("uris", "").split(), fields.get("suites", "").split(),
               fields.get("components", "").split(), kept)


def entries(root):
    """Every entry of the machine, in apt's order."""
    etc = root / "etc/apt"
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    for file in files:
        if not file.is_file():
            continue
        text = file.read_text(errors="replace")
        if file.suffix == ".list":
            yield from one_line_entries(text)
        elif file.suffix == ".sources":
            yield from deb822_entries(text)


def derive(all_entries, codename, suffix):
    """The stanza for CODENAME+SUFFIX, or None."""
    wanted = codename + suffix
    exact, close = None, None
    for uris, suites, components, fields in all_entries:
        uris = [u for u in uris if not u.startswith("cdrom:")]
        if not uris or "main" not in components:
            continue
        if wanted in suites:
            exact = exact or (uris, fields)
        elif codename in suites or ALIASES & set(suites):
            close = close or (uris, fields)
    found = exact or close
    if not found:
        return None
    uris, fields = found
    lines = ["Types: deb", f"URIs: {' '.join(uris)}", f"Suites: {wanted}", "Components: main"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\n".join(lines) + "\n"


def main(arguments):
    root = Path("/")
    if "--root" in arguments:
        at = arguments.index("--root")
        root = Path(arguments[at + 1])
        del arguments[at:at + 2]
    if not 1 <= len(arguments) <= 2:
        sys.exit(__doc__)
    codename, suffix = arguments[0], arguments[1] if len(arguments) == 2 else ""
    stanza = derive(entries(root), codename, suffix)
    if stanza is None:
        sys.exit(f"no entry for {codename} with component main in {root / 'etc/apt/sources.list*'}")
    print(stanza, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
