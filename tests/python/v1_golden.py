#!/usr/bin/env python3
"""Version 1 records computed from NVFP4 checkpoints by the description of the v1 layout alone.

    v1_golden.py CHECKPOINT [--out DIR]   prints the manifest and the hashes; with --out writes the store

write() makes expected/v1-<fixture>.json and one whole record per fixture, expected/v1-<fixture>.bin.
"""
import argparse
import hashlib
import json
import math
import os
import struct
import sys

import oracle
import xxhash

FIXTURES = ("nvfp4-compressed-tensors", "nvfp4-modelopt", "nvfp4-missing-input-scale")
MAGIC = 0x58505254
GROUP = 16


def up(n, to):
    return -(-n // to) * to


def transpose(data, rows, columns):
    """Bytes [rows, columns] to [columns, rows]."""
    assert len(data) == rows * columns
    return b"".join(data[c::columns] for c in range(columns))


def single(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


class V1:
    def __init__(self, path):
        self.checkpoint = oracle.Checkpoint(path)
        stacks, _ = oracle.stacks_of(self.checkpoint)
        (self.prefix, _), self.layers = next((k, v) for k, v in stacks.items() if k[1] == "trunk")
        counts = {layer.num_experts for layer in self.layers}
        assert len(counts) == 1, counts
        self.experts = counts.pop()
        self.files = oracle.Files()
        gate = self.parts(self.layers[0], 0)["gate"]
        self.inter, k2 = gate["packed"][0]
        self.hidden = 2 * k2
        sizes = []
        for n, k in ((self.inter, self.hidden), (self.inter, self.hidden), (self.hidden, self.inter)):
            sizes += [n * k // 2, n * k // GROUP]
        self.sizes = sizes
        self.raw = 256 + sum(up(s, 256) for s in sizes)
        self.stride = up(self.raw, 4096)

    def parts(self, layer, expert):
        """{role: packed (shape, bytes), scale (shape, bytes), scale2, input_scale or None}"""
        out = {}
        for s, dtype, shape, path, offset, n in layer.leaves(expert):
            data = b"".join(self.files.pieces(path, offset, n))
            part = out.setdefault(s.role, dict(input_scale=None))
            if s.leaf == "weight_packed" or (s.leaf == "weight" and dtype == "U8"):
                part["packed"] = (shape, data)
            elif s.leaf == "weight_scale":
                assert dtype == "F8_E4M3"
                part["scale"] = (shape, data)
            elif s.leaf == "weight_global_scale":
                part["scale2"] = single(1.0 / struct.unpack("<f", data)[0])
            elif s.leaf == "weight_scale_2":
                part["scale2"] = struct.unpack("<f", data)[0]
            elif s.leaf in ("input_scale", "input_global_scale"):
                part["input_scale"] = struct.unpack("<f", data)[0]
            else:
                raise SystemExit(f"{s.template} has no place in a v1 record")
        return out

    def record(self, layer, expert):
        p = self.parts(layer, expert)
        bits, scale2, inputs, body = 0, [], [], b""
        for i, role in enumerate(("gate", "up", "down")):
            n, k = (self.inter, self.hidden) if role != "down" else (self.hidden, self.inter)
            (shape, packed), (scale_shape, scale) = p[role]["packed"], p[role]["scale"]
            assert shape == [n, k // 2] and scale_shape == [n, k // GROUP], (shape, scale_shape)
            for data, columns in ((packed, k // 2), (scale, k // GROUP)):
                t = transpose(data, n, columns)
                body += t + bytes(-len(t) % 256)
            scale2.append(p[role]["scale2"])
            value = p[role]["input_scale"]
            if value is not None:
                bits |= 1 << i
            inputs.append(0.0 if value is None else value)
        head = struct.pack("<8I3f3f", MAGIC, 1, layer.layer, expert, self.inter, self.hidden, GROUP, bits, *scale2, *inputs)
        record = head + bytes(256 - len(head)) + body
        assert len(record) == self.raw and all(map(math.isfinite, scale2))
        return record + bytes(self.stride - self.raw)

    def manifest(self):
        return dict(version=1, num_moe_layers=len(self.layers), num_experts=self.experts, inter=self.inter, hidden=self.hidden, group_size=GROUP, sub_align=256, fs_block_size=4096,
                    record_stride=self.stride, record_raw_bytes=self.raw, file_template="experts_{:05}.xpr", moe_layer_to_model_layer=[layer.model_layer for layer in self.layers])

    def describe(self):
        payload, files, checksums, ids = xxhash.xxh3_128(), [], b"", {True: [], False: []}
        for layer in self.layers:
            name = f"v1.layers.{layer.model_layer}.experts.{{}}"
            cid = oracle.class_id([("other", name, "per-expert", 0, "U8", [self.stride])])
            sha, records = hashlib.sha256(), {True: [], False: []}
            for e in range(self.experts):
                r = self.record(layer, e)
                sha.update(r)
                payload.update(r)
                image = oracle.Image()
                image.feed(r)
                image.end()
                checksums += b"".join(map(oracle.u64, image.checksums))
                for full in (True, False):
                    records[full].append((e, oracle.record_id(cid, self.stride, image.checksums if full else [])))
            for full in (True, False):
                ids[full].append((layer.layer, oracle.layer_id(layer.layer, layer.model_layer, records[full])))
            files.append(dict(name="experts_%05d.xpr" % layer.layer, bytes=self.experts * self.stride, sha256=sha.hexdigest()))
        return dict(manifest=self.manifest(), files=files, payload_digest=f"{payload.intdigest():032x}", checksums_xxh3_sha256=hashlib.sha256(checksums).hexdigest(),
                    content_id=oracle.shown(oracle.content("v1", ids[True])), layout_id=oracle.shown(oracle.content("v1", ids[False])))


def write(checkpoints, expected):
    for name in FIXTURES:
        v = V1(os.path.join(checkpoints, name))
        d = v.describe()
        # The last record, or the last one that lacks only some of the input scales.
        keys = [(layer, e) for layer in v.layers for e in range(v.experts)]
        partial = [k for k in keys if struct.unpack_from("<I", v.record(*k), 28)[0] not in (0, 7)]
        layer, expert = (partial or keys)[-1]
        record = v.record(layer, expert)
        d = dict(fixture=name, **d, golden=dict(file=f"v1-{name}.bin", layer=layer.layer, expert=expert, sha256=hashlib.sha256(record).hexdigest()))
        with open(os.path.join(expected, f"v1-{name}.json"), "w") as f:
            json.dump(d, f, indent=1)
            f.write("\n")
        with open(os.path.join(expected, f"v1-{name}.bin"), "wb") as f:
            f.write(record)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint")
    p.add_argument("--out", help="write the store into this folder")
    a = p.parse_args()
    v = V1(a.checkpoint)
    if a.out:
        os.makedirs(a.out, exist_ok=True)
        for layer in v.layers:
            with open(os.path.join(a.out, "experts_%05d.xpr" % layer.layer), "wb") as f:
                for e in range(v.experts):
                    f.write(v.record(layer, e))
        with open(os.path.join(a.out, "manifest.json"), "w") as f:
            json.dump(v.manifest(), f, indent=1)
            f.write("\n")
    json.dump(v.describe(), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
