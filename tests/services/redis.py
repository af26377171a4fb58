"""A real redis-server (Debian's 7.0 or newer) that keeps everything in memory."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence

from tests.services.service import Service, ServiceUnavailable

DEFAULTS = {
    "save": "",
    "appendonly": "no",
    # 68 bytes of value at dim 16 are over Redis' own limit of 64 and would turn every bucket
    # into a hash table; the tests run as production should
    "hash-max-listpack-value": "512",
    "maxmemory": "0",
    "maxmemory-policy": "noeviction",
}


class RedisServer(Service):
    """redis-server on a free port, empty at every start.

    Parameters
    ----------
    options
        Further words of the command line, such as ``["--maxmemory", "10mb"]``; they win over
        `DEFAULTS`.
    """

    name = "redis"

    def __init__(self, options: Sequence[str] = ()) -> None:
        super().__init__()
        self.options = tuple(options)

    @property
    def url(self) -> str:
        """Address for clients, database 0."""
        return f"redis://{self.host}:{self.port}/0"

    def command(self) -> list[str]:
        """The server's command line; raises ServiceUnavailable when there is no redis-server."""
        words = [_binary(), "--bind", self.host, "--port", str(self.port), "--daemonize", "no"]
        words += ["--dir", str(self.folder)]
        for name, value in DEFAULTS.items():
            words += [f"--{name}", value]
        return [*words, *self.options]

    def answers(self) -> bool:
        """Whether PING is answered."""
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        raise ServiceUnavailable(
            "redis-server is not on the PATH; install it: apt-get install redis-server"
        )
    return found
