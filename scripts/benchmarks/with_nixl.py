"""Records by NIXL with its UCX backend over TCP: READs of descriptor lists, between two processes.

  python -m benchmarks.with_nixl serve FILE
  python -m benchmarks.with_nixl read SERVER FILE --batch 8
"""

import json
import os
import sys

from . import work

# Before the library loads.
os.environ.setdefault("UCX_TLS", "tcp,self")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_LOG_LEVEL", "error")


def agent(name, progress):
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, backends=["UCX"]))


def main():
    args = work.parser(__doc__).parse_args()
    if args.role == "serve":
        # Nobody else drives this side: its bytes are sent by the progress thread.
        made = agent("server", True)
        pages, at = work.mapped(args.file)
        made.register_memory([(at, len(pages), 0, "")], "DRAM")
        work.serve({"metadata": made.get_agent_metadata().hex(), "at": at})
    else:
        server = json.loads(args.server)
        each = args.record_bytes
        made = agent("client", False)
        buffer, at = work.anonymous(args.batch * each)
        made.register_memory([(at, len(buffer), 0, "")], "DRAM")
        there = made.add_remote_agent(bytes.fromhex(server["metadata"]))
        there = there.decode() if isinstance(there, bytes) else there

        def read(indices):
            local = made.get_xfer_descs([(at + slot * each, each, 0) for slot in range(len(indices))], "DRAM")
            remote = made.get_xfer_descs([(server["at"] + i * each, each, 0) for i in indices], "DRAM")
            handle = made.initialize_xfer("READ", local, remote, there)
            state = made.transfer(handle)
            while state == "PROC":
                state = made.check_xfer_state(handle)
            if state != "DONE":
                sys.exit(f"a transfer ended as {state}")
            made.release_xfer_handle(handle)

        work.timed(read, buffer, args.file, **work.what(args))
    sys.stdout.flush()
    # The library's threads need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
