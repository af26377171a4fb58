"""One file of the log, in Arrow's IPC format.

A file ``delta-<version>.arrow`` has the columns

- ``table`` (string), ``key`` (uint64), ``value`` (list of float32; null: the key was removed)

with the tables in order of their names, in each the written rows by key and then the removed
keys. The dense weights, if they changed, are one row at the end whose table is the empty string.
The schema's metadata holds under ``streamtrain`` a JSON object: ``format`` (1), ``version``,
``since``, ``generation``, ``step``, ``watermark``, ``positions``, ``dims``, ``rows``, ``checksum``.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from exporters.errors import LogCorrupt
from exporters.sink import Entry
from exporters.version import Delta, TableRows
from exporters.wire import checksum_of

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = ["read_delta", "read_entry", "write_delta"]

FORMAT = 1
ROWS_PER_BATCH = 1 << 16

_KEY = b"streamtrain"


class _FileMeta(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    version: Annotated[int, msgspec.Meta(ge=1)]
    since: Annotated[int, msgspec.Meta(ge=0)]
    generation: int
    step: int
    watermark: int
    positions: dict[str, int]
    dims: dict[str, Annotated[int, msgspec.Meta(ge=1)]]
    rows: dict[str, int]
    checksum: str


def write_delta(file: IO[bytes], delta: Delta, checksum: str) -> None:
    """Write a checked delta."""
    import pyarrow as pa

    meta = _FileMeta(
        format=FORMAT,
        version=delta.version,
        since=delta.since,
        generation=delta.generation,
        step=delta.step,
        watermark=delta.watermark,
        positions=dict(delta.positions),
        dims=dict(delta.dims),
        rows=dict(delta.rows),
        checksum=checksum,
    )
    schema = pa.schema(
        [("table", pa.string()), ("key", pa.uint64()), ("value", pa.list_(pa.float32()))],
        metadata={_KEY: msgspec.json.encode(meta, order="deterministic")},
    )
    with pa.ipc.new_file(file, schema) as writer:
        for name in sorted(delta.tables):
            rows = delta.tables[name]
            for at in range(0, len(rows.keys), ROWS_PER_BATCH):
                part = slice(at, at + ROWS_PER_BATCH)
                writer.write_batch(_batch(schema, name, rows.keys[part], rows.values[part]))
            for at in range(0, len(rows.removed), ROWS_PER_BATCH):
                writer.write_batch(_batch(schema, name, rows.removed[at : at + ROWS_PER_BATCH]))
        if delta.dense is not None:
            zero = np.zeros(1, np.uint64)
            writer.write_batch(_batch(schema, "", zero, delta.dense[np.newaxis, :]))


def read_entry(path: Path) -> Entry:
    """Return what a file says of itself, without reading its rows.

    Raises
    ------
    LogCorrupt
        It can't be read, or says what can't be.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            meta = _meta_of(path, reader.schema)
        size = path.stat().st_size
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error)) from error
    if meta.since >= meta.version:
        raise _damaged(path, f"it says that it covers ({meta.since}, {meta.version}]")
    return Entry(
        version=meta.version,
        since=meta.since,
        generation=meta.generation,
        step=meta.step,
        checksum=meta.checksum,
        bytes=size,
        watermark=meta.watermark,
    )


def read_delta(path: Path) -> Delta:
    """Return the delta in a file, checked against the file's checksum.

    Raises
    ------
    LogCorrupt
        It can't be read, or isn't what its checksum says.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            meta = _meta_of(path, reader.schema)
            delta = _delta_of(path, meta, reader)
        found = checksum_of(delta)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, LogCorrupt):
            raise
        raise _damaged(path, str(error)) from error
    if found != meta.checksum:
        raise _damaged(path, f"checksum {found}, {meta.checksum} expected")
    return delta


def _batch(
    schema: pa.Schema,
    name: str,
    keys: NDArray[np.uint64],
    values: NDArray[np.float32] | None = None,
) -> pa.RecordBatch:
    import pyarrow as pa

    if values is None:
        column = pa.nulls(len(keys), schema.field("value").type)
    else:
        n, dim = values.shape
        offsets = pa.array(np.arange(0, n * dim + 1, dim, dtype=np.int32) if dim else [0, 0])
        column = pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))
    columns = [pa.repeat(pa.scalar(name), len(keys)), pa.array(keys), column]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _meta_of(path: Path, schema: pa.Schema) -> _FileMeta:
    try:
        meta = msgspec.json.decode((schema.metadata or {}).get(_KEY, b""), type=_FileMeta)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, f"its metadata: {error}") from error
    if meta.format != FORMAT:
        raise _damaged(path, f"format {meta.format}; this version reads {FORMAT}: upgrade")
    return meta


def _keys_of(batch: pa.RecordBatch) -> NDArray[np.uint64]:
    keys: NDArray[np.uint64] = batch.column(1).to_numpy(zero_copy_only=False)
    return keys.astype(np.uint64, copy=True)


def _delta_of(path: Path, meta: _FileMeta, reader: pa.RecordBatchFileReader) -> Delta:
    keys: dict[str, list[NDArray[np.uint64]]] = {}
    values: dict[str, list[NDArray[np.float32]]] = {}
    removed: dict[str, list[NDArray[np.uint64]]] = {}
    dense: NDArray[np.float32] | None = None
    for index in range(reader.num_record_batches):
        batch = reader.get_batch(index)
        name = batch.column(0)[0].as_py()
        column = batch.column(2)
        floats = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=True)
        if not name:
            dense = floats
        elif column.null_count == len(column):
            removed.setdefault(name, []).append(_keys_of(batch))
        else:
            dim = meta.dims.get(name)
            if dim is None or len(floats) != len(column) * dim:
                raise _damaged(path, f"table {name!r}: rows are not of dim {dim}")
            keys.setdefault(name, []).append(_keys_of(batch))
            values.setdefault(name, []).append(floats.reshape(-1, dim))
    tables = {}
    for name in sorted(keys.keys() | removed.keys()):
        no_rows = np.empty((0, meta.dims.get(name, 0)), np.float32)
        no_keys = np.empty(0, np.uint64)
        tables[name] = TableRows(
            np.concatenate([no_keys, *keys.get(name, [])]),
            np.concatenate([no_rows, *values.get(name, [])]),
            np.concatenate([no_keys, *removed.get(name, [])]),
        )
    return Delta(
        version=meta.version,
        since=meta.since,
        generation=meta.generation,
        step=meta.step,
        watermark=meta.watermark,
        positions=meta.positions,
        tables=tables,
        dense=dense,
        dims=meta.dims,
        rows=meta.rows,
    )


def _damaged(path: Path, why: str) -> LogCorrupt:
    return LogCorrupt(
        f"{path}: damaged: {why}. Move the file away: sinks that need it get a snapshot"
    )
