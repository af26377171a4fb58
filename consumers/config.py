"""Config of sources, decoding and features: frozen structs, nothing else.

Durations are integers in milliseconds and sizes integers in bytes; who reads a config file
turns ``30s`` and ``256MiB`` into them first. Secrets are named (``*_env``, ``*_file``), never held.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

__all__ = [
    "Avro",
    "Clip",
    "Decode",
    "Earliest",
    "Feature",
    "Kafka",
    "Label",
    "Latest",
    "Log1p",
    "Registry",
    "Sample",
    "Security",
    "Source",
    "TimeField",
    "Timestamp",
]

# A time before 1973 in milliseconds is, in practice, one given in seconds.
_EARLIEST_PLAUSIBLE_MS = 100_000_000_000


class Earliest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start at the first message that the source still has."""


class Latest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start behind the last message that is there at the first start."""


class Timestamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start at the first message of this time or later.

    ``timestamp`` is ISO 8601 with a zone (``2026-01-31T00:00:00Z``) or milliseconds since 1970.
    """

    timestamp: str | int

    def __post_init__(self) -> None:
        """Refuse what isn't a point in time.

        Raises
        ------
        ValueError
            No zone, not ISO 8601, or a number that looks like seconds.
        """
        if self.ms < _EARLIEST_PLAUSIBLE_MS:
            raise ValueError(
                f"start timestamp {self.timestamp!r} lies before 1973: are those seconds? "
                "Give milliseconds since 1970, or a date such as 2026-01-31T00:00:00Z"
            )

    @property
    def ms(self) -> int:
        """The point in time in milliseconds since 1970, UTC."""
        if isinstance(self.timestamp, int):
            return self.timestamp
        try:
            moment = datetime.fromisoformat(self.timestamp)
        except ValueError as error:
            raise ValueError(
                f"start timestamp {self.timestamp!r} is no ISO 8601 date and time; "
                "write it as 2026-01-31T00:00:00Z"
            ) from error
        if moment.tzinfo is None:
            raise ValueError(
                f"start timestamp {self.timestamp!r} has no zone; end it with Z or +00:00"
            )
        return round(moment.timestamp() * 1000)


Start = Annotated[
    Earliest | Latest | Timestamp,
    msgspec.Meta(
        extra={"choices": {"earliest": Earliest, "latest": Latest, "timestamp": Timestamp}}
    ),
]


class Security(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to prove who we are to Kafka. Files are paths, environment variables are names."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "SASL_SSL"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    username_env: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


class Kafka(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Topics of a Kafka cluster, all partitions of each.

    ``start`` counts at the first start only; ``group`` is where a courtesy commit goes for lag
    dashboards, and decides nothing; ``memory`` bounds what the client fetches ahead.
    """

    brokers: str
    topics: list[str]
    start: Start = Earliest()
    group: str | None = None
    memory: Annotated[int, msgspec.Meta(ge=8 << 20, extra={"unit": "size"})] = 256 << 20
    security: Security | None = None
    options: dict[str, Any] = {}


class Registry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Confluent-compatible schema registry. Name and password come by environment variables."""

    url: str
    username_env: str | None = None
    password_env: str | None = None
    ca: str | None = None
    timeout: Annotated[int, msgspec.Meta(ge=100, extra={"unit": "duration"})] = 5000

    def __post_init__(self) -> None:
        """Refuse half of a login, and a secret in the address.

        Raises
        ------
        ValueError
            As said.
        """
        if "@" in self.url:
            raise ValueError("registry url holds a login; name it by username_env and password_env")
        if (self.username_env is None) != (self.password_env is None):
            raise ValueError("registry needs both username_env and password_env, or neither")


class Avro(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Avro messages, read by one schema whatever they were written with.

    Attributes
    ----------
    schema
        Path of the schema that samples are described by, in JSON.
    framing
        ``bare``: nothing but the record, written with ``schema``. ``confluent``: 0x00 and an id,
        0x01 and a GUID, or either in the header ``__value_schema_id``. ``single_object``: Avro's
        own, a fingerprint of the schema.
    registry
        Where ids and GUIDs are looked up.
    writers
        Paths of further schemas that single objects may be written with.
    """

    schema: str
    framing: Literal["bare", "confluent", "single_object"] = "bare"
    registry: Registry | None = None
    writers: list[str] = []

    def __post_init__(self) -> None:
        """Refuse what the framing has no use for.

        Raises
        ------
        ValueError
            As said.
        """
        if (self.framing == "confluent") != (self.registry is not None):
            raise ValueError("framing confluent needs a registry, and no other framing takes one")
        if self.writers and self.framing != "single_object":
            raise ValueError("writers belong to framing single_object")


class Decode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How message values become samples."""

    avro: Avro


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where samples come from."""

    kafka: Kafka | None = None
    decode: Decode


class TimeField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The integer field that holds the event time, counted from 1970 UTC in ``unit``."""

    field: str
    unit: Literal["s", "ms", "us"] = "ms"


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a task learns.

    ``field`` defaults to the task's name. ``at_least`` turns a number into a binary label:
    1 where the value is at least this. ``weight`` is the task's share of the loss.
    """

    field: str | None = None
    loss: Literal["binary", "squared"] = "binary"
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    at_least: float | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Event time, weight and labels of a sample; ``weight`` names a field."""

    time: TimeField
    weight: str | None = None
    labels: dict[str, Label]


class Log1p(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``sign(x) * log(1 + |x|)``: the usual log1p from 0 up, defined below 0 too."""


class Clip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values below the first bound become it, values above the second become that."""

    clip: tuple[float, float]


DenseStep = Annotated[Log1p | Clip, msgspec.Meta(extra={"choices": {"log1p": Log1p, "clip": Clip}})]


class Feature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named input of the model: ids (with ``tables``) or floats (with ``dense``).

    Attributes
    ----------
    field
        Field of the message; the feature's name when absent.
    tables
        Tables that the ids are looked up in.
    pool
        How the rows of several ids become one.
    max
        A longer list keeps its first ``max`` ids.
    weights
        Field with one weight per id.
    sequence
        Ids stay apart; a longer list keeps its last ``sequence`` ids.
    padding
        Ids with this value are left out.
    dense
        Steps applied to floats in this order; an empty list takes them as they are.
    width
        Number of floats where the field is an array.
    buckets
        Bounds in rising order; the id is the number of bounds at or below the value.
    """

    field: str | None = None
    tables: list[str] = []
    pool: Literal["sum", "mean", "sqrtn"] = "mean"
    max: Annotated[int, msgspec.Meta(ge=1)] | None = None
    weights: str | None = None
    sequence: Annotated[int, msgspec.Meta(ge=1)] | None = None
    padding: int | str | None = None
    dense: list[DenseStep] | None = None
    width: Annotated[int, msgspec.Meta(ge=1)] | None = None
    buckets: list[float] | None = None
