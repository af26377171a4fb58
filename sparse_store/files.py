"""Saved stores: a folder per freeze, Arrow IPC files and one `store.json`.

A folder is a *base* (all that a store held) or an *increment* (what changed since a step). It
holds, for table number i, named `name`:

    iii-name.rows.arrow        key, count, stamp, changed_at, value [dim], slots [slots * dim]
    iii-name.candidates.arrow  key, count, stamp, changed_at
    iii-name.removed.arrow     key: entries gone since `since`, candidates included
    iii-name.tombs.arrow       key, removed_at, row: removals that some reader has not seen yet
    store.json                 format, seed, step, clock, since, cursors; per table its config,
                               standing, and how many rows each file has

All but tombs are sorted by key as unsigned numbers, and a key stands in at most one of the first
three; at each key the last folder of a chain that has it decides. A file without rows is left out.
The number of the format stands in `store.json` and in the metadata of every Arrow schema, under
`sparse_store`. Torn files, foreign columns, wrong order and counts are found when read; a bit that
flipped inside a number is not: whoever keeps the folders keeps checksums of their files.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparse_store.arrays import Block
from sparse_store.config import Table
from sparse_store.errors import ChainBroken, StoreCorrupt, UnknownTable
from sparse_store.runs import (
    BATCH,
    CANDIDATES,
    FORMAT,
    REMOVED,
    ROWS,
    TOMBS,
    Run,
    TableFiles,
    merged,
    sync,
)
from sparse_store.table import Part, Standing
from sparse_store.tombs import Tombs

MANIFEST = "store.json"


class _SavedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    table: Table
    standing: Standing
    lengths: dict[str, int]


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
            The folder holds a saved store, or files of one, already.
        OSError
            The disk said no. What was written stays, without a `store.json`.
        """
        _begin(folder)
        saved = []
        for number, part in enumerate(self._parts):
            with TableFiles(folder, number, part.table) as files:
                for kind, block in ((ROWS, part.rows), (CANDIDATES, part.candidates)):
                    order = np.argsort(block.keys)
                    for low in range(0, order.size, BATCH):
                        files.add(kind, block.take(order[low : low + BATCH]))
                files.add(REMOVED, (part.removed,))
                files.add(TOMBS, part.tombs)
            saved.append(
                _SavedTable(table=part.table, standing=part.standing, lengths=files.lengths)
            )
        _finish(folder, self._header, self.since, saved)


class Chain:
    """Saved folders in order, a base and its increments, read as the one store that they make.

    Attributes
    ----------
    since
        The step after which the base begins, 0 or less.
    header, tables
        The store beside its tables, and the tables' configuration by name: the last folder's.

    Raises
    ------
    ChainBroken
        The first is no base, or one doesn't begin where the one before it ends.
    StoreCorrupt
        A file is missing, torn, altered or of another format. Arrow files are looked at when read.
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
        with self._open(self._links[-1][0], number, saved, TOMBS, order=0) as run:
            parts = [Tombs(*columns) for columns in run.rest()]
        return Tombs(
            np.concatenate([np.empty(0, np.uint64), *(part.keys for part in parts)]),
            np.concatenate([np.empty(0, np.int64), *(part.steps for part in parts)]),
            np.concatenate([np.empty(0, np.bool_), *(part.rows for part in parts)]),
        )

    def entries(self, name: str) -> Iterator[tuple[bool, Block]]:
        """Stream a table's entries by rising key, in blocks of rows (True) or candidates."""
        born = self._last(name)[1].standing.born
        with ExitStack() as stack:
            runs = []
            for order, (folder, manifest) in enumerate(self._links):
                for number, saved in enumerate(manifest.tables):
                    # A table of the same name that began at another step is another table.
                    if saved.table.name == name and saved.standing.born == born:
                        for kind in (ROWS, CANDIDATES, REMOVED):
                            run = self._open(folder, number, saved, kind, order=order)
                            runs.append(stack.enter_context(run))
            yield from merged(runs)

    def _last(self, name: str) -> tuple[int, _SavedTable]:
        for number, saved in enumerate(self._links[-1][1].tables):
            if saved.table.name == name:
                return number, saved
        raise UnknownTable(f"no table {name!r} in {self._links[-1][0]}; it has {[*self.tables]}")

    @staticmethod
    def _open(folder: Path, number: int, saved: _SavedTable, kind: str, *, order: int) -> Run:
        length = saved.lengths.get(kind, 0)
        return Run(folder, number, saved.table, kind, length=length, order=order)


def merge(folders: Sequence[Path], into: Path) -> None:
    """Write a base that loads equal to the chain `folders`, without building the store.

    Memory stays at a few record batches per file; `into` is made when missing.

    Raises
    ------
    ChainBroken, StoreCorrupt, FileExistsError, OSError
    """
    chain = Chain(folders)
    _begin(into)
    saved = []
    for number, (name, table) in enumerate(chain.tables.items()):
        with TableFiles(into, number, table) as files:
            for with_rows, block in chain.entries(name):
                files.add(ROWS if with_rows else CANDIDATES, block)
            files.add(TOMBS, chain.tombs(name))
        standing = chain.standing(name)
        saved.append(_SavedTable(table=table, standing=standing, lengths=files.lengths))
    _finish(into, chain.header, chain.since, saved)


def rows_of(
    folders: Sequence[Path], table: str
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Stream the rows of a table out of a chain, without building the store.

    Yields keys [n], rising from first to last, and values [n, dim].

    Raises
    ------
    UnknownTable
        The last folder has no such table.
    ChainBroken, StoreCorrupt
    """
    for with_rows, block in Chain(folders).entries(table):
        if with_rows:
            yield block.keys, block.values


def _begin(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise FileExistsError(f"{folder} holds a saved store already; write into an empty folder")


def _finish(folder: Path, header: Header, since: int, saved: list[_SavedTable]) -> None:
    manifest = _Manifest(format=FORMAT, since=since, tables=saved, **header._asdict())
    with (folder / MANIFEST).open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        sync(file)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    try:
        raw = msgspec.json.decode(path.read_bytes())
        found = raw.get("format") if isinstance(raw, dict) else None
        if found != FORMAT:
            raise StoreCorrupt(f"{path}: is of format {found}, this release reads {FORMAT}")
        return msgspec.convert(raw, _Manifest)
    except OSError as error:
        raise StoreCorrupt(f"{path}: {error.strerror}; is this a saved store?") from error
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"{path}: {error}") from error
