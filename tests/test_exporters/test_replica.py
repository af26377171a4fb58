"""A replica beside a real Redis: it follows, survives, and never mixes versions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from exporters import Log, NotReady, Publisher, Replica, UnknownTable
from exporters.redis_sink import RedisSink
from tests.services.redis import RedisServer
from tests.test_exporters.test_publisher import Whole, draft, wait_until

KEYS = 1000


class Live:
    """A publisher on a real Redis, every version of which has the same value in all rows."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.log = Log(folder, max_bytes=1 << 30)
        self.source = Whole(self.log)  # type: ignore[arg-type]
        self.sink = RedisSink(url, model="ctr", expected_rows={"t": KEYS}, timeout_s=2.0)
        self.publisher = Publisher(
            self.log, [self.sink], generation=1, floor=0, snapshots=self.source, idle_s=0.02
        )

    def publish(self, value: float, keys: int = KEYS) -> int:
        rows = dict.fromkeys(range(keys), value)
        self.source.rows.update(rows)
        return self.publisher.append(draft(rows, count=KEYS)).version

    def replica(self) -> Replica:
        return Replica(self.url, model="ctr", poll_s=0.05, retry_s=0.05)


@pytest.fixture
def live(redis_url: str, tmp_path: Path) -> Iterator[Live]:
    live = Live(redis_url, tmp_path)
    with live.publisher:
        yield live


def test_a_replica_answers_what_was_published(live: Live) -> None:
    live.publish(1.0)
    with live.replica() as replica:
        rows, found = replica.lookup("t", np.array([0, 5, 2**64 - 1], np.uint64))
        assert rows.tolist() == [[1.0], [1.0], [0.0]]
        assert found.tolist() == [True, True, False]
        assert replica.lookup("t", np.array([-1, 3]))[1].tolist() == [False, True]
        assert replica.version == 1
        assert replica.tables == {"t": 1}
        assert replica.dense is None
        newest = live.publish(2.0)
        assert replica.wait_for(newest, 5.0) == newest
        assert replica.lookup("t", np.array([7], np.uint64))[0].tolist() == [[2.0]]
        wait_until(lambda: replica.staleness_s < 1.0)
        assert replica.reason == ""
        assert replica.watermark == 2


def test_questions_that_make_no_sense(live: Live) -> None:
    live.publish(1.0)
    with live.replica() as replica:
        with pytest.raises(UnknownTable, match="no table 'x'"):
            replica.lookup("x", np.array([1], np.uint64))
        with pytest.raises(TypeError, match="float64"):
            replica.lookup("t", np.array([1.5]))
        with pytest.raises(ValueError, match="flat"):
            replica.lookup("t", np.zeros((2, 2), np.uint64))
        rows, found = replica.lookup("t", [])
        assert rows.shape == (0, 1)
        assert found.shape == (0,)


def test_before_anything_is_published_it_says_so(redis_url: str) -> None:
    replica = Replica(redis_url, model="ctr", poll_s=0.05, retry_s=0.05)
    with pytest.raises(NotReady, match="nothing was published yet"):
        replica.start(timeout_s=0.3)
    with pytest.raises(NotReady, match="holds no version yet"):
        replica.lookup("t", np.array([1], np.uint64))
    assert replica.staleness_s == float("inf")
    replica.stop()
    nowhere = Replica("redis://127.0.0.1:1", model="m", retry_s=0.05)
    with pytest.raises(NotReady, match="can't be reached"):
        nowhere.start(timeout_s=0.3)
    nowhere.stop()


def test_a_lookup_is_of_one_version_while_versions_fly_by(live: Live) -> None:
    live.publish(1.0)
    mixed: list[object] = []
    with live.replica() as replica:
        keys = np.arange(KEYS, dtype=np.uint64)
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                found = replica.lookups({"t": keys})
                values = set(found.tables["t"][0][:, 0].tolist())
                if values != {float(found.version)}:
                    mixed.append((found.version, values))

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for version in range(2, 40):
            wait_until(live.publisher.may_begin)
            assert live.publish(float(version)) == version
            if version % 10 == 0:
                live.publisher.shippers[0].mark()
        replica.wait_for(39, 20.0)
        stop.set()
        for thread in threads:
            thread.join()
    assert mixed == []


def test_replicas_that_begin_while_rows_are_written_begin_with_one_version(live: Live) -> None:
    live.publish(1.0)
    wait_until(lambda: live.publisher.status[0].behind == 0)
    stop = threading.Event()

    def publish() -> None:
        version = 2
        while not stop.is_set():
            if live.publisher.may_begin():
                live.publish(float(version))
                version += 1

    writer = threading.Thread(target=publish)
    writer.start()
    try:
        for _ in range(8):
            with live.replica() as replica:
                found = replica.lookups({"t": np.arange(KEYS, dtype=np.uint64)})
                assert set(found.tables["t"][0][:, 0].tolist()) == {float(found.version)}
    finally:
        stop.set()
        writer.join()


def test_a_snapshot_is_taken_over_in_the_background(live: Live) -> None:
    live.publish(1.0)
    with live.replica() as replica:
        live.publisher.shippers[0].mark()
        newest = live.publish(2.0)
        assert replica.wait_for(newest, 5.0) == newest
        assert replica.lookup("t", np.array([3], np.uint64))[0].tolist() == [[2.0]]


def test_a_trimmed_stream_means_a_new_copy(live: Live) -> None:
    live.publish(1.0)
    replica = live.replica()
    replica.start()
    replica.stop()
    live.publish(2.0)
    newest = live.publish(3.0)
    wait_until(lambda: live.publisher.status[0].behind == 0)
    with contextlib.closing(redis.Redis.from_url(live.url)) as client:
        client.xtrim("st:{ctr}:log", minid=newest)
        for name in client.scan_iter("st:{ctr}:d:2:*"):
            client.delete(name)
    with replica:
        assert replica.wait_for(newest, 5.0) == newest


def test_a_payload_that_was_tampered_with_means_a_new_copy(live: Live) -> None:
    live.publish(1.0)
    replica = live.replica()
    replica.start()
    replica.stop()
    newest = live.publish(2.0)
    wait_until(lambda: live.publisher.status[0].behind == 0)
    with contextlib.closing(redis.Redis.from_url(live.url)) as client:
        client.setrange(f"st:{{ctr}}:d:{newest}:1", 100, b"\xff\xff")
    with replica:
        assert replica.wait_for(newest, 5.0) == newest
        assert replica.lookup("t", np.array([3], np.uint64))[0].tolist() == [[2.0]]


def test_a_restart_of_redis_is_survived(tmp_path: Path) -> None:
    """It comes back empty; the trainer fills it again, and the replica goes on in between."""
    server = RedisServer()
    server.start()
    try:
        live = Live(server.url, tmp_path)
        with live.publisher:
            live.publish(1.0)
            with live.replica() as replica:
                server.stop()
                wait_until(lambda: "reached" in replica.reason)
                assert replica.lookup("t", np.array([3], np.uint64))[0].tolist() == [[1.0]]
                before = replica.staleness_s
                time.sleep(0.05)
                assert replica.staleness_s > before
                server.start()
                newest = live.publish(2.0)
                assert replica.wait_for(newest, 10.0) == newest
                assert replica.lookup("t", np.array([3], np.uint64))[0].tolist() == [[2.0]]
    finally:
        server.close()
