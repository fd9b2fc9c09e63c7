#!/usr/bin/env python3
"""READs by Mooncake's transfer engine between two processes of one guest, for comparison.

  mooncake_read.py serve ADDRESS DEVICE BYTES             prints "serving SEGMENT AT", then waits
  mooncake_read.py read ADDRESS DEVICE SEGMENT AT BYTES READ_BYTES BATCH...
                                                          prints "batch N: S s" for each BATCH: all BYTES,
                                                          in READs of READ_BYTES, N at a time

Every byte that was read is compared afterwards. The environment has MC_GID_INDEX.
"""

import ctypes
import mmap
import sys
import time

from mooncake.engine import TransferEngine

PATTERN = bytes(range(256)) * 16


def engine(address, device):
    found = TransferEngine()
    if found.initialize(address, "P2PHANDSHAKE", "rdma", device):
        sys.exit("the engine does not start")
    return found


def memory(made, size):
    """A registered buffer and where it lies."""
    buffer = mmap.mmap(-1, size)
    at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if made.register_memory(at, size):
        sys.exit("memory cannot be registered")
    return buffer, at


def serve(address, device, size):
    made = engine(address, device)
    buffer, at = memory(made, size)
    buffer[:] = PATTERN * (size // len(PATTERN))
    print(f"serving {address}:{made.get_rpc_port()} {at}", flush=True)
    time.sleep(600)


def read(address, device, segment, there, size, each, batches):
    made = engine(address, device)
    buffer, at = memory(made, size)
    offsets = range(0, size, each)

    def timed(offsets, batch):
        begin = time.monotonic()
        for first in range(0, len(offsets), batch):
            some = offsets[first:first + batch]
            if made.batch_transfer_sync_read(segment, [at + o for o in some], [there + o for o in some],
                                             [each] * len(some)):
                sys.exit("a transfer failed")
        return time.monotonic() - begin

    timed(offsets[:8], 8)  # connects
    for batch in batches:
        buffer[:] = bytes(size)
        seconds = timed(offsets, batch)
        if buffer[:] != PATTERN * (size // len(PATTERN)):
            sys.exit("wrong bytes")
        print(f"batch {batch}: {seconds:.6f} s", flush=True)


def main(role, address, device, *rest):
    if role == "serve":
        serve(address, device, int(rest[0]))
    else:
        segment, there, size, each, *batches = rest
        read(address, device, segment, int(there), int(size), int(each), [int(b) for b in batches])


if __name__ == "__main__":
    main(*sys.argv[1:])
