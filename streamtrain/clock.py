"""Timers and deadlines: the only module that reads the time of day or a monotonic clock.

Nothing that changes a learned result reads time; the clock of the model is event time and lives
in the trainer.
"""

import time
from collections.abc import Callable

Now = Callable[[], float]

monotonic: Now = time.monotonic
wall: Now = time.time


class Timer:
    """Says when something that is done every so often is due again.

    Parameters
    ----------
    every_s : float
        Seconds between two times. The first time is one period after the start.
    now : callable
        Monotonic clock in seconds.
    """

    def __init__(self, every_s: float, *, now: Now = monotonic) -> None:
        self._every = every_s
        self._now = now
        self._next = now() + every_s

    def due(self) -> bool:
        """Whether the period has passed; does not restart it."""
        return self._now() >= self._next

    def restart(self) -> None:
        """Begin a new period now: a late beat is not made up for by a burst."""
        self._next = self._now() + self._every


class Deadline:
    """One time budget shared by a chain of blocking calls: each takes what remains."""

    def __init__(self, seconds: float, *, now: Now = monotonic) -> None:
        self._now = now
        self._end = now() + seconds

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - self._now())

    def passed(self) -> bool:
        """Whether the budget is used up."""
        return self.remaining() <= 0.0
