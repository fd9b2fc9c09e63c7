#!/usr/bin/env python3
"""Independent oracle for expert stores.

Computes, from a safetensors or GGUF checkpoint alone, what docs/store.md says a store of it must
hold: stacks, layers, records, leaves in canonical order, chunk checksums, payload digest, layout id
and content id. It shares no code with the packer. Tensors are read in pieces of at most 4 MiB.

    oracle.py PATH [--stack PREFIX] [--mtp] --json
    oracle.py PATH [--stack PREFIX] [--mtp] --payload-digest | --content-id | --layout-id

PATH is a checkpoint folder, a .safetensors file or a .gguf file (any shard of a split one).
Exit codes: 0 done, 1 the checkpoint is bad, 2 wrong usage.
"""
import argparse
import json
import os
import re
import struct
import sys
from collections import namedtuple

import xxhash

CHUNK_BYTES = 262144
ALIGN = 256
READ_BYTES = 4 << 20
MAX_HEADER = 100_000_000
MAX_EXPERTS = 65535
ROLES = ["gate", "gate-up", "up", "down", "other"]
STACKINGS = ["per-expert", "stacked", "flattened", "common"]
BITS = dict(BOOL=8, F4=4, F6_E2M3=6, F6_E3M2=6, U8=8, I8=8, F8_E5M2=8, F8_E4M3=8, F8_E8M0=8, F8_E4M3FNUZ=8,
            F8_E5M2FNUZ=8, I16=16, U16=16, F16=16, BF16=16, I32=32, U32=32, F32=32, C64=64, F64=64, I64=64, U64=64)

Tensor = namedtuple("Tensor", "name dtype shape path offset nbytes")
Source = namedtuple("Source", "role leaf template stacking dtype shape dim0 tensors")  # tensors: {expert: Tensor} or Tensor


class Bad(Exception):
    """The checkpoint cannot be trusted or understood."""


# ---------------------------------------------------------------- containers

def product(values):
    n = 1
    for v in values:
        n *= v
    return n


def unique(pairs):
    seen = {}
    for k, v in pairs:
        if k in seen:
            raise Bad(f"key {k!r} occurs twice")
        seen[k] = v
    return seen


def read_safetensors(path):
    size = os.stat(path).st_size
    with open(path, "rb") as f:
        head = f.read(8)
        if len(head) < 8:
            raise Bad(f"{path}: {size} bytes are too few")
        n, = struct.unpack("<Q", head)
        if n > MAX_HEADER or 8 + n > size:
            raise Bad(f"{path}: header of {n} bytes in a file of {size}")
        text = f.read(n)
    if text[:1] != b"{":
        raise Bad(f"{path}: the header does not start with a brace")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except ValueError as e:
        raise Bad(f"{path}: {e}") from None
    metadata = header.pop("__metadata__", {}) or {}
    if not all(isinstance(v, str) for v in metadata.values()):
        raise Bad(f"{path}: __metadata__ holds something that is not a string")
    tensors, spans = [], []
    for name, info in header.items():
        dtype, shape = info["dtype"], info["shape"]
        begin, end = info["data_offsets"]
        if dtype not in BITS:
            raise Bad(f"{path}: {name}: unknown dtype {dtype}")
        if any(type(d) is not int or d < 0 for d in shape):
            raise Bad(f"{path}: {name}: bad shape {shape}")
        bits = product(shape) * BITS[dtype]
        if bits % 8 or bits >= 1 << 64 or bits // 8 != end - begin or begin < 0:
            raise Bad(f"{path}: {name}: {dtype} {shape} does not fit {begin}..{end}")
        spans.append((begin, end, name))
        tensors.append(Tensor(name, dtype, shape, path, 8 + n + begin, end - begin))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise Bad(f"{path}: {name} starts at {begin}, expected {at}")
        at = end
    if 8 + n + at != size:
        raise Bad(f"{path}: data end at {8 + n + at}, the file at {size}")
    return tensors, metadata


def read_gguf(path):
    """Tensors with shapes in row-major order (the reverse of ne), and the key-value pairs."""
    import gguf
    reader = gguf.GGUFReader(path, "r")
    if reader.byte_order == "S":
        raise Bad(f"{path}: big-endian")
    kv = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.") and f.types[0] != gguf.GGUFValueType.ARRAY}
    size = os.stat(path).st_size
    tensors = []
    for t in reader.tensors:
        n, offset = int(t.n_bytes), int(t.data_offset)
        if offset + n > size:
            raise Bad(f"{path}: {t.name} ends past the file")
        shape = [int(d) for d in reversed(t.shape.tolist())]
        tensors.append(Tensor(t.name, t.tensor_type.name, shape, path, offset, n))
    return tensors, kv


SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


class Checkpoint:
    def __init__(self, path):
        self.path = path
        self.config = {}
        self.kv = {}
        if os.path.isdir(path):
            self.root, names = path, sorted(os.listdir(path), key=os.fsencode)
        else:
            self.root, names = os.path.dirname(path) or ".", [os.path.basename(path)]
            m = SPLIT.match(names[0])
            if m:
                names = [n for n in sorted(os.listdir(self.root)) if (k := SPLIT.match(n)) and k[1] == m[1] and k[3] == m[3]]
        for name in ("config.json", "params.json"):
            try:
                with open(os.path.join(self.root, name), encoding="utf-8") as f:
                    self.config = json.load(f)
                break
            except FileNotFoundError:
                pass
        self.tensors = {}
        index = [n for n in names if n.endswith(".safetensors.index.json")]
        plain = [n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_")]
        if index:
            self.container = "safetensors"
            self._indexed(os.path.join(self.root, index[0]))
        elif plain:
            self.container = "safetensors"
            for name in plain:
                self._add(read_safetensors(os.path.join(self.root, name))[0])
        else:
            shards = [n for n in names if n.endswith(".gguf")]
            if not shards:
                raise Bad(f"{path}: no safetensors and no GGUF file")
            self.container = "gguf"
            self._gguf([os.path.join(self.root, n) for n in shards])

    def _add(self, tensors):
        for t in tensors:
            if t.name in self.tensors:
                raise Bad(f"{t.name} is in {t.path} and in {self.tensors[t.name].path}")
            self.tensors[t.name] = t

    def _indexed(self, index):
        with open(index, encoding="utf-8") as f:
            weight_map = json.load(f, object_pairs_hook=unique)["weight_map"]
        for file in sorted(set(weight_map.values())):
            if os.path.isabs(file) or ".." in file.split("/"):
                raise Bad(f"{index}: {file!r} leaves the folder")
            self._add(read_safetensors(os.path.join(self.root, file))[0])
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name].path != os.path.join(self.root, file):
                raise Bad(f"{index}: {name} is not in {file}")

    def _gguf(self, paths):
        parts = [(*read_gguf(p), p) for p in paths]
        count = max(int(kv.get("split.count", 1)) for _, kv, _ in parts)
        if len(parts) != max(count, 1):
            raise Bad(f"{len(parts)} GGUF files, split.count is {count}")
        parts.sort(key=lambda p: int(p[1].get("split.no", 0)))
        if count > 1 and [int(kv["split.no"]) for _, kv, _ in parts] != list(range(count)):
            raise Bad("split.no is not 0..split.count")
        self.kv = parts[0][1]
        for tensors, _, _ in parts:
            self._add(tensors)
        total = self.kv.get("split.tensors.count")
        if total is not None and int(total) != len(self.tensors):
            raise Bad(f"{len(self.tensors)} tensors, split.tensors.count is {total}")

    # ------------------------------------------------------------ config

    def configs_for(self, stack):
        def sub(*keys):
            node = self.config
            for k in keys:
                node = node.get(k) if isinstance(node, dict) else None
            return [node] if isinstance(node, dict) else []
        if stack.startswith("talker."):
            return sub("talker_config", "text_config") + sub("talker_config")
        if stack.startswith("thinker."):
            return sub("thinker_config", "text_config") + sub("thinker_config")
        return (sub("text_config") + sub("thinker_config", "text_config") + sub("llm_config") + sub("language_config")
                + [self.config])

    def value(self, stack, *keys):
        for config in self.configs_for(stack):
            for key in keys:
                node = config
                for part in key.split("."):
                    node = node.get(part) if isinstance(node, dict) else None
                if node is not None:
                    return node
        return None

    def num_layers(self, stack):
        """Layers of the trunk, or None where nothing tells."""
        if any("vision" in s or "visual" in s for s in stack.split(".")):
            return None
        if self.container == "gguf":
            arch = self.kv.get("general.architecture")
            blocks = self.kv.get(f"{arch}.block_count")
            return None if blocks is None else int(blocks) - int(self.kv.get(f"{arch}.nextn_predict_layers", 0))
        n = self.value(stack, "num_hidden_layers", "num_layers", "n_layers")
        if n is None:
            kinds = self.value(stack, "layers_block_type", "hybrid_override_pattern")
            n = None if kinds is None else len(kinds)
        return n

    def identity_experts(self, stack):
        return int(self.value(stack, "zero_expert_num") or 0)


# ---------------------------------------------------------------- recognition

SEG = r"(?:[A-Za-z_]\w*\.)*?"
PRE = rf"^(?P<pre>{SEG})"
SAFETENSORS_RULES = [
    ("A", re.compile(PRE + r"(?P<unit>layers|blocks|h|decoder_layer|mtp)\.(?P<layer>\d+)\.(?P<mid>" + SEG + r")experts\.(?P<expert>\d+)\."
        r"(?P<proj>gate_proj|up_proj|down_proj|gate_up_proj|gate_and_up_proj|w1|w2|w3|fc1|fc2|fc3|gate|up|down)(?:\.(?P<leaf>.+))?$", re.A)),
    # Whatever else lies below an expert belongs to it: role other, the leaf is all that follows the expert.
    ("A_OTHER", re.compile(PRE + r"(?P<unit>layers|blocks|h|decoder_layer|mtp)\.(?P<layer>\d+)\.(?P<mid>" + SEG + r")experts\.(?P<expert>\d+)\.(?P<leaf>[^.]+(?:\..+)?)$", re.A)),
    ("B", re.compile(PRE + r"(?P<unit>layers|blocks)\.(?P<layer>\d+)\.(?P<mid>" + SEG + r")experts\."
        r"(?P<proj>gate_up_projs|gate_projs|up_projs|down_projs)\.(?P<expert>\d+)\.(?P<leaf>[A-Za-z_][\w.]*)$", re.A)),
    ("C", re.compile(PRE + r"(?P<unit>layers|blocks|h|mtp)\.(?P<layer>\d+)\.(?P<mid>" + SEG + r")(?P<module>experts|switch_mlp|experts\.switch_glu|experts\.mlp)\."
        r"(?P<proj>gate_up_proj|gate_and_up_projs|gate_proj|up_proj|down_projs|down_proj|w13_weight|w2_weight|w1|w2|w3|v1|fc1|fc2)"
        r"(?P<leaf>(?:[._][A-Za-z_][\w.]*)?)$", re.A)),
    ("E", re.compile(PRE + r"(?P<unit>layers)\.(?P<layer>\d+)\.(?P<mid>block_sparse_moe\.|mlp\.)(?P<proj>input_linear|output_linear)\.(?P<leaf>weight\w*)$", re.A)),
    ("D", re.compile(PRE + r"(?P<unit>layers)\.(?P<layer>\d+)\.(?P<mid>moe\.)(?P<proj>gate_proj|up_proj|down_proj)\.(?P<leaf>[A-Za-z_]\w*)$", re.A)),
    ("GROK", re.compile(PRE + r"(?P<unit>decoder_layer)\.(?P<layer>\d+)\.(?P<mid>moe\.)(?P<expert>\d+)\.(?P<proj>linear_v|linear_1|linear)\.(?P<leaf>weight)$", re.A)),
    ("KT", re.compile(r"^(?P<pre>)(?P<unit>blk)\.(?P<layer>\d+)\.ffn_(?P<proj>gate|up|down)_exps\.(?P<expert>\d+)\.(?P<leaf>numa\.\d+\.\w+)$", re.A)),
]
GGUF_RULES = [
    ("G", re.compile(r"^(?P<pre>)(?P<unit>blk)\.(?P<layer>\d+)\.ffn_(?P<proj>gate_up|gate|up|down)_exps\.(?P<leaf>weight|bias|scale|input_scale)$", re.A)),
    ("GOLD", re.compile(r"^(?P<pre>)(?P<unit>blk)\.(?P<layer>\d+)\.ffn_(?P<proj>gate|up|down)\.(?P<expert>\d+)\.(?P<leaf>weight|bias)$", re.A)),
]
PROJ_ROLE = {}
for _role, _names in {
    "gate": "gate_proj gate_projs w1 gate linear",
    "up": "up_proj up_projs w3 v1 up linear_v",
    "down": "down_proj down_projs w2 w2_weight down linear_1 output_linear",
    "other": "other",
    "gate-up": "gate_up_proj gate_up_projs gate_and_up_proj gate_and_up_projs w13_weight input_linear gate_up",
}.items():
    for _name in _names.split():
        PROJ_ROLE[_name] = _role


def recognise(name, container):
    for rule, regex in GGUF_RULES if container == "gguf" else SAFETENSORS_RULES:
        m = regex.search(name)
        if not m:
            continue
        g = m.groupdict()
        leaf = g["leaf"] or ""
        if leaf[:1] in (".", "_") and rule == "C":
            leaf = leaf[1:]
        leaf = leaf or "weight"
        if ".lora_" in name:
            return None
        expert = g.get("expert")
        template = name
        if expert is not None:
            if expert != str(int(expert)) or int(expert) >= MAX_EXPERTS:
                raise Bad(f"{name}: expert index {expert}")
            a, b = m.span("expert")
            template = name[:a] + "{}" + name[b:]
            expert = int(expert)
        flattened = rule == "C" and g["module"] == "experts.mlp"
        return dict(stack=g["pre"] + g["unit"], layer=int(g["layer"]), expert=expert, proj=g.get("proj") or "other", leaf=leaf, template=template, flattened=flattened)
    return None


def fc_roles(found):
    """fc1, fc2 and fc3 mean different things; the tensors of the layer tell."""
    sizes = {}
    for m, t in found:
        if m["proj"] in ("fc1", "fc2", "fc3"):
            sizes[m["proj"]] = max(sizes.get(m["proj"], 0), t.nbytes)
    if "fc3" in sizes:
        return dict(fc1="gate", fc3="up", fc2="down")
    return dict(fc1="gate-up" if sizes.get("fc1", 0) > sizes.get("fc2", 0) else "up", fc2="down")


class Layer:
    """All expert tensors of one layer, sorted into sources in canonical order."""

    def __init__(self, checkpoint, stack, layer, model_layer, found):
        self.layer, self.model_layer = layer, model_layer
        self.identity_experts = checkpoint.identity_experts(stack)
        fc = fc_roles(found)
        singles, wholes = {}, []
        for m, t in found:
            role = PROJ_ROLE.get(m["proj"]) or fc[m["proj"]]
            if m["expert"] is None:
                wholes.append((role, m, t))
                continue
            per = singles.setdefault((role, m["leaf"], m["template"]), {})
            if m["expert"] in per:
                raise Bad(f"{t.name}: expert {m['expert']} occurs twice")
            per[m["expert"]] = t
        counts = set()
        if singles:
            seen = set().union(*singles.values())
            if seen != set(range(len(seen))):
                raise Bad(f"{stack}.{model_layer}: experts are not 0..{max(seen)}")
            counts.add(len(seen))
        for proj in sorted({m["proj"] for _, m, _ in wholes}):
            m, t = max(((m, t) for _, m, t in wholes if m["proj"] == proj), key=lambda p: p[1].nbytes)
            if m["flattened"]:
                experts = checkpoint.value(stack, "ffn_config.moe_num_experts", "moe_num_experts")
                if not experts or t.shape[0] % experts:
                    raise Bad(f"{t.name}: {t.shape[0]} rows for {experts} experts")
                counts.add(experts)
            else:
                counts.add(t.shape[0] if t.shape else 0)
        if len(counts) != 1:
            raise Bad(f"{stack}.{model_layer}: tensors disagree on the number of experts: {sorted(counts)}")
        self.num_experts = counts.pop()
        if self.num_experts > MAX_EXPERTS:
            raise Bad(f"{stack}.{model_layer}: {self.num_experts} experts")
        self.sources = []
        for (role, leaf, template), per in singles.items():
            self.sources.append(Source(role, leaf, template, "per-expert", None, None, None, per))
        for role, m, t in wholes:
            self.sources.append(self._whole(role, m, t))
        self.sources.sort(key=lambda s: (ROLES.index(s.role), s.leaf.encode(), s.template.encode()))

    def _whole(self, role, m, t):
        n = self.num_experts
        rest = t.shape[1:]
        if m["flattened"] and t.shape and t.shape[0] % n == 0 and t.shape[0] > n:
            stacking, shape = "flattened", [t.shape[0] // n] + rest
        elif t.shape and t.shape[0] == n:
            stacking, shape = "stacked", rest
        else:
            return Source(role, m["leaf"], m["template"], "common", t.dtype, t.shape, None, t)
        if t.nbytes % n or (t.dtype in BITS and product(shape) * BITS[t.dtype] % 8):
            raise Bad(f"{t.name}: {t.nbytes} bytes cannot be cut into {n} experts")
        return Source(role, m["leaf"], m["template"], stacking, t.dtype, shape, t.shape[0], t)

    def leaves(self, expert):
        """(source, dtype, shape, path, offset, bytes) of one record, in canonical order."""
        for s in self.sources:
            if s.stacking == "per-expert":
                t = s.tensors.get(expert)
                if t is not None:
                    yield s, t.dtype, t.shape, t.path, t.offset, t.nbytes
            elif s.stacking == "common":
                yield s, s.dtype, s.shape, s.tensors.path, s.tensors.offset, s.tensors.nbytes
            else:
                n = s.tensors.nbytes // self.num_experts
                yield s, s.dtype, s.shape, s.tensors.path, s.tensors.offset + expert * n, n


def stacks_of(checkpoint):
    """{(stack, class): [Layer]} in order of name, and the set of names taken."""
    groups = {}
    for t in checkpoint.tensors.values():
        m = recognise(t.name, checkpoint.container)
        if m is None:
            continue
        trunk = checkpoint.num_layers(m["stack"])
        mtp = "mtp" in m["stack"].split(".") or (trunk is not None and m["layer"] >= trunk)
        groups.setdefault((m["stack"], "mtp" if mtp else "trunk"), {}).setdefault(m["layer"], []).append((m, t))
    taken = {t.name for layers in groups.values() for found in layers.values() for _, t in found}
    stacks = {}
    for key in sorted(groups, key=lambda k: (k[0].encode(), k[1] != "trunk")):
        stacks[key] = [Layer(checkpoint, key[0], dense, n, groups[key][n]) for dense, n in enumerate(sorted(groups[key]))]
    return stacks, taken


# ---------------------------------------------------------------- hashes

def u8(n): return struct.pack("<B", n)
def u16(n): return struct.pack("<H", n)
def u32(n): return struct.pack("<I", n)
def u64(n): return struct.pack("<Q", n)


def text(s):
    b = s.encode()
    return u16(len(b)) + b


def xxh128(data):
    """The 16 bytes as stored: little-endian of the number people see as 32 digits."""
    return xxhash.xxh3_128(data).intdigest().to_bytes(16, "little")


def shown(stored):
    return stored[::-1].hex()


def class_id(leaves):
    """leaves: (role, source name, stacking, transform, dtype, shape) in canonical order."""
    out = u32(len(leaves))
    for role, name, stacking, transform, dtype, shape in leaves:
        out += u8(ROLES.index(role)) + text(name) + u8(STACKINGS.index(stacking)) + u8(transform) + text(dtype)
        out += u8(len(shape)) + b"".join(u64(d) for d in shape)
    return xxh128(out)


def record_id(class_bytes, image_bytes, checksums):
    return xxh128(class_bytes + u64(image_bytes) + u32(len(checksums)) + b"".join(u64(c) for c in checksums))


def layer_id(layer, model_layer, records):
    return xxh128(u32(layer) + u32(model_layer) + u32(len(records)) + b"".join(u32(e) + r for e, r in records))


def content(stack, layers):
    return xxh128(b"atlas-content-2\0" + text(stack) + u32(len(layers)) + b"".join(u32(n) + i for n, i in layers))


class Image:
    """Feeds a record image chunk by chunk into checksums; keeps the bytes only if asked."""

    def __init__(self):
        self.bytes = 0
        self.checksums = []
        self.hash = xxhash.xxh3_64()
        self.room = CHUNK_BYTES

    def feed(self, data):
        view = memoryview(data)
        self.bytes += len(view)
        while len(view):
            piece = view[:self.room]
            self.hash.update(piece)
            self.room -= len(piece)
            view = view[len(piece):]
            if self.room == 0:
                self._cut()

    def _cut(self):
        self.checksums.append(self.hash.intdigest())
        self.hash = xxhash.xxh3_64()
        self.room = CHUNK_BYTES

    def pad(self):
        self.feed(bytes(-self.bytes % ALIGN))

    def end(self):
        self.pad()
        if self.room != CHUNK_BYTES:
            self._cut()


class Files:
    """Positional reads with a bounded number of open files."""

    def __init__(self):
        self.open = {}

    def pieces(self, path, offset, n):
        fd = self.open.get(path)
        if fd is None:
            if len(self.open) >= 64:
                os.close(self.open.pop(next(iter(self.open))))
            fd = self.open[path] = os.open(path, os.O_RDONLY)
        while n:
            data = os.pread(fd, min(n, READ_BYTES), offset)
            if not data:
                raise Bad(f"{path}: short read at {offset}")
            yield data
            offset += len(data)
            n -= len(data)


def describe(stack, cls, layers, with_data=True, with_records=True):
    files, payload = Files(), xxhash.xxh3_128()
    out_layers, with_sums, without_sums, total = [], [], [], 0
    for layer in layers:
        ids, plain, records, classes, class_ids = [], [], [], [], {}
        for expert in range(layer.num_experts):
            leaves, described, image, at = [], [], Image(), 0
            for s, dtype, shape, path, offset, n in layer.leaves(expert):
                described.append((s.role, s.template, s.stacking, 0, dtype, shape))
                at += -at % ALIGN
                leaves.append(dict(role=s.role, leaf=s.leaf, name=s.template, stacking=s.stacking, dtype=dtype, shape=shape,
                                   source_dim0=s.dim0, image_offset=at, bytes=n))
                at += n
                if with_data:
                    image.pad()
                    for data in files.pieces(path, offset, n):
                        payload.update(data)
                        image.feed(data)
            image_bytes = at + -at % ALIGN
            if with_data:
                image.end()
                assert image.bytes == image_bytes
            cid = class_id(described)
            if cid not in class_ids:
                class_ids[cid] = len(classes)
                classes.append(dict(class_id=shown(cid), image_bytes=image_bytes, leaves=leaves))
            rid = record_id(cid, image_bytes, image.checksums)
            ids.append((expert, rid))
            plain.append((expert, record_id(cid, image_bytes, [])))
            records.append({"expert": expert, "class": class_ids[cid], "record_id": shown(rid),
                            "checksums": [f"{c:016x}" for c in image.checksums]})
        total += layer.num_experts
        lid = layer_id(layer.layer, layer.model_layer, ids)
        with_sums.append((layer.layer, lid))
        without_sums.append((layer.layer, layer_id(layer.layer, layer.model_layer, plain)))
        entry = dict(layer=layer.layer, model_layer=layer.model_layer, num_experts=layer.num_experts,
                     identity_experts=layer.identity_experts, layer_id=shown(lid) if with_data else None, classes=classes)
        if with_records:
            entry["records"] = records
        out_layers.append(entry)
    return {"prefix": stack, "class": cls, "records": total,
            "payload_digest": f"{payload.intdigest():032x}" if with_data else None,
            "content_id": shown(content(stack, with_sums)) if with_data else None,
            "layout_id": shown(content(stack, without_sums)),
            "layers": out_layers}


def oracle(path, stack=None, mtp=None, with_data=True, with_records=True):
    """The whole answer as plain data; stack and mtp (None, True, False) restrict it."""
    checkpoint = Checkpoint(path)
    stacks, _ = stacks_of(checkpoint)
    chosen = [describe(prefix, cls, layers, with_data, with_records) for (prefix, cls), layers in stacks.items()
              if (stack is None or stack == prefix) and (mtp is None or mtp == (cls == "mtp"))]
    return {"container": checkpoint.container, "stacks": chosen}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("path")
    p.add_argument("--stack", help="only the stack of this prefix")
    p.add_argument("--mtp", action="store_true", help="the MTP part instead of the trunk")
    p.add_argument("--all", action="store_true", help="with --json: trunk and MTP stacks")
    g = p.add_mutually_exclusive_group(required=True)
    for name in ("json", "payload-digest", "content-id", "layout-id"):
        g.add_argument("--" + name, action="store_true")
    a = p.parse_args()
    try:
        r = oracle(a.path, a.stack, None if a.all else a.mtp, with_data=not a.layout_id)
    except (Bad, OSError, KeyError, ValueError, TypeError) as e:
        print(f"oracle: {e}", file=sys.stderr)
        return 1
    if a.json:
        json.dump(r, sys.stdout, indent=1)
        print()
        return 0
    if len(r["stacks"]) != 1:
        names = ", ".join(s["prefix"] for s in r["stacks"]) or "none"
        print(f"oracle: need exactly one stack, found {names}; choose with --stack", file=sys.stderr)
        return 2 if r["stacks"] else 1
    print(r["stacks"][0]["payload_digest" if a.payload_digest else "content_id" if a.content_id else "layout_id"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
