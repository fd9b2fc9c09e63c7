"""Made-up checkpoints, served by everyone who takes part."""

import os
import shutil

from .install import ATLAS, BARE, PEER, PYTHON, ROOT
from .process import Failed, Server, run, run_json

# The default record: an expert of Qwen3-30B-A3B in bf16.
RECORD_BYTES = 9_437_184
# 1 MiB segments: what NIXL's TCP transport can do when it is told to; its default is 8 KiB.
NIXL_TUNED = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}


def square(record_bytes):
    """Hidden and inner size of a Nemotron-H expert, two matrices in bf16, of about that many bytes."""
    hidden = 1 << max(4, (record_bytes // 4).bit_length() // 2)
    return hidden, max(1, record_bytes // 4 // hidden)


class Store:
    """A checkpoint in the page cache and its servers, begun when they are first asked."""

    def __init__(self, folder, megabytes, record_bytes=RECORD_BYTES, flags=()):
        self.folder = folder
        experts = max(8, megabytes * 10**6 // record_bytes // 2)
        if record_bytes == RECORD_BYTES:
            shape = ("--family", "qwen3-moe", "--layers", 2, "--hidden", 2048, "--inter", 768)
        else:
            hidden, inter = square(record_bytes)
            shape = ("--family", "nemotron", "--layers", 2, "--hidden", hidden, "--inter", inter)
        # The wire bounds the experts of a layer.
        run(ATLAS, "synth", *shape, "--experts", min(experts, 8192), "-o", folder, "--quiet")
        # What is written back meanwhile would be measured, too.
        os.sync()
        layers = run_json(ATLAS, "inspect", folder, "--json")["layers"]
        self.record_bytes = layers[0]["image_bytes_max"]
        self.among = sum(layer["records"] for layer in layers)
        self.file = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
        if self.file.stat().st_size < self.among * self.record_bytes:
            raise Failed(f"{self.file} is not one file with all {self.among} records")
        self.peer_flags = flags
        self.servers = {}
        self.failed = {}

    def server(self, name):
        """A server by name. One that does not start is not tried again."""
        if name in self.failed:
            raise Failed(self.failed[name])
        if name not in self.servers:
            try:
                self.servers[name] = self.begin(name)
            except Failed as e:
                self.failed[name] = str(e)
                raise
        return self.servers[name]

    def begin(self, name):
        scripts = {"cwd": ROOT / "scripts"}
        if name == "peer":
            # Checksums of a bare checkpoint are computed first.
            return Server(PEER, "--store", self.folder, "--listen", "127.0.0.1:0", "--json", "--quiet", *self.peer_flags)
        if name in ("bare sendfile", "bare copy"):
            return Server(BARE, "serve", self.file, "--transfer", name.split()[1])
        if name == "mooncake":
            return Server(PYTHON, "-m", "benchmarks.with_mooncake", "serve", self.file, **scripts)
        env = environment(name == "nixl tuned")
        return Server(PYTHON, "-m", "benchmarks.with_nixl", "serve", self.file, env=env, **scripts)

    def end(self):
        for server in self.servers.values():
            server.end()
        self.servers = {}

    def remove(self):
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def environment(tuned):
    return {**os.environ, **(NIXL_TUNED if tuned else {})}
