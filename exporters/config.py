"""Settings of the export, as plain frozen values. Durations in ms, sizes in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Export", "Log", "Redis"]

GIB = 1 << 30

Duration = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "duration"})]
Size = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "size"})]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The directory of deltas.

    Parameters
    ----------
    max_bytes
        Size beyond which a sink that lags no longer holds old entries; it gets a snapshot.
    """

    max_bytes: Size = 20 * GIB


class Redis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Redis to publish into.

    Parameters
    ----------
    url_env, url
        Where it is: the name of an environment variable that holds the URL, or the URL itself
        when it holds no secret. Exactly one.
    layout, dtype
        How rows are kept.
    expected_rows
        Rows to expect per table; buckets are sized by it. Tables not named: a million.
    max_rows_per_s
        Bound on rows written per second, or None.
    keep_versions
        Versions of the dense weights that are kept.
    stream_bytes
        Payload bytes that the stream keeps for replicas that lag.
    groups
        Hash slots over which buckets are spread.
    allow_eviction
        Go on with a Redis that may drop rows silently.
    """

    url_env: str | None = None
    url: str | None = None
    layout: Literal["buckets"] = "buckets"
    dtype: Literal["float32"] = "float32"
    expected_rows: dict[str, Count] = {}
    max_rows_per_s: Count | None = None
    keep_versions: Annotated[int, msgspec.Meta(ge=2)] = 2
    stream_bytes: Size = GIB
    groups: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    allow_eviction: bool = False

    def __post_init__(self) -> None:
        if (self.url is None) == (self.url_env is None):
            raise ValueError("export.redis needs exactly one of `url` and `url_env`")

    def resolve_url(self, environ: Mapping[str, str]) -> str:
        """Return the URL, taken from `environ` when the config names a variable.

        Raises
        ------
        ValueError
            The variable is not set.
        """
        if self.url is not None:
            return self.url
        url = environ.get(self.url_env or "")
        if not url:
            raise ValueError(
                f"export.redis.url_env: the environment variable {self.url_env} is not set"
            )
        return url


class Export(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is published, how often and where.

    Parameters
    ----------
    every
        Time between two deltas.
    log
        The directory of deltas.
    redis
        The Redis to ship to; None: the log alone.
    """

    every: Duration = 1000
    log: Log = Log()
    redis: Redis | None = None
