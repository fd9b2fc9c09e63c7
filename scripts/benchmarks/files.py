"""The disk, and work on whole checkpoints, against fio, cp and plain reads."""

import os
import shutil
import time

from .contenders import local
from .install import ATLAS
from .process import Failed, run, run_json

MIB = 1 << 20
# As the client reads: see IO_BYTES and TierBuilder::uma_depth.
IO_KIB, IO_DEPTH = 512, 16


def sync_tree(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as f:
                os.fsync(f.fileno())


def read_and_discard(files):
    """The same bytes with 8 MiB reads and nothing done with them."""
    buffer = bytearray(8 * MIB)
    for path in files:
        with open(path, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


class Files:
    """Steps of one round; what a step leaves behind is removed outside of its time."""

    def __init__(self, checkpoint, work):
        self.checkpoint, self.work = checkpoint, work
        self.files = sorted(checkpoint.glob("*.safetensors"))
        self.bytes = sum(f.stat().st_size for f in self.files)
        self.can_skip_sync = "--no-sync" in run(ATLAS, "pack", "--help")

    def timed(self, step, *, made=None, keeps=None):
        """Rate of a step that reads all of the checkpoint. What `made` it left is removed."""
        os.sync()
        if made in ("copy", "pack"):
            # A virtual machine gives free memory back to its host, and the first to use it again pays for
            # that, up to ten times the time of a copy: so one goes before whoever writes.
            run("cp", "-r", self.checkpoint, self.work / "before")
            shutil.rmtree(self.work / "before")
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        if made:
            shutil.rmtree(self.work / made)
        return {"gb_per_s": self.bytes / seconds / 1e9}

    def copy(self, durably=False):
        run("cp", "-r", self.checkpoint, self.work / "copy")
        if durably:
            sync_tree(self.work / "copy")

    def pack(self, *flags):
        run(ATLAS, "pack", self.checkpoint, "-o", self.work / "pack", "--quiet", *flags)

    def verify(self):
        store = self.work / "indexed"
        if not store.exists():
            run(ATLAS, "index", self.checkpoint, "-o", store, "--quiet")
        return self.timed(lambda: run(ATLAS, "verify", store, "--quiet"))

    def steps(self):
        """Name and how to measure it, in turn."""
        index = lambda: run(ATLAS, "index", self.checkpoint, "-o", self.work / "index", "--quiet")
        steps = {
            "read and discard, 8 MiB reads": lambda: self.timed(lambda: read_and_discard(self.files)),
            "ours, index": lambda: self.timed(index, made="index"),
            "ours, verify": self.verify,
            "cp": lambda: self.timed(self.copy, made="copy"),
            "ours, pack --no-sync": lambda: self.timed(lambda: self.pack("--no-sync"), made="pack"),
            "cp and fsync": lambda: self.timed(lambda: self.copy(durably=True), made="copy"),
            "ours, pack": lambda: self.timed(self.pack, made="pack"),
        }
        if not self.can_skip_sync:
            del steps["ours, pack --no-sync"]
        return steps


class Disk:
    """Direct reads of a packed store, in turn with fio on the same files."""

    def __init__(self, checkpoint, work, records):
        self.store = work / "packed"
        self.records = records
        run(ATLAS, "pack", checkpoint, "-o", self.store, "--quiet")
        os.sync()
        self.files = sorted(self.store.glob("layer_*.xp2"))

    def fio(self, fixed):
        """fio as it comes, or with its buffers registered and in huge pages, as the client's are: the disk gets a
        request in few pieces then."""
        # fio takes a list of files with colons between.
        names = ":".join(str(f).replace(":", "\\:") for f in self.files)
        total = sum(f.stat().st_size for f in self.files)
        job = run_json("fio", "--name=read", f"--filename={names}", "--rw=read", "--direct=1", "--ioengine=io_uring",
                       f"--bs={IO_KIB}k", f"--iodepth={IO_DEPTH}", f"--size={total}", "--thread",
                       "--output-format=json", *(["--fixedbufs"] if fixed else []),
                       env={**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if fixed else {})})["jobs"][0]
        gib = job["read"]["io_bytes"] / (1 << 30)
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return {"gb_per_s": job["read"]["bw_bytes"] / 1e9, "client_cpu": cpu / gib}

    def uma(self, verify):
        found = local(self.store, self.store, "uma", records=self.records, batch=8, verify=verify,
                      flags=("--io-depth", IO_DEPTH))
        if found.pop("mode") != "io-uring-direct":
            raise Failed(f"{self.store} cannot be read directly here; name another place with BENCH_DIR")
        return found

    def steps(self):
        return {
            f"fio, direct, {IO_KIB} KiB, depth {IO_DEPTH}": lambda: self.fio(fixed=False),
            "fio, the same, fixed buffers in huge pages": lambda: self.fio(fixed=True),
            "ours, uma, checksums off": lambda: self.uma("off"),
            "ours, uma, checksums on": lambda: self.uma("always"),
        }
