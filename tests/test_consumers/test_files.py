"""The source over Avro container files."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers import (
    Batch,
    Partition,
    PositionLost,
    SourceCorrupt,
    SourceUnavailable,
    SpecError,
)
from consumers.container import Container
from consumers.files import Files
from tests.contracts.source import (
    Maker,
    Opener,
    Records,
    SourceContract,
    drain,
    ids,
    never,
    picture,
)
from tests.test_consumers.clicks import PARSED, SCHEMA, click, decoder


def write(path: Path, records: Records, codec: str = "null", interval: int = 200) -> str:
    with path.open("wb") as out:
        fastavro.writer(out, PARSED, records, codec=codec, sync_interval=interval)
    return str(path)


class TestFilesContract(SourceContract):
    @pytest.fixture
    def maker(self, tmp_path: Path) -> Maker:
        def make(records: Sequence[Records]) -> Opener:
            paths = [write(tmp_path / f"{p}.avro", part) for p, part in enumerate(records)]
            return lambda: Files(paths, decoder())

        return make


def drained(source: Files, size: int = 10) -> list[Batch]:
    batches = []
    while not source.exhausted:
        batch = source.batch(size, None, never)
        assert batch is not None or source.exhausted
        batches += [batch] if batch is not None else []
    return batches


def order(paths: Sequence[str], position: Mapping[Partition, int] | None = None, **how: Any) -> Any:
    with closing(Files(paths, decoder(), **how)) as source:
        source.open(position)
        return [n for batch in drained(source) for n in ids(batch)]


def test_files_are_merged_by_event_time(tmp_path: Path) -> None:
    """Replay equals live needs one order: time, then file, and within a file as it was written."""
    times = [[5, 5, 1, 9], [5, 4, 20], [7]]
    paths = [
        write(tmp_path / f"{f}.avro", [click(10 * f + i, ts=t) for i, t in enumerate(some)])
        for f, some in enumerate(times)
    ]
    assert order(paths) == [0, 1, 2, 10, 11, 20, 3, 12]
    assert order(paths, merge=False) == [0, 1, 2, 3, 10, 11, 12, 20]
    assert order(paths[::-1]) == [10, 11, 0, 1, 2, 20, 3, 12]


def test_a_record_without_a_time_goes_first(tmp_path: Path) -> None:
    """Its place may depend on nothing that a restart forgets."""
    first = [click(0), click(1, ts=-1), click(2)]
    paths = [write(tmp_path / "0.avro", first), write(tmp_path / "1.avro", [click(0, id=9)])]
    with closing(Files(paths, decoder())) as source:
        source.open(None)
        [batch] = drained(source)
    assert ids(batch) == [0, 9, 2]
    assert [bad.offset for bad in batch.bad] == [1]


@given(
    times=st.lists(st.lists(st.integers(-1, 30), max_size=30), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    where=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_restarts_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    times: list[list[int]],
    sizes: list[int],
    where: int,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    number = itertools.count()
    paths = [
        write(folder / f"{f}.avro", [click(next(number), ts=t) for t in some], interval=60)
        for f, some in enumerate(times)
    ]
    messages = sum(len(some) for some in times)

    def batches(position: Mapping[Partition, int] | None, skip: int, count: int) -> list[Batch]:
        asked = itertools.islice(itertools.cycle(sizes), skip, None)
        with closing(Files(paths, decoder())) as source:
            source.open(position)
            return drain(source, asked, count)

    whole = batches(None, 0, messages)
    if not whole:
        return
    k = where % len(whole)
    rest = whole[k + 1 :]
    again = batches(whole[k].position, k + 1, sum(batch.consumed for batch in rest))
    assert [picture(batch) for batch in again] == [picture(batch) for batch in rest]


def test_a_damaged_block_ends_the_run_and_says_where(tmp_path: Path) -> None:
    """One changed byte in a block would otherwise be a wrong sample, or shift all that follow."""
    path = write(tmp_path / "a.avro", [click(n) for n in range(40)])
    content = bytearray(Path(path).read_bytes())
    with Container(path) as container:
        start = [block.offset for _, block in container.blocks()][2]
    content[content.index(b"\x02\x04u", start)] = 0x06  # no such branch of the union
    Path(path).write_bytes(content)
    with closing(Files([path], decoder())) as source:
        source.open(None)
        first = source.batch(3, None, never)
        assert first is not None
        assert ids(first) == [0, 1, 2]
        with pytest.raises(SourceCorrupt, match=f"{path} is damaged in the block at byte {start}"):
            drained(source)


def test_files_of_an_older_schema(tmp_path: Path) -> None:
    older = fastavro.parse_schema(
        {**SCHEMA, "fields": [f for f in SCHEMA["fields"] if f["name"] not in ("user", "price")]}
    )
    path = tmp_path / "old.avro"
    with path.open("wb") as out:
        fastavro.writer(out, older, [{k: click(n)[k] for k in ("id", "ts", "click", "tags")} for n in range(3)])  # fmt: skip
    new = write(tmp_path / "new.avro", [click(3)])
    with closing(Files([str(path), new], decoder())) as source:
        source.open(None)
        [batch] = drained(source)
    assert ids(batch) == [0, 1, 2, 3]
    assert batch.columns.ids["user"].row_splits.tolist() == [0, 0, 0, 0, 1]


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", [click(0)])
    with pytest.raises(SpecError, match="name at least one"):
        Files([], decoder())
    with pytest.raises(SpecError, match="named more than once"):
        Files([path, path], decoder())
    missing = str(tmp_path / "none.avro")
    with pytest.raises(SourceUnavailable, match="none.avro"):
        Files([path, missing], decoder()).open(None)
    with pytest.raises(PositionLost, match="isn't among the files"):
        Files([path], decoder()).open({Partition(missing, 0): 0})


def test_an_empty_file(tmp_path: Path) -> None:
    source = Files([write(tmp_path / "a.avro", [])], decoder())
    assert list(source.open(None).values()) == [0]
    assert source.exhausted
    assert source.batch(1, None, never) is None
    source.close()
