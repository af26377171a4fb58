"""A generated click stream with a known best possible log loss.

Users and items follow Zipf's law, items are born and die, and taste drifts, so that a model which
stops learning gets worse. Every click is a pure function of seed, its number and its event time:
whoever knows these can say with which probability it was a click, and how well anyone could do.
"""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import fastavro
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]

SCHEMA: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "user", "type": "long"},
        {"name": "segment", "type": "int"},
        {"name": "item", "type": "long"},
        {"name": "click", "type": "int"},
    ],
}

_WIDTH: Final = 4  # of the hidden taste vectors
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_PARSED: Final = fastavro.parse_schema(
    {
        **SCHEMA,
        "fields": [{**f, "type": "long"} if f["name"] == "ts" else f for f in SCHEMA["fields"]],
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the world is, and how fast it changes.

    Attributes
    ----------
    users, segments : int
        Who clicks, and the groups that share most of their taste.
    items : int
        How many are alive at any one time.
    life_ms : int
        How long an item lives, in event time.
    drift_ms : int
        How long taste takes to come back to where it was; after half of it, it is the opposite.
    zipf : float
        Exponent of the popularity of users and of items.
    bias, strength : float
        Log-odds of a click without any taste, and how strong taste is.
    """

    users: int = 5_000
    segments: int = 12
    items: int = 300
    life_ms: int = 30_000
    drift_ms: int = 180_000
    zipf: float = 1.05
    bias: float = -1.2
    strength: float = 2.0

    def __post_init__(self) -> None:
        """Refuse a world without inhabitants, or one without time."""
        for name in ("users", "segments", "items", "life_ms", "drift_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Clicks:
    """Consecutive clicks as columns, all of shape ``(n,)``.

    Attributes
    ----------
    id, ts, user, segment, item, click : int64 array
        The fields of the record; `ts` in ms.
    best : float64 array
        The probability that this was a click, which nobody is told.
    """

    id: Longs
    ts: Longs
    user: Longs
    segment: Longs
    item: Longs
    click: Longs
    best: Floats

    def records(self) -> Iterator[dict[str, int]]:
        """Yield the clicks as records of `SCHEMA`."""
        names = ("id", "ts", "user", "segment", "item", "click")
        columns = [getattr(self, name).tolist() for name in names]
        for row in zip(*columns, strict=True):
            yield dict(zip(names, row, strict=True))

    def values(self) -> Iterator[bytes]:
        """Yield the clicks as bare Avro values of `SCHEMA`."""
        for record in self.records():
            buffer = io.BytesIO()
            fastavro.schemaless_writer(buffer, _PARSED, record)
            yield buffer.getvalue()


class ClickStream:
    """The stream of one seed.

    Parameters
    ----------
    seed : int
    shape : Shape

    Examples
    --------
    >>> stream = ClickStream(seed=7)
    >>> clicks = stream.clicks(0, np.array([1_700_000_000_000, 1_700_000_000_001]))
    >>> clicks.click.shape, bool((clicks.best < 1).all())
    ((2,), True)
    """

    def __init__(self, *, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape = shape or Shape()
        self._seed = seed
        users, segments = np.arange(shape.users), np.arange(shape.segments)
        self._user_ranks = _cumulative(shape.users, shape.zipf)
        self._item_ranks = _cumulative(shape.items, shape.zipf)
        self._segment_of = np.floor(self._uniform(1, users) * shape.segments).astype(np.int64)
        # Most of a user's taste is the segment's; two vectors span the plane in which it turns.
        self._tastes = [
            math.sqrt(0.8) * self._vectors(2 + n, segments)[self._segment_of]
            + math.sqrt(0.2) * self._vectors(4 + n, users)
            for n in range(2)
        ]
        self._phases = self._uniform(6, np.arange(shape.items))

    def clicks(self, first: int, times_ms: Longs) -> Clicks:
        """Return the clicks with the numbers from `first` on, at these event times."""
        shape = self.shape
        number = np.arange(first, first + len(times_ms), dtype=np.int64)
        times = np.asarray(times_ms, np.int64)
        user = np.searchsorted(self._user_ranks, self._uniform(7, number), side="right")
        place = np.searchsorted(self._item_ranks, self._uniform(8, number), side="right")
        # A place in the ranking is held by one item after the other.
        life = np.floor(times / shape.life_ms + self._phases[place]).astype(np.int64)
        item = life * shape.items + place
        angle = 2 * np.pi * (times % shape.drift_ms) / shape.drift_ms
        taste = (
            np.cos(angle)[:, None] * self._tastes[0][user]
            + np.sin(angle)[:, None] * self._tastes[1][user]
        )
        liking = (taste * self._vectors(9, item)).sum(axis=1) / math.sqrt(_WIDTH)
        own = 0.5 * self._normal(30, item)
        best = 1 / (1 + np.exp(-(shape.bias + own + shape.strength * liking)))
        click = (self._uniform(10, number) < best).astype(np.int64)
        return Clicks(number, times, user, self._segment_of[user], item, click, best)

    def _uniform(self, purpose: int, number: Longs) -> Floats:
        """Return numbers in [0, 1) that depend on seed, purpose and number alone."""
        with np.errstate(over="ignore"):
            x = _mixed(np.uint64(self._seed) + np.uint64(purpose) * _GOLDEN)
            x = _mixed(x ^ (number.astype(np.uint64) * _GOLDEN))
        uniform: Floats = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return uniform

    def _normal(self, purpose: int, number: Longs) -> Floats:
        """Return numbers of the normal distribution, by Box and Muller's formula."""
        radius = np.sqrt(-2 * np.log1p(-self._uniform(2 * purpose + 100, number)))
        normal: Floats = radius * np.cos(2 * np.pi * self._uniform(2 * purpose + 101, number))
        return normal

    def _vectors(self, purpose: int, number: Longs) -> Floats:
        return np.stack(
            [self._normal(1000 + purpose * _WIDTH + n, number) for n in range(_WIDTH)], axis=1
        )


def times(start_ms: int, rate: float, first: int, count: int) -> Longs:
    """Return the event times of numbered clicks that come `rate` a second, evenly."""
    number = np.arange(first, first + count, dtype=np.float64)
    return start_ms + np.floor(number * 1000 / rate).astype(np.int64)


def _mixed(x: Any) -> Any:
    """Mix 64 bits well (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _cumulative(n: int, exponent: float) -> Floats:
    """Return the cumulative probabilities of ranks 1 to n under Zipf's law."""
    weights = 1 / np.arange(1, n + 1) ** exponent
    cumulative = np.cumsum(weights / weights.sum())
    cumulative[-1] = 1.0
    return cumulative
