"""The daemon over a source and a sink in memory: start, learn, publish, end, go on."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from consumers.memory import Memory
from consumers.source import Partition
from exporters.errors import SinkUnfit
from sparse_store.store import SparseStore
from streamtrain import assembly
from streamtrain.config import Config
from streamtrain.cut import Checkpoints
from streamtrain.daemon import Daemon
from streamtrain.errors import (
    ConfigError,
    EmptyStartRefused,
    LockHeld,
    NonFinite,
    StartRefused,
)
from streamtrain.replaying import replay
from streamtrain.report import Report
from streamtrain.timeline import Parts
from tests.doubles.memory_sink import MemoryServer, MemorySink
from tests.small import SCHEMA, config_in, encode, records, values, write_container

CLICKS = Partition("clicks", 0)


def _parts(config: Config, messages: list[bytes | None], servers: list[MemoryServer]) -> Parts:
    return Parts(
        source=Memory({CLICKS: messages}, assembly.decoder(config)),
        sinks=[MemorySink(server) for server in servers],
        trainer=lambda cut: assembly.trainer(config, cut),
        environment={},
    )


def _run(
    config: Config,
    messages: list[bytes | None],
    servers: list[MemoryServer] | None = None,
    *,
    until: int | None = None,
    fresh: bool = False,
) -> Report:
    parts = _parts(config, messages, servers or [])
    return Daemon(config, parts, until_samples=until, fresh=fresh).run()


def _store(config: Config) -> SparseStore:
    cut = Checkpoints(Path(config.checkpoint.dir), keep=3).newest()
    assert cut is not None
    return SparseStore.load(cut.parts())


def _same_stores(one: SparseStore, other: SparseStore) -> None:
    assert one.step == other.step
    for table in one.tables:
        for field, a, b in zip(
            one.dump(table)._fields, one.dump(table), other.dump(table), strict=True
        ):
            # When a row was last shown to readers is no part of what was learned: a restart from a
            # cut that was frozen before its boundary's delta came to the log shows rows again.
            if not field.endswith("changed_at"):
                np.testing.assert_array_equal(a, b, err_msg=f"{table}.{field}")


def test_what_is_learned_is_served(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    server = MemoryServer()
    report = _run(config, values(640), [server])
    assert (report.learned, report.consumed, report.dropped) == (640, 640, {})
    store = _store(config)
    head = server.state.head
    assert head is not None
    assert head.version == report.version
    for table in store.tables:
        held = server.table(table)
        dump = store.dump(table)
        assert sorted(held) == dump.keys.tolist()
        for key, row in zip(dump.keys.tolist(), dump.values, strict=True):
            assert held[key] == row.tobytes()
    counts = store.count("own", np.arange(640, dtype=np.uint64))
    assert counts.tolist() == [1] * 640


def test_stop_and_go_on_equals_going_through(tmp_path: Path) -> None:
    """Resume that isn't continue would make every restart a little experiment."""
    through, halted = tmp_path / "a", tmp_path / "b"
    through.mkdir()
    halted.mkdir()
    config = config_in(through)
    _run(config, values(640))
    resumed = config_in(halted)
    for until in (96, 100, 416):
        _run(resumed, values(640), until=until)
    _run(resumed, values(640))
    whole, pieces = _store(config), _store(resumed)
    # 96 and 416 end at batch boundaries of the uninterrupted run; 100 does not, so bits may differ
    # in what is learned, but never in what was seen.
    for table in whole.tables:
        a, b = whole.dump(table), pieces.dump(table)
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_array_equal(a.counts, b.counts)


def test_stop_at_batch_boundaries_changes_no_bit(tmp_path: Path) -> None:
    through, halted = tmp_path / "a", tmp_path / "b"
    through.mkdir()
    halted.mkdir()
    config = config_in(through)
    _run(config, values(640))
    resumed = config_in(halted)
    for until in (96, 128, 416, 640):
        _run(resumed, values(640), until=until)
    _same_stores(_store(config), _store(resumed))
    first = Checkpoints(Path(config.checkpoint.dir), keep=3).newest()
    second = Checkpoints(Path(resumed.checkpoint.dir), keep=3).newest()
    assert first is not None
    assert second is not None
    assert first.state()["trainer"] == second.state()["trainer"]
    for name, array in first.dense().items():
        np.testing.assert_array_equal(array, second.dense()[name], err_msg=name)
    for task, state in first.validation().items():
        for name, array in state.items():
            np.testing.assert_array_equal(array, second.validation()[task][name])


def test_replay_equals_live(tmp_path: Path) -> None:
    """A study on recorded samples must speak of the model that is live."""
    config = config_in(tmp_path)
    _run(config, values(640))
    write_container(tmp_path / "a.avro", list(records(640)))
    report = replay(config, [str(tmp_path / "a.avro")], save=tmp_path / "saved")
    assert report.learned == 640
    cut = Checkpoints(tmp_path / "saved", keep=1).newest()
    assert cut is not None
    _same_stores(_store(config), SparseStore.load(cut.parts()))


def test_bad_messages_become_dead_letters_and_training_goes_on(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    messages: list[bytes | None] = [*values(320)]
    truncated = encode(next(records(1, first=1000)))[:-3]
    messages[10:10] = [truncated, b"", None, b"\xff" * 40]
    report = _run(config, messages)
    assert report.learned == 320
    assert report.consumed == 324
    assert sum(report.dropped.values()) == 4
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [line["offset"] for line in lines] == [10, 11, 12, 13]
    assert {line["topic"] for line in lines} == {"clicks"}
    assert all(line["reason"] and line["partition"] == 0 for line in lines)
    assert base64.b64decode(lines[0]["value"]) == truncated
    assert lines[2]["value"] is None


def test_dead_letters_are_cut_back_with_the_state(tmp_path: Path) -> None:
    """Lines behind the restored cut are written again by the samples that are read again."""
    config = config_in(tmp_path, cut_every="1h")
    messages: list[bytes | None] = [*values(320)]
    messages[200:200] = [b"", b"\x01"]
    _run(config, messages, until=96)
    (tmp_path / "bad.jsonl").write_text('{"written": "after the cut, by a trainer that died"}\n')
    _run(config, messages)
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [line["offset"] for line in lines] == [200, 201]


def test_an_empty_start_over_a_live_head_is_refused(tmp_path: Path) -> None:
    """A lost volume must never make serving empty."""
    config = config_in(tmp_path)
    server = MemoryServer()
    _run(config, values(320), [server])
    lost = config_in(tmp_path, "checkpoint.dir=elsewhere")
    with pytest.raises(EmptyStartRefused, match="memory serves version"):
        _run(lost, values(320), [server])
    head = server.state.head
    assert head is not None
    before = head.version
    _run(lost, values(320), [server], fresh=True)
    head = server.state.head
    assert head is not None
    assert head.version > before


def test_an_unreachable_sink_stops_only_an_empty_start(tmp_path: Path) -> None:
    config = config_in(tmp_path, "shutdown.deadline=200ms")
    server = MemoryServer()
    server.down = True
    with pytest.raises(EmptyStartRefused, match="A first start must know"):
        _run(config, values(320), [server])
    server.down = False
    _run(config, values(320), [server], until=96)
    server.down = True
    assert _run(config, values(320), [server], until=192).learned == 192
    server.down = False
    report = _run(config, values(320), [server])
    head = server.state.head
    assert head is not None
    assert head.version == report.version
    assert sorted(server.table("own")) == list(range(320))


def test_a_sink_that_may_lose_rows_silently_stops_the_start(tmp_path: Path) -> None:
    class Forgetful(MemorySink):
        def check(self, dims: Mapping[str, int]) -> list[str]:
            assert dims["item"] == 4
            raise SinkUnfit("maxmemory-policy is allkeys-lru")

    config = config_in(tmp_path)
    parts = _parts(config, values(32), [])
    parts.sinks.append(Forgetful(MemoryServer()))
    with pytest.raises(StartRefused, match="allkeys-lru"):
        Daemon(config, parts).run()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    holder = Checkpoints(Path(config.checkpoint.dir), keep=3)
    holder.lock()
    with pytest.raises(LockHeld, match="is held by a running trainer"):
        _run(config, values(32))
    holder.unlock()


def test_a_directory_with_strangers_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    Path(config.checkpoint.dir).mkdir()
    (Path(config.checkpoint.dir) / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(EmptyStartRefused, match=r"holiday\.jpg"):
        _run(config, values(32))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("tables.user.dim=8", "tables.user.dim"),
        ("tables.user.init={uniform: 0.1}", "tables.user.init"),
        ("model.build=streamtrain.models:deepfm", "model.build"),
        ("model.seed=8", "model.seed"),
        ("model.optimizer={sgd: {}}", "model.optimizer"),
        ("sample.labels={click: {field: click, at_least: 1}}", "sample.labels.click.at_least"),
        ("features.price={dense: []}", "features.price.dense"),
    ],
)
def test_a_changed_config_against_an_old_cut_is_refused_and_named(
    tmp_path: Path, override: str, named: str
) -> None:
    _run(config_in(tmp_path), values(64))
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        _run(config_in(tmp_path, override), values(64))


@pytest.mark.parametrize(
    "override",
    [
        "tables.item.evict={ttl: 1h}",
        "tables.user.admit=always",
        "tables.user.optimizer={adagrad: {rate: 0.5}}",
        "model.optimizer={adam: {rate: 0.5}}",
    ],
)
def test_rates_ttl_and_admission_are_taken_over(tmp_path: Path, override: str) -> None:
    _run(config_in(tmp_path), values(96), until=64)
    assert _run(config_in(tmp_path, override), values(96)).learned == 96


def test_a_non_finite_loss_stops_and_names_the_sample(tmp_path: Path) -> None:
    """One poisoned sample must not be in any row, any weight or any cut."""
    config = config_in(tmp_path, "features.price={dense: []}", "model.optimizer={sgd: {rate: 0.5}}")
    poison = {**next(records(1, first=70)), "price": 3e38}
    clean, bad = values(192), encode(poison)
    # The first one or two make the weight huge; the last one makes the logit infinite.
    messages = [*clean[:64], bad, *clean[64:128], bad, *clean[128:160], bad, *clean[160:]]
    with pytest.raises(NonFinite, match=r"sample\(s\) clicks-0@162;"):
        _run(config, messages)
    assert _store(config).step <= 5


def test_an_invalid_newest_cut_is_passed_over(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    _run(config, values(320), until=96)
    _run(config, values(320), until=192)
    checkpoints = Checkpoints(Path(config.checkpoint.dir), keep=3)
    newest = checkpoints.newest()
    assert newest is not None
    (newest.path / "dense.npz").write_bytes(b"torn")
    older = checkpoints.newest()
    assert older is not None
    assert older.order < newest.order
    assert _run(config, values(320)).learned == 320
    assert _store(config).count("own", np.arange(320, dtype=np.uint64)).tolist() == [1] * 320


def test_the_schema_is_the_one_of_the_samples() -> None:
    assert encode(next(records(1)))
    assert SCHEMA["name"] == "Click"
