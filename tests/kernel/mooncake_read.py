#!/usr/bin/env python3
"""READs by Mooncake's transfer engine between two processes of one guest, for comparison.

  mooncake_read.py serve ADDRESS DEVICE BYTES             prints "serving SEGMENT AT", then waits
  mooncake_read.py read ADDRESS DEVICE SEGMENT AT BYTES READ_BYTES PASSES BATCH...
                                                          prints "batch N: S s" for each BATCH: all BYTES,
                                                          PASSES times, in READs of READ_BYTES, N at a time,
                                                          into the same N places

Before the time is taken everything is read once, and every byte of that compared. The environment has MC_GID_INDEX.
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


def read(address, device, segment, there, size, each, passes, batches):
    made = engine(address, device)
    buffer, at = memory(made, each * max(batches))
    offsets = range(0, size, each)
    want = PATTERN * (each // len(PATTERN))

    def calls(batch):
        """A call's arguments for each batch: they are not part of what is measured."""
        for first in range(0, len(offsets), batch):
            some = [there + offset for offset in offsets[first:first + batch]]
            yield segment, [at + i * each for i in range(len(some))], some, [each] * len(some)

    for batch in batches:
        planned = list(calls(batch))
        for call in planned:  # connects, and proves
            buffer[:] = bytes(len(buffer))
            if made.batch_transfer_sync_read(*call):
                sys.exit("a transfer failed")
            if any(buffer[i * each:(i + 1) * each] != want for i in range(len(call[1]))):
                sys.exit("wrong bytes")
        begin = time.monotonic()
        for call in planned * passes:
            if made.batch_transfer_sync_read(*call):
                sys.exit("a transfer failed")
        print(f"batch {batch}: {time.monotonic() - begin:.6f} s", flush=True)


def main(role, address, device, *rest):
    if role == "serve":
        serve(address, device, int(rest[0]))
    else:
        segment, *numbers = rest
        there, size, each, passes, *batches = map(int, numbers)
        read(address, device, segment, there, size, each, passes, batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
