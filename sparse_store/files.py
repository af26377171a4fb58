"""Saved stores: a folder per freeze, Arrow IPC files and one `store.json`.

A folder is a *base* (all that a store held) or an *increment* (what changed since a step). It
holds, for table number i, named `name`:

    iii-name.rows.arrow        key, count, stamp, changed_at, value [dim], slots [slots * dim]
    iii-name.candidates.arrow  key, count, stamp, changed_at
    iii-name.removed.arrow     key: entries gone since `since`, candidates included
    iii-name.tombs.arrow       key, removed_at, row: removals that some reader has not seen yet
    store.json                 format, seed, step, clock, since, until, cursors, tables

All but tombs are sorted by key, keys ascending as unsigned numbers, each key in at most one of the
first three. Files are cut into record batches of at most 65,536 rows, so a chain of folders is
merged as a stream: at each key the last folder that has it decides. A file without rows is left
out; `store.json` says how many rows each has. Numbers of format stand in `store.json` and in the
metadata of every Arrow schema, under `sparse_store`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparse_store import optim
from sparse_store.config import Table
from sparse_store.errors import ChainBroken, StoreCorrupt, UnknownTable
from sparse_store.table import Block, Part, Standing, Tombs

FORMAT = 1
MANIFEST = "store.json"
_BATCH = 65_536
_ROWS, _CANDIDATES, _REMOVED, _TOMBS = "rows", "candidates", "removed", "tombs"


class _SavedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    table: Table
    born: int
    horizon: int | None
    forget_horizon: int | None
    admitted: int
    evicted: int
    forgotten: int
    lengths: dict[str, int]

    @property
    def standing(self) -> Standing:
        return Standing(*(getattr(self, field) for field in Standing._fields))


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    seed: int
    step: int
    clock: int
    since: int
    cursors: dict[str, int]
    tables: list[_SavedTable]


class Header(NamedTuple):
    """A store beside its tables: seed, step, clock (ms) and the readers' cursors."""

    seed: int
    step: int
    clock: int
    cursors: dict[str, int]


class Frozen:
    """Copies of what changed in a store, at one step boundary; `write` may run in any thread.

    Attributes
    ----------
    since, until
        It covers the steps (since, until]; until is the store's step.
    """

    __slots__ = ("_header", "_parts", "since", "until")

    def __init__(self, header: Header, parts: Sequence[Part], *, since: int) -> None:
        self._header = header
        self._parts = tuple(parts)
        self.since = since
        self.until = header.step

    def write(self, folder: Path) -> None:
        """Write and fsync every file, `store.json` last, then the folder, made when missing.

        Raises
        ------
        FileExistsError
            The folder holds a saved store already.
        OSError
            The disk said no. What was written stays, without a `store.json`.
        """
        _begin(folder)
        saved = []
        for number, part in enumerate(self._parts):
            with _Files(folder, number, part.table) as files:
                for kind, block in ((_ROWS, part.rows), (_CANDIDATES, part.candidates)):
                    order = np.argsort(block.keys)
                    for low in range(0, order.size, _BATCH):
                        files.add(kind, block.take(order[low : low + _BATCH]))
                files.add(_REMOVED, (part.removed,))
                files.add(_TOMBS, part.tombs)
            saved.append(_saved(part.table, part.standing, files.lengths))
        _finish(folder, self._header, self.since, saved)


class Chain:
    """Saved folders in order, a base and its increments, read as the one store that they make.

    Raises
    ------
    ChainBroken
        The first is no base, or one doesn't begin where the one before it ends.
    StoreCorrupt
        A file is missing, torn, altered or of another format. Data files are looked at when read.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        if not folders:
            raise ChainBroken("no folder to read a store from; give a base and its increments")
        self._links = [(Path(folder), _read_manifest(Path(folder))) for folder in folders]
        first, last = self._links[0], self._links[-1][1]
        if first[1].since > 0:
            raise ChainBroken(
                f"{first[0]} begins after step {first[1].since}; the first folder must be a base"
            )
        for (_, older), (folder, newer) in zip(self._links[:-1], self._links[1:], strict=True):
            if not newer.since <= older.step <= newer.step or newer.seed != older.seed:
                raise ChainBroken(
                    f"{folder} covers steps ({newer.since}, {newer.step}] under seed {newer.seed}; "
                    f"it can't follow one that ends at step {older.step} under seed {older.seed}"
                )
        self.since = first[1].since
        self.header = Header(last.seed, last.step, last.clock, dict(last.cursors))
        self.tables = {saved.table.name: saved.table for saved in last.tables}

    def standing(self, name: str) -> Standing:
        """Return what a table is beside its entries."""
        return self._last(name)[1].standing

    def tombs(self, name: str) -> Tombs:
        """Return a table's tombstones."""
        number, saved = self._last(name)
        run = _Run(self._links[-1][0], number, saved, _TOMBS, order=0)
        with run:
            columns = list(run.rest())
        empty = [np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.bool_)]
        return Tombs(*(np.concatenate(parts) for parts in zip(empty, *columns, strict=True)))

    def entries(self, name: str) -> Iterator[tuple[bool, Block]]:
        """Stream a table's entries by rising key, in blocks of rows (True) or candidates."""
        born = self._last(name)[1].born
        with ExitStack() as stack:
            runs = []
            for order, (folder, manifest) in enumerate(self._links):
                for number, saved in enumerate(manifest.tables):
                    # A table of the same name that began at another step is another table.
                    if saved.table.name == name and saved.born == born:
                        for kind in (_ROWS, _CANDIDATES, _REMOVED):
                            run = _Run(folder, number, saved, kind, order=order)
                            runs.append(stack.enter_context(run))
            yield from _merged(runs)

    def _last(self, name: str) -> tuple[int, _SavedTable]:
        for number, saved in enumerate(self._links[-1][1].tables):
            if saved.table.name == name:
                return number, saved
        raise UnknownTable(f"no table {name!r} in {self._links[-1][0]}; it has {[*self.tables]}")


def merge(folders: Sequence[Path], into: Path) -> None:
    """Write a base that loads equal to the chain `folders`, without building the store.

    Memory stays at a few record batches per file; `into` is made when missing.
    """
    chain = Chain(folders)
    _begin(into)
    saved = []
    for number, table in enumerate(chain.tables.values()):
        with _Files(into, number, table) as files:
            for with_rows, block in chain.entries(table.name):
                files.add(_ROWS if with_rows else _CANDIDATES, block)
            files.add(_TOMBS, chain.tombs(table.name))
        saved.append(_saved(table, chain.standing(table.name), files.lengths))
    _finish(into, chain.header, chain.since, saved)


def rows_of(
    folders: Sequence[Path], table: str
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Stream the rows of a table out of a chain: keys [n] rising over the whole, values [n, dim].

    Raises
    ------
    UnknownTable
        The last folder has no such table.
    """
    for with_rows, block in Chain(folders).entries(table):
        if with_rows:
            yield block.keys, block.values


# ---- files of one table


def _types(table: Table, kind: str) -> list[tuple[str, pa.DataType]]:
    key = ("key", pa.uint64())
    if kind == _REMOVED:
        return [key]
    if kind == _TOMBS:
        return [key, ("removed_at", pa.int64()), ("row", pa.bool_())]
    entry = [key, ("count", pa.uint32()), ("stamp", pa.int64()), ("changed_at", pa.int64())]
    if kind == _CANDIDATES:
        return entry
    slots = optim.slot_start(table.optimizer, table.dim).size
    return [
        *entry,
        ("value", pa.list_(pa.field("item", pa.float32(), nullable=False), table.dim)),
        ("slots", pa.list_(pa.field("item", pa.float32(), nullable=False), slots)),
    ]


def _schema(table: Table, kind: str) -> pa.Schema:
    fields = [pa.field(name, type_, nullable=False) for name, type_ in _types(table, kind)]
    return pa.schema(fields, metadata={"sparse_store": str(FORMAT)})


def _path(folder: Path, number: int, table: Table, kind: str) -> Path:
    return folder / f"{number:03d}-{table.name}.{kind}.arrow"


class _Files:
    """The Arrow files of one table while they are written; each is made at its first row."""

    def __init__(self, folder: Path, number: int, table: Table) -> None:
        self.lengths: dict[str, int] = {_ROWS: 0, _CANDIDATES: 0, _REMOVED: 0, _TOMBS: 0}
        self._where = (folder, number, table)
        self._stack = ExitStack()
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self, kind: str, columns: Sequence[NDArray[Any]]) -> None:
        """Append columns of equal length; what the kind has no column for is left out."""
        size = columns[0].shape[0]
        if size == 0:
            return
        folder, number, table = self._where
        schema = _schema(table, kind)
        if kind not in self._writers:
            file = self._stack.enter_context(_path(folder, number, table, kind).open("xb"))
            self._stack.callback(_sync, file)
            self._writers[kind] = self._stack.enter_context(pa.ipc.new_file(file, schema))
        for low in range(0, size, _BATCH):
            arrays = [
                _to_arrow(column[low : low + _BATCH], field.type)
                for column, field in zip(columns, schema, strict=False)
            ]
            self._writers[kind].write_batch(pa.record_batch(arrays, schema=schema))
        self.lengths[kind] += size


class _Run:
    """One file of a table, read batch by batch and, where keys are sorted, piece by piece.

    Attributes
    ----------
    kind, order
        Which file, and of which folder in the chain.
    columns
        What is left of the batch being read; empty columns at the end.
    """

    def __init__(
        self, folder: Path, number: int, saved: _SavedTable, kind: str, *, order: int
    ) -> None:
        self.kind = kind
        self.order = order
        self._path = _path(folder, number, saved.table, kind)
        self._schema = _schema(saved.table, kind)
        self._length = saved.lengths.get(kind, 0)
        self._stack = ExitStack()
        self._batches: Iterator[list[NDArray[Any]]] = iter(())
        self.columns: list[NDArray[Any]] = []
        self._newest: int | None = None

    def __enter__(self) -> "_Run":
        if self._length:
            try:
                file = self._stack.enter_context(pa.memory_map(str(self._path)))
                reader = self._stack.enter_context(pa.ipc.open_file(file))
            except (OSError, pa.ArrowInvalid) as error:
                self._stack.close()
                raise StoreCorrupt(f"{self._path}: {error}") from error
            if not reader.schema.equals(self._schema, check_metadata=True):
                self._stack.close()
                raise StoreCorrupt(
                    f"{self._path}: its columns are {reader.schema}, {MANIFEST} says {self._schema}"
                )
            self._batches = self._read(reader)
        self._next()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.columns = []
        self._batches = iter(())
        self._stack.close()

    @property
    def last(self) -> int | None:
        """Last key of the batch being read; None at the end."""
        return int(self.columns[0][-1]) if self.columns else None

    def take(self, upto: int) -> list[NDArray[Any]]:
        """Return the columns of this batch up to a key, and move on past them."""
        keys = self.columns[0]
        size = int(np.searchsorted(keys, np.uint64(upto), side="right"))
        taken = [column[:size] for column in self.columns]
        self.columns = [column[size:] for column in self.columns]
        if size == keys.size:
            self._next()
        return taken

    def rest(self) -> Iterator[list[NDArray[Any]]]:
        """Stream what is left, batch by batch."""
        while self.columns:
            yield self.columns
            self._next()

    def _next(self) -> None:
        self.columns = next(self._batches, [])

    def _read(self, reader: Any) -> Iterator[list[NDArray[Any]]]:
        length = 0
        for number in range(reader.num_record_batches):
            try:
                batch = reader.get_batch(number)
                batch.validate()
            except (OSError, pa.ArrowInvalid) as error:
                raise StoreCorrupt(f"{self._path}: batch {number}: {error}") from error
            length += batch.num_rows
            if batch.num_rows == 0 or length > self._length:
                break
            columns = [_to_numpy(column) for column in batch.columns]
            self._check(columns)
            yield columns
        if length != self._length:
            raise StoreCorrupt(
                f"{self._path}: {length} rows or more, {MANIFEST} says {self._length}"
            )

    def _check(self, columns: list[NDArray[Any]]) -> None:
        keys = columns[0]
        if self.kind != _TOMBS:
            rising = bool(np.all(keys[1:] > keys[:-1]))
            if not rising or (self._newest is not None and int(keys[0]) <= self._newest):
                raise StoreCorrupt(f"{self._path}: keys do not rise")
            self._newest = int(keys[-1])
        for column in columns:
            if column.dtype == np.float32 and not np.isfinite(column).all():
                row = int(np.flatnonzero(~np.isfinite(column).all(axis=1))[0])
                raise StoreCorrupt(f"{self._path}: the row of key {keys[row]} is not finite")


def _merged(runs: list[_Run]) -> Iterator[tuple[bool, Block]]:
    """Merge sorted runs: at each key the run of the last folder decides what becomes of it."""
    while True:
        ends = [run.last for run in runs if run.last is not None]
        if not ends:
            return
        # Up to the smallest end of any batch, nothing unread can hold a key.
        upto = min(ends)
        pieces = [(run, run.take(upto)) for run in runs if run.columns]
        keys = np.concatenate([columns[0] for _, columns in pieces])
        orders = np.repeat([run.order for run, _ in pieces], [c[0].size for _, c in pieces])
        ranked = np.lexsort((orders, keys))
        wins = np.zeros(keys.size, np.bool_)
        wins[ranked] = np.append(keys[ranked][1:] != keys[ranked][:-1], True)
        twins = (keys[ranked][1:] == keys[ranked][:-1]) & (
            orders[ranked][1:] == orders[ranked][:-1]
        )
        if twins.any():
            key = keys[ranked][1:][twins][0]
            raise StoreCorrupt(f"key {key} stands in two files of one folder of the chain")
        for kind in (_ROWS, _CANDIDATES):
            chosen = []
            low = 0
            for run, columns in pieces:
                high = low + columns[0].size
                if run.kind == kind:
                    chosen.append([column[wins[low:high]] for column in columns])
                low = high
            if any(columns[0].size for columns in chosen):
                block = _block([np.concatenate(parts) for parts in zip(*chosen, strict=True)])
                yield kind == _ROWS, block.take(np.argsort(block.keys))


def _block(columns: list[NDArray[Any]]) -> Block:
    if len(columns) == len(Block._fields):
        return Block(*columns)
    none = np.empty((columns[0].size, 0), np.float32)
    return Block(*columns, none, none)


def _to_arrow(column: NDArray[Any], type_: pa.DataType) -> pa.Array:
    if column.ndim == 2:
        flat = pa.array(np.ascontiguousarray(column).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, type=type_)
    return pa.array(column, type=type_)


def _to_numpy(column: pa.Array) -> NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        flat: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=True)
        return flat.reshape(len(column), column.type.list_size)
    array: NDArray[Any] = column.to_numpy(zero_copy_only=not pa.types.is_boolean(column.type))
    return array


# ---- folders


def _saved(table: Table, standing: Standing, lengths: dict[str, int]) -> _SavedTable:
    return _SavedTable(table=table, lengths=lengths, **standing._asdict())


def _begin(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise FileExistsError(f"{folder} holds a saved store already; write into an empty folder")


def _finish(folder: Path, header: Header, since: int, saved: list[_SavedTable]) -> None:
    manifest = _Manifest(format=FORMAT, since=since, tables=saved, **header._asdict())
    with (folder / MANIFEST).open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        _sync(file)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    try:
        raw = msgspec.json.decode(path.read_bytes())
        number = raw["format"]
        if number != FORMAT:
            raise StoreCorrupt(f"{path}: format {number}, this release reads {FORMAT}")
        return msgspec.convert(raw, _Manifest)
    except OSError as error:
        raise StoreCorrupt(f"{path}: {error}; is this a folder of a saved store?") from error
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, StoreCorrupt):
            raise
        raise StoreCorrupt(f"{path}: {error}") from error
