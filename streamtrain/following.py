"""A replica in a process of its own, which says what it follows.

``python -m streamtrain.following URL MODEL`` prints a JSON line per version that it serves, and
answers questions on stdin: a line ``version keys_file answer_file`` waits for the version, looks
the keys up and writes rows, sizes and dense weights. Loads neither TensorFlow nor Numba.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from exporters import NotReady, Replica
from streamtrain import clock

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WAIT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    """A version that a replica began to serve.

    Attributes
    ----------
    at_ms : float
        Since 1970.
    version : int
    watermark : int
        Event time that the model had reached, ms.
    rows : dict of str to int
        By table.
    """

    at_ms: float
    version: int
    watermark: int
    rows: dict[str, int]

    @property
    def age_s(self) -> float:
        """How old the newest samples in it were when it was served."""
        return (self.at_ms - self.watermark) / 1000


def follow(
    replica: Replica, stop: threading.Event, *, wall: clock.Now = clock.wall
) -> Iterator[Served | str]:
    """Yield each version as it is served, and each new reason for standing still.

    Parameters
    ----------
    replica : Replica
        Started.
    stop : threading.Event
        Ends it.
    wall : callable
        Seconds since 1970.
    """
    version, reason = -1, ""
    while not stop.is_set():
        try:
            version = replica.wait_for(version + 1, _WAIT_S)
        except NotReady:
            if replica.reason and replica.reason != reason:
                reason = replica.reason
                yield reason
            continue
        at, reason = wall() * 1000, ""
        rows = {table: replica.rows(table) for table in sorted(replica.tables)}
        yield Served(at, version, replica.watermark, rows)


def main() -> None:
    """Follow until stdin ends."""
    url, model = sys.argv[1:]
    replica = Replica(url, model=model).start(timeout_s=0)
    stop, lock = threading.Event(), threading.Lock()

    def say(line: object) -> None:
        with lock:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    reporter = threading.Thread(target=_report, args=(replica, stop, say), daemon=True)
    reporter.start()
    try:
        for line in sys.stdin:
            version, keys_file, answer_file = line.rstrip("\n").split("\t")
            _answer(replica, int(version), keys_file, answer_file)
            say({"answered": answer_file})
    finally:
        stop.set()
        reporter.join()
        replica.stop()


def _report(replica: Replica, stop: threading.Event, say: Callable[[object], None]) -> None:
    for seen in follow(replica, stop):
        say(asdict(seen) if isinstance(seen, Served) else {"reason": seen})


def _answer(replica: Replica, version: int, keys_file: str, answer_file: str) -> None:
    replica.wait_for(version, timeout_s=60)
    answers: dict[str, NDArray[Any]] = {}
    with np.load(keys_file, allow_pickle=False) as keys:
        for table in keys.files:
            rows, found = replica.lookup(table, keys[table])
            answers[f"{table}.rows"], answers[f"{table}.found"] = rows, found
            answers[f"{table}.size"] = np.array(replica.rows(table))
    if replica.dense is not None:
        answers["dense"] = replica.dense
    answers["version"] = np.array(replica.version)
    np.savez(answer_file, **answers)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
