"""Work beside the training thread, one job at a time; errors come back to the trainer."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A slot for one piece of background work at a time.

    Only the training thread calls its methods.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._future: Future[T] | None = None

    @property
    def busy(self) -> bool:
        """Whether work was submitted and its result not taken yet."""
        return self._future is not None

    def submit(self, work: Callable[[], T]) -> None:
        """Begin; the slot must be free."""
        if self._future is not None:
            raise RuntimeError("the slot is taken")
        self._future = self._pool.submit(work)

    def take(self, timeout_s: float | None = 0.0) -> T | None:
        """Return the result and free the slot, or None when there is none within `timeout_s`.

        Raises whatever the work raised; the slot is free then, too. None waits for ever.
        """
        future = self._future
        if future is None:
            return None
        try:
            result = future.result(timeout_s)
        except TimeoutError:
            if not future.done():
                return None
            self._future = None
            raise
        except BaseException:
            self._future = None
            raise
        self._future = None
        return result

    def close(self) -> None:
        """Let the running work end, and take no more."""
        self._pool.shutdown(wait=True)
