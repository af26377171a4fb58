"""What was removed from a table, remembered until every reader has it."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Tombs(NamedTuple):
    """Removals as columns [n], by rising step; `rows` tells lost rows from lost candidates."""

    keys: NDArray[np.uint64]
    steps: NDArray[np.int64]
    rows: NDArray[np.bool_]

    def after(self, step: int) -> "Tombs":
        """Return those of later steps, copied."""
        later = self.steps > step
        return Tombs(self.keys[later], self.steps[later], self.rows[later])


class Graveyard:
    """Tombstones in the order of their steps. A key may have several, and may be back."""

    __slots__ = ("_graves",)

    def __init__(self) -> None:
        self._graves: list[tuple[int, bool, NDArray[np.uint64]]] = []

    def __len__(self) -> int:
        return sum(keys.size for _, _, keys in self._graves)

    def bury(self, keys: NDArray[np.uint64], *, rows: bool, step: int) -> None:
        """Remember that these keys lost their row, or their place as a candidate, at `step`."""
        self._graves.append((step, rows, keys))

    def forget(self, upto: int) -> None:
        """Drop tombstones of steps up to that one."""
        self._graves = [grave for grave in self._graves if grave[0] > upto]

    def after(self, step: int, *, rows_only: bool) -> NDArray[np.uint64]:
        """Return keys buried after `step`, sorted, each once."""
        keys = [k for at, rows, k in self._graves if at > step and (rows or not rows_only)]
        return np.unique(np.concatenate(keys)) if keys else np.empty(0, np.uint64)

    def last(self, key: int) -> int | None:
        """Return the step at which a key last lost its row, as far as is remembered."""
        for step, rows, keys in reversed(self._graves):
            if rows and bool(np.any(keys == np.uint64(key))):
                return step
        return None

    def columns(self) -> Tombs:
        """Return all of them, copied."""
        sizes = [keys.size for _, _, keys in self._graves]
        return Tombs(
            np.concatenate([np.empty(0, np.uint64), *(keys for _, _, keys in self._graves)]),
            np.repeat(np.array([step for step, _, _ in self._graves], np.int64), sizes),
            np.repeat(np.array([rows for _, rows, _ in self._graves], np.bool_), sizes),
        )

    def restore(self, tombs: Tombs) -> None:
        """Take over what `columns` gave."""
        turns = (np.diff(tombs.steps) != 0) | (tombs.rows[1:] != tombs.rows[:-1])
        bounds = [0, *(np.flatnonzero(turns) + 1).tolist(), tombs.keys.size]
        self._graves = [
            (int(tombs.steps[low]), bool(tombs.rows[low]), tombs.keys[low:high].copy())
            for low, high in pairwise(bounds)
            if low < high
        ]
