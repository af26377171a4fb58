"""A version on its way to a sink: the head that it will have, and its pieces in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from exporters.version import DenseInfo, Head, TableInfo, TableRows
from exporters.wire import Kind, cut_chunks, cut_dense, cut_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from exporters.sink import Entry, Sink, Snapshot
    from exporters.version import Delta
    from exporters.wire import Chunk

__all__ = ["Job", "Piece", "delta_job", "snapshot_job"]


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
        The pieces that are still to be sent: payload and dense weights as the wire has them, rows
        in the order that the sink likes best.
    count
        Chunks of the payload; 0 for a snapshot, which has none.
    current
        The piece that is being sent; it stays until the sink has it.
    """

    head: Head
    since: int | None
    chunks: Iterator[Piece]
    count: int
    current: Piece | None = None


class Piece(NamedTuple):
    """A chunk, and whether it goes to the sink's rows or dense weights, or to the payload."""

    chunk: Chunk
    payload: bool


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
    payload = cut_chunks(delta)
    head = _head_of(entry, delta, before.epoch, tables, dense, sink)
    return Job(head, entry.since, _pieces(delta, payload, head, sink), len(payload))


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
    return Job(head, None, _snapshot_pieces(snapshot, head, sink), 0)


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


def _pieces(delta: Delta, payload: list[Chunk], head: Head, sink: Sink) -> Iterator[Piece]:
    for name, rows in delta.tables.items():
        yield from _row_pieces(name, rows, head, sink)
    for chunk in payload:
        if chunk.kind is Kind.DENSE:
            yield Piece(chunk, payload=False)
        yield Piece(chunk, payload=True)


def _snapshot_pieces(snapshot: Snapshot, head: Head, sink: Sink) -> Iterator[Piece]:
    for name, keys, values in snapshot.rows:
        if len(keys):
            yield from _row_pieces(name, TableRows(keys, values, keys[:0]), head, sink)
    if snapshot.dense is not None:
        for chunk in cut_dense(snapshot.dense):
            yield Piece(chunk, payload=False)


def _row_pieces(name: str, rows: TableRows, head: Head, sink: Sink) -> Iterator[Piece]:
    order = sink.order(name, rows.keys, head)
    removed = sink.order(name, rows.removed, head)
    arranged = TableRows(rows.keys[order], rows.values[order], rows.removed[removed])
    for chunk in cut_rows(name, arranged):
        yield Piece(chunk, payload=False)
