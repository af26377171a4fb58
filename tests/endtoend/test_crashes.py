"""kill -9 after every numbered step and at random moments, on a real Kafka and a real Redis.

Each life is one model that is killed and restarted over and over; at its end it must be what an
uninterrupted run is, and serving must hold exactly that.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sparse_store.store import SparseStore
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


@dataclass(frozen=True)
class Followed:
    """A life that went through everything, and the serving process that followed it all along."""

    life: Life
    replica: subprocess.Popen[str]


@pytest.fixture(scope="module")
def lives(
    kafka_broker: Broker, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Followed]]:
    """Return lives by their number of partitions; they go through everything beside each other."""
    kafka_broker.start()
    redis_server.start()
    folder = tmp_path_factory.mktemp("lives")
    with ExitStack() as stack:
        found = {}
        for partitions in (1, 4):
            model = f"killed-{partitions}-{uuid.uuid4().hex[:8]}"
            kafka_broker.create_topic(model, partitions)
            produce(kafka_broker.bootstrap, model, values(SAMPLES), partitions)
            life = Life.begin(
                folder / model,
                brokers=kafka_broker.bootstrap,
                topic=model,
                redis_url=redis_server.url,
                model=model,
            )
            found[partitions] = Followed(life, stack.enter_context(_following(life)))
        with ThreadPoolExecutor(len(found)) as pool:
            done = [
                pool.submit(_through_everything, followed.life, seed=partitions)
                for partitions, followed in found.items()
            ]
            for future in done:
                future.result()
        yield found


@contextmanager
def _following(life: Life) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.endtoend.follow", life.redis_url, life.model],
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


def _serving_is(followed: Followed, store: SparseStore) -> None:
    """Redis by ``redis-cli`` and the replica hold exactly the admitted rows."""
    life = followed.life
    held = rows_by_redis_cli(life.redis_url, life.model)
    for table in store.tables:
        dump = store.dump(table)
        assert sorted(held.get(table, {})) == dump.keys.tolist(), table
        for key, row in zip(dump.keys.tolist(), dump.values, strict=True):
            assert held[table][key] == row.tobytes(), (table, key)
    version = int(head_by_redis_cli(life.redis_url, life.model)[b"version"])
    _replica_is(store, followed.replica, version, life.folder)


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
    lives: dict[int, Followed], tmp_path: Path, kafka_broker: Broker
) -> None:
    killed = lives[1].life
    store = killed.store()
    _serving_is(lives[1], store)

    through = Life.begin(
        tmp_path,
        brokers=kafka_broker.bootstrap,
        topic=killed.model,
        redis_url=killed.redis_url,
        model="through",
    )
    through.run(until=SAMPLES)
    whole = through.store()
    assert any(whole.metrics()[t]["evicted"] for t in whole.tables), "nothing was ever evicted"
    rows = ("keys", "values", "slots", "counts", "stamps")
    candidates = ("candidate_keys", "candidate_counts", "candidate_stamps")
    for table in whole.tables:
        for field in (*rows, *candidates):
            np.testing.assert_array_equal(
                getattr(store.dump(table), field),
                getattr(whole.dump(table), field),
                f"{table} {field}",
            )
    for name, array in through.cut().dense().items():
        np.testing.assert_array_equal(array, killed.cut().dense()[name], name)


def test_four_partitions_killed_everywhere_learn_every_sample_exactly_once(
    lives: dict[int, Followed],
) -> None:
    store = lives[4].life.store()
    own = np.array([record["id"] for record in records(SAMPLES)], np.uint64)
    assert store.rows("own") == SAMPLES
    assert store.count("own", own).tolist() == [1] * SAMPLES
    _serving_is(lives[4], store)
