"""Who reads records over loopback, and how: each function measures once and gives back one sample.

A sample has gb_per_s, client and server CPU seconds per GiB, and percentiles in microseconds, as far as there are.
"""

import json
import socket
import time

from .install import ATLAS, BARE, PYTHON, ROOT
from .process import Failed, Server, run, run_json
from .store import environment

GIB = 1 << 30
STREAMS = 2
SEED = 1


def counted(records):
    return ("--records", records, "--seed", SEED)


def sample(report, server=None, server_cpu=None):
    """One form for all that report bytes, seconds and cpu_seconds."""
    gib = report["bytes"] / GIB
    made = {"gb_per_s": report["bytes"] / report["seconds"] / 1e9, "client_cpu": report["cpu_seconds"] / gib}
    if server is not None:
        made["server_cpu"] = (server.cpu_seconds() - server_cpu) / gib
    return made


def ours(store, *, records, batch, depth=1, verify="always", streams=STREAMS, clients=1, flags=()):
    with store.server("peer") as server:
        before = server.cpu_seconds()
        report = run_json(ATLAS, "bench", "fetch", "--expert-backend", "rdma", "--expert-peer", server.ready["listening"],
                          "--batch", batch, "--depth", depth, "--verify", verify, "--streams", streams,
                          "--clients", clients, *counted(records), "--json", *flags)
        if report["fallbacks"] or report["takeovers"] or report["verify_failures"]:
            raise Failed("a fetch fell back, was taken over, or found wrong bytes: its figures are not of what was asked")
        latency = report["request_us"]
        return {**sample(report, server, before), "p50_us": latency["p50"], "p99_us": latency["p99"]}


def local(store, path, backend, *, records, batch, depth=2, verify="always", flags=()):
    """The same client, reading this machine's files."""
    report = run_json(ATLAS, "bench", "fetch", "--expert-backend", backend, "--store", path, "--batch", batch,
                      "--depth", depth, "--verify", verify, *counted(records), "--json", *flags)
    io = report["rails"][0].get("io") or {}
    return {**sample(report), "mode": io.get("mode")}


def bare(store, transfer, *, records, batch, streams=STREAMS):
    with store.server(f"bare {transfer}") as server:
        before = server.cpu_seconds()
        report = run_json(BARE, "read", server.ready["listening"], store.file, "--streams", streams, "--batch", batch,
                          "--record-bytes", store.record_bytes, "--among", store.among, *counted(records))
        return {**sample(report, server, before), "p50_us": report["record_p50_us"], "p99_us": report["record_p99_us"]}


def floor(store, source, *, records, threads):
    report = run_json(BARE, "copy", store.file, "--from", source, "--threads", threads, "--batch", 8,
                      "--record-bytes", store.record_bytes, "--among", store.among, *counted(records))
    return sample(report)


def engine(store, name, *, records, batch):
    """Mooncake's engine, NIXL, or NIXL with larger segments."""
    module = "benchmarks.with_mooncake" if name == "mooncake" else "benchmarks.with_nixl"
    with store.server(name) as server:
        before = server.cpu_seconds()
        report = run_json(PYTHON, "-m", module, "read", json.dumps(server.ready), store.file, "--batch", batch,
                          "--record-bytes", store.record_bytes, "--among", store.among, *counted(records),
                          cwd=ROOT / "scripts", env=environment(name == "nixl tuned"))
        return {**sample(report, server, before), "p50_us": report["batch_p50_us"], "p99_us": report["batch_p99_us"]}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def iperf3(seconds=2):
    """One stream of bytes without a question, thrown away by the receiver."""
    port = free_port()
    server = Server("iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, says_json=False)
    try:
        until = time.monotonic() + 10
        while True:
            time.sleep(0.2)
            try:
                report = json.loads(run("iperf3", "-c", "127.0.0.1", "-p", port, "-t", seconds, "-J"))
                return {"gb_per_s": report["end"]["sum_received"]["bits_per_second"] / 8e9}
            except Failed:
                # Not listening yet.
                if time.monotonic() > until:
                    raise
    finally:
        server.end()


def bulk(store, records):
    """Whole records, several at once: name and how to measure it, in turn."""
    few = max(8, records // 3)
    return {
        "iperf3, one stream": iperf3,
        "bare pair, sendfile, batch 8": lambda: bare(store, "sendfile", records=records, batch=8),
        "bare pair, pread and send, batch 8": lambda: bare(store, "copy", records=records, batch=8),
        "ours, checksums off, batch 8, depth 2": lambda: ours(store, records=records, batch=8, depth=2, verify="off"),
        "ours, checksums on, batch 8, depth 2": lambda: ours(store, records=records, batch=8, depth=2),
        "ours, checksums off, batch 8": lambda: ours(store, records=records, batch=8, verify="off"),
        "ours, checksums on, batch 8": lambda: ours(store, records=records, batch=8),
        "ours, checksums on, batch 1": lambda: ours(store, records=records, batch=1),
        "Mooncake TCP, batch 8": lambda: engine(store, "mooncake", records=records, batch=8),
        "Mooncake TCP, batch 1": lambda: engine(store, "mooncake", records=records, batch=1),
        "NIXL UCX-TCP, batch 8": lambda: engine(store, "nixl", records=few, batch=8),
        "NIXL UCX-TCP, batch 1": lambda: engine(store, "nixl", records=few, batch=1),
        "NIXL UCX-TCP, 1 MiB segments, batch 8": lambda: engine(store, "nixl tuned", records=few, batch=8),
        "NIXL UCX-TCP, 1 MiB segments, batch 1": lambda: engine(store, "nixl tuned", records=few, batch=1),
        "ours, posix, page cache, batch 8": lambda: local(store, store.folder, "posix", records=records, batch=8, verify="off"),
        "floor: memcpy, one thread": lambda: floor(store, "memory", records=records, threads=1),
        "floor: memcpy, two threads": lambda: floor(store, "memory", records=records, threads=2),
        "floor: pread of cached pages, one thread": lambda: floor(store, "file", records=records, threads=1),
        "floor: pread of cached pages, two threads": lambda: floor(store, "file", records=records, threads=2),
    }


def single(store, records):
    """One small record at a time."""
    return {
        "bare pair, sendfile, one record": lambda: bare(store, "sendfile", records=records, batch=1, streams=1),
        "bare pair, pread and send, one record": lambda: bare(store, "copy", records=records, batch=1, streams=1),
        "ours, checksums off, one record": lambda: ours(store, records=records, batch=1, verify="off"),
        "ours, checksums on, one record": lambda: ours(store, records=records, batch=1),
        "Mooncake TCP, one record": lambda: engine(store, "mooncake", records=max(1, records // 5), batch=1),
        "NIXL UCX-TCP, one record": lambda: engine(store, "nixl", records=max(1, records // 5), batch=1),
    }
