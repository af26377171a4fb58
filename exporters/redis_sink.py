"""Ships versions into Redis.

Layout in `exporters.redis_layout`, order and guarantees in `exporters.sink`. Every write is one
transaction that watches the fence and the notes: if either changed, nothing is written.
"""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from exporters import redis_layout
from exporters.errors import (
    Corrupt,
    FenceLost,
    FenceTaken,
    HeadMismatch,
    OutcomeUnknown,
    SinkLostTime,
    SinkRefused,
    SinkUnavailable,
)
from exporters.notes import Ledger, Note, Notes, judge
from exporters.redis_layout import Keys
from exporters.redis_parts import Parts
from exporters.redis_scripts import COMMIT, TAKE_FENCE, TAKE_GROUP
from exporters.redis_session import Session, fence_of, problems

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from exporters.config import Redis
    from exporters.redis_session import Command
    from exporters.version import Head
    from exporters.wire import Chunk

__all__ = ["RedisSink"]

SLICE = 1000


class RedisSink:
    """A model in one Redis.

    Parameters
    ----------
    url
        Where it is.
    model
        Name of the model; part of every key.
    name
        Name for messages and status.
    expected_rows
        Rows to expect per table; buckets are sized by it.
    groups
        Hash slots to spread rows over.
    keep_versions
        Versions of the dense weights to keep.
    stream_bytes
        Payload bytes to keep for replicas that lag.
    allow_eviction
        Warn of a Redis that may drop rows, rather than call it a problem.
    timeout_s
        Bound on connecting and on each answer.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        name: str = "redis",
        expected_rows: Mapping[str, int] | None = None,
        groups: int = 1,
        keep_versions: int = 2,
        stream_bytes: int = 1 << 30,
        allow_eviction: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        self._name = name
        self._keys = Keys(model)
        self._expected = dict(expected_rows or {})
        self._groups = groups
        self._allow_eviction = allow_eviction
        self._session = Session(url, name=name, timeout_s=timeout_s)
        self._token = secrets.token_hex(16)
        self._ledgers = [Ledger(name) for _ in range(groups)]
        self._parts = Parts(self._keys, keep_versions=keep_versions, stream_bytes=stream_bytes)

    @classmethod
    def from_config(cls, config: Redis, *, model: str, environ: Mapping[str, str]) -> Self:
        """Return the sink that a config describes.

        Raises
        ------
        ValueError
            The variable that should hold the URL is not set, or the URL can't be read.
        """
        return cls(
            config.resolve_url(environ),
            model=model,
            expected_rows=config.expected_rows,
            groups=config.groups,
            keep_versions=config.keep_versions,
            stream_bytes=config.stream_bytes,
            allow_eviction=config.allow_eviction,
        )

    @property
    def name(self) -> str:
        """Name for messages and status."""
        return self._name

    @property
    def groups(self) -> int:
        """Hash slots that rows are spread over."""
        return self._groups

    def buckets(self, table: str, rows: int) -> int:
        """Return the number of buckets for a table in a new epoch."""
        expected = self._expected.get(table, redis_layout.EXPECTED_ROWS)
        return redis_layout.buckets_for(max(rows, expected))

    def order(self, table: str, keys: NDArray[np.uint64], head: Head) -> NDArray[np.int64]:
        """Return the order in which keys are best written: bucket by bucket.

        A command costs Redis far more than a row in it.
        """
        bucket = redis_layout.buckets_of(keys, head.tables[table].buckets)
        return np.lexsort((bucket, bucket % head.groups))

    def check(self, dims: Mapping[str, int]) -> list[str]:
        """Return what would make this Redis costly for tables of these dims."""
        return problems(self._session, dims, allow_eviction=self._allow_eviction)

    def take_fence(self, generation: int) -> Head | None:
        """S3: raise all fences to `generation` and answer the head."""
        keys = self._keys
        taken = self._session.script(
            TAKE_FENCE, [keys.fence, keys.owner], [generation, self._token]
        )
        for group in range(self._groups):
            if int(taken) == 0:
                taken = self._session.script(TAKE_GROUP, [keys.group(group, "fence")], [generation])
        if int(taken):
            raise FenceTaken(self._name, int(taken))
        # What another writer noted last is where this one begins; nobody else writes from here.
        for ledger, notes in zip(self._ledgers, self._read_notes(), strict=True):
            ledger.reset(notes)
        self._parts.forget()
        return self.read_head()

    def read_fence(self) -> int | None:
        """Return the lowest generation over all fence keys; None when one is gone."""
        names = [self._keys.fence, *(self._keys.group(g, "fence") for g in range(self._groups))]
        found = self._session.many([("GET", name) for name in names])
        return None if None in found else min(fence_of(value) or 0 for value in found)

    def read_head(self) -> Head | None:
        """Return the head with what the notes tell of it, or None."""
        fields = self._session.call("HGETALL", self._keys.head)
        try:
            head = redis_layout.head_from(dict(zip(fields[::2], fields[1::2], strict=True)))
        except Corrupt as error:
            raise SinkRefused(
                f"sink {self._name!r}: {error}; delete {self._keys.head} and a snapshot is written"
            ) from error
        if head is None:
            return None
        # Groups of the head's epoch; a writer with another number writes it anew.
        return judge(head, self._read_notes(head.groups))

    def put(self, chunk: Chunk, head: Head, *, generation: int) -> None:
        """D4: write rows and removals of one chunk, group by group."""
        buckets = head.tables[chunk.table].buckets
        commands: dict[int, list[bytes]] = {}
        for keys, values in ((chunk.keys, chunk.values), (chunk.removed, None)):
            if not len(keys):
                continue
            bucket = redis_layout.buckets_of(keys, buckets)
            order = np.argsort(bucket, kind="stable")
            found, first = np.unique(bucket[order], return_index=True)
            names = [
                self._keys.bucket(b % head.groups, head.epoch, chunk.table, b)
                for b in found.tolist()
            ]
            packed = redis_layout.row_commands(
                names,
                np.append(first, len(keys)).astype(np.int64),
                keys[order],
                None if values is None else values[order],
                head.version,
            )
            for b, command in zip(found.tolist(), packed, strict=True):
                commands.setdefault(b % head.groups, []).append(command)
        for group in sorted(commands):
            self._write_rows(group, commands[group], head, generation=generation)

    def put_payload(self, index: int, data: bytes, head: Head, *, generation: int) -> None:
        """D4: keep chunk `index` of the payload of the version."""
        self._write_part(
            generation,
            self._parts.payload_field(head.version),
            lambda found: self._parts.add_payload(head.version, index, data, found),
        )

    def put_dense(self, chunk: Chunk, head: Head, *, generation: int) -> None:
        """D4: keep a piece of the dense weights of the version."""
        self._write_part(
            generation,
            self._parts.dense_field(head.version),
            lambda found: self._parts.add_dense(head.version, chunk.offset, chunk.dense, found),
        )

    def commit(
        self, head: Head, *, since: int | None, generation: int, expect: Head | None, chunks: int
    ) -> Literal["published", "already"]:
        """D5: seal the notes, then publish in one step."""
        for group in range(head.groups):
            self._write_rows(group, [], head, generation=generation, seal=True)
        keys = self._keys
        own_dense = head.dense is not None and head.dense.version == head.version
        entry = _words(redis_layout.entry_fields(head, since=since, chunks=chunks))
        arguments: list[str | int] = [generation, head.version, head.checksum, head.generation]
        arguments += [head.epoch, "" if since is None else since]
        if expect is None:
            arguments += ["", "", "", ""]
        else:
            arguments += [expect.version, expect.checksum, expect.generation, expect.epoch]
        arguments += [chunks, head.dense.size if own_dense and head.dense is not None else ""]
        arguments += [len(entry), *entry, *_words(redis_layout.head_fields(head))]
        try:
            answer = self._session.script(
                COMMIT, [keys.fence, keys.head, keys.log, keys.parts], arguments
            )
        except SinkUnavailable as error:
            raise OutcomeUnknown(str(error)) from error
        outcome, *rest = (word.decode() for word in answer)
        if outcome == "fence":
            raise FenceLost(self._name, fence_of(rest[0].encode()))
        if outcome == "head":
            raise HeadMismatch(self._name, head.version, int(rest[0]) if rest[0] else None)
        if outcome == "parts":
            raise SinkLostTime(f"sink {self._name!r} misses pieces of {rest[0]}")
        self._parts.published(head.version)
        return "published" if outcome == "published" else "already"

    def trim(self, *, generation: int) -> None:
        """Drop payloads beyond the bound, old dense weights, and what was never published."""
        keys = self._keys
        if not self._parts.loaded:
            fields = self._session.call("HGETALL", keys.parts)
            self._parts.load(dict(zip(fields[::2], fields[1::2], strict=True)))
        found = self._session.call("HGET", keys.head, "version")
        doomed = self._parts.doomed(int(found)) if found is not None else None
        if doomed is None:
            return

        def unchanged(replies: list[Any]) -> list[bytes]:
            if replies[0] != found:
                raise SinkLostTime(f"sink {self._name!r}: the head moved by itself")
            commands: list[Command] = [
                ("UNLINK", *doomed.keys[at : at + SLICE])
                for at in range(0, len(doomed.keys), SLICE)
            ]
            if doomed.stream_below is not None:
                commands.append(("XTRIM", keys.log, "MINID", f"{doomed.stream_below}-0"))
            commands.append(("HDEL", keys.parts, *doomed.fields))
            return self._session.pack(commands)

        self._session.transact(
            keys.fence, [keys.head], [("HGET", keys.head, "version")], unchanged, generation
        )
        self._parts.dropped(doomed)

    def drop_old_epochs(self, keep: int, *, generation: int) -> None:
        """Drop rows of all epochs but `keep`, a slice at a time, while head and fence stand."""
        for group in range(self._groups):
            self._write_notes(
                group, lambda ledger, found: ledger.before_dropping(found, keep), [], generation
            )
        keys = self._keys
        cursor = b"0"
        while True:
            cursor, found = self._session.call("SCAN", cursor, "MATCH", keys.epochs, "COUNT", SLICE)
            doomed = [name for name in found if keys.epoch_of(name) not in (None, keep)]
            if doomed or cursor == b"0":
                self._session.transact(
                    keys.fence,
                    [keys.head],
                    [("HGET", keys.head, "epoch")],
                    functools.partial(self._drop, keep, doomed),
                    generation,
                )
            if cursor == b"0":
                return

    def close(self) -> None:
        """Let go of the connection."""
        self._session.close()

    def _drop(self, keep: int, doomed: list[bytes], replies: list[Any]) -> list[bytes]:
        if int(replies[0] or 0) != keep:
            raise SinkLostTime(f"sink {self._name!r}: epoch {keep} is not the head's")
        return self._session.pack([("UNLINK", *doomed)] if doomed else [])

    def _write_rows(
        self, group: int, packed: list[bytes], head: Head, *, generation: int, seal: bool = False
    ) -> None:
        def noted(ledger: Ledger, found: Notes) -> Notes:
            return ledger.next(
                found,
                epoch=head.epoch,
                version=head.version,
                generation=generation,
                of=head.generation,
                seal=seal,
            )

        self._write_notes(group, noted, packed, generation)

    def _write_notes(
        self,
        group: int,
        noted: Callable[[Ledger, Notes], Notes | None],
        packed: list[bytes],
        generation: int,
    ) -> None:
        """Write commands to a group together with the notes that they leave."""
        ledger = self._ledgers[group]
        names = [self._keys.group(group, what) for what in Notes._fields]
        after: Notes | None = None

        def build(replies: list[Any]) -> list[bytes]:
            nonlocal after
            before = self._notes(replies)
            after = noted(ledger, before)
            if after is None:
                return packed
            ledger.sent(after)
            changed: list[Command] = [
                ("SET", name, new.encode())
                for name, old, new in zip(names, before, after, strict=True)
                if new is not None and new != old
            ]
            return [*packed, *self._session.pack(changed)]

        self._session.transact(
            self._keys.group(group, "fence"),
            names,
            [("GET", name) for name in names],
            build,
            generation,
        )
        if after is not None:
            ledger.acknowledged(after)

    def _write_part(
        self, generation: int, field: str, add: Callable[[bytes | None], list[Command]]
    ) -> None:
        parts = self._keys.parts
        self._session.transact(
            self._keys.fence,
            [parts],
            [("HGET", parts, field)],
            lambda replies: self._session.pack(add(replies[0])),
            generation,
        )

    def _read_notes(self, groups: int | None = None) -> list[Notes]:
        names = [
            self._keys.group(group, what)
            for group in range(self._groups if groups is None else groups)
            for what in Notes._fields
        ]
        found = self._session.many([("GET", name) for name in names])
        return [self._notes(found[at : at + 2]) for at in range(0, len(found), 2)]

    def _notes(self, found: Sequence[bytes | None]) -> Notes:
        try:
            pending, filling = (None if raw is None else Note.decode(raw) for raw in found)
        except Corrupt as error:
            raise SinkRefused(
                f"sink {self._name!r}: {error}; delete that key and a snapshot is written"
            ) from error
        return Notes(pending, filling)


def _words(fields: Mapping[str, str]) -> list[str]:
    return [word for pair in fields.items() for word in pair]
