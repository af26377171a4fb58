"""The servers themselves: without them the integration tests would prove nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import redis
from confluent_kafka import Consumer, Producer

from tests.conftest import TopicMaker
from tests.services.kafka import Broker
from tests.services.redis import RedisServer
from tests.services.service import Service, ServiceFailed, ServiceUnavailable, free_ports


def test_redis_comes_back_empty_on_the_same_port() -> None:
    """A restarted Redis that kept its keys would hide the loss that the sinks must repair."""
    with RedisServer() as server:
        url = server.url
        with contextlib.closing(redis.Redis.from_url(url)) as client:
            client.set("a", 1)
        server.stop()
        assert not server.running
        server.start()
        assert server.url == url
        with contextlib.closing(redis.Redis.from_url(url)) as client:
            assert client.dbsize() == 0
            assert client.config_get("hash-max-listpack-value") == {
                "hash-max-listpack-value": "512"
            }
        folder = server.folder
    assert not server.running
    assert not folder.exists()


def test_redis_takes_options_of_the_caller() -> None:
    with (
        RedisServer(["--maxmemory", "20mb"]) as server,
        contextlib.closing(redis.Redis.from_url(server.url)) as client,
    ):
        assert client.config_get("maxmemory") == {"maxmemory": str(20 << 20)}


def test_redis_url_is_empty_and_unlimited(redis_server: RedisServer, redis_url: str) -> None:
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        assert client.dbsize() == 0
        assert client.config_get("maxmemory") == {"maxmemory": "0"}
    assert redis_url == redis_server.url


@pytest.mark.slow
def test_kafka_keeps_its_topics_over_a_crash(kafka_broker: Broker, kafka_topic: TopicMaker) -> None:
    """Tests of a broker's outage need the same address and the same records after it."""
    if not kafka_broker.durable:
        pytest.skip("this broker keeps its records in memory")
    topic = kafka_topic(partitions=2, max_message_bytes=2_000_000)
    address = kafka_broker.bootstrap
    sent = {f"{number}".encode() for number in range(100)}
    _produce(address, topic, sent)
    kafka_broker.kill()
    assert not kafka_broker.running
    kafka_broker.start()
    assert kafka_broker.bootstrap == address
    assert _consume(address, topic, len(sent)) == sent


def test_topics_have_names_of_their_own(kafka_topic: TopicMaker) -> None:
    assert kafka_topic() != kafka_topic()


def test_server_that_dies_at_its_start_shows_its_log() -> None:
    with pytest.raises(ServiceFailed, match="nonsense"):
        RedisServer(["--nonsense", "1"]).start()


def test_missing_binary_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceUnavailable, match="apt-get install redis-server"):
        RedisServer().start()


def test_free_ports_are_distinct_and_below_the_ephemeral_range() -> None:
    """A client could otherwise connect to itself while its server is stopped."""
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert max(ports) < 32_768


_STARTS_ONE_AND_WAITS = """
import sys, time
from tests.services.redis import RedisServer
server = RedisServer().start()
print(server.process.pid, server.folder, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_its_owner(end: signal.Signals) -> None:
    """A test run that is killed must leave nothing behind, whatever kills it."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _STARTS_ONE_AND_WAITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        pid, folder = owner.stdout.readline().split()
        assert _lives(int(pid))
        owner.send_signal(end)
        owner.wait(10)
    deadline = time.monotonic() + 10
    while _lives(int(pid)):
        assert time.monotonic() < deadline, f"redis-server {pid} lives on"
        time.sleep(0.02)
    # the folder stays after a kill; it is ours to remove here
    for file in os.scandir(folder):
        os.unlink(file)
    os.rmdir(folder)


def test_close_before_start_is_harmless() -> None:
    Service().close()


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _produce(address: str, topic: str, values: set[bytes]) -> None:
    producer = Producer({"bootstrap.servers": address, "log_level": 0})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(20) == 0
    producer.close()


def _consume(address: str, topic: str, count: int) -> set[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    got: set[bytes] = set()
    deadline = time.monotonic() + 20
    while len(got) < count and time.monotonic() < deadline:
        for message in consumer.consume(count, 0.2):
            value = message.value()
            if message.error() is None and value is not None:
                got.add(value)
    consumer.close()
    return got
