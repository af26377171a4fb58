"""Saved stores: chains, merges, changed configurations, and files that are not what they were."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparse_store import (
    Adagrad,
    Always,
    ChainBroken,
    ConfigChanged,
    Count,
    Evict,
    Ftrl,
    Normal,
    StoreCorrupt,
    Table,
    UnknownTable,
    Zeros,
    files,
    runs,
)
from sparse_store.files import Chain, merge, rows_of
from sparse_store.store import Keys, SparseStore

GOLDEN = Path(__file__).parents[1] / "data" / "sparse_store_1"

ITEM = Table(
    "item",
    dim=3,
    optimizer=Adagrad(rate=0.1, clip=1.0),
    admit=Count(2, candidates=100, forget=400),
    evict=Evict(ttl=300, rows=120),
)
BIAS = Table("bias", dim=1, optimizer=Ftrl(alpha=0.1, l1=0.01), evict=Evict(ttl=5000))


def train(store: SparseStore, steps: int, *, seed: int = 0) -> None:
    """Learn from a stream that is a function of the store's step, so that runs can be compared."""
    for _ in range(steps):
        random = np.random.default_rng((seed, store.step))
        ids = random.zipf(1.2, 40).astype(np.uint64) % np.uint64(300)
        ids[random.random(40) < 0.05] = 2**64 - 1
        splits = np.arange(0, 41, 4)
        inputs = {name: Keys(name, ids, splits, pool="mean") for name in store.tables}
        plan = store.resolve(inputs, clock=store.clock + 10)
        grads = {
            name: random.normal(size=(10, table.dim)).astype(np.float32)
            for name, table in store.tables.items()
        }
        store.push(plan, grads)


def cut(store: SparseStore, folder: Path) -> Path:
    frozen = store.freeze("checkpoint")
    frozen.write(folder)
    store.ack("checkpoint", frozen.until)
    return folder


def chain_of(folder: Path, store: SparseStore, steps: list[int]) -> list[Path]:
    folders = []
    for number, count in enumerate(steps):
        train(store, count)
        folders.append(cut(store, folder / f"{number:02d}"))
    return folders


def assert_equal(one: SparseStore, other: SparseStore) -> None:
    assert (one.step, one.clock, one.seed) == (other.step, other.clock, other.seed)
    assert one.metrics() == other.metrics()
    for reader in ("serving", "checkpoint"):
        assert one.cursor(reader) == other.cursor(reader)
        for table, rows in one.peek(reader).tables.items():
            for found, wanted in zip(rows, other.peek(reader).tables[table], strict=True):
                np.testing.assert_array_equal(found, wanted)
    for table in one.tables:
        assert one._live[table].standing == other._live[table].standing
        for found, wanted in zip(one.dump(table), other.dump(table), strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


@pytest.fixture
def store() -> SparseStore:
    return SparseStore([ITEM, BIAS], seed=11)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many record batches, without the rows that would take."""
    monkeypatch.setattr(runs, "BATCH", 7)
    monkeypatch.setattr(files, "BATCH", 7)


# a chain is the store


@pytest.mark.parametrize("steps", [[0], [1], [0, 5, 0], [9, 30, 1, 1, 60, 15], [100, 100]])
def test_a_chain_loads_as_the_store_it_was(
    tmp_path: Path, store: SparseStore, steps: list[int]
) -> None:
    folders = chain_of(tmp_path, store, steps)
    assert_equal(SparseStore.load(folders), store)


def test_a_loaded_store_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, store: SparseStore
) -> None:
    """Bits after a restart: initial values, horizons, counts and order all come back."""
    folders = chain_of(tmp_path, store, [40, 7])
    loaded = SparseStore.load(folders)
    for other in (store, loaded):
        train(other, 60)
    assert_equal(loaded, store)
    assert store.metrics()["item"]["evicted"] > 0
    assert store.metrics()["item"]["forgotten"] > 0


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("steps", [[30], [0, 30], [30, 1, 40, 2, 50]])
def test_merged_is_equal_to_the_chain(tmp_path: Path, store: SparseStore, steps: list[int]) -> None:
    folders = chain_of(tmp_path, store, steps)
    merge(folders, tmp_path / "merged")
    assert_equal(SparseStore.load([tmp_path / "merged"]), store)
    train(store, 5)
    more = cut(store, tmp_path / "more")
    assert_equal(SparseStore.load([tmp_path / "merged", more]), store)
    merge([tmp_path / "merged", more], tmp_path / "again")
    assert_equal(SparseStore.load([tmp_path / "again"]), store)


@pytest.mark.usefixtures("small_batches")
def test_rows_stream_out_of_a_chain_in_order(tmp_path: Path, store: SparseStore) -> None:
    folders = chain_of(tmp_path, store, [30, 20, 50])
    dump = store.dump("item")
    pieces = [*rows_of(folders, "item")]
    assert len(pieces) > 3
    np.testing.assert_array_equal(np.concatenate([keys for keys, _ in pieces]), dump.keys)
    np.testing.assert_array_equal(np.concatenate([values for _, values in pieces]), dump.values)
    with pytest.raises(UnknownTable, match="no table 'user'"):
        next(rows_of(folders, "user"))


def test_a_freeze_is_of_its_moment(tmp_path: Path, store: SparseStore) -> None:
    """It is written beside the training that goes on."""
    train(store, 20)
    frozen = store.freeze("checkpoint")
    writer = threading.Thread(target=frozen.write, args=(tmp_path / "cut",))
    writer.start()
    train(store, 20)
    writer.join()
    then = SparseStore([ITEM, BIAS], seed=11)
    train(then, 20)
    then.ack("checkpoint", 20)
    assert_equal(SparseStore.load([tmp_path / "cut"]), then)


def test_a_cut_that_failed_is_covered_by_the_next(tmp_path: Path, store: SparseStore) -> None:
    folders = chain_of(tmp_path, store, [30])
    train(store, 30)
    store.freeze("checkpoint")
    train(store, 30)
    folders.append(cut(store, tmp_path / "next"))
    assert_equal(SparseStore.load(folders), store)


def test_sightings_survive_a_restart(tmp_path: Path) -> None:
    """Seen twice, restarted, seen once more: three sightings."""
    store = SparseStore([Table("t", dim=1, admit=Count(3))], seed=1)
    keys = {"f": Keys("t", np.array([8, 8], np.uint64), np.array([0, 2]))}
    store.abandon(store.resolve(keys, clock=0))
    loaded = SparseStore.load([cut(store, tmp_path / "cut")])
    once = {"f": Keys("t", np.array([8], np.uint64), np.array([0, 1]))}
    loaded.abandon(loaded.resolve(once, clock=0))
    assert loaded.rows("t") == 1


def test_marks_reach_the_next_cut(tmp_path: Path, store: SparseStore) -> None:
    folders = chain_of(tmp_path, store, [30, 10])
    loaded = SparseStore.load(folders)
    keys = loaded.dump("item").keys[:5]
    absent = np.array([10**15], np.uint64)
    loaded.mark_changed({"item": np.concatenate([keys, absent])}, reader="serving")
    folders.append(cut(loaded, tmp_path / "marked"))
    again = SparseStore.load(folders)
    assert_equal(again, loaded)
    assert set(keys) <= set(again.peek("serving").tables["item"].keys)
    assert 10**15 in again.peek("serving").tables["item"].removed


# a changed configuration


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Table("item", dim=4, optimizer=Adagrad()), "'item': dim was 3 and is 4"),
        (Table("item", dim=3, optimizer=Ftrl()), "optimizer was adagrad and is ftrl"),
        (Table("item", dim=3, init=Zeros()), r"init was Normal\(normal=0.01\) and is Zeros"),
        (Table("item", dim=3, init=Normal(0.1)), "init was"),
        (Table("thing", dim=3), "'item' was saved and is no longer configured"),
    ],
)
def test_what_saved_rows_do_not_fit_is_refused(
    tmp_path: Path, store: SparseStore, item: Table, message: str
) -> None:
    folders = chain_of(tmp_path, store, [5])
    with pytest.raises(ConfigChanged, match=message):
        SparseStore.load(folders, tables=[item, BIAS])


def test_another_seed_is_refused(tmp_path: Path, store: SparseStore) -> None:
    folders = chain_of(tmp_path, store, [5])
    with pytest.raises(ConfigChanged, match="seed was 11 and is 12"):
        SparseStore.load(folders, seed=12)
    assert SparseStore.load(folders, seed=11).seed == 11


def test_rates_and_rules_are_taken_and_logged(
    tmp_path: Path, store: SparseStore, caplog: pytest.LogCaptureFixture
) -> None:
    folders = chain_of(tmp_path, store, [60])
    item = Table("item", dim=3, optimizer=Adagrad(rate=0.9), admit=Always(), evict=Evict(ttl=50))
    with caplog.at_level(logging.INFO, logger="sparse_store.store"):
        loaded = SparseStore.load(folders, tables=[item, BIAS])
    assert [record.args[0] for record in caplog.records] == ["item"]
    assert loaded.tables["item"] == item
    assert loaded.metrics()["item"]["candidates"] > 0
    np.testing.assert_array_equal(loaded.dump("item").values, store.dump("item").values)
    train(loaded, 1)
    assert loaded.metrics()["item"]["candidates"] == 0, "a rule of first sight keeps none"
    assert loaded.dump("item").stamps.min() >= loaded.clock - 50 - 1, "a shorter ttl bites at once"


def test_a_new_table_starts_empty_and_a_dropped_one_is_gone(
    tmp_path: Path, store: SparseStore
) -> None:
    folders = chain_of(tmp_path, store, [20])
    new = Table("new", dim=2)
    loaded = SparseStore.load(folders, tables=[new, BIAS], drop=["item"])
    assert [*loaded.tables] == ["new", "bias"]
    assert loaded.rows("new") == 0
    train(loaded, 20)
    folders.append(cut(loaded, tmp_path / "new"))
    assert_equal(SparseStore.load(folders), loaded)
    merge(folders, tmp_path / "merged")
    assert_equal(SparseStore.load([tmp_path / "merged"]), loaded)
    with pytest.raises(ConfigChanged, match=r"drop names \['item'\]"):
        SparseStore.load(folders, drop=["item"])


def test_a_table_that_starts_again_does_not_inherit(tmp_path: Path, store: SparseStore) -> None:
    """Of the same name, but with another beginning: rows of the old one stay in the old cuts."""
    folders = chain_of(tmp_path, store, [20])
    wider = Table("item", dim=5)
    loaded = SparseStore.load(folders, tables=[wider, BIAS], drop=["item"])
    assert loaded.entries("item") == 0
    train(loaded, 2)
    folders.append(cut(loaded, tmp_path / "wider"))
    assert_equal(SparseStore.load(folders), loaded)
    merge(folders, tmp_path / "merged")
    assert_equal(SparseStore.load([tmp_path / "merged"]), loaded)


def test_tables_may_change_their_order(tmp_path: Path, store: SparseStore) -> None:
    folders = chain_of(tmp_path, store, [20])
    loaded = SparseStore.load(folders, tables=[BIAS, ITEM])
    train(loaded, 5)
    train(store, 5)
    folders.append(cut(loaded, tmp_path / "turned"))
    np.testing.assert_array_equal(
        SparseStore.load(folders).dump("item").keys, loaded.dump("item").keys
    )


# files that are not what they were


def test_a_chain_with_a_hole_is_refused(tmp_path: Path, store: SparseStore) -> None:
    folders = chain_of(tmp_path, store, [5, 5, 5])
    with pytest.raises(ChainBroken, match="the first folder must be a base"):
        SparseStore.load(folders[1:])
    with pytest.raises(ChainBroken, match=r"covers steps \(10, 15\]"):
        SparseStore.load([folders[0], folders[2]])
    with pytest.raises(ChainBroken, match=r"covers steps \(0, 5\]"):
        SparseStore.load([folders[0], folders[1], folders[0]])
    with pytest.raises(ChainBroken, match="no folder"):
        SparseStore.load([])
    other = SparseStore([ITEM, BIAS], seed=12)
    strangers = chain_of(tmp_path / "other", other, [5, 5])
    with pytest.raises(ChainBroken, match="under seed 12"):
        SparseStore.load([folders[0], strangers[1]])


def test_a_folder_is_written_once(tmp_path: Path, store: SparseStore) -> None:
    train(store, 5)
    frozen = store.freeze("checkpoint")
    frozen.write(tmp_path)
    with pytest.raises(FileExistsError, match="already"):
        frozen.write(tmp_path)
    with pytest.raises(FileExistsError, match="already"):
        merge([tmp_path], tmp_path)


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    raw = json.loads(path.read_bytes())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(format=2), "is of format 2, this release reads 1"),
        (lambda raw: raw.pop("format"), "is of format None"),
        (lambda raw: raw.update(extra=1), "unknown field `extra`"),
        (lambda raw: raw.pop("clock"), "missing required field `clock`"),
        (lambda raw: raw.update(step="x"), "Expected `int`"),
        (lambda raw: raw["tables"][0]["table"].update(dim=0), "`int` >= 1"),
        (lambda raw: raw["tables"][0]["lengths"].update(rows=3), "3 were written"),
        (lambda raw: raw["tables"][0]["lengths"].update(rows=10**6), "1000000 were written"),
        (lambda raw: raw["tables"][0]["table"].update(dim=7), "and should"),
    ],
)
def test_an_altered_manifest_is_refused(
    tmp_path: Path, store: SparseStore, change: Callable[[dict], None], message: str
) -> None:
    [folder] = chain_of(tmp_path, store, [20])
    rewrite(folder / "store.json", change)
    with pytest.raises(StoreCorrupt, match=message):
        SparseStore.load([folder])


def test_a_folder_without_a_manifest_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreCorrupt, match=r"No such file.*is this a saved store\?"):
        SparseStore.load([tmp_path])
    (tmp_path / "store.json").write_bytes(b"")
    with pytest.raises(StoreCorrupt, match="store.json"):
        SparseStore.load([tmp_path])


def test_a_missing_file_is_named(tmp_path: Path, store: SparseStore) -> None:
    [folder] = chain_of(tmp_path, store, [20])
    (folder / "001-bias.rows.arrow").unlink()
    with pytest.raises(StoreCorrupt, match="001-bias.rows.arrow"):
        SparseStore.load([folder])


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("kind", ["rows", "candidates", "tombs"])
def test_a_torn_file_is_refused_wherever_it_is_torn(
    tmp_path: Path, store: SparseStore, kind: str
) -> None:
    [folder] = chain_of(tmp_path, store, [60])
    path = folder / f"000-item.{kind}.arrow"
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 50)):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreCorrupt, match=path.name):
            SparseStore.load([folder])
    path.write_bytes(whole)
    SparseStore.load([folder])


def test_flipped_bits_are_refused_or_read_and_never_anything_else(
    tmp_path: Path, store: SparseStore
) -> None:
    """Checksums are the cut's; but no damage may end in an error that names no file."""
    [folder] = chain_of(tmp_path, store, [40])
    path = folder / "000-item.candidates.arrow"
    whole = path.read_bytes()
    refused = 0
    random = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[random.integers(len(whole))] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            SparseStore.load([folder])
        except StoreCorrupt as error:
            refused += 1
            assert path.name in str(error) or "stands in two files" in str(error)  # noqa: PT017
    assert refused > 50


def test_another_table_s_file_is_refused(tmp_path: Path, store: SparseStore) -> None:
    [folder] = chain_of(tmp_path, store, [20])
    shutil.copy(folder / "001-bias.rows.arrow", folder / "000-item.rows.arrow")
    with pytest.raises(StoreCorrupt, match=r"000-item.rows.arrow: holds the columns"):
        SparseStore.load([folder])


def save_by_hand(folder: Path, kind: str, columns: tuple[np.ndarray, ...]) -> None:
    """Replace one file of table `item`."""
    (folder / f"000-item.{kind}.arrow").unlink(missing_ok=True)
    with runs.TableFiles(folder, 0, ITEM) as tables:
        tables.add(kind, columns)
    rewrite(
        folder / "store.json",
        lambda raw: raw["tables"][0]["lengths"].update({kind: columns[0].size}),
    )


def entries(keys: list[int], value: float = 0.0) -> tuple[np.ndarray, ...]:
    n = len(keys)
    floats = np.full((n, 3), value, np.float32)
    numbers = np.ones(n, np.int64)
    return np.array(keys, np.uint64), numbers.astype(np.uint32), numbers, numbers, floats, floats


@pytest.mark.parametrize("keys", [[1, 1], [2, 1], [2**63, 5]])
def test_keys_out_of_order_are_refused(tmp_path: Path, store: SparseStore, keys: list[int]) -> None:
    [folder] = chain_of(tmp_path, store, [0])
    save_by_hand(folder, "rows", entries(keys))
    with pytest.raises(StoreCorrupt, match="keys do not rise"):
        SparseStore.load([folder])


def test_a_key_in_two_files_of_a_folder_is_refused(tmp_path: Path, store: SparseStore) -> None:
    [folder] = chain_of(tmp_path, store, [0])
    save_by_hand(folder, "rows", entries([3, 9]))
    save_by_hand(folder, "candidates", entries([4, 9])[:4])
    with pytest.raises(StoreCorrupt, match="key 9 stands in two files"):
        SparseStore.load([folder])


@pytest.mark.parametrize("wild", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_refused(
    tmp_path: Path, store: SparseStore, wild: float
) -> None:
    [folder] = chain_of(tmp_path, store, [0])
    save_by_hand(folder, "rows", entries([3, 9], wild))
    with pytest.raises(StoreCorrupt, match="the row of key 3 is not finite"):
        SparseStore.load([folder])


def test_a_full_disk_leaves_no_manifest(
    tmp_path: Path, store: SparseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store, 20)
    frozen = store.freeze("checkpoint")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runs.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            frozen.write(tmp_path / "full")
    assert not (tmp_path / "full" / "store.json").exists()
    frozen.write(tmp_path / "roomy")
    assert SparseStore.load([tmp_path / "roomy"]).step == store.step


# for ever


def test_a_golden_chain_of_format_1_loads_for_ever() -> None:
    """Saved by the release that made the format; a later one must read the same bits out of it."""
    wanted = json.loads((GOLDEN / "wanted.json").read_text())
    chain = Chain([GOLDEN / "base", GOLDEN / "increment"])
    assert chain.tables == {"item": ITEM, "bias": BIAS}
    loaded = SparseStore.load([GOLDEN / "base", GOLDEN / "increment"])
    assert described(loaded) == wanted


def described(store: SparseStore) -> dict:
    """Everything that a store holds, as JSON can hold it; floats as bits."""

    def plain(array: np.ndarray) -> list:
        return (array.view(np.uint32) if array.dtype == np.float32 else array).tolist()

    return {
        "step": store.step,
        "clock": store.clock,
        "seed": store.seed,
        "cursors": {reader: store.cursor(reader) for reader in ("serving", "checkpoint")},
        "metrics": store.metrics(),
        "removed": {t: plain(r.removed) for t, r in store.peek("serving").tables.items()},
        "tables": {
            table: {name: plain(array) for name, array in store.dump(table)._asdict().items()}
            for table in store.tables
        },
    }
