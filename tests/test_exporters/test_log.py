"""The directory of deltas: whole files or none, and what the log says of heads."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporters import (
    Delta,
    Entry,
    Half,
    Head,
    Log,
    LogCorrupt,
    TableRows,
    covers,
    keys_above,
    knows,
    pick,
)
from exporters.wire import checksum_of
from tests.test_exporters.deltas import deltas, golden, same

DATA = Path(__file__).parent.parent / "data" / "exporters_1"
GIB = 1 << 30


def entry(version: int, since: int, generation: int = 1) -> Entry:
    return Entry(
        version=version,
        since=since,
        generation=generation,
        step=0,
        checksum=f"{version:064x}",
        bytes=10,
        watermark=0,
    )


def small(version: int, since: int, keys: list[int], removed: list[int]) -> Delta:
    rows = TableRows(
        np.array(keys, np.uint64),
        np.zeros((len(keys), 3), np.float32),
        np.array(removed, np.uint64),
    )
    return replace(golden(), version=version, since=since, tables={"user": rows})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deltas())
def test_what_is_appended_is_read(tmp_path: Path, delta: Delta) -> None:
    shutil.rmtree(tmp_path)
    log = Log(tmp_path, max_bytes=GIB)
    written = log.append(delta)
    assert same(log.read(delta.version), delta)
    assert written.checksum == checksum_of(delta)
    again = Log(tmp_path, max_bytes=GIB)
    assert again.entries() == [written] == log.entries()
    assert same(again.read(delta.version), delta)


def test_the_golden_file_is_read_for_ever(tmp_path: Path) -> None:
    name = "delta-00000000000000000042.arrow"
    shutil.copy(DATA / name, tmp_path)
    log = Log(tmp_path, max_bytes=GIB)
    (found,) = log.entries()
    assert (found.version, found.since, found.generation) == (42, 40, 7)
    assert same(log.read(42), golden())


def test_any_reader_of_arrow_reads_a_file(tmp_path: Path) -> None:
    log = Log(tmp_path, max_bytes=GIB)
    log.append(golden())
    (path,) = tmp_path.iterdir()
    with pa.OSFile(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    assert [(field.name, str(field.type)) for field in table.schema] == [
        ("table", "string"),
        ("key", "uint64"),
        ("value", "list<item: float>"),
    ]
    assert table.column("table").to_pylist() == ["item"] + ["user"] * 7 + [""]
    assert table.column("value").to_pylist()[6:8] == [None, None]
    assert table.column("key").to_pylist()[6:8] == [2, 2**64 - 2]


def test_more_rows_than_a_batch(tmp_path: Path) -> None:
    n = 150_000
    rows = TableRows(
        np.arange(n, dtype=np.uint64),
        np.arange(3 * n, dtype=np.float32).reshape(n, 3),
        np.arange(n, 2 * n, dtype=np.uint64),
    )
    delta = replace(golden(), tables={"user": rows})
    log = Log(tmp_path, max_bytes=GIB)
    log.append(delta)
    assert same(log.read(42), delta)


def test_unfinished_files_are_dropped_and_strange_ones_left(tmp_path: Path) -> None:
    Log(tmp_path, max_bytes=GIB).append(golden())
    (tmp_path / "tmp-0123").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    log = Log(tmp_path, max_bytes=GIB)
    assert [e.version for e in log.entries()] == [42]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "delta-00000000000000000042.arrow",
        "notes.txt",
    ]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    Log(tmp_path, max_bytes=GIB).append(golden())
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(LogCorrupt, match=r"0042\.arrow.*[Mm]ove the file away"):
        Log(tmp_path, max_bytes=GIB)


def test_a_flipped_bit_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    """Arrow's own format has no checksum."""
    log = Log(tmp_path, max_bytes=GIB)
    log.append(golden())
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    at = data.index(np.array([2**63], "<u8").tobytes())
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(LogCorrupt, match=r"0042\.arrow"):
        Log(tmp_path, max_bytes=GIB).read(42)
    with pytest.raises(LogCorrupt, match=r"0042\.arrow"):
        keys_above(log, 0)


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    Log(tmp_path, max_bytes=GIB).append(golden())
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "delta-00000000000000000043.arrow")
    with pytest.raises(LogCorrupt, match="holds version 42"):
        Log(tmp_path, max_bytes=GIB)


def test_a_full_disk_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, max_bytes=GIB)
    log.append(small(1, 0, [1], []))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        log.append(small(2, 1, [1], []))
    monkeypatch.undo()
    assert [e.version for e in log.entries()] == [1]
    assert len(list(tmp_path.iterdir())) == 1
    log.append(small(2, 1, [1], []))
    assert [e.version for e in Log(tmp_path, max_bytes=GIB).entries()] == [1, 2]


def test_versions_rise(tmp_path: Path) -> None:
    log = Log(tmp_path, max_bytes=GIB)
    log.append(small(5, 0, [], []))
    for version in (4, 5):
        with pytest.raises(ValueError, match="not above 5"):
            log.append(small(version, 0, [], []))


def test_the_entry_at_the_bound_stays(tmp_path: Path) -> None:
    """By it a head is recognised."""
    log = Log(tmp_path, max_bytes=GIB)
    for version in range(1, 6):
        log.append(small(version, version - 1, [version], []))
    assert log.prune(3) == 2
    assert [e.version for e in log.entries()] == [3, 4, 5]
    assert log.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert log.prune(3) == 0
    with pytest.raises(KeyError):
        log.read(2)


def test_keys_above_are_those_written_and_removed(tmp_path: Path) -> None:
    log = Log(tmp_path, max_bytes=GIB)
    log.append(small(1, 0, [1, 2], [3]))
    log.append(small(2, 1, [2, 9], [1]))
    log.append(small(3, 2, [2**64 - 1], []))
    assert {k: v.tolist() for k, v in keys_above(log, 1).items()} == {"user": [1, 2, 9, 2**64 - 1]}
    assert keys_above(log, 3) == {}


def test_entries_of_an_undone_timeline_are_passed_over() -> None:
    entries = [entry(5, 4), entry(6, 5), entry(7, 6), entry(8, 5, 2), entry(9, 8, 2)]
    assert pick(entries, 4) == entries[0]
    assert [e.version if (e := pick(entries, h)) else None for h in (5, 6, 7, 8, 9, 3)] == [
        8,
        8,
        8,
        9,
        None,
        None,
    ]
    assert covers(entries, 4)
    assert covers(entries, 9)
    assert covers([], 3)
    assert not covers(entries, 3)


@given(st.sets(st.integers(1, 12)), st.integers(0, 13))
def test_a_chain_covers_from_its_beginning_on(gone: set[int], low: int) -> None:
    entries = [entry(v, v - 1) for v in range(1, 13) if v not in gone]
    newest = max((e.version for e in entries), default=0)
    assert covers(entries, low) == all(v not in gone for v in range(low + 1, newest + 1))


HEAD = Head(
    version=5,
    generation=1,
    epoch=2,
    checksum=f"{5:064x}",
    watermark=0,
    step=0,
    positions={},
    tables={},
)


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({}, True),
        ({"generation": 2}, False),
        ({"checksum": "0" * 64}, False),
        ({"version": 9}, False),
        ({"whole": False}, False),
        ({"half": Half(6, 1)}, True),
        ({"half": Half(6, 2)}, False),
        ({"half": Half(7, 1)}, False),
    ],
)
def test_a_head_is_known_by_more_than_its_number(change: dict, known: bool) -> None:
    entries = [entry(4, 3), entry(5, 4), entry(6, 5)]
    assert knows(entries, replace(HEAD, **change)) == known
