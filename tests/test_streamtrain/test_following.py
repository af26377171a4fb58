"""What a replica's process says."""

from __future__ import annotations

import threading

from exporters import NotReady
from streamtrain.following import Served, follow


class Scripted:
    """Stands for a replica: serves the versions of a script, and then stands still."""

    def __init__(self, versions: list[int], stop: threading.Event) -> None:
        self._versions = versions
        self._stop = stop
        self.reason = ""
        self.watermark = 1_000
        self.tables = {"user": 4, "item": 4}

    def wait_for(self, version: int, timeout_s: float) -> int:
        del timeout_s
        for held in self._versions:
            if held >= version:
                return held
        if self.reason:
            self._stop.set()
        self.reason = "the sink is gone"
        raise NotReady("nothing came")

    def rows(self, table: str) -> int:
        return len(table)


def test_each_version_is_told_once_and_so_is_each_reason() -> None:
    stop = threading.Event()
    replica = Scripted([0, 3, 4], stop)
    told = list(follow(replica, stop, wall=lambda: 3.5))  # type: ignore[arg-type]
    assert [t.version for t in told if isinstance(t, Served)] == [0, 3, 4]
    assert told[-1] == "the sink is gone"
    assert len(told) == 4
    first = told[0]
    assert isinstance(first, Served)
    assert (first.rows, first.age_s) == ({"item": 4, "user": 4}, 2.5)
