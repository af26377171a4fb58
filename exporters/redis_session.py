"""One connection to Redis; the only module that imports the Redis client.

The client finds, connects and logs in; commands then go over its socket directly, without its
retries: a client that reconnects between WATCH and EXEC would write without the fence.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import hiredis
from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from exporters.errors import FenceLost, SinkLostTime, SinkRefused, SinkUnavailable, SinkUnfit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Command = Sequence[str | bytes | int]

__all__ = ["Session", "fence_of", "problems"]

READ_BYTES = 1 << 16
NOT_NOW = frozenset({"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"})
BUCKET_ENTRIES = 200
"""Fields that a bucket may come to hold, being made for a hundred on average."""

_logger = logging.getLogger(__name__)


class _ErrorReply(Exception):
    """An error that Redis answered, kept among the answers until all are read."""


class Session:
    """One connection to a Redis server, made when it is needed and dropped on any trouble.

    Parameters
    ----------
    url
        As the client reads it: redis://, rediss:// or unix://.
    name
        Name for messages; the URL may hold a password and is never shown.
    timeout_s
        Bound on connecting, and on waiting for an answer.
    """

    def __init__(self, url: str, *, name: str, timeout_s: float) -> None:
        self.name = name
        pool = ConnectionPool.from_url(url)
        pool.connection_kwargs.update(
            decode_responses=False,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
            health_check_interval=0,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )
        self._connection: Any = pool.make_connection()
        self._socket: socket.socket | None = None
        self._reader = hiredis.Reader(replyError=_ErrorReply)

    def call(self, *command: str | bytes | int) -> Any:
        """Send one command and return its answer."""
        return self.many([command])[0]

    def many(self, commands: Iterable[Command]) -> list[Any]:
        """Send commands in one go and return their answers, all of which must be good."""
        packed = self.pack(commands)
        return self.raw([b"".join(packed)], len(packed))

    def pack(self, commands: Iterable[Command]) -> list[bytes]:
        """Return the bytes of commands, one item each."""
        pack = self._connection.pack_command
        return [b"".join(pack(*command)) for command in commands]

    def raw(self, data: Sequence[bytes], answers: int) -> list[Any]:
        """Send bytes and return so many answers.

        Raises
        ------
        SinkUnavailable
            Not reached, or the connection broke. It is made anew by the next call.
        SinkRefused
            One of the answers is an error; all were read.
        """
        try:
            wire = self._open()
            wire.sendall(b"".join(data))
            replies = [self._read(wire) for _ in range(answers)]
        except (exceptions.RedisError, hiredis.HiredisError, OSError) as error:
            self.close()
            raise SinkUnavailable(f"sink {self.name!r} can't be reached: {error}") from error
        except BaseException:
            self.close()
            raise
        self._refuse(replies)
        return replies

    def script(self, text: str, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """Run a script by its digest, or by its text when the server doesn't know it."""
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        rest = (len(keys), *keys, *arguments)
        try:
            return self.call("EVALSHA", digest, *rest)
        except SinkRefused as error:
            if not str(error.__cause__).startswith("NOSCRIPT"):
                raise
        return self.call("EVAL", text, *rest)

    def close(self) -> None:
        """Drop the connection."""
        self._socket = None
        with contextlib.suppress(Exception):
            self._connection.disconnect()

    def _open(self) -> socket.socket:
        """Have the client connect and log in, and take over the socket.

        Reading answers one by one through the client costs several times what Redis needs to
        write the rows that are answered for.
        """
        if self._socket is None:
            self._connection.connect()
            # The client has no public way to hand over its socket.
            self._socket = self._connection._sock  # noqa: SLF001
            self._reader = hiredis.Reader(replyError=_ErrorReply)
        return self._socket

    def _read(self, wire: socket.socket) -> Any:
        while (reply := self._reader.gets()) is False:
            data = wire.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
        return reply

    def _refuse(self, replies: Iterable[Any]) -> None:
        for reply in replies:
            for error in reply if isinstance(reply, list) else [reply]:
                # That EXEC was aborted comes last; an answer before it says why.
                if isinstance(error, _ErrorReply):
                    word = str(error).split(" ", 1)[0]
                    if word in NOT_NOW:
                        raise SinkUnavailable(
                            f"sink {self.name!r} can't answer now: {error}"
                        ) from error
                    # After a fail-over the address may lead elsewhere: connect anew.
                    if word == "READONLY":
                        self.close()
                    raise SinkRefused(f"sink {self.name!r} refuses: {error}") from error

    def transact(
        self,
        fence: str,
        watch: Sequence[str],
        reads: Sequence[Command],
        build: Callable[[list[Any]], list[bytes]],
        generation: int,
    ) -> None:
        """Write what `build` makes of the answers to `reads`, if nothing watched has changed.

        Raises
        ------
        FenceLost
            The key `fence` doesn't hold `generation`.
        SinkLostTime
            A watched key changed in between, though the fence is ours: an earlier write of ours
            arrived late, or the sink went back in time.
        """
        _, held, *replies = self.many([("WATCH", fence, *watch), ("GET", fence), *reads])
        try:
            self._own(held, generation)
            packed = build(replies)
        except BaseException:
            self.close()  # and with it the watch
            raise
        data = b"".join([*self.pack([("MULTI",)]), *packed, *self.pack([("EXEC",)])])
        if self.raw([data], len(packed) + 2)[-1] is None:
            self._own(self.call("GET", fence), generation)
            raise SinkLostTime(f"sink {self.name!r} was written to by something else")

    def _own(self, held: bytes | None, generation: int) -> None:
        if (observed := fence_of(held)) != generation:
            raise FenceLost(self.name, observed)


def fence_of(value: bytes | None) -> int | None:
    """Return the generation in a fence; None when it is gone."""
    if not value:
        return None
    if not value.isdigit() or len(value) > 16:
        raise SinkRefused(f"a fence that is no number: {value[:40]!r}")
    return int(value)


def problems(session: Session, dims: Mapping[str, int], *, allow_eviction: bool) -> list[str]:
    """Return what would make a Redis costly for tables of these dims, one sentence each.

    Raises
    ------
    SinkUnfit
        Its eviction policy may drop rows silently, and `allow_eviction` is off.
    """
    found = []
    info = session.call("INFO", "memory").decode(errors="replace")
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "unknown").strip()
    if policy != "noeviction" and not policy.startswith("volatile"):
        text = (
            f"Redis {session.name!r} may drop rows silently: maxmemory-policy is {policy};"
            " set it to noeviction, or allow it by export.redis.allow_eviction"
        )
        if not allow_eviction:
            raise SinkUnfit(text)
        _logger.warning("%s (it is allowed)", text)
    width = 4 + 4 * max(dims.values(), default=0)
    wanted = {"hash-max-listpack-value": width, "hash-max-listpack-entries": BUCKET_ENTRIES}
    for name, limit in _listpack_limits(session).items():
        if limit < wanted.get(name, 0):
            found.append(
                f"Redis {session.name!r} would keep rows at up to double the memory: set {name}"
                f" to {wanted[name]} or more (it is {limit})"
            )
    return found


def _listpack_limits(session: Session) -> dict[str, int]:
    try:
        found = session.call("CONFIG", "GET", "hash-max-listpack-*")
    except SinkRefused:  # hosted servers refuse CONFIG
        return {}
    return {name.decode(): int(value) for name, value in zip(found[::2], found[1::2], strict=True)}
