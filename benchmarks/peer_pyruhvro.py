"""Decodes Avro to Arrow by pyruhvro, in an environment of its own: one line in, one figure out.

Told a schema and a file of messages (each behind its length, four bytes little-endian), it times a
pass over them for each line on its standard input: microseconds of CPU per message.
"""

import struct
import sys
import time
from pathlib import Path

import pyruhvro

BATCH = 2048


def main() -> None:
    """Answer each line with one figure."""
    schema = Path(sys.argv[1]).read_text(encoding="utf-8")
    content = Path(sys.argv[2]).read_bytes()
    messages, at = [], 0
    while at < len(content):
        (size,) = struct.unpack_from("<I", content, at)
        messages.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    batches = [messages[i : i + BATCH] for i in range(0, len(messages), BATCH)]
    rows = pyruhvro.deserialize_array(batches[0], schema).num_rows
    print(rows, flush=True)
    for _ in sys.stdin:
        start = time.thread_time()
        for batch in batches:
            pyruhvro.deserialize_array(batch, schema)
        print((time.thread_time() - start) / len(messages) * 1e6, flush=True)


if __name__ == "__main__":
    main()
