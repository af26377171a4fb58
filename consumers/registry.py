"""Schemas out of a Confluent-compatible registry.

What was found is kept for ever, on disk too: a schema id never changes its meaning, and a restart
must outlive an outage of the registry. An id that the registry says it doesn't know is asked for
a few times, then given up, and asked for again with growing pauses. A registry that doesn't answer
is another matter: it says nothing about the message, so the message has to wait.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from consumers._avro_schema import Schema
from consumers.config import Registry
from consumers.errors import DecodeError, RegistryUnavailable, SpecError

logger = logging.getLogger(__name__)

TRIES = 3
"""How often an id is asked for before its messages are given up."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 600.0
_DOWN_PAUSE_S = 2.0
_NOT_FOUND = 404


class Client(Protocol):
    """The part of the client that is used."""

    def get_schema(self, schema_id: int) -> Any:
        """Return a schema by its id."""
        ...

    def get_schema_by_guid(self, guid: str) -> Any:
        """Return a schema by its GUID."""
        ...


class RegistrySchemas:
    """Schemas by key, as :mod:`consumers._framing` makes them.

    Parameters
    ----------
    config
        Where the registry is.
    cache
        Folder for what was found; None keeps it in memory alone.
    client
        In place of the one that the config asks for.
    now
        Clock of the pauses, in seconds.

    Raises
    ------
    SpecError
        The config is wrong, a secret isn't there, or the client isn't installed.
    """

    def __init__(
        self,
        config: Registry,
        *,
        cache: Path | None = None,
        client: Client | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = config.url
        self._cache = cache
        self._client = _client(config, os.environ) if client is None else client
        self._now = now
        self._found: dict[str, Schema] = {}
        self._tries: dict[str, int] = {}
        self._ask_again: dict[str, float] = {}
        self._down_until = float("-inf")

    def schema(self, key: str) -> Schema:
        """Return a schema.

        Raises
        ------
        RegistryUnavailable
            The registry doesn't answer, or an id is to be asked for again in a moment.
        DecodeError
            ``unknown_schema``: the registry doesn't know it.
        """
        if key in self._found:
            return self._found[key]
        found = self._read(key)
        if found is None:
            found = self._ask(key)
            self._write(key, found)
        self._found[key] = found
        return found

    def _ask(self, key: str) -> Schema:
        now = self._now()
        if now < self._ask_again.get(key, now):
            raise self._unknown(key)
        if now < self._down_until:
            raise RegistryUnavailable(f"schema registry {self._url} doesn't answer")
        kind, _, name = key.partition("-")
        try:
            if kind == "id":
                answer = self._client.get_schema(int(name))
            else:
                answer = self._client.get_schema_by_guid(name)
        except Exception as error:  # the client lets out those of its HTTP library as well
            if getattr(error, "http_status_code", None) == _NOT_FOUND:
                raise self._not_found(key) from error
            self._down_until = self._now() + _DOWN_PAUSE_S
            logger.warning("schema registry %s doesn't answer: %s", self._url, error)
            raise RegistryUnavailable(
                f"schema registry {self._url} doesn't answer: {error}"
            ) from error
        return _plain(key, answer)

    def _not_found(self, key: str) -> RegistryUnavailable | DecodeError:
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        pause = min(_FIRST_PAUSE_S * 2 ** min(tries - 1, 20), _LONGEST_PAUSE_S)
        self._ask_again[key] = self._now() + pause
        logger.warning("schema registry %s doesn't know %s (asked %d times)", self._url, key, tries)
        return self._unknown(key)

    def _unknown(self, key: str) -> RegistryUnavailable | DecodeError:
        if self._tries[key] < TRIES:
            return RegistryUnavailable(
                f"schema registry {self._url} doesn't know {key}; asking again in a moment"
            )
        return DecodeError("unknown_schema", f"the registry doesn't know {key}")

    def _read(self, key: str) -> Schema | None:
        if self._cache is None:
            return None
        path = self._cache / f"{key}.avsc"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s can't be read and is asked for again: %s", path, error)
            return None

    def _write(self, key: str, schema: Schema) -> None:
        if self._cache is None:
            return
        path = self._cache / f"{key}.avsc"
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(schema), encoding="utf-8")
            part.replace(path)
        except OSError as error:  # the next start has to ask again, and that is all
            logger.warning("schema %s can't be kept in %s: %s", key, self._cache, error)


def _plain(key: str, answer: Any) -> Schema:
    kind = answer.schema_type or "AVRO"
    if kind != "AVRO":
        raise DecodeError("unknown_schema", f"{key} is a schema of {kind}, not of Avro")
    if answer.references:
        raise DecodeError("unknown_schema", f"{key} refers to other schemas; register it whole")
    try:
        return json.loads(answer.schema_str)
    except ValueError:
        return answer.schema_str  # the name of a primitive type, without its quotes


def _client(config: Registry, environment: Mapping[str, str]) -> Client:
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise SpecError(
            "the client of the schema registry isn't installed; "
            "pip install 'confluent-kafka[schemaregistry]'"
        ) from error
    options: dict[str, Any] = {
        "url": config.url,
        "timeout": config.timeout / 1000,
        "max.retries": 0,  # a message waits for the registry, and asks again by itself
    }
    if config.ca is not None:
        options["ssl.ca.location"] = config.ca
    if config.username_env is not None:
        names = [config.username_env, config.password_env or ""]
        missing = [name for name in names if name not in environment]
        if missing:
            raise SpecError(
                f"source.decode.avro.registry names {' and '.join(missing)} in the environment, "
                "which isn't set; set it"
            )
        options["basic.auth.user.info"] = ":".join(environment[name] for name in names)
    try:
        client: Client = SchemaRegistryClient(options)
    except (ValueError, OSError) as error:
        raise SpecError(f"source.decode.avro.registry: {error}") from error
    return client
