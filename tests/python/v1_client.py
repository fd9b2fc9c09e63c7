#!/usr/bin/env python3
"""A version 1 client for TCP, standard library only.

    v1_client.py HOST:PORT [--records L:E,L:E] [--out DIR] [--check-header] [--timeout S]

Fetches all records (or those given), prints SHA-256 of them one after another, ends the session.
Exit code 1 on any deviation from the protocol, 2 on wrong usage.
"""
import argparse
import hashlib
import json
import os
import socket
import struct
import sys

KEYS = ("version", "num_moe_layers", "num_experts", "inter", "hidden", "group_size", "sub_align", "fs_block_size",
        "record_stride", "record_raw_bytes", "file_template", "moe_layer_to_model_layer")


def exactly(sock, n):
    out = bytearray()
    while len(out) < n:
        piece = sock.recv(min(n - len(out), 1 << 20))
        if not piece:
            raise ValueError(f"the server hung up after {len(out)} of {n} bytes")
        out += piece
    return bytes(out)


def session(a):
    host, port = a.address.rsplit(":", 1)
    with socket.create_connection((host.strip("[]"), int(port)), timeout=a.timeout) as sock:
        length, = struct.unpack("<I", exactly(sock, 4))
        if not 0 < length <= 16 << 20:
            raise ValueError(f"a manifest of {length} bytes")
        manifest = json.loads(exactly(sock, length))
        missing = [k for k in KEYS if k not in manifest]
        if missing:
            raise ValueError(f"the manifest lacks {', '.join(missing)}")
        layers, experts, stride = (manifest[k] for k in ("num_moe_layers", "num_experts", "record_stride"))
        keys = [tuple(map(int, k.split(":"))) for k in a.records.split(",")] if a.records else [(n, e) for n in range(layers) for e in range(experts)]
        sock.sendall(b"\0")
        total = hashlib.sha256()
        for layer, expert in keys:
            sock.sendall(struct.pack("<II", layer, expert))
            status = exactly(sock, 1)[0]
            if status != 0:
                raise ValueError(f"status {status} for layer {layer}, expert {expert}")
            record = exactly(sock, stride)
            if a.check_header and struct.unpack_from("<4I", record) != (0x58505254, 1, layer, expert):
                raise ValueError(f"asked for {layer}:{expert}, the header says {struct.unpack_from('<4I', record)}")
            total.update(record)
            if a.out:
                with open(os.path.join(a.out, f"{layer}_{expert}.bin"), "wb") as f:
                    f.write(record)
        sock.sendall(struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF))
        extra = sock.recv(1)
        if extra:
            raise ValueError("bytes after the end of the session")
        if a.manifest:
            print(json.dumps(manifest, sort_keys=True))
        print(f"{total.hexdigest()}  {len(keys)} records of {stride} bytes")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("address")
    p.add_argument("--records", help="L:E,L:E ...; default all")
    p.add_argument("--out", help="write each record to DIR/L_E.bin")
    p.add_argument("--manifest", action="store_true", help="print the manifest as well")
    p.add_argument("--check-header", action="store_true", help="each record must carry the layer and expert asked for")
    p.add_argument("--timeout", type=float, default=10, help="seconds without a byte; default 10")
    a = p.parse_args()
    try:
        session(a)
    except (OSError, ValueError, KeyError, struct.error) as e:
        print(f"v1_client: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
