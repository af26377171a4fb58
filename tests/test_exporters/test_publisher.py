"""Numbers, the gate, pruning and threads of the publisher; the shipper's ways through trouble."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from exporters import (
    Delta,
    HeadMismatch,
    Publisher,
    Shipper,
    SinkUnavailable,
    Snapshot,
    StaleGeneration,
    TableRows,
)
from tests.doubles.memory_log import MemoryLog
from tests.doubles.memory_sink import MemoryServer, MemorySink

DIMS = {"t": 1}
Rows = dict[int, float]


def draft(rows: Rows, removed: tuple[int, ...] = (), count: int = 0) -> Delta:
    return Delta(
        version=0,
        since=0,
        generation=0,
        step=1,
        watermark=2,
        positions={"p/0": 3},
        tables={
            "t": TableRows(
                np.array(list(rows), np.uint64),
                np.array(list(rows.values()), np.float32).reshape(-1, 1),
                np.array(removed, np.uint64),
            )
        },
        dense=None,
        dims=DIMS,
        rows={"t": count or len(rows)},
    )


@dataclass
class Whole:
    """A snapshot source that knows the rows of each version."""

    log: MemoryLog
    rows: Rows = field(default_factory=dict)
    ready: bool = True
    asked: int = 0

    def snapshot(self, at_least: int) -> Snapshot | None:
        self.asked += 1
        newest = self.log.newest()
        if newest is None or newest.version < at_least or not self.ready:
            return None
        keys = np.array(sorted(self.rows), np.uint64)
        values = np.array([[self.rows[k]] for k in sorted(self.rows)], np.float32).reshape(-1, 1)
        return Snapshot(
            version=newest.version,
            step=newest.step,
            watermark=newest.watermark,
            positions={},
            dense=None,
            dims=DIMS,
            counts={"t": len(keys)},
            rows=iter([("t", keys, values)]),
        )


class Bench:
    """A publisher on memory, with its parts at hand."""

    def __init__(
        self,
        servers: int = 1,
        *,
        generation: int = 1,
        floor: int = 0,
        log: MemoryLog | None = None,
        on_step: Callable[[str], None] = lambda step: None,
        max_rows_per_s: int | None = None,
        places: list[MemoryServer] | None = None,
    ) -> None:
        self.servers = places or [MemoryServer() for _ in range(servers)]
        self.log = log if log is not None else MemoryLog({})
        self.source = Whole(self.log)
        self.clock = 0.0
        self.publisher = Publisher(
            self.log,
            [MemorySink(server, name=f"s{i}") for i, server in enumerate(self.servers)],
            generation=generation,
            floor=floor,
            snapshots=self.source,
            on_step=on_step,
            now=lambda: self.clock,
            max_rows_per_s=max_rows_per_s,
        )

    def publish(self, rows: Rows, removed: tuple[int, ...] = ()) -> Delta:
        self.source.rows.update(rows)
        for key in removed:
            self.source.rows.pop(key, None)
        return self.publisher.append(draft(rows, removed, len(self.source.rows)))

    def settle(self, ticks: int = 40) -> None:
        for _ in range(ticks):
            self.publisher.tick()

    def heads(self) -> list[int | None]:
        return [s.state.head.version if s.state.head else None for s in self.servers]

    def served(self, server: int = 0) -> dict[int, float]:
        table = self.servers[server].table("t")
        return {key: float(np.frombuffer(row, np.float32)[0]) for key, row in table.items()}


def test_the_first_version_reaches_an_empty_sink_as_a_snapshot() -> None:
    bench = Bench()
    bench.publish({1: 1.0, 2: 2.0})
    bench.settle()
    assert bench.heads() == [1]
    assert bench.served() == {1: 1.0, 2: 2.0}
    bench.publish({2: 5.0}, removed=(1,))
    bench.settle()
    assert bench.heads() == [2]
    assert bench.served() == {2: 5.0}
    assert [p.since for p in bench.servers[0].state.stream] == [None, 1]
    (status,) = bench.publisher.status
    assert (status.reason, status.connected, status.behind) == ("", True, 0)


def test_a_draft_is_numbered_and_put_in_order() -> None:
    bench = Bench(servers=0, generation=3, floor=7)
    first = bench.publisher.append(draft({9: 1.0, 2: 2.0, 5: 3.0}, removed=(8, 4)))
    assert (first.version, first.since, first.generation) == (8, 7, 3)
    written = bench.log.read(8).tables["t"]
    assert written.keys.tolist() == [2, 5, 9]
    assert written.values[:, 0].tolist() == [2.0, 3.0, 1.0]
    assert written.removed.tolist() == [4, 8]
    assert bench.publisher.append(draft({})).since == 8
    repair = bench.publisher.append(draft({}), since=5)
    assert (repair.version, repair.since) == (10, 5)
    broken = bench.publisher.append(draft({}), since=30)
    assert (broken.version, broken.since) == (31, 30)


def test_no_version_is_given_out_at_or_below_a_head_ever_seen() -> None:
    bench = Bench()
    bench.publisher.note_head(41)
    assert bench.publisher.next_version() == 42
    bench.publisher.note_head(7)
    assert bench.publisher.next_version() == 42


def test_a_strange_head_gets_a_snapshot_above_it() -> None:
    bench = Bench()
    bench.publish({1: 1.0})
    bench.settle()
    other = Bench(places=bench.servers, generation=2)
    for _ in range(3):
        other.publish({5: 5.0, 6: 6.0})
    other.settle()
    assert other.heads() == [3]
    assert bench.heads() == [3]
    third = Bench(places=bench.servers, generation=3)
    third.publish({8: 8.0, 9: 9.0})
    third.settle()
    assert third.heads() == [3]
    assert third.publisher.status[0].needs_snapshot
    third.publish({8: 8.5})
    third.settle()
    assert third.heads() == [4]
    assert third.served() == {8: 8.5, 9: 9.0}


def test_the_gate_closes_two_entries_ahead_of_the_foremost_sink() -> None:
    bench = Bench(servers=2)
    bench.publish({1: 1.0})
    bench.settle()
    bench.servers[0].down = True
    for version in range(2, 6):
        assert bench.publisher.may_begin()
        bench.publish({1: float(version)})
        bench.settle(6)
    bench.servers[1].down = True
    bench.settle(6)
    bench.publish({1: 1.0})
    assert bench.publisher.may_begin()
    bench.publish({1: 1.0})
    assert not bench.publisher.may_begin()
    bench.servers[1].down = False
    bench.settle()
    assert bench.publisher.may_begin()
    assert Bench(servers=0).publisher.may_begin()


def test_the_gate_does_not_wait_for_a_snapshot_that_waits_for_a_delta() -> None:
    bench = Bench()
    bench.source.ready = False
    for _ in range(4):
        bench.publish({1: 1.0})
    bench.settle()
    assert bench.publisher.may_begin()


def test_a_newer_trainer_ends_an_older_one() -> None:
    older = Bench()
    older.publish({1: 1.0})
    older.settle()
    newer = Bench(places=older.servers, generation=2, log=MemoryLog(older.log._shelf), floor=1)
    newer.settle(1)
    with pytest.raises(StaleGeneration, match="generation 1"):
        older.settle(2)
    with pytest.raises(StaleGeneration, match="generation 2"):
        Bench(places=older.servers, generation=2).settle(1)


def test_a_wiped_sink_is_filled_again() -> None:
    bench = Bench()
    bench.publish({1: 1.0})
    bench.publish({2: 2.0})
    bench.settle()
    bench.servers[0].wipe()
    bench.settle()
    assert bench.heads() == [2]
    assert bench.served() == {1: 1.0, 2: 2.0}
    assert bench.servers[0].state.fence == 1


def test_a_sink_back_in_time_is_seen_while_idle_and_brought_up_again() -> None:
    """A fail-over loses acknowledged writes; nothing else will ever tell."""
    bench = Bench()
    bench.publish({1: 1.0})
    bench.settle()
    saved = bench.servers[0].save()
    bench.publish({1: 2.0, 2: 2.0})
    bench.settle()
    bench.servers[0].restore(saved)
    bench.settle()
    assert bench.heads() == [2]
    assert bench.served() == {1: 2.0, 2: 2.0}
    assert [p.since for p in bench.servers[0].state.stream] == [None, 1]


def test_a_piece_that_failed_is_sent_again() -> None:
    for after in (False, True):
        for fail_in in range(8):
            bench = Bench()
            bench.publish({1: 1.0})
            bench.settle()
            bench.servers[0].fail_in = fail_in
            bench.servers[0].fail_after_applying = after
            bench.publish({1: 2.0}, removed=(7,))
            bench.settle()
            assert bench.heads() == [2]
            assert bench.served() == {1: 2.0}


def test_a_full_sink_is_told_and_tried_again() -> None:
    bench = Bench()
    bench.publish({1: 1.0})
    bench.settle()
    bench.servers[0].full = True
    bench.publish({1: 2.0})
    bench.settle()
    (status,) = bench.publisher.status
    assert "OOM" in status.reason
    assert status.connected
    assert bench.heads() == [1]
    bench.servers[0].full = False
    bench.settle()
    assert bench.heads() == [2]
    assert bench.publisher.status[0].reason == ""


def test_a_snapshot_of_under_half_of_the_rows_is_held_until_released() -> None:
    bench = Bench()
    bench.publish(dict.fromkeys(range(10), 1.0))
    bench.settle()
    lost = Bench(places=bench.servers, generation=2)
    lost.publish({1: 5.0})
    lost.publish({2: 6.0})
    lost.settle()
    (status,) = lost.publisher.status
    assert status.held
    assert "2 rows where 10 are served" in status.reason
    assert lost.heads() == [1]
    asked = lost.source.asked
    lost.settle()
    assert lost.source.asked == asked
    lost.clock += 60
    lost.settle()
    assert lost.source.asked == asked + 1
    lost.publisher.shippers[0].accept_small()
    lost.settle()
    assert lost.heads() == [2]
    assert lost.served() == {1: 5.0, 2: 6.0}
    assert not lost.publisher.status[0].held


def test_old_epochs_stay_for_a_while_after_a_flip() -> None:
    """Clients that read the head before it go on reading there."""
    bench = Bench()
    bench.publish({1: 1.0})
    bench.settle()
    bench.publish({1: 2.0})
    bench.publisher.shippers[0].mark()
    bench.settle()
    assert bench.heads() == [2]
    assert set(bench.servers[0].state.rows) == {1, 2}
    bench.clock += 11
    bench.settle()
    assert set(bench.servers[0].state.rows) == {2}


def test_pruning_stops_at_kept_cuts_and_at_heads() -> None:
    bench = Bench(servers=2)
    bench.publish({1: 1.0})
    bench.settle()
    bench.servers[0].down = True
    for version in range(2, 8):
        bench.publish({1: float(version)})
        bench.settle()
    assert bench.publisher.prune(0) == 0
    assert bench.publisher.prune(5) == 0
    bench.servers[0].down = False
    bench.settle()
    assert bench.publisher.prune(5) == 4
    assert [e.version for e in bench.log.entries()] == [5, 6, 7]
    assert bench.publisher.prune(9) == 2


def test_a_sink_that_was_never_reached_holds_the_whole_log() -> None:
    bench = Bench()
    bench.servers[0].down = True
    bench.publish({1: 1.0})
    bench.publish({1: 2.0})
    bench.settle()
    assert bench.publisher.prune(2) == 0


def test_a_full_log_lets_go_of_the_sink_that_lags_most() -> None:
    bench = Bench(servers=2)
    bench.publish({1: 1.0})
    bench.settle()
    bench.servers[0].down = True
    for version in range(2, 8):
        bench.publish({1: float(version)})
        bench.settle()
    bench.log.max_bytes = 10
    assert bench.publisher.prune(5) == 4
    bench.servers[0].down = False
    bench.settle()
    assert bench.heads() == [7, 7]
    assert bench.served(0) == bench.served(1) == {1: 7.0}
    assert [p.since for p in bench.servers[0].state.stream][-1] is None


def test_rows_are_paced() -> None:
    bench = Bench(max_rows_per_s=1000)
    bench.publish(dict.fromkeys(range(5000), 1.0))
    bench.settle()
    assert bench.heads() == [None]
    bench.clock += 5.1
    bench.settle()
    assert bench.heads() == [1]


def test_steps_are_told_and_what_they_raise_goes_through() -> None:
    steps: list[str] = []
    bench = Bench(on_step=steps.append)
    bench.publish({1: 1.0})
    bench.settle()
    bench.publish({1: 2.0})
    bench.settle()
    assert steps == ["D2", "D4", "D5", "D2", "D4", "D4", "D4", "D5"]

    class Crash(Exception):
        pass

    def crash(step: str) -> None:
        if step == "D5":
            raise Crash

    other = Bench(on_step=crash)
    other.publish({1: 1.0})
    with pytest.raises(Crash):
        other.settle()


def test_a_damaged_entry_means_a_snapshot() -> None:
    bench = Bench()
    bench.publish({1: 1.0})
    bench.settle()
    bench.publish({1: 2.0, 2: 2.0})
    bench.publish({3: 3.0})
    del bench.log._shelf[2]
    bench.settle()
    assert bench.heads() == [3]
    assert bench.served() == {1: 2.0, 2: 2.0, 3: 3.0}


def test_sinks_have_different_names() -> None:
    log = MemoryLog({})
    sinks = [MemorySink(MemoryServer()), MemorySink(MemoryServer())]
    with pytest.raises(ValueError, match="different names"):
        Publisher(log, sinks, generation=1, floor=0, snapshots=Whole(log))


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.002)


def test_threads_ship_and_stop() -> None:
    bench = Bench(servers=2)
    with bench.publisher:
        bench.publish({1: 1.0})
        wait_until(lambda: bench.heads() == [1, 1])
        bench.servers[0].down = True
        bench.publish({1: 2.0})
        wait_until(lambda: bench.heads() == [1, 2])
        wait_until(lambda: not bench.publisher.status[0].connected)
        assert bench.publisher.drain(5.0)
        bench.servers[0].down = False
        wait_until(lambda: bench.heads() == [2, 2])
    assert not [t for t in threading.enumerate() if t.name.startswith("ship-")]
    assert bench.publisher.fatal is None


def test_what_ends_a_thread_is_kept_for_the_trainer() -> None:
    older = Bench()
    with older.publisher:
        older.publish({1: 1.0})
        wait_until(lambda: older.heads() == [1])
        MemorySink(older.servers[0]).take_fence(5)
        wait_until(lambda: older.publisher.fatal is not None)
        assert isinstance(older.publisher.fatal, StaleGeneration)
        assert not older.publisher.drain(0.0) or older.publisher.status[0].behind == 0


def test_a_head_that_another_moved_is_looked_at_anew() -> None:
    bench = Bench()
    bench.publish({1: 1.0})
    bench.settle()
    head = bench.servers[0].state.head
    assert head is not None
    bench.servers[0].state.head = replace(head, version=9)
    bench.publish({1: 2.0})
    bench.settle()
    assert bench.publisher.status[0].needs_snapshot
    assert bench.publish({1: 3.0}).version == 10
    bench.settle()
    assert bench.heads() == [10]


def test_errors_say_what_the_caller_does_next() -> None:
    assert issubclass(SinkUnavailable, ConnectionError)
    assert "no head" in str(HeadMismatch("s", 3, None))
    assert isinstance(Bench().publisher.shippers[0], Shipper)
