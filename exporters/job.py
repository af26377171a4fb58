"""A version on its way to a sink: the head that it will have, and its pieces in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from exporters.version import DenseInfo, Head, TableInfo, TableRows
from exporters.wire import cut_chunks, cut_dense, cut_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from exporters.sink import Entry, Sink, Snapshot
    from exporters.version import Delta
    from exporters.wire import Chunk

__all__ = ["Job", "delta_job", "snapshot_job"]


@dataclass(slots=True, eq=False)
class Job:
    """A version on its way.

    Parameters
    ----------
    head
        The head that it will have.
    since
        Of a delta; None: a snapshot.
    chunks
        The pieces that are still to be sent.
    count
        Chunks of the payload; 0 for a snapshot, which has none.
    current
        The piece that is being sent; it stays until the sink has it.
    """

    head: Head
    since: int | None
    chunks: Iterator[Chunk]
    count: int
    current: Chunk | None = None


def delta_job(entry: Entry, delta: Delta, before: Head, sink: Sink) -> Job:
    """Return the job that takes a sink from head `before` to the version of a log entry.

    Tables stay in as many buckets as the epoch has for them; new tables get theirs.
    """
    tables = {}
    for name, dim in delta.dims.items():
        info = before.tables.get(name)
        rows = delta.rows.get(name, info.rows if info is not None else 0)
        buckets = sink.buckets(name, rows) if info is None else info.buckets
        tables[name] = TableInfo(dim, buckets, rows)
    dense = before.dense
    if delta.dense is not None:
        dense = DenseInfo(delta.version, len(delta.dense))
    chunks = cut_chunks(delta)
    head = _head_of(entry, delta, before.epoch, tables, dense, sink)
    return Job(head, entry.since, iter(chunks), len(chunks))


def snapshot_job(entry: Entry, snapshot: Snapshot, sink: Sink) -> Job:
    """Return the job that puts a snapshot at the version of a log entry into its own epoch."""
    tables = {}
    for name, dim in snapshot.dims.items():
        rows = snapshot.counts.get(name, 0)
        tables[name] = TableInfo(dim, sink.buckets(name, rows), rows)
    dense = None
    if snapshot.dense is not None:
        dense = DenseInfo(snapshot.version, len(snapshot.dense))
    head = _head_of(entry, snapshot, snapshot.version, tables, dense, sink)
    return Job(head, None, _cut_snapshot(snapshot), 0)


def _head_of(
    entry: Entry,
    what: Delta | Snapshot,
    epoch: int,
    tables: Mapping[str, TableInfo],
    dense: DenseInfo | None,
    sink: Sink,
) -> Head:
    return Head(
        version=entry.version,
        generation=entry.generation,
        epoch=epoch,
        checksum=entry.checksum,
        watermark=what.watermark,
        step=what.step,
        positions=what.positions,
        tables=tables,
        dense=dense,
        groups=sink.groups,
    )


def _cut_snapshot(snapshot: Snapshot) -> Iterator[Chunk]:
    index = 0
    for name, keys, values in snapshot.rows:
        for chunk in cut_rows(name, TableRows(keys, values, keys[:0]), first=index):
            index = chunk.index + 1
            yield chunk
    if snapshot.dense is not None:
        yield from cut_dense(snapshot.dense, first=index)
