"""Records by Mooncake's transfer engine over TCP, batch_transfer_sync_read, between two processes.

  python -m benchmarks.with_mooncake serve FILE
  python -m benchmarks.with_mooncake read SERVER FILE --batch 8
"""

import json
import os
import sys

from . import work

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


def engine():
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        sys.exit("the engine does not start")
    return made


def register(made, at, size):
    if made.register_memory(at, size):
        sys.exit(f"{size} bytes of memory cannot be registered")


def main():
    args = work.parser(__doc__).parse_args()
    made = engine()
    if args.role == "serve":
        pages, at = work.mapped(args.file)
        register(made, at, len(pages))
        work.serve({"segment": f"127.0.0.1:{made.get_rpc_port()}", "at": at})
    else:
        server = json.loads(args.server)
        each = args.record_bytes
        buffer, at = work.anonymous(args.batch * each)
        register(made, at, len(buffer))

        def read(indices):
            if made.batch_transfer_sync_read(server["segment"], [at + slot * each for slot in range(len(indices))],
                                             [server["at"] + i * each for i in indices], [each] * len(indices)):
                sys.exit("a transfer failed")

        work.timed(read, buffer, args.file, **work.what(args))
    sys.stdout.flush()
    # The engine's threads need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
