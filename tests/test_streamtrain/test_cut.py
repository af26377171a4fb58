"""Cuts on disk: whole or not there, the newest valid one wins, parts are shared and folded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparse_store.config import Table
from sparse_store.store import Keys, SparseStore
from streamtrain.cut import Checkpoints, Cut, Moment
from streamtrain.errors import CutCorrupt, LockHeld


def _learn(store: SparseStore, keys: list[int]) -> None:
    ids = np.array(keys, np.uint64)
    plan = store.resolve({"item": Keys("item", ids, np.arange(len(ids) + 1))}, clock=store.clock)
    store.push(plan, {"item": np.ones((len(ids), 2), np.float32)})


def _moment(store: SparseStore, *, generation: int = 1, version: int = 0) -> Moment:
    return Moment(
        generation=generation,
        step=store.step,
        version=version,
        store=store.freeze("checkpoint"),
        dense={"0000": np.arange(3.0)},
        validation={"click": {"sums": np.zeros(3)}},
        state={"trainer": {"clock": store.step}},
        lengths={"dead_letters": 17},
    )


def _write(checkpoints: Checkpoints, store: SparseStore, previous: Cut | None, **facts: int) -> Cut:
    cut = checkpoints.write(_moment(store, **facts), previous)
    store.ack("checkpoint", cut.step)
    return cut


@pytest.fixture
def store() -> SparseStore:
    return SparseStore([Table("item", dim=2)], seed=1)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    found = Checkpoints(tmp_path / "cuts", keep=2)
    found.lock()
    yield found
    found.unlock()


def test_a_cut_gives_back_what_was_frozen(checkpoints: Checkpoints, store: SparseStore) -> None:
    cut = None
    for n in range(5):
        _learn(store, [n, n + 1])
        cut = _write(checkpoints, store, cut, version=n)
    found = checkpoints.newest()
    assert found is not None
    assert (found.order, found.version) == ((1, 5), 4)
    assert found.state() == {"trainer": {"clock": 5}, "lengths": {"dead_letters": 17}}
    np.testing.assert_array_equal(found.dense()["0000"], np.arange(3.0))
    assert list(found.validation()) == ["click"]
    loaded = SparseStore.load(found.parts())
    for a, b in zip(store.dump("item"), loaded.dump("item"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_pruning_an_older_cut_leaves_the_newer_whole(
    checkpoints: Checkpoints, store: SparseStore
) -> None:
    """A kept cut keeps its parts, though others wrote them."""
    cut = None
    for n in range(6):
        _learn(store, list(range(100)) if n == 0 else [n])
        cut = _write(checkpoints, store, cut, version=n)
        oldest = checkpoints.prune()
        assert oldest == max(0, n - 1)
    assert len(checkpoints.names()) == 2
    assert cut is not None
    assert len(cut.parts()) > 1
    found = checkpoints.newest()
    assert found is not None
    assert SparseStore.load(found.parts()).rows("item") == 100


def test_increments_are_folded_once_they_outweigh_the_base(
    checkpoints: Checkpoints, store: SparseStore
) -> None:
    cut = None
    most = 0
    for n in range(40):
        _learn(store, [n])
        cut = _write(checkpoints, store, cut)
        most = max(most, len(cut.parts()))
    assert cut is not None
    assert 1 < most <= 33
    assert SparseStore.load(cut.parts()).rows("item") == 40


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "no manifest", "bad manifest"])
def test_an_invalid_newest_cut_is_reported_and_passed_over(
    checkpoints: Checkpoints,
    store: SparseStore,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _learn(store, [1])
    older = _write(checkpoints, store, None)
    _learn(store, [2])
    newest = _write(checkpoints, store, older)
    # Not a hard link into the older cut: its damage must not be the older one's too.
    victim = newest.path / "dense.npz"
    if damage == "torn":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "flipped":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "missing":
        victim.unlink()
    elif damage == "no manifest":
        (newest.path / "manifest.json").unlink()
    else:
        (newest.path / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(CutCorrupt, match=newest.path.name):
        checkpoints.open(newest.path.name)
    found = checkpoints.newest()
    assert found is not None
    assert found.order == older.order
    assert newest.path.name in caplog.text


def test_a_cut_of_another_format_is_refused_by_name(
    checkpoints: Checkpoints, store: SparseStore
) -> None:
    cut = _write(checkpoints, store, None)
    manifest = json.loads((cut.path / "manifest.json").read_text())
    (cut.path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CutCorrupt, match="format 99 is not known here"):
        checkpoints.open(cut.path.name)


@pytest.mark.parametrize("step", ["C3", "C4"])
def test_a_crash_while_writing_leaves_a_whole_cut_or_none(
    tmp_path: Path, store: SparseStore, step: str
) -> None:
    class Crash(Exception):
        pass

    def die(reached: str) -> None:
        if reached == step:
            raise Crash

    _learn(store, [1])
    checkpoints = Checkpoints(tmp_path, keep=2, on_step=die)
    checkpoints.lock()
    with pytest.raises(Crash):
        checkpoints.write(_moment(store), None)
    checkpoints.unlock()
    again = Checkpoints(tmp_path, keep=2)
    again.lock()
    assert (again.newest() is not None) == (step == "C4")
    assert not list(tmp_path.glob("tmp-*"))
    again.unlock()


def test_a_full_disk_leaves_nothing_behind_and_the_next_cut_holds_it_all(
    checkpoints: Checkpoints, store: SparseStore
) -> None:
    """The cursor has not moved, so nothing is missing from the cut after the failed one."""

    class Full:
        until = 2

        def write(self, folder: Path) -> None:
            (folder / "part").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    _learn(store, [1])
    first = _write(checkpoints, store, None)
    _learn(store, [2])
    moment = _moment(store)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write(
            Moment(**{f: getattr(moment, f) for f in moment.__slots__} | {"store": Full()}), first
        )
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [first.path.name, "lock"]
    _learn(store, [3])
    cut = _write(checkpoints, store, first)
    assert SparseStore.load(cut.parts()).rows("item") == 3


def test_a_pinned_cut_is_not_pruned(checkpoints: Checkpoints, store: SparseStore) -> None:
    """A snapshot may be read from it at the moment."""
    first = cut = _write(checkpoints, store, None)
    with checkpoints.pinned(first):
        for n in range(4):
            _learn(store, [n])
            cut = _write(checkpoints, store, cut)
            checkpoints.prune()
        assert first.path.exists()
    checkpoints.prune()
    assert not first.path.exists()


def test_generations_only_rise_and_survive(checkpoints: Checkpoints) -> None:
    assert checkpoints.generation() == 0
    checkpoints.claim(7)
    assert Checkpoints(checkpoints.folder, keep=1).generation() == 7
    (checkpoints.folder / "GENERATION").write_text("seven")
    with pytest.raises(CutCorrupt, match="does not hold a number"):
        checkpoints.generation()


def test_the_order_is_generation_then_step(checkpoints: Checkpoints, store: SparseStore) -> None:
    """A restored trainer is at a lower step than the one that died, and yet it is the newer one."""
    for n in range(3):
        _learn(store, [n])
    _write(checkpoints, store, None, generation=1)
    other = SparseStore([Table("item", dim=2)], seed=1)
    _learn(other, [9])
    _write(checkpoints, other, None, generation=2)
    found = checkpoints.newest()
    assert found is not None
    assert found.order == (2, 1)


def test_only_one_may_hold_the_directory(checkpoints: Checkpoints) -> None:
    with pytest.raises(LockHeld):
        Checkpoints(checkpoints.folder, keep=1).lock()
    checkpoints.unlock()
    other = Checkpoints(checkpoints.folder, keep=1)
    other.lock()
    other.unlock()
