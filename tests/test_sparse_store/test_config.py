"""Configuration: ranges, defaults, and what a converter of YAML relies on."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest

from sparse_store import config
from sparse_store.config import (
    DAY,
    Adagrad,
    Always,
    Count,
    Evict,
    Ftrl,
    Normal,
    Table,
    Uniform,
    Zeros,
    validated,
)


def test_defaults_are_the_documented_ones() -> None:
    table = Table("t", dim=4)
    assert validated(table) == table
    assert (table.optimizer, table.admit, table.evict) == (Adagrad(0.05), Always(), Evict())
    assert Adagrad() == Adagrad(
        rate=0.05, initial=0.1, epsilon=1e-7, clip=None, l2=0.0, decay=1.0, floor=0.0
    )
    assert Count(3) == Count(count=3, candidates=50_000_000, forget=7 * DAY)


def test_rows_start_where_their_optimizer_does() -> None:
    """Published FTRL derives weights from its state, and an empty state means zero."""
    assert Table("t", dim=1).start == Normal(0.01)
    assert Table("t", dim=1, optimizer=Ftrl()).start == Zeros()
    assert Table("t", dim=1, optimizer=Ftrl(), init=Uniform(0.1)).start == Uniform(0.1)


def choices(annotation: Any) -> dict[str, type]:
    [meta] = [m for m in annotation.__metadata__ if isinstance(m, msgspec.Meta)]
    assert meta.extra is not None
    found: dict[str, type] = meta.extra["choices"]
    return found


def test_choices_stand_in_the_annotations() -> None:
    hints = get_type_hints(Table, include_extras=True)
    assert choices(hints["optimizer"]) == {"adagrad": Adagrad, "ftrl": Ftrl}
    assert choices(hints["admit"]) == {"always": Always, "count": Count}
    assert choices(config.Init) == {"zeros": Zeros, "normal": Normal, "uniform": Uniform}
    for struct, field in ((Evict, "ttl"), (Count, "forget")):
        assert "duration" in repr(get_type_hints(struct, include_extras=True)[field])


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "ü", "x" * 65, "a:b", "a}"])
def test_names_that_no_file_or_key_could_carry_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="regex"):
        validated(Table(name, dim=1))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (Table("t", dim=0), r">= 1 - at `\$.dim`"),
        (Table("t", dim=1, optimizer=Adagrad(0.0)), r"> 0.0 - at `\$.optimizer.rate`"),
        (Table("t", dim=1, optimizer=Adagrad(float("nan"))), "optimizer.rate"),
        (Table("t", dim=1, optimizer=Adagrad(float("inf"))), "optimizer.rate"),
        (Table("t", dim=1, optimizer=Adagrad(decay=1.1)), "optimizer.decay"),
        (Table("t", dim=1, optimizer=Adagrad(clip=0.0)), "optimizer.clip"),
        (Table("t", dim=1, optimizer=Ftrl(alpha=-1.0)), "optimizer.alpha"),
        (Table("t", dim=1, init=Normal(-1.0)), "init.normal"),
        (Table("t", dim=1, admit=Count(0)), "admit.count"),
        (Table("t", dim=1, admit=Count(2, candidates=0)), "admit.candidates"),
        (Table("t", dim=1, evict=Evict(ttl=0)), "evict.ttl"),
        (Table("t", dim=1, evict=Evict(rows=0)), "evict.rows"),
        (Table("t", dim=1, unadmitted="shared"), "unadmitted"),  # type: ignore[arg-type]
    ],
)
def test_a_struct_made_by_hand_does_not_slip_through(table: Table, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        validated(table)
    assert "table 't'" in str(raised.value)


def test_a_division_by_zero_is_refused_before_it_happens() -> None:
    with pytest.raises(ValueError, match="epsilon 0"):
        Adagrad(initial=0.0, epsilon=0.0)
    with pytest.raises(ValueError, match="epsilon 0"):
        Adagrad(initial=1.0, decay=0.9, epsilon=0.0)
    Adagrad(initial=1.0, epsilon=0.0)
    Adagrad(floor=0.1, decay=0.9, epsilon=0.0)
    with pytest.raises(ValueError, match="beta and l2"):
        Ftrl(beta=0.0)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="per_step"):
        msgspec.convert({"ttl": 5, "per_step": 1}, Evict)
