"""What the config structs refuse by themselves."""

import msgspec
import pytest

from consumers.config import Kafka, Timestamp


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        ("2026-01-31T00:00:00Z", 1_769_817_600_000),
        ("2026-01-31T08:00:00.250+08:00", 1_769_817_600_250),
        (1_769_817_600_000, 1_769_817_600_000),
    ],
)
def test_start_times(given: str | int, ms: int) -> None:
    assert Timestamp(timestamp=given).ms == ms


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1_769_817_600, "are those seconds"),
        ("1970-01-02T00:00:00Z", "before 1973"),
        ("2026-01-31T00:00:00", "has no zone"),
        ("yesterday", "ISO 8601"),
    ],
)
def test_start_times_that_mean_something_else(given: str | int, message: str) -> None:
    """A zone left out moves the start by hours, seconds taken for ms move it to 1970."""
    with pytest.raises(ValueError, match=message):
        Timestamp(timestamp=given)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="topic"):
        Kafka(brokers="localhost:9092", topic=["clicks"])  # type: ignore[call-arg]


def test_structs_are_frozen_and_share_no_defaults() -> None:
    first, second = (Kafka(brokers="b", topics=["t"]) for _ in range(2))
    first.options["x"] = 1
    assert second.options == {}
    with pytest.raises(AttributeError):
        first.brokers = "c"  # type: ignore[misc]
    assert msgspec.structs.asdict(first)["memory"] == 256 << 20
