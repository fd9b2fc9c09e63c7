"""What the comparison needs: programs of the distribution, wheels in a folder of their own, and this product."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .process import Failed, run

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BINARIES = Path(os.environ.get("ATLAS_BIN_DIR", TARGET / "release"))
ATLAS = BINARIES / "atlas-expert"
PEER = BINARIES / "atlas-expert-peer"
BARE = BINARIES / "bare_pair"
VENV = TARGET / "venv-bench"
PYTHON = VENV / "bin" / "python"


def programs(names):
    """Installs what is missing, as root on Debian and its relatives; gives back what is missing still, and why."""
    missing = [name for name in names if not shutil.which(name)]
    if not missing:
        return {}
    line = " ".join(missing)
    if os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            run("apt-get", "update", "-q", limit_s=300, env=quiet)
            run("apt-get", "install", "-y", "-q", "--no-install-recommends", *missing, limit_s=300, env=quiet)
        except Failed as e:
            return {name: f"{name} cannot be installed: {e}" for name in missing if not shutil.which(name)}
    why = f"is missing: sudo apt-get install -y {line} (or dnf install {line})"
    return {name: f"{name} {why}" for name in missing if not shutil.which(name)}


def wheels():
    """Sets up target/venv-bench as requirements.txt has it; gives back what could not be installed, and why."""
    listed = Path(__file__).with_name("requirements.txt")
    stamp = VENV / "requirements.txt"
    if stamp.is_file() and stamp.read_bytes() == listed.read_bytes():
        return {}
    print(f"bench: setting up {VENV}", file=sys.stderr)
    failed = {}
    wanted = [line for line in listed.read_text().splitlines() if line and not line.startswith("#")]
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        run(sys.executable, "-m", "venv", VENV, limit_s=300)
    except Failed as e:
        return {name.split("=")[0]: str(e) for name in wanted}
    for one in wanted:
        try:
            run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
                "--only-binary=:all:", one, limit_s=300)
        except Failed as e:
            failed[one.split("=")[0]] = f"pip install --no-deps {one}: {e}"
    if not failed:
        # Written last: a folder without it is not finished and is set up anew.
        stamp.write_bytes(listed.read_bytes())
    return failed


def product():
    """Builds what is measured; ATLAS_BIN_DIR names binaries that are there already."""
    if "ATLAS_BIN_DIR" not in os.environ:
        os.environ["PATH"] += f":{Path.home()}/.cargo/bin"
        subprocess.run(["cargo", "build", "--locked", "--release", "-p", "atlas-expert", "--bins",
                        "-p", "atlas-expert-tests", "--bin", "bare_pair"], check=True, cwd=ROOT)
    for path in (ATLAS, PEER, BARE):
        if not path.is_file():
            sys.exit(f"bench: {path} is missing; without ATLAS_BIN_DIR it is built")
