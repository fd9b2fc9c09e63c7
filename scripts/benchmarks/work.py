"""The work that every contender does: records drawn by a seed, read in batches, timed, and the last of them compared."""

import ctypes
import json
import mmap
import sys
import time

MASK = (1 << 64) - 1


def draw(seed, count, among):
    """Indices of the records to read: SplitMix64, as `atlas-expert bench fetch` and `bare_pair` draw them."""
    drawn = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        drawn.append((z ^ (z >> 31)) % among)
    return drawn


def mapped(path):
    """A file's pages in the page cache, all of them mapped, and where they lie. Nothing writes to them, but
    only of a writable mapping does Python tell the address."""
    with open(path, "r+b") as f:
        pages = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0x8000),
                          prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return pages, address(pages)


def anonymous(size):
    """Memory that was written to once, and where it lies."""
    pages = mmap.mmap(-1, size)
    for at in range(0, size, mmap.PAGESIZE):
        pages[at] = 1
    return pages, address(pages)


def address(pages):
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def percentile(ordered, percent):
    return ordered[max(1, -(-len(ordered) * percent // 100)) - 1] if ordered else 0


def timed(read, buffer, path, *, record_bytes, among, records, batch, seed):
    """Calls read(indices) for each batch, which lands in `buffer` from its start, and prints what it took."""
    drawn = draw(seed, records, among)
    batches = [drawn[first:first + batch] for first in range(0, records, batch)]
    read(draw(seed + 1, batch, among))  # connects, and is not counted
    took_us = []
    began, cpu = time.perf_counter(), time.process_time()
    for some in batches:
        start = time.perf_counter()
        read(some)
        took_us.append((time.perf_counter() - start) * 1e6)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    with open(path, "rb") as f:
        for slot, index in enumerate(batches[-1]):
            f.seek(index * record_bytes)
            if f.read(record_bytes) != buffer[slot * record_bytes:(slot + 1) * record_bytes]:
                sys.exit(f"record {index} arrived with other bytes than {path} has")
    took_us.sort()
    print(json.dumps({
        "bytes": records * record_bytes, "records": records, "seconds": seconds, "cpu_seconds": cpu,
        "batch_p50_us": percentile(took_us, 50), "batch_p99_us": percentile(took_us, 99),
    }), flush=True)


def parser(description):
    """Arguments that the contenders share."""
    import argparse

    words = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = words.add_subparsers(dest="role", required=True)
    serve = roles.add_parser("serve", help="map FILE, print one line of JSON, wait until standard input ends")
    serve.add_argument("file")
    read = roles.add_parser("read", help="read records of FILE from the server that printed SERVER; FILE itself is compared with")
    read.add_argument("server")
    read.add_argument("file")
    for flag, default in (("record-bytes", 9_437_184), ("among", 110), ("records", 220), ("batch", 8), ("seed", 1)):
        read.add_argument(f"--{flag}", type=int, default=default)
    return words


def what(args):
    return {k: getattr(args, k) for k in ("record_bytes", "among", "records", "batch", "seed")}


def serve(description):
    """Prints what a client needs and waits until whoever started this goes away."""
    print(json.dumps(description), flush=True)
    sys.stdin.read()
