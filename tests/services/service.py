"""A server process: start, stop, start again on the same port and data, and never outlive us."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_LOWEST_PORT = 10_240
_POLL_S = 0.02


class ServiceUnavailable(RuntimeError):
    """The server can't be had on this machine; the message says what is missing and the cure."""


class ServiceFailed(RuntimeError):
    """The server was started and did not come up; the message holds the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, below the range of outgoing connections.

    A port from the ephemeral range would be unsafe while its server is stopped: a client that
    keeps connecting to it may be given that very port as its source, connects to itself, and
    the server can't come back.
    """
    highest = _ephemeral_start()
    found: list[int] = []
    dice = random.SystemRandom()
    for _ in range(10_000):
        port = dice.randrange(_LOWEST_PORT, highest)
        if port not in found and _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise ServiceUnavailable(f"no {count} free ports between {_LOWEST_PORT} and {highest}")


def _ephemeral_start() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        start = int(text.split()[0])
    except OSError:
        start = 32_768
    return start if start > _LOWEST_PORT + 1_000 else 32_768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # as servers do: a port whose last connections are in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Service:
    """One server process, its folder and its log.

    A subclass gives the command and tells when the server answers. `start` and `stop` may
    follow one another as often as you like: port and data stay. `close` also removes the folder.

    Attributes
    ----------
    host, port
        Where the server listens; fixed from the first successful start.
    process
        The server's own process (no wrapper in between), or None before the first start.
    folder, log_path
        Its data and what it printed; gone after `close`.
    """

    name = "service"
    start_timeout_s = 30.0
    stop_timeout_s = 10.0

    def __init__(self) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = Path()
        self.log_path = Path()
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._opened = False

    # what a subclass says

    def choose_ports(self) -> None:
        """Take ports; called before the first start, and again when one was snatched away."""
        [self.port] = free_ports(1)

    def prepare(self) -> None:
        """Write configuration into the folder; called after `choose_ports`."""

    def command(self) -> list[str]:
        """The server's command line."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether the server is ready for clients; asked repeatedly after a start."""
        raise NotImplementedError

    # what everybody calls

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> Self:
        """Start the server and return when it answers; nothing to do when it runs already."""
        if self.running:
            return self
        if self._opened:
            self._launch()
            return self
        self.folder = Path(tempfile.mkdtemp(prefix=f"streamtrain-{self.name}-"))
        self.log_path = self.folder / "server.log"
        self._opened = True
        try:
            self._first_start()
        except BaseException:
            self.close()
            raise
        return self

    def stop(self) -> None:
        """End the server in order (SIGTERM, then SIGKILL when it takes too long)."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server at once (SIGKILL), as a crash would."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        if self._opened:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._opened = False

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the server printed."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # inside

    def _first_start(self) -> None:
        for attempt in range(3):
            self.choose_ports()
            self.prepare()
            try:
                self._launch()
            except ServiceFailed:
                # between choosing a port and listening on it, another process may take it
                if attempt == 2 or "in use" not in self.log_tail(200).lower():
                    raise
            else:
                return

    def _launch(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for us; we end the server in our order
            )
        self._watchdog = _watch(self.process.pid)
        deadline = time.monotonic() + self.start_timeout_s
        while not self.answers():
            code = self.process.poll()
            if code is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            self.kill()
            what = (
                f"gave no answer in {self.start_timeout_s:g} s"
                if code is None
                else f"ended with code {code}"
            )
            raise ServiceFailed(f"{self.name} {what}; end of its log:\n{self.log_tail()}")

    def _end(self, signal_number: signal.Signals) -> None:
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal_number)
            try:
                process.wait(self.stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._release_watchdog()

    def _release_watchdog(self) -> None:
        if self._watchdog is None:
            return
        self._watchdog.kill()
        if self._watchdog.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watchdog.stdin.close()
        self._watchdog.wait()
        self._watchdog = None


def _watch(pid: int) -> subprocess.Popen[bytes]:
    """A shell that kills `pid` when our end of its pipe closes: also when we are killed ourselves.

    The parent-death signal of Linux would be shorter, but it fires when the *thread* that
    started the server ends.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -9 "$1"', "watchdog", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
