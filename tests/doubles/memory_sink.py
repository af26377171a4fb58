"""A sink in memory that is as strict as the Redis one, and can fail in all its ways.

`MemoryServer` is the place: it outlives sinks, goes back in time, is wiped, goes down. Several
`MemorySink` objects (an older trainer's and a newer one's) may write to one server.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from exporters.errors import (
    FenceLost,
    FenceTaken,
    Gap,
    HeadMismatch,
    OutcomeUnknown,
    SinkLostTime,
    SinkRefused,
    SinkUnavailable,
)
from exporters.notes import Ledger, Notes, judge
from exporters.sink import Published, Slice
from exporters.version import Delta, Head
from exporters.wire import Chunk, decode_chunks


@dataclass
class State:
    """All that a server holds."""

    fence: int | None = None
    owner: str = ""
    head: Head | None = None
    rows: dict[int, dict[tuple[str, int], tuple[int, bytes]]] = field(default_factory=dict)
    notes: Notes = field(default_factory=lambda: Notes(None, None))
    payloads: dict[int, list[bytes]] = field(default_factory=dict)
    dense: dict[int, bytearray] = field(default_factory=dict)
    stream: list[Published] = field(default_factory=list)
    published: set[int] = field(default_factory=set)


class MemoryServer:
    """The place that sinks write to.

    `down`: nothing is answered. `full`: writes are refused. `fail_in`: after so many writes more
    the next one fails, `fail_after_applying` telling whether it took effect first.
    """

    def __init__(self) -> None:
        self.state = State()
        self.down = False
        self.full = False
        self.fail_in: int | None = None
        self.fail_after_applying = False
        self.before_write: Callable[[str], None] = lambda what: None

    def save(self) -> State:
        """Return a copy of all that is held, to go back to."""
        return copy.deepcopy(self.state)

    def restore(self, state: State) -> None:
        """Go back in time."""
        self.state = copy.deepcopy(state)

    def wipe(self) -> None:
        """Lose everything."""
        self.state = State()

    def table(self, name: str) -> dict[int, bytes]:
        """Return a table's rows in the head's epoch."""
        head = self.state.head
        rows = self.state.rows.get(head.epoch, {}) if head is not None else {}
        return {key: row for (table, key), (_, row) in rows.items() if table == name}


class MemorySink:
    """A sink object on a `MemoryServer`."""

    def __init__(
        self,
        server: MemoryServer,
        *,
        name: str = "memory",
        groups: int = 1,
        keep_payloads: int = 64,
    ) -> None:
        self.server = server
        self._name = name
        self._groups = groups
        self._keep_payloads = keep_payloads
        self._owner = secrets.token_hex(8)
        self._ledger = Ledger(name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def groups(self) -> int:
        return self._groups

    def buckets(self, table: str, rows: int) -> int:
        return 1

    def order(self, table: str, keys: NDArray[np.uint64], head: Head) -> NDArray[np.int64]:
        return np.arange(len(keys))[::-1]

    def check(self, dims: Mapping[str, int]) -> list[str]:
        return []

    def take_fence(self, generation: int) -> Head | None:
        with _Write(self, None):
            state = self.server.state
            fence = state.fence or 0
            if fence > generation or (fence == generation and state.owner != self._owner):
                raise FenceTaken(self._name, fence)
            state.fence, state.owner = generation, self._owner
        self._ledger.reset(self.server.state.notes)
        return self.read_head()

    def read_fence(self) -> int | None:
        self._reach()
        return self.server.state.fence

    def read_head(self) -> Head | None:
        self._reach()
        return self.show_head()

    def show_head(self) -> Head | None:
        """Return the head, even of a server that is down."""
        state = self.server.state
        head = state.head
        if head is None:
            return None
        return judge(head, [state.notes])

    def put(self, chunk: Chunk, head: Head, *, generation: int) -> None:
        epoch, version = head.epoch, head.version
        with _Write(self, generation):
            self._note(head, generation, sealed=False)
            rows = self.server.state.rows.setdefault(epoch, {})
            for key, row in zip(chunk.keys.tolist(), chunk.values, strict=True):
                rows[chunk.table, key] = (version, row.tobytes())
            for key in chunk.removed.tolist():
                rows.pop((chunk.table, key), None)

    def put_payload(self, index: int, data: bytes, head: Head, *, generation: int) -> None:
        version = head.version
        with _Write(self, generation):
            payload = self.server.state.payloads.setdefault(version, [])
            if index == 0:
                payload.clear()
            if not index <= len(payload) <= index + 1:
                raise SinkLostTime(f"payload of {version} has {len(payload)} chunks")
            payload[index:] = [data]

    def put_dense(self, chunk: Chunk, head: Head, *, generation: int) -> None:
        version = head.version
        with _Write(self, generation):
            dense = self.server.state.dense.setdefault(version, bytearray())
            if chunk.offset == 0:
                dense.clear()
            if len(dense) not in (4 * chunk.offset, 4 * (chunk.offset + len(chunk.dense))):
                raise SinkLostTime(f"dense of {version} has {len(dense)} bytes")
            dense[4 * chunk.offset :] = chunk.dense.tobytes()

    def commit(
        self, head: Head, *, since: int | None, generation: int, expect: Head | None, chunks: int
    ) -> Literal["published", "already"]:
        with _Write(self, generation):
            self._note(head, generation, sealed=True)
        try:
            with _Write(self, generation, "flip"):
                return self._flip(head, since, expect, chunks)
        except SinkUnavailable as error:
            raise OutcomeUnknown(str(error)) from error

    def _flip(
        self, head: Head, since: int | None, expect: Head | None, chunks: int
    ) -> Literal["published", "already"]:
        state = self.server.state
        before = state.head
        version = before.version if before is not None else None
        if before is not None and _same(before, head):
            return "already"
        if since is None:
            fits = (before is None and expect is None) or (
                before is not None
                and expect is not None
                and _same(before, expect)
                and before.epoch == expect.epoch
                and before.version < head.version
            )
        else:
            fits = (
                before is not None
                and before.epoch == head.epoch
                and since <= before.version < head.version
            )
        if not fits:
            raise HeadMismatch(self._name, head.version, version)
        if len(state.payloads.get(head.version, [])) != chunks and since is not None:
            raise SinkLostTime("payload chunks are missing")
        if (
            head.dense is not None
            and head.dense.version == head.version
            and len(state.dense.get(head.version, b"")) != 4 * head.dense.size
        ):
            raise SinkLostTime("dense weights are missing")
        if before is None:
            state.stream.clear()
        state.head = head
        state.published.add(head.version)
        state.stream.append(
            Published(
                version=head.version,
                since=since,
                epoch=head.epoch,
                generation=head.generation,
                checksum=head.checksum,
                chunks=chunks,
            )
        )
        return "published"

    def trim(self, *, generation: int) -> None:
        with _Write(self, generation):
            state = self.server.state
            head = state.head
            if head is None:
                return
            published = [entry.version for entry in state.stream][-self._keep_payloads :]
            state.stream = state.stream[-self._keep_payloads :]
            state.payloads = {
                version: payload
                for version, payload in state.payloads.items()
                if version in published or version > head.version
            }
            kept = sorted(v for v in state.dense if v in state.published)[-2:]
            state.dense = {
                v: dense for v, dense in state.dense.items() if v in kept or v > head.version
            }

    def drop_old_epochs(self, keep: int, *, generation: int) -> None:
        with _Write(self, generation):
            head = self.server.state.head
            if keep != (head.epoch if head is not None else 0):
                raise SinkLostTime(f"epoch {keep} is not the head's")
            notes = self._ledger.before_dropping(self.server.state.notes, keep)
            if notes is not None:
                self._leave(notes)
            rows = self.server.state.rows
            self.server.state.rows = {keep: rows[keep]} if keep in rows else {}

    def close(self) -> None:
        pass

    def _reach(self) -> None:
        if self.server.down:
            raise SinkUnavailable(f"sink {self._name!r} is down")

    def _note(self, head: Head, generation: int, *, sealed: bool) -> None:
        notes = self._ledger.next(
            self.server.state.notes,
            epoch=head.epoch,
            version=head.version,
            generation=generation,
            of=head.generation,
            seal=sealed,
        )
        self._leave(notes)

    def _leave(self, notes: Notes) -> None:
        self._ledger.sent(notes)
        self.server.state.notes = notes
        if self.server.fail_in != 0:  # else the answer is about to be lost
            self._ledger.acknowledged(notes)


class _Write:
    """One atomic write: all of the state changes, or none of it does."""

    def __init__(self, sink: MemorySink, generation: int | None, what: str = "write") -> None:
        self._sink = sink
        self._what = what
        self._generation = generation
        self._before: State | None = None

    def __enter__(self) -> None:
        sink, server = self._sink, self._sink.server
        sink._reach()
        server.before_write(self._what)
        if self._generation is not None and server.state.fence != self._generation:
            raise FenceLost(sink.name, server.state.fence)
        if server.full:
            raise SinkRefused(f"sink {sink.name!r}: OOM command not allowed")
        if server.fail_in == 0 and not server.fail_after_applying:
            server.fail_in = None
            raise SinkUnavailable(f"sink {sink.name!r}: connection reset")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sink, server = self._sink, self._sink.server
        if error is not None or server.fail_in is None:
            return
        if server.fail_in == 0:
            server.fail_in = None
            raise SinkUnavailable(f"sink {sink.name!r}: connection reset after writing")
        server.fail_in -= 1


class MemoryFeed:
    """The reading side of a `MemoryServer`. `between` is called while rows are being read."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.between: Callable[[], None] = lambda: None
        self._sink = MemorySink(server)

    def read_head(self) -> Head | None:
        return self._sink.read_head()

    def read_rows(self, head: Head) -> Iterator[Slice]:
        for part in range(4):
            self.between()
            self._sink._reach()
            for (table, key), (_, row) in self.server.state.rows.get(head.epoch, {}).items():
                if key % 4 == part:
                    values = np.frombuffer(row, np.float32)[np.newaxis, :]
                    keys = np.array([key], np.uint64)
                    yield Slice(table, keys, values, self.server.state.notes)
            for table, info in head.tables.items():
                nothing = np.empty((0, info.dim), np.float32)
                yield Slice(table, np.empty(0, np.uint64), nothing, self.server.state.notes)

    def read_dense(self, head: Head) -> NDArray[np.float32] | None:
        self._sink._reach()
        if head.dense is None or head.dense.version not in self.server.state.dense:
            return None
        return np.frombuffer(bytes(self.server.state.dense[head.dense.version]), np.float32)

    def follow(self, after: int, *, wait_ms: int, limit: int) -> list[Published]:
        self._sink._reach()
        found = [p for p in self.server.state.stream if p.version >= after]
        return found[: limit + 1] if found and found[-1].version > after else []

    def read_delta(self, published: Published) -> Delta:
        self._sink._reach()
        payload = self.server.state.payloads.get(published.version)
        if payload is None or len(payload) != published.chunks:
            raise Gap(f"the payload of version {published.version} is gone")
        return decode_chunks(payload, checksum=published.checksum)

    def close(self) -> None:
        pass


def _same(a: Head, b: Head) -> bool:
    return (a.version, a.generation, a.checksum) == (b.version, b.generation, b.checksum)
