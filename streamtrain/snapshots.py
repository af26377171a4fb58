"""Where a sink's snapshot comes from: the newest durable cut, merged, and the log's tail over it.

Never the live store: a snapshot must not stop training for as long as the model is large.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from exporters.log import Log
from exporters.sink import Snapshot, TableSlice
from exporters.version import Delta
from sparse_store.files import rows_of
from streamtrain.cut import Checkpoints, Cut

Keys = NDArray[np.uint64]
Values = NDArray[np.float32]

_NO_KEYS: Keys = np.zeros(0, np.uint64)
_NO_VALUES: Values = np.zeros((0, 0), np.float32)


@dataclass(slots=True)
class _Overlay:
    """What a table's tail says of keys, the newest word last."""

    rows: dict[int, Values | None] = field(default_factory=dict)

    def take(self, delta: Delta, table: str) -> None:
        change = delta.tables.get(table)
        if change is None:
            return
        self.rows.update(dict.fromkeys(change.removed.tolist()))
        self.rows.update(zip(change.keys.tolist(), change.values, strict=True))

    def keys(self) -> Keys:
        return np.fromiter(self.rows, np.uint64, len(self.rows))

    def written(self, dim: int) -> tuple[Keys, Values]:
        kept = {key: row for key, row in self.rows.items() if row is not None}
        values = np.stack([*kept.values()]) if kept else np.zeros((0, dim), np.float32)
        return np.fromiter(kept, np.uint64, len(kept)), values.astype(np.float32, copy=False)


class CutSnapshots:
    """Makes snapshots out of `Checkpoints` and a `Log`; sinks ask from threads of their own.

    The tail is what this generation wrote after the cut: its entries follow on each other, and the
    cut holds all that came before them. It must reach the step of the cut or beyond: a cut may
    hold rows that are newer than its version says, and only an entry at its step or later speaks
    of all of them.
    """

    def __init__(self, checkpoints: Checkpoints, log: Log, *, generation: int) -> None:
        self._checkpoints = checkpoints
        self._log = log
        self._generation = generation
        self._guard = threading.Lock()
        self._cut: Cut | None = None

    def use(self, cut: Cut) -> None:
        """Name the newest durable cut of this trainer's timeline."""
        with self._guard:
            self._cut = cut

    def snapshot(self, at_least: int) -> Snapshot | None:
        """Return the model at the newest log entry, or None when it is not to be had yet."""
        with self._guard:
            cut = self._cut
        newest = self._log.newest()
        if cut is None or newest is None or newest.version < at_least:
            return None
        if newest.generation != self._generation or newest.step < cut.step:
            return None
        tail = [
            self._log.read(entry.version)
            for entry in self._log.entries()
            if entry.generation == self._generation and entry.version > cut.version
        ]
        last = self._log.read(newest.version)
        dense = next((d.dense for d in reversed([*tail, last]) if d.dense is not None), None)
        rows = self._rows(cut, tail, last.dims)
        next(rows)  # From here on the cut is pinned.
        return Snapshot(
            version=newest.version,
            step=newest.step,
            watermark=newest.watermark,
            positions=last.positions,
            dense=dense,
            dims=last.dims,
            counts=last.rows,
            rows=rows,
        )

    def _rows(self, cut: Cut, tail: list[Delta], dims: Mapping[str, int]) -> Iterator[TableSlice]:
        with self._checkpoints.pinned(cut):
            yield "", _NO_KEYS, _NO_VALUES
            parts = cut.parts()
            saved = set(cut.state()["rows"])
            for table, dim in dims.items():
                overlay = _Overlay()
                for delta in tail:
                    overlay.take(delta, table)
                if table in saved:
                    newer = overlay.keys()
                    for keys, values in rows_of(parts, table):
                        older = ~np.isin(keys, newer)
                        yield table, keys[older], values[older]
                yield (table, *overlay.written(dim))
