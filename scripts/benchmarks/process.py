"""Commands and servers: each with a time limit, each ended by its own pid."""

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path

STEP_S = 120
# Bytes of one line that a server prints; NIXL's metadata is some kilobytes.
LINE_MAX = 1 << 20


class Failed(Exception):
    """Why a contender has no figures, in one line."""


def last_line(text):
    """The error in what a program said, or else the last of it."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def run(*command, limit_s=STEP_S, **options):
    """Standard output of a command that must succeed within its time."""
    words = [str(c) for c in command]
    options.setdefault("stderr", subprocess.PIPE)
    options.setdefault("stdin", subprocess.DEVNULL)
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=limit_s, text=True, **options)
    except subprocess.TimeoutExpired:
        raise Failed(f"{Path(words[0]).name} did not end within {limit_s} s") from None
    except OSError as e:
        raise Failed(f"{words[0]} cannot be run: {e.strerror}") from None
    if done.returncode:
        raise Failed(f"{Path(words[0]).name} ended with {done.returncode}: {last_line(done.stderr) if done.stderr else last_line(done.stdout)}")
    return done.stdout


def run_json(*command, **options):
    """The last JSON of a command's output; libraries may print before it."""
    text = run(*command, **options)
    for start in (text, text.strip().rpartition("\n")[2]):
        try:
            return json.loads(start)
        except json.JSONDecodeError:
            continue
    raise Failed(f"{Path(str(command[0])).name} printed no JSON: {last_line(text)}")


class Server:
    """A server that stands still, stopped by a signal, but for the time when it is asked: an idle one may spin."""

    def __init__(self, *command, ready_s=60, says_json=True, **options):
        self.words = [str(c) for c in command]
        self.name = Path(self.words[0]).name
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        try:
            self.process = subprocess.Popen(self.words, text=True, stdin=subprocess.PIPE, stderr=self.errors,
                                            stdout=subprocess.PIPE if says_json else subprocess.DEVNULL, **options)
        except OSError as e:
            raise Failed(f"{self.words[0]} cannot be run: {e.strerror}") from None
        try:
            self.ready = self.first_json(ready_s) if says_json else None
        except Failed:
            self.end()
            raise
        if says_json:
            self.signal(signal.SIGSTOP)

    def first_json(self, limit_s):
        """The first line that begins an object; a library's own lines before it are passed over."""
        until = time.monotonic() + limit_s
        os.set_blocking(self.process.stdout.fileno(), False)
        held = ""
        with selectors.DefaultSelector() as waits:
            waits.register(self.process.stdout, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0 and len(held) < LINE_MAX:
                if not waits.select(left):
                    break
                some = os.read(self.process.stdout.fileno(), 1 << 16)
                if not some:
                    code = self.process.wait(10)
                    self.errors.seek(0)
                    raise Failed(f"{self.name} ended at once, with {code}: {last_line(self.errors.read())}")
                held += some.decode(errors="replace")
                *lines, held = held.split("\n")
                for line in lines:
                    if line.startswith("{"):
                        return json.loads(line)
        raise Failed(f"{self.name} was not ready within {limit_s} s")

    def signal(self, what):
        if self.process.poll() is None:
            self.process.send_signal(what)

    def cpu_seconds(self):
        """Processor time so far, all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self):
        """Runs until the block is left."""
        if self.process.poll() is not None:
            raise Failed(f"the server {self.name} ended, with {self.process.returncode}")
        self.signal(signal.SIGCONT)
        return self

    def __exit__(self, *_):
        self.signal(signal.SIGSTOP)

    def end(self):
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe:
                pipe.close()
