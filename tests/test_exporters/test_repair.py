"""What S5 finds, case by case; that it suffices is what the crash model shows."""

from __future__ import annotations

from dataclasses import replace

from exporters import Head, Repair, plan
from tests.test_exporters.test_log import HEAD, entry


def head(version: int, generation: int = 1) -> Head:
    return replace(
        HEAD, version=version, generation=generation, checksum=f"{version:064x}", epoch=1
    )


CHAIN = [entry(v, v - 1) for v in range(1, 9)]


def test_nothing_was_published_after_the_cut() -> None:
    assert plan(CHAIN, {"a": head(8)}, 8) == Repair(8, [], frozenset(), needed=False)
    assert plan([], {}, 0) == Repair(0, [], frozenset(), needed=False)


def test_versions_after_the_cut_are_repaired() -> None:
    assert plan(CHAIN, {"a": head(7)}, 5) == Repair(5, [6, 7, 8], frozenset(), needed=True)
    assert plan(CHAIN, {}, 5) == Repair(5, [6, 7, 8], frozenset(), needed=True)


def test_a_sink_that_lags_behind_the_cut_draws_the_repair_down() -> None:
    found = plan(CHAIN, {"a": head(3), "b": head(8)}, 6)
    assert found == Repair(3, [4, 5, 6, 7, 8], frozenset(), needed=True)


def test_a_sink_without_a_head_or_with_a_strange_one_gets_a_snapshot() -> None:
    strange = {"none": None, "number": head(9), "generation": head(4, 2), "ours": head(8)}
    strange["checksum"] = replace(head(4), checksum="f" * 64)
    strange["lost"] = replace(head(4), whole=False)
    found = plan(CHAIN, strange, 8)
    assert found.m == 8
    assert found.snapshot_sinks == set(strange) - {"ours"}


def test_a_sink_below_the_logs_beginning_gets_a_snapshot() -> None:
    found = plan(CHAIN[4:], {"a": head(4), "b": head(5)}, 8)
    assert found == Repair(5, [6, 7, 8], frozenset({"a"}), needed=True)


def test_a_hole_above_the_cut_breaks_the_chain_on_purpose() -> None:
    """No delta can name the keys that were in the hole."""
    holed = [e for e in CHAIN if e.version != 6]
    found = plan(holed, {"a": head(8), "b": head(5)}, 4)
    assert found == Repair(9, [], frozenset({"a", "b"}), needed=True)
    assert plan(holed, {"a": replace(head(8), version=20)}, 4).m == 21


def test_a_log_that_ends_below_the_cut_repairs_no_sink_below_it() -> None:
    found = plan(CHAIN, {"a": head(6), "b": head(8)}, 9)
    assert found == Repair(9, [], frozenset({"a", "b"}), needed=False)


def test_an_empty_start_over_a_whole_log_removes_what_was_published() -> None:
    found = plan(CHAIN, {"a": head(8)}, 0)
    assert found == Repair(0, list(range(1, 9)), frozenset(), needed=True)


def test_an_empty_start_over_a_pruned_log_breaks_the_chain() -> None:
    found = plan(CHAIN[3:], {"a": head(8)}, 0)
    assert found == Repair(9, [], frozenset({"a"}), needed=True)
