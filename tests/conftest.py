"""What every test may use: hypothesis profiles, a real Redis, a real Kafka.

The servers start with the first test that asks for them and end with the session. Where one can't
be had, the tests that ask for it are skipped and the summary says so once, loudly.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings

# Before anything imports TensorFlow: no start-up chatter, and no search for a GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from tests.services.kafka import Broker, chosen_broker
from tests.services.redis import DEFAULTS, RedisServer
from tests.services.service import Service, ServiceUnavailable

# No deadline per example: the first one that calls a kernel pays for its compilation.
settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, database=None, print_blob=True
)
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=1_000,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_SERVICES = frozenset({"redis_server", "redis_url", "kafka_broker", "kafka_topic"})
_LAST = "tests/test_kernel_rooms.py"

S = TypeVar("S", bound=Service)

_missing = pytest.StashKey[dict[str, str]]()


class TopicMaker:
    """Makes topics with names of their own: ``kafka_topic(partitions=4) -> name``."""

    def __init__(self, broker: Broker, hint: str) -> None:
        self._broker = broker
        self._hint = "".join(c if c.isalnum() else "-" for c in hint)[:60].strip("-")

    def __call__(self, partitions: int = 1, **config: str | int) -> str:
        """Make a topic; `config` are topic properties with ``_`` for ``.``."""
        name = f"{self._hint}-{uuid.uuid4().hex[:8]}"
        properties = {key.replace("_", "."): str(value) for key, value in config.items()}
        self._broker.create_topic(name, partitions, properties)
        return name


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """The session's redis-server; take `redis_url` unless you stop it or need its port."""
    yield from _served(RedisServer(), request.config)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Address of a Redis that is up, empty and configured as at its start."""
    redis_server.start()
    with contextlib.closing(redis.Redis.from_url(redis_server.url)) as client:
        for name, value in DEFAULTS.items():
            client.config_set(name, value)
        client.flushall()
        client.script_flush()
    return redis_server.url


@pytest.fixture(scope="session")
def kafka_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """The session's Kafka; `.bootstrap` is its address, `stop` and `start` keep port and data."""
    yield from _served(chosen_broker(), request.config)


@pytest.fixture
def kafka_topic(kafka_broker: Broker, request: pytest.FixtureRequest) -> TopicMaker:
    """Factory of topics on a broker that is up."""
    kafka_broker.start()
    return TopicMaker(kafka_broker, request.node.name)


def _served(service: S, config: pytest.Config) -> Iterator[S]:
    try:
        service.start()
    except ServiceUnavailable as reason:
        config.stash[_missing][service.name] = str(reason)
        pytest.skip(f"no {service.name}: {reason}")
    try:
        yield service
    finally:
        service.close()


def pytest_configure(config: pytest.Config) -> None:
    """Begin with nothing missing."""
    config.stash[_missing] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server, and put the checks that look back over the run at its end."""
    for item in items:
        if _SERVICES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)
    items.sort(key=lambda item: item.nodeid.startswith(_LAST))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say loudly which servers could not be had, since their tests did not run."""
    for name, reason in config.stash[_missing].items():
        terminalreporter.section(
            f"TESTS OF {name.upper()} DID NOT RUN", sep="!", red=True, bold=True
        )
        terminalreporter.line(reason, red=True)
