"""Curves: what one setting does, the others as they are by default."""

import shutil

from . import contenders, table
from .contenders import bare, engine, ours
from .install import ATLAS, PEER
from .process import Failed, Server, run, run_json
from .store import Store

KIB, MIB = 1 << 10, 1 << 20


def records(record_bytes, megabytes, least=16):
    """As many as a store of that size has, for a point of a curve; of small ones fewer."""
    return max(least, min(20_000, megabytes * 10**6 // record_bytes))


class Sweep:
    """Samples of one curve by name and place; measured in turns, like everything else."""

    def __init__(self, name, title, x_label, field="gb_per_s", y_label="GB/s", names=None):
        self.name, self.title, self.x_label = name, title, x_label
        self.field, self.y_label, self.names = field, y_label, names or {}
        self.steps = {}

    def add(self, series, x, measure):
        self.steps[f"{series} @ {x}"] = (series, x, measure)

    def measure(self, rounds, failed, tell):
        samples = {}
        table.take_turns({key: measure for key, (_, _, measure) in self.steps.items()}, rounds, samples, failed,
                         lambda what: tell(f"{self.name}: {what}"))
        series = {}
        for key, (name, x, _) in self.steps.items():
            found = table.spread(samples, key, self.field)
            if found:
                series.setdefault(name, []).append((x, *found))
        return series

    def text(self, series):
        places = sorted({p[0] for points in series.values() for p in points})
        rows = []
        for place in places:
            row = [self.names.get(place, f"{place:g}")]
            for points in series.values():
                found = next((p for p in points if p[0] == place), None)
                row.append("-" if not found else f"{found[1]:.2f}" if found[2] == found[3]
                           else f"{found[1]:.2f} ({found[2]:.2f} to {found[3]:.2f})")
            rows.append(row)
        return f"{self.title}, {self.y_label}\n{table.columns([self.x_label, *series], rows)}"


def size_name(size):
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def by_size(work, megabytes):
    sizes = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    names = {size: size_name(size) for size in sizes}
    rates = Sweep("record-size", "Record size, batch 8", "record", names=names)
    waits = Sweep("record-size-latency", "Record size, one record at a time", "record", "p50_us", "microseconds, p50", names)
    for size in sizes:
        store = Store(work / f"size-{size}", min(megabytes, 600), size)
        count = records(size, megabytes)
        for verify in ("off", "always"):
            label = "ours, checksums off" if verify == "off" else "ours, checksums on"
            rates.add(label, size, lambda s=store, n=count, v=verify: ours(s, records=n, batch=8, depth=2, verify=v))
            waits.add(label, size, lambda s=store, n=count, v=verify: ours(s, records=min(n, 2000), batch=1, verify=v))
        rates.add("bare pair, sendfile", size, lambda s=store, n=count: bare(s, "sendfile", records=n, batch=8))
        waits.add("bare pair, sendfile, one stream", size,
                  lambda s=store, n=count: bare(s, "sendfile", records=min(n, 2000), batch=1, streams=1))
        for name, label in (("mooncake", "Mooncake TCP"), ("nixl", "NIXL UCX-TCP")):
            rates.add(label, size, lambda s=store, n=count, e=name: engine(s, e, records=max(8, n // 3), batch=8))
        yield store
    yield rates
    yield waits


def on_one_store(work, megabytes):
    """Batch, window, streams and clients, over the default record."""
    store = Store(work / "default", megabytes,
                  flags=("--max-connections", 1024, "--max-connections-per-address", 1024))
    yield store
    count = records(store.record_bytes, megabytes, 64)
    batches = Sweep("batch", "Records asked for at once", "batch")
    for batch in (1, 2, 4, 8, 16, 32):
        batches.add("ours, checksums off", batch, lambda b=batch: ours(store, records=count, batch=b, verify="off"))
        batches.add("ours, checksums on", batch, lambda b=batch: ours(store, records=count, batch=b))
        batches.add("bare pair, sendfile", batch, lambda b=batch: bare(store, "sendfile", records=count, batch=b))
        batches.add("Mooncake TCP", batch, lambda b=batch: engine(store, "mooncake", records=count, batch=b))
        batches.add("NIXL UCX-TCP", batch, lambda b=batch: engine(store, "nixl", records=count // 2, batch=b))
    yield batches
    windows = Sweep("window", "Bytes in flight per connection, batch 8", "window",
                    names={kib: size_name(kib * KIB) for kib in (256, 1024, 2048, 4096, 16384, 65536)})
    for kib in windows.names:
        for verify, label in (("off", "ours, checksums off"), ("always", "ours, checksums on")):
            windows.add(label, kib, lambda k=kib, v=verify: ours(store, records=count, batch=8, depth=2, verify=v,
                                                                  flags=("--window-kib", k)))
    yield windows
    streams = Sweep("streams", "TCP connections, batch 8", "streams")
    for n in (1, 2, 3, 4):
        for verify, label in (("off", "ours, checksums off"), ("always", "ours, checksums on")):
            streams.add(label, n, lambda n=n, v=verify: ours(store, records=count, batch=8, depth=2, verify=v, streams=n))
        for transfer, label in (("sendfile", "bare pair, sendfile"), ("copy", "bare pair, pread and send")):
            streams.add(label, n, lambda n=n, t=transfer: bare(store, t, records=count, batch=8, streams=n))
    yield streams
    clients = Sweep("clients", "Clients at once, one record each, all together", "clients")
    for n in (1, 2, 4, 8, 16, 32, 64):
        each = max(2, count // n)
        for verify, label in (("off", "ours, checksums off"), ("always", "ours, checksums on")):
            clients.add(label, n, lambda n=n, e=each, v=verify: ours(store, records=e, batch=1, verify=v, clients=n))
        clients.add("bare pair, sendfile, a stream each", n,
                    lambda n=n, e=each: bare(store, "sendfile", records=e * n, batch=n, streams=n))
    yield clients


class Tiny:
    """A store of so many records of 768 bytes, without checksums: what counts is how many there are."""

    def __init__(self, folder, layers, experts):
        checkpoint, self.folder = folder / "checkpoint", folder
        folder.mkdir()
        run(ATLAS, "synth", "--family", "qwen3.5-moe", "--layers", layers, "--experts", experts, "--hidden", 32,
            "--inter", 4, "-o", checkpoint, "--quiet")
        run(ATLAS, "index", "--no-checksums", checkpoint, "-o", folder / "store", "--quiet")
        self.peer = Server(PEER, "--store", folder / "store", "--listen", "127.0.0.1:0", "--json", "--quiet")

    def server(self, _):
        return self.peer

    def remove(self):
        self.peer.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def by_records(work, _):
    sweep = Sweep("store-records", "Records in the store, requests of 8 records of 768 bytes", "records", "p50_us",
                  "microseconds, p50", {10**power: f"10^{power}" for power in range(2, 7)})
    for power, (layers, experts) in {2: (2, 50), 3: (10, 100), 4: (50, 200), 5: (250, 400), 6: (1000, 1000)}.items():
        store = Tiny(work / f"tiny-{power}", layers, experts)
        # What warms up asks every layer's catalogue once.
        sweep.add("ours, no checksums", 10**power,
                  lambda s=store: contenders.ours(s, records=16_000, batch=8, verify="off", flags=("--warm-up", 20_000)))
        yield store
    yield sweep


def rails(_, __):
    sweep = Sweep("rails", "Simulated rails of 125 MB/s, objects of 64 MiB", "rails", "mb_per_s", "MB/s")

    def measure(clock, n, field):
        row = run_json(ATLAS, "bench", "rails", "--clock", clock, "--rails", n, "--json")["rows"][0]
        return {"mb_per_s": row[field]}

    for n in (1, 2, 3, 4, 5, 6, 7, 8):
        sweep.add("predicted", n, lambda n=n: measure("virtual", n, "aggregate_mb_per_s"))
        sweep.add("measured, real clock", n, lambda n=n: measure("real", n, "aggregate_mb_per_s"))
        sweep.add("sum of the rates", n, lambda n=n: measure("virtual", n, "theoretical_mb_per_s"))
    yield sweep


SWEEPS = {"size": by_size, "one-store": on_one_store, "records": by_records, "rails": rails}


def run_all(chosen, work, megabytes, rounds, failed, tell, show):
    """Measures the chosen ones, and shows each as soon as it is there: show(sweep, series)."""
    for name in chosen:
        stores = []
        try:
            for made in SWEEPS[name](work, megabytes):
                if not isinstance(made, Sweep):
                    stores.append(made)
                    continue
                show(made, made.measure(rounds, failed, tell))
        except Failed as e:
            failed[name] = str(e)
        finally:
            for store in stores:
                store.remove()
