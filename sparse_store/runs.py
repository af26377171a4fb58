"""Files of one table: Arrow IPC, written in batches, read and merged as a stream.

Every file is cut into record batches of at most 65,536 rows. Those of entries and of removed keys
are sorted by key as unsigned numbers, so that a chain of them can be merged without being held.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparse_store import optim
from sparse_store.arrays import Block
from sparse_store.config import Table
from sparse_store.errors import StoreCorrupt

FORMAT: Final = 1
BATCH: Final = 65_536

ROWS: Final = "rows"
CANDIDATES: Final = "candidates"
REMOVED: Final = "removed"
TOMBS: Final = "tombs"


def _types(table: Table, kind: str) -> list[tuple[str, pa.DataType]]:
    key = ("key", pa.uint64())
    if kind == REMOVED:
        return [key]
    if kind == TOMBS:
        return [key, ("removed_at", pa.int64()), ("row", pa.bool_())]
    entry = [key, ("count", pa.uint32()), ("stamp", pa.int64()), ("changed_at", pa.int64())]
    if kind == CANDIDATES:
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


class TableFiles:
    """The Arrow files of one table while they are written; each is made at its first row."""

    def __init__(self, folder: Path, number: int, table: Table) -> None:
        self.lengths: dict[str, int] = {ROWS: 0, CANDIDATES: 0, REMOVED: 0, TOMBS: 0}
        self._where = (folder, number, table)
        self._stack = ExitStack()
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> Self:
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
            self._stack.callback(sync, file)
            self._writers[kind] = self._stack.enter_context(pa.ipc.new_file(file, schema))
        for low in range(0, size, BATCH):
            arrays = [
                _to_arrow(column[low : low + BATCH], field.type)
                for column, field in zip(columns, schema, strict=False)
            ]
            self._writers[kind].write_batch(pa.record_batch(arrays, schema=schema))
        self.lengths[kind] += size


class Run:
    """One file of a table while it is read; a context manager.

    Attributes
    ----------
    kind, order
        Which file, and of which folder in the chain.
    columns
        What is left of the batch being read; no column at the end.
    """

    def __init__(
        self, folder: Path, number: int, table: Table, kind: str, *, length: int, order: int
    ) -> None:
        self.kind = kind
        self.order = order
        self._path = _path(folder, number, table, kind)
        self._schema = _schema(table, kind)
        self._length = length
        self._stack = ExitStack()
        self._batches: Iterator[list[NDArray[Any]]] = iter(())
        self.columns: list[NDArray[Any]] = []
        self._newest: int | None = None

    def __enter__(self) -> Self:
        if self._length:
            try:
                file = self._stack.enter_context(pa.memory_map(str(self._path)))
                reader = self._stack.enter_context(pa.ipc.open_file(file))
            except (OSError, pa.ArrowException) as error:
                self._stack.close()
                raise StoreCorrupt(f"{self._path}: {error}") from error
            if not reader.schema.equals(self._schema, check_metadata=True):
                self._stack.close()
                raise StoreCorrupt(
                    f"{self._path}: holds the columns\n{reader.schema}\nand should\n{self._schema}"
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
    def where(self) -> str:
        """The file's name, for messages."""
        return str(self._path)

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
            except (OSError, pa.ArrowException) as error:
                raise StoreCorrupt(f"{self._path}: batch {number}: {error}") from error
            length += batch.num_rows
            if batch.num_rows == 0 or length > self._length:
                break
            columns = [_to_numpy(column) for column in batch.columns]
            self._check(columns)
            yield columns
        if length != self._length:
            raise StoreCorrupt(
                f"{self._path}: {length} rows or more, and {self._length} were written"
            )

    def _check(self, columns: list[NDArray[Any]]) -> None:
        keys = columns[0]
        if self.kind != TOMBS:
            rising = bool(np.all(keys[1:] > keys[:-1]))
            if not rising or (self._newest is not None and int(keys[0]) <= self._newest):
                raise StoreCorrupt(f"{self._path}: keys do not rise")
            self._newest = int(keys[-1])
        for column in columns:
            if column.dtype == np.float32 and not np.isfinite(column).all():
                row = int(np.flatnonzero(~np.isfinite(column).all(axis=1))[0])
                raise StoreCorrupt(f"{self._path}: the row of key {keys[row]} is not finite")


def merged(runs: Sequence[Run]) -> Iterator[tuple[bool, Block]]:
    """Merge sorted runs: at each key the run of the last folder decides what becomes of it.

    Streams blocks of rows (True) or candidates; keys rise from each pair of blocks to the next.

    Raises
    ------
    StoreCorrupt
    """
    while True:
        ends = [run.last for run in runs if run.last is not None]
        if not ends:
            return
        # Up to the smallest end of any batch, nothing unread can hold a key.
        upto = min(ends)
        pieces = [(run, run.take(upto)) for run in runs if run.columns]
        wins = _winners(pieces)
        for kind in (ROWS, CANDIDATES):
            chosen = [
                [column[won] for column in columns]
                for (run, columns), won in zip(pieces, wins, strict=True)
                if run.kind == kind
            ]
            if any(columns[0].size for columns in chosen):
                block = _block([np.concatenate(parts) for parts in zip(*chosen, strict=True)])
                yield kind == ROWS, block.by_key()


def _winners(pieces: Sequence[tuple[Run, list[NDArray[Any]]]]) -> list[NDArray[np.bool_]]:
    """Mark in each piece the keys that no piece of a later folder holds."""
    sizes = [columns[0].size for _, columns in pieces]
    keys = np.concatenate([columns[0] for _, columns in pieces])
    orders = np.repeat([run.order for run, _ in pieces], sizes)
    ranked = np.lexsort((orders, keys))
    again = keys[ranked][1:] == keys[ranked][:-1]
    twice = again & (orders[ranked][1:] == orders[ranked][:-1])
    if twice.any():
        key = keys[ranked][1:][twice][0]
        raise StoreCorrupt(f"key {key} stands in two files of one folder; {pieces[0][0].where}")
    wins = np.empty(keys.size, np.bool_)
    wins[ranked] = np.append(~again, True)
    return np.split(wins, np.cumsum(sizes)[:-1])


def _block(columns: list[NDArray[Any]]) -> Block:
    none = np.empty((columns[0].size, 0), np.float32)
    keys, counts, stamps, changed, values, slots = (*columns, none, none)[: len(Block._fields)]
    return Block(keys, counts, stamps, changed, values, slots)


def sync(file: IO[bytes]) -> None:
    """Bring what was written to the disk itself."""
    file.flush()
    os.fsync(file.fileno())


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
