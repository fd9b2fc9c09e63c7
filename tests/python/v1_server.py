#!/usr/bin/env python3
"""A version 1 server for TCP, standard library only, with faults to order.

    v1_server.py STORE [--port 0] [--seconds 60] [faults]

Listens on 127.0.0.1 and prints "listening 127.0.0.1:PORT". Ends by itself after --seconds.
"""
import argparse
import json
import os
import socket
import struct
import sys
import threading
import time

END = 0xFFFFFFFF


def exactly(sock, n):
    out = b""
    while len(out) < n:
        piece = sock.recv(n - len(out))
        if not piece:
            raise ConnectionError("the client hung up")
        out += piece
    return out


class Server:
    def __init__(self, args):
        self.a = args
        with open(os.path.join(args.store, "manifest.json"), "rb") as f:
            self.text = f.read()
        self.m = json.loads(self.text)
        if self.m.get("version") != 1:
            raise SystemExit("v1_server: not a version 1 store")
        self.deadline = time.monotonic() + args.seconds

    def record(self, layer, expert):
        stride = self.m["record_stride"]
        name = self.m["file_template"].format(layer)
        with open(os.path.join(self.a.store, name), "rb") as f:
            f.seek(expert * stride)
            data = f.read(stride)
        if len(data) != stride:
            raise OSError(f"{name} is too short")
        return data

    def client(self, sock):
        a, m = self.a, self.m
        sock.settimeout(max(0.1, self.deadline - time.monotonic()))
        try:
            if a.silent:
                sock.recv(1)
                time.sleep(max(0, self.deadline - time.monotonic()))
                return
            if a.garbage:
                sock.sendall(bytes((i * 167 + 13) % 251 for i in range(65536)))
                return
            length = len(self.text) if a.announce_bytes is None else a.announce_bytes
            sock.sendall(struct.pack("<I", length) + self.text)
            if exactly(sock, 1) != b"\0":
                return  # only TCP here
            while True:
                layer, expert = struct.unpack("<II", exactly(sock, 8))
                if layer == END and expert == END:
                    return
                if a.stall_after is not None:
                    a.stall_after -= 1
                    if a.stall_after < 0:
                        time.sleep(max(0, self.deadline - time.monotonic()))
                        return
                if a.answer_error or layer >= m["num_moe_layers"] or expert >= m["num_experts"]:
                    sock.sendall(b"\1")
                    continue
                if a.answer_wrong_expert:
                    expert = (expert + 1) % m["num_experts"]
                data = bytearray(self.record(layer, expert))
                if a.flip_bit is not None:
                    data[a.flip_bit // 8 % len(data)] ^= 1 << a.flip_bit % 8
                sock.sendall(b"\0")
                if a.close_mid_record is not None:
                    sock.sendall(data[:a.close_mid_record])
                    return
                sock.sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            sock.close()

    def run(self):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.a.port))
            listener.listen(64)
            print(f"listening 127.0.0.1:{listener.getsockname()[1]}", flush=True)
            while (left := self.deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    break
                threading.Thread(target=self.client, args=(sock,), daemon=True).start()


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("store")
    p.add_argument("--port", type=int, default=0, help="0: any free port")
    p.add_argument("--seconds", type=float, default=60, help="lifetime")
    g = p.add_argument_group("faults")
    g.add_argument("--answer-wrong-expert", action="store_true", help="send the next expert's record")
    g.add_argument("--answer-error", action="store_true", help="answer every request with status 1")
    g.add_argument("--announce-bytes", type=int, metavar="N", help="announce a manifest of N bytes")
    g.add_argument("--silent", action="store_true", help="accept and say nothing")
    g.add_argument("--garbage", action="store_true", help="send noise in place of the manifest")
    g.add_argument("--close-mid-record", type=int, metavar="N", help="hang up after N bytes of a record")
    g.add_argument("--flip-bit", type=int, metavar="N", help="flip bit N of each record")
    g.add_argument("--stall-after", type=int, metavar="N", help="stop answering after N requests")
    Server(p.parse_args()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
