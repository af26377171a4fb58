"""The client of a Kafka source: its options, out of the config, and its log.

The client may hold fetched messages in three places: its queue, the answer of each broker that
is being read, and what is handed over. ``memory`` is split so that they stay within it.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from consumers.config import Kafka, Security
from consumers.errors import SpecError

Options = dict[str, object]

_SECRETS = frozenset({"sasl.password", "ssl.key.password", "ssl.keystore.password"})
_ALIASES = frozenset(
    {
        "metadata.broker.list",
        "fetch.message.max.bytes",
        "group.instance.id",
        "group.protocol",
        "partition.assignment.strategy",
        "error_cb",
        "on_commit",
        "logger",
    }
)
_MAX_QUEUE_KIB = 2_097_151
_MAX_FETCH = 2_147_483_135
_MAX_RECEIVE = 2_147_483_647
_QUIET_S = 60.0


def client_options(config: Kafka) -> Options:
    """Return what the client is made with.

    Raises
    ------
    SpecError
        The config overrides an option that belongs to the source, puts a secret into it, or
        names a secret that isn't there.
    """
    memory = config.memory
    fetch = min(memory // 4, _MAX_FETCH)
    options: Options = {
        "bootstrap.servers": config.brokers,
        # The client insists on a name; nothing joins that group, and nothing is committed to it.
        "group.id": config.group or "streamtrain",
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        "queued.max.messages.kbytes": min(memory // 2 // 1024, _MAX_QUEUE_KIB),
        "fetch.max.bytes": fetch,
        "max.partition.fetch.bytes": min(memory // 8, 1 << 20),
        "receive.message.max.bytes": min(max(100_000_000, fetch + 512), _MAX_RECEIVE),
    }
    if config.security is not None:
        options |= _security(config.security)
    for name in config.options:
        if name in _SECRETS:
            raise SpecError(
                f"source.kafka.options.{name} is a secret; name where it is instead, "
                "by source.kafka.security.password_env or password_file"
            )
        if name in options or name in _ALIASES:
            raise SpecError(f"source.kafka.options.{name} is set by the source itself; take it out")
    tuned: Options = {
        "fetch.wait.max.ms": 50,
        "reconnect.backoff.max.ms": 10_000,
        "topic.metadata.refresh.interval.ms": 30_000,
        "log.connection.close": False,
        "client.id": "streamtrain",
    }
    return tuned | dict(config.options) | options


def _security(security: Security) -> Options:
    given = {
        "security.protocol": security.protocol,
        "sasl.mechanisms": security.mechanism,
        "sasl.username": _of_environment("username_env", security.username_env, os.environ),
        "sasl.password": _password(security),
        "ssl.ca.location": security.ca,
        "ssl.certificate.location": security.certificate,
        "ssl.key.location": security.key,
    }
    return {name: value for name, value in given.items() if value is not None}


def _password(security: Security) -> str | None:
    if security.password_file is None:
        return _of_environment("password_env", security.password_env, os.environ)
    if security.password_env is not None:
        raise SpecError(
            "source.kafka.security has password_env and password_file; take one of them out"
        )
    try:
        return Path(security.password_file).read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise SpecError(
            f"source.kafka.security.password_file {security.password_file}: {error.strerror}"
        ) from error


def _of_environment(field: str, name: str | None, environment: Mapping[str, str]) -> str | None:
    if name is None:
        return None
    if name not in environment:
        raise SpecError(f"source.kafka.security.{field} names {name}, which isn't set; set it")
    return environment[name]


class _Quiet(logging.Filter):
    """Lets one of many like lines through per minute; a client without a broker floods."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        alike = re.sub(r"[0-9.]+", "#", record.getMessage())
        last = self._last.get(alike)
        if last is not None and self._now() - last < _QUIET_S:
            return False
        if len(self._last) >= 1000:
            self._last.clear()
        self._last[alike] = self._now()
        return True


def client_logger(name: str, now: Callable[[], float]) -> logging.Logger:
    """Return the logger that the client writes to, with its floods thinned out."""
    client = logging.getLogger(name)
    client.filters = [_Quiet(now)]
    return client
