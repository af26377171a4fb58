"""Options and log of the Kafka client."""

import logging
from pathlib import Path
from typing import Any

import pytest

from consumers._kafka_client import client_logger, client_options
from consumers.config import Kafka, Security
from consumers.errors import SpecError


def kafka(**more: Any) -> Kafka:
    return Kafka(brokers="b:9092", topics=["clicks"], **more)


@pytest.mark.parametrize("memory", [8 << 20, 64 << 20, 256 << 20, 64 << 30])
def test_memory_is_split(memory: int) -> None:
    """A backlog fills whatever the client may hold: queue and answers in flight together."""
    options: Any = client_options(kafka(memory=memory))
    queue = options["queued.max.messages.kbytes"] * 1024
    assert queue + options["fetch.max.bytes"] <= memory
    assert options["max.partition.fetch.bytes"] <= options["fetch.max.bytes"]
    assert options["receive.message.max.bytes"] >= options["fetch.max.bytes"] + 512
    assert 1_000_000 <= options["fetch.max.bytes"] < 2**31
    assert queue < 2**31


def test_nothing_moves_by_itself() -> None:
    options = client_options(kafka())
    assert options["auto.offset.reset"] == "error"
    assert options["enable.auto.commit"] is False
    assert options["enable.auto.offset.store"] is False
    assert options["isolation.level"] == "read_committed"
    assert options["group.id"] == "streamtrain"
    assert client_options(kafka(group="board"))["group.id"] == "board"


def test_options_are_passed_on() -> None:
    options = client_options(kafka(options={"fetch.wait.max.ms": 7, "client.rack": "a"}))
    assert options["fetch.wait.max.ms"] == 7
    assert options["client.rack"] == "a"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("auto.offset.reset", "set by the source itself"),
        ("group.id", "set by the source itself"),
        ("metadata.broker.list", "set by the source itself"),
        ("fetch.message.max.bytes", "set by the source itself"),
        ("sasl.password", "is a secret"),
    ],
)
def test_options_that_are_ours(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"options.{name} .*{message}"):
        client_options(kafka(options={name: "x"}))


def test_security(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KAFKA_USER", "me")
    secret = tmp_path / "secret"
    secret.write_text("a b \n", encoding="utf-8")
    security = Security(
        mechanism="SCRAM-SHA-512",
        username_env="KAFKA_USER",
        password_file=str(secret),
        ca="ca.pem",
    )
    options = client_options(kafka(security=security))
    assert {name: options[name] for name in options if name.startswith(("s", "sasl"))} == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": "a b ",
        "ssl.ca.location": "ca.pem",
    }
    with pytest.raises(SpecError, match="security.protocol is set by"):
        client_options(kafka(security=security, options={"security.protocol": "SSL"}))


@pytest.mark.parametrize(
    ("security", "message"),
    [
        (Security(username_env="NOT_SET"), "username_env names NOT_SET, which isn't set"),
        (Security(password_env="NOT_SET"), "password_env names NOT_SET"),
        (Security(password_file="/none"), "password_file /none: No such file"),
        (Security(password_file="/none", password_env="X"), "take one of them out"),
    ],
)
def test_secrets_that_are_not_there(security: Security, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        client_options(kafka(security=security))


def test_floods_are_thinned_out(caplog: pytest.LogCaptureFixture) -> None:
    """A broker that is down has cost a thousand lines a second."""
    now = 0.0
    logger = client_logger("test.kafka.client", lambda: now)
    with caplog.at_level(logging.INFO):
        for attempt in range(50):
            logger.error("%s/1: connect failed after %d ms", "10.0.0.1:9092", attempt)
        logger.error("something else")
        now = 61.0
        logger.error("10.0.0.1:9092/1: connect failed after 99 ms")
    assert len(caplog.messages) == 3
