"""kill -9 after every numbered step and at random moments, on a real Kafka and a real Redis.

Each life is one model that is killed and restarted over and over; at its end it must be what an
uninterrupted run is, and serving must hold exactly that.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparse_store.store import SparseStore
from tests.conftest import TopicMaker
from tests.endtoend.life import Life, head_by_redis_cli, produce, rows_by_redis_cli
from tests.services.kafka import Broker
from tests.services.redis import RedisServer
from tests.small import records, values

pytestmark = pytest.mark.endtoend

# Kills before a cut and behind one take turns, so that the life goes forward and is undone by
# turns; counts make some of them fall into training and not into the repair of the start.
FAULTS = (
    *("S1:1", "D1:1", "C4:2", "D2:1", "C5:1", "S2:1", "D2:3", "C6:1", "D3:2", "C7:1"),
    *("S3:1", "D4:1", "C1:1", "D4:5", "C4:1", "S4:1", "D5:1", "C2:2", "S5:1", "C7:1"),
    *("D5:3", "C3:1", "S6:1", "C4:2"),
)
PER_RUN = 160
RANDOM_KILLS = 10
SAMPLES = PER_RUN * (len(FAULTS) + RANDOM_KILLS + 2)


@pytest.fixture
def redis_of_one(redis_server: RedisServer, redis_url: str) -> str:
    """Address of the shared Redis, emptied for this test."""
    del redis_server
    return redis_url


@pytest.fixture
def replica(redis_of_one: str) -> Iterator[subprocess.Popen[str]]:
    """A serving process that lives through it all."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.endtoend.follow", redis_of_one, "small"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


def _through_everything(life: Life, *, seed: int) -> None:
    """Kill after every step, then at random moments, then let it end."""
    until = 0
    whole = 0.0
    for fault in FAULTS:
        until += PER_RUN
        began = time.monotonic()
        life.run(until=until, fault=fault)
        whole = max(whole, time.monotonic() - began)
    rng = random.Random(seed)
    for _ in range(RANDOM_KILLS):
        until += PER_RUN
        process = life.start(until=until)
        try:
            process.wait(rng.uniform(0.3, 1.1) * whole)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate(timeout=30)
        assert process.returncode in (0, -9), life.tail()
    report = life.run(until=SAMPLES)
    assert report["learned"] == SAMPLES
    assert report["consumed"] == report["learned"] + sum(report["dropped"].values())


def _serving_is(
    life: Life, store: SparseStore, replica: subprocess.Popen[str], folder: Path
) -> None:
    """Redis by ``redis-cli`` and the replica hold exactly the admitted rows."""
    held = rows_by_redis_cli(life.redis_url, "small")
    for table in store.tables:
        dump = store.dump(table)
        assert sorted(held.get(table, {})) == dump.keys.tolist(), table
        for key, row in zip(dump.keys.tolist(), dump.values, strict=True):
            assert held[table][key] == row.tobytes(), (table, key)
    version = int(head_by_redis_cli(life.redis_url, "small")[b"version"])
    _replica_is(store, replica, version, folder)


def _replica_is(
    store: SparseStore, replica: subprocess.Popen[str], version: int, folder: Path
) -> None:
    assert replica.stdin is not None
    assert replica.stdout is not None
    gone = np.array([2**63, 2**63 + 1], np.uint64)
    asked = {t: np.concatenate([store.dump(t).keys, gone]) for t in store.tables}
    np.savez(folder / "keys.npz", **asked)  # type: ignore[arg-type]
    replica.stdin.write(f"{version} {folder / 'keys.npz'} {folder / 'answer.npz'}\n")
    replica.stdin.flush()
    assert replica.stdout.readline() == "following\n"
    assert replica.stdout.readline() == f"{version} light\n"
    with np.load(folder / "answer.npz", allow_pickle=False) as answer:
        for table in store.tables:
            dump = store.dump(table)
            assert answer[f"{table}.size"] == len(dump.keys), table
            assert answer[f"{table}.found"].tolist() == [True] * len(dump.keys) + [False, False]
            np.testing.assert_array_equal(answer[f"{table}.rows"][:-2], dump.values)


def test_one_partition_killed_everywhere_equals_an_uninterrupted_run_bit_for_bit(
    tmp_path: Path,
    kafka_broker: Broker,
    kafka_topic: TopicMaker,
    redis_of_one: str,
    replica: subprocess.Popen[str],
) -> None:
    topic = kafka_topic(partitions=1)
    produce(kafka_broker.bootstrap, topic, values(SAMPLES), 1)
    killed = Life.begin(
        tmp_path / "killed", brokers=kafka_broker.bootstrap, topic=topic, redis_url=redis_of_one
    )
    _through_everything(killed, seed=1)
    store = killed.store()
    _serving_is(killed, store, replica, tmp_path)

    through = Life.begin(
        tmp_path / "through", brokers=kafka_broker.bootstrap, topic=topic, redis_url=redis_of_one
    )
    config = through.folder / "small.yaml"
    config.write_text(config.read_text().replace("name: small", "name: through"))
    through.run(until=SAMPLES)
    whole = through.store()
    assert any(whole.metrics()[t]["evicted"] for t in whole.tables), "nothing was ever evicted"
    for table in whole.tables:
        for field in ("keys", "values", "slots", "counts", "stamps"):
            np.testing.assert_array_equal(
                getattr(store.dump(table), field),
                getattr(whole.dump(table), field),
                f"{table} {field}",
            )
        for field in ("candidate_keys", "candidate_counts", "candidate_stamps"):
            np.testing.assert_array_equal(
                getattr(store.dump(table), field),
                getattr(whole.dump(table), field),
                f"{table} {field}",
            )
    for name, array in through.cut().dense().items():
        np.testing.assert_array_equal(array, killed.cut().dense()[name], name)


def test_four_partitions_killed_everywhere_learn_every_sample_exactly_once(
    tmp_path: Path,
    kafka_broker: Broker,
    kafka_topic: TopicMaker,
    redis_of_one: str,
    replica: subprocess.Popen[str],
) -> None:
    topic = kafka_topic(partitions=4)
    produce(kafka_broker.bootstrap, topic, values(SAMPLES), 4)
    life = Life.begin(
        tmp_path / "life", brokers=kafka_broker.bootstrap, topic=topic, redis_url=redis_of_one
    )
    _through_everything(life, seed=4)
    store = life.store()
    own = np.array([record["id"] for record in records(SAMPLES)], np.uint64)
    assert store.rows("own") == SAMPLES
    assert store.count("own", own).tolist() == [1] * SAMPLES
    _serving_is(life, store, replica, tmp_path)
