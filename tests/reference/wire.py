"""The payload of a delta, read with `struct` alone and as docs/wire.md tells it.

Written from the page, not from the code, the way a reader in another language would.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any


def read_payload(chunks: list[bytes]) -> dict[str, Any]:
    """Return meta, rows by table and key (as bytes), removed keys by table, dense (as bytes)."""
    meta, dense = b"", None
    rows: dict[str, dict[int, bytes]] = {}
    removed: dict[str, list[int]] = {}
    for index, chunk in enumerate(chunks):
        assert chunk[:3] == b"STD"
        assert chunk[3] == 1
        kind, length = chunk[4], chunk[5]
        (dim,) = struct.unpack_from("<H", chunk, 6)
        version, at, count, first, second = struct.unpack_from("<QIIII", chunk, 8)
        assert (at, count) == (index, len(chunks))
        body = chunk[32:]
        if kind == 0:
            assert first == len(meta)
            assert second == len(body)
            meta += body
        elif kind == 2:
            dense = (dense or b"") + body
            assert len(body) == 4 * second
        else:
            name = body[:length].decode()
            place = (length + 7) // 8 * 8
            keys = struct.unpack_from(f"<{first}Q", body, place)
            place += 8 * first
            gone = struct.unpack_from(f"<{second}Q", body, place)
            place += 8 * second
            assert len(body) == place + 4 * dim * first
            table = rows.setdefault(name, {})
            for number, key in enumerate(keys):
                start = place + 4 * dim * number
                table[key] = body[start : start + 4 * dim]
            removed.setdefault(name, []).extend(gone)
    return {
        "version": version,
        "meta": json.loads(meta),
        "rows": rows,
        "removed": removed,
        "dense": dense,
        "checksum": hashlib.sha256(b"".join(chunks)).hexdigest(),
    }


def mix(key: int) -> int:
    """The finaliser of SplitMix64 in whole numbers."""
    mask = 2**64 - 1
    key ^= key >> 30
    key = key * 0xBF58476D1CE4E5B9 & mask
    key ^= key >> 27
    key = key * 0x94D049BB133111EB & mask
    return key ^ key >> 31
