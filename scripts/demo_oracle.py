#!/usr/bin/env python3
"""Digest of every routed expert's weights of a Qwen3-MoE-shaped safetensors checkpoint.

The independent side of `make demo`: it reads the checkpoint with the `safetensors` package and
hashes with the `xxhash` package, and shares nothing with the code under test. The digest is
XXH3-128 over the bytes of gate, up and down of each expert, in order of layer and expert.

usage: demo_oracle.py CHECKPOINT_DIR   (prints one line of JSON)
"""

import json
import math
import pathlib
import re
import sys

import xxhash
from safetensors import safe_open

EXPERT = re.compile(r"\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
ORDER = {"gate": 0, "up": 1, "down": 2}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
PIECE_BYTES = 8 << 20


def tensors(path):
    """Yields (key, first byte in the file, bytes) of each expert tensor of one file."""
    with open(path, "rb") as file:
        at = 8 + int.from_bytes(file.read(8), "little")
    with safe_open(path, framework="np") as header:
        # In order of offset; the package has checked that there are no gaps between tensors.
        for name in header.offset_keys():
            part = header.get_slice(name)
            size = math.prod(part.get_shape()) * ITEM_BYTES[part.get_dtype()]
            found = EXPERT.search(name)
            if found:
                layer, expert, projection = found.groups()
                yield (int(layer), int(expert), ORDER[projection]), at, size
            at += size


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = {}
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
        for key, offset, size in tensors(path):
            if key in found:
                sys.exit(f"{path}: layer {key[0]} expert {key[1]} occurs twice")
            found[key] = (path, offset, size)
    records = {key[:2] for key in found}
    if not records or len(found) != 3 * len(records):
        sys.exit(f"{len(found)} expert tensors for {len(records)} experts, expected three each")

    digest, total = xxhash.xxh3_128(), 0
    for key in sorted(found):
        path, offset, left = found[key]
        total += left
        with open(path, "rb") as file:
            file.seek(offset)
            while left > 0:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    sys.exit(f"{path}: ends in the middle of a tensor")
                digest.update(piece)
                left -= len(piece)
    print(json.dumps({"records": len(records), "bytes": total, "payload_digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
