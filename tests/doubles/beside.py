"""Work beside the training thread that runs when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Later(Generic[T]):
    """A slot as `streamtrain.background.Job` is one, without a thread: `run` does the work.

    `patient`: whoever takes with time to wait finds the work done.
    """

    def __init__(self) -> None:
        self.patient = False
        self._work: Callable[[], T] | None = None
        self._done: tuple[T] | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self.waiting or self._done is not None or self._error is not None

    @property
    def waiting(self) -> bool:
        """Whether work was submitted that nobody has run."""
        return self._work is not None

    def submit(self, work: Callable[[], T]) -> None:
        assert not self.busy
        self._work = work

    def run(self) -> None:
        """Do the work now; what it raises comes back to whoever takes, but for a crash and a failed check."""
        work, self._work = self._work, None
        if work is not None:
            try:
                self._done = (work(),)
            except AssertionError:
                raise
            except Exception as error:  # noqa: BLE001
                self._error = error

    def take(self, timeout_s: float | None = 0.0) -> T | None:
        if self.waiting and (timeout_s is None or self.patient):
            self.run()
        error, self._error = self._error, None
        done, self._done = self._done, None
        if error is not None:
            raise error
        return done[0] if done is not None else None
