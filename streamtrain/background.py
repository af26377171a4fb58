"""Work beside the training thread: one job at a time, or a loop; errors come back to the trainer."""

import threading
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


class Loop:
    """Calls a function over and over in a thread: at once while it says True, else after a pause.

    Parameters
    ----------
    name : str
    turn : callable
        One turn; answers whether there may be more to do right now.
    pause_s : float
        Rest after a turn that had nothing to do.
    """

    def __init__(self, name: str, turn: Callable[[], bool], *, pause_s: float) -> None:
        self._turn = turn
        self._pause = pause_s
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to turn."""
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the loop, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self, timeout_s: float) -> None:
        """Ask the loop to end and wait for its current turn."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                more = self._turn()
            except BaseException as error:  # noqa: BLE001  it is raised again where check() is called
                self._error = error
                return
            if not more:
                self._stop.wait(self._pause)
