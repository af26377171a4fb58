"""The generated stream: the same for everyone, and as hard as it says it is."""

from __future__ import annotations

import io

import fastavro
import numpy as np
import pytest

from streamtrain.clickstream import SCHEMA, Clicks, ClickStream, Shape, times
from streamtrain.validation import auc, log_loss

START = 1_700_000_000_000
SMALL = Shape(users=200, segments=4, items=50, life_ms=10_000, drift_ms=60_000)


def some(n: int, *, seed: int = 7, first: int = 0, rate: float = 1000.0) -> Clicks:
    return ClickStream(seed=seed, shape=SMALL).clicks(first, times(START, rate, first, n))


def same(a: Clicks, b: Clicks) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in Clicks.__dataclass_fields__
    )


def test_a_click_depends_on_seed_number_and_time_alone() -> None:
    """The quickstart computes the best possible loss in another process than the one that sent."""
    whole, tail = some(1000), some(300, first=700)
    for name in Clicks.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(whole, name)[700:], getattr(tail, name))
    assert same(whole, some(1000))
    assert not same(whole, some(1000, seed=8))


def test_times_are_even_and_do_not_depend_on_where_one_begins() -> None:
    assert times(START, 400.0, 0, 5).tolist() == [
        START,
        START + 2,
        START + 5,
        START + 7,
        START + 10,
    ]
    assert times(START, 400.0, 3, 2).tolist() == [START + 7, START + 10]


def test_nobody_predicts_better_than_the_known_probability() -> None:
    clicks = some(60_000)
    labels, ones = clicks.click.astype(float), np.ones(60_000)
    best = log_loss(clicks.best, labels, ones)
    assert best is not None
    entropy = -(
        clicks.best * np.log(clicks.best) + (1 - clicks.best) * np.log1p(-clicks.best)
    ).mean()
    assert best == pytest.approx(entropy, abs=0.01)
    constant = log_loss(np.full(60_000, labels.mean()), labels, ones)
    assert constant is not None
    assert best < constant - 0.05
    blurred = 1 / (1 + np.exp(-0.5 * np.log(clicks.best / (1 - clicks.best))))
    assert best < (log_loss(blurred, labels, ones) or 0)
    assert (auc(clicks.best, labels, ones) or 0) > 0.7


def test_popularity_follows_zipf() -> None:
    clicks = some(50_000)
    weights = 1 / np.arange(1, SMALL.users + 1) ** SMALL.zipf
    share = (clicks.user == 0).mean()
    assert share == pytest.approx(weights[0] / weights.sum(), rel=0.05)
    assert clicks.user.max() < SMALL.users
    assert clicks.segment.max() < SMALL.segments


def test_items_are_born_and_die() -> None:
    clicks = some(30_000)  # three lives long
    seen = {int(item): clicks.ts[clicks.item == item] for item in np.unique(clicks.item)}
    assert len(seen) > 2 * SMALL.items
    assert max(int(ts.max() - ts.min()) for ts in seen.values()) < SMALL.life_ms
    for at in range(0, 30_000, 10_000):
        alive = np.unique(clicks.item[(clicks.ts - START) // 100 == at // 100])
        assert len(alive) <= SMALL.items


def test_taste_turns_into_its_opposite() -> None:
    """What a model learned half a period ago must be of no use, or staleness would cost nothing."""
    stream = ClickStream(seed=7, shape=Shape(users=200, items=50, life_ms=10**9, drift_ms=60_000))
    now, later = (
        stream.clicks(0, np.full(5000, START // 60_000 * 60_000 + at)) for at in (0, 30_000)
    )
    np.testing.assert_array_equal(now.item, later.item)
    logits = [np.log(c.best / (1 - c.best)) for c in (now, later)]
    assert np.corrcoef(*logits)[0, 1] < 0.1


def test_values_are_avro_of_the_schema() -> None:
    clicks = some(20)
    schema = fastavro.parse_schema(SCHEMA)
    for value, record in zip(clicks.values(), clicks.records(), strict=True):
        file = io.BytesIO(value)
        read = fastavro.schemaless_reader(file, schema, None)
        assert isinstance(read, dict)
        assert {**read, "ts": round(read["ts"].timestamp() * 1000)} == record
        assert file.read() == b""


def test_a_world_without_inhabitants_is_refused() -> None:
    with pytest.raises(ValueError, match="items is 0; give 1 or more"):
        Shape(items=0)
