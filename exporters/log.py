"""The log: a directory with one file per version. Outbox, file sink and memory in one.

A file ``delta-<version>.arrow`` (layout in `exporters.log_file`) appears under its name whole and
on the disk, or not at all. Files leave from the oldest upwards. So what is missing is always a
beginning, unless somebody took a file away; the rules below notice that, too.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exporters.errors import LogCorrupt
from exporters.log_file import read_delta, read_entry, write_delta
from exporters.sink import Entry
from exporters.wire import checksum_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from exporters.version import Delta, Head

__all__ = ["Entry", "Log", "covers", "keys_above", "knows", "pick"]

_FILE = re.compile(r"delta-(\d{20})\.arrow")
_TMP = "tmp-"
_logger = logging.getLogger(__name__)


class Log:
    """The directory of deltas of one model, written by one process.

    Parameters
    ----------
    directory
        Made when missing. It must be a local one: rename and fsync have to hold.
    max_bytes
        Size beyond which the log asks for room; see `over`.

    Raises
    ------
    LogCorrupt
        A file under a version's name is damaged.
    """

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._entries: tuple[Entry, ...] = tuple(self._scan())

    def entries(self) -> list[Entry]:
        """Return what the log holds, in order of version."""
        return list(self._entries)

    def newest(self) -> Entry | None:
        """Return the newest entry, or None when the log is empty."""
        entries = self._entries
        return entries[-1] if entries else None

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self._entries)

    def append(self, delta: Delta) -> Entry:
        """Write a delta as a file of its own; when this returns it is not forgotten any more.

        Raises
        ------
        ValueError
            The delta breaks a rule of the wire, or its version is not above the newest.
        OSError
            The disk refused; the log is as it was.
        """
        newest = self.newest()
        if newest is not None and delta.version <= newest.version:
            raise ValueError(
                f"version {delta.version} is not above {newest.version}, the newest of the log"
            )
        checksum = checksum_of(delta)
        path = self._path(delta.version)
        tmp = self.directory / f"{_TMP}{secrets.token_hex(8)}"
        try:
            with tmp.open("xb") as file:
                write_delta(file, delta, checksum)
                file.flush()
                os.fsync(file.fileno())
            size = tmp.stat().st_size
            tmp.rename(path)
        except BaseException:
            tmp.unlink(missing_ok=True)
            raise
        _fsync_directory(self.directory)
        entry = Entry(
            version=delta.version,
            since=delta.since,
            generation=delta.generation,
            step=delta.step,
            checksum=checksum,
            bytes=size,
            watermark=delta.watermark,
        )
        with self._lock:
            self._entries = (*self._entries, entry)
        return entry

    def read(self, version: int) -> Delta:
        """Return the delta of one version.

        Raises
        ------
        KeyError
            The log doesn't hold this version.
        LogCorrupt
            The file can't be read, or isn't what its checksum says.
        """
        if all(entry.version != version for entry in self._entries):
            raise KeyError(f"the log holds no version {version}")
        return read_delta(self._path(version))

    def prune(self, below: int) -> int:
        """Drop the entries with ``version < below``, oldest first, and return how many."""
        with self._lock:
            gone = [entry for entry in self._entries if entry.version < below]
            self._entries = tuple(entry for entry in self._entries if entry.version >= below)
        for entry in gone:
            self._path(entry.version).unlink(missing_ok=True)
        return len(gone)

    def _path(self, version: int) -> Path:
        return self.directory / f"delta-{version:020d}.arrow"

    def _scan(self) -> Iterator[Entry]:
        for path in sorted(self.directory.iterdir()):
            if path.name.startswith(_TMP):
                _logger.info("unfinished file dropped: path=%s", path)
                path.unlink()
            elif match := _FILE.fullmatch(path.name):
                entry = read_entry(path)
                if entry.version != int(match[1]):
                    raise LogCorrupt(f"{path}: holds version {entry.version}: it was renamed")
                yield entry


def pick(entries: Sequence[Entry], head: int) -> Entry | None:
    """Return the entry that a sink at version `head` takes next, or None.

    Of those with ``since <= head < version`` the largest: entries of an undone timeline are
    passed over.
    """
    fitting = [entry for entry in entries if entry.since <= head < entry.version]
    return max(fitting, key=lambda entry: entry.version, default=None)


def covers(entries: Sequence[Entry], low: int) -> bool:
    """Tell whether picking from version `low` onwards reaches the newest entry."""
    newest = max((entry.version for entry in entries), default=low)
    while low < newest:
        entry = pick(entries, low)
        if entry is None:
            return False
        low = entry.version
    return True


def knows(entries: Sequence[Entry], head: Head) -> bool:
    """Tell whether a head, and what is half written above it, is of this log.

    The version alone says nothing: an older timeline, or another log, may have used the number.
    """
    generations = {entry.version: entry.generation for entry in entries}
    if head.half is not None and generations.get(head.half.version) != head.half.generation:
        return False
    return head.whole and any(
        (entry.version, entry.generation, entry.checksum)
        == (head.version, head.generation, head.checksum)
        for entry in entries
    )


def keys_above(log: Log, low: int) -> dict[str, NDArray[np.uint64]]:
    """Return all keys in entries with ``version > low``, by table, each once and ascending."""
    found: dict[str, NDArray[np.uint64]] = {}
    for entry in log.entries():
        if entry.version > low:
            for name, rows in log.read(entry.version).tables.items():
                before = found.get(name, np.empty(0, np.uint64))
                found[name] = np.unique(np.concatenate([before, rows.keys, rows.removed]))
    return found


def _fsync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
