"""Notes that a sink keeps of how far it has come; what they tell of a head; pure.

A sink that fails over to a copy of itself, or comes back from a backup, is *older* than what it
acknowledged. Nothing in Redis tells. So every write of rows changes a note beside the rows, in the
same transaction, and goes through only if the note is the one that the writer left there last.

There are two per group: *pending* for a delta's rows in the live epoch, *filling* for a snapshot's
rows in an epoch that is still to go live. A note is written as seven numbers with spaces between:
``epoch version generation chunks done reach_version reach_generation``.

Because every write changes a note, and every write watches both, a write that was given up for
lost but waits in some buffer can't take effect after a later one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from exporters.errors import Corrupt, SinkLostTime
from exporters.version import MAX_INT, Half

if TYPE_CHECKING:
    from collections.abc import Iterable

    from exporters.version import Head

__all__ = ["Ledger", "Note", "Notes", "judge"]


class Note(NamedTuple):
    """How far the rows of a version have come in a group.

    Parameters
    ----------
    epoch, version, generation
        Whose rows: the trainer `generation` writes `version` into `epoch`.
    chunks
        Writes so far; only its being another number after each write matters.
    done
        Pending: the largest version that was completed in this epoch. Filling: the epoch completed
        last, 0 if none. A version that is begun (again) is not done.
    reach
        The largest version begun in this epoch, and the generation that made it, by which a log
        knows it whoever ships it. A fail-over may take back a head, so that a version is shipped
        again below one that was begun.
    """

    epoch: int
    version: int
    generation: int
    chunks: int
    done: int
    reach: Half

    def encode(self) -> bytes:
        """Return the note as it stands in a sink."""
        return b" ".join(str(number).encode() for number in (*self[:5], *self.reach))

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """Read a note.

        Raises
        ------
        Corrupt
            It isn't seven numbers.
        """
        words = data[:200].split(b" ")
        if len(words) != 7 or not all(word.isdigit() and len(word) <= 16 for word in words):
            raise Corrupt(f"not a note: {data[:200]!r}")
        numbers = [int(word) for word in words]
        if max(numbers) > MAX_INT:
            raise Corrupt(f"not a note: {data[:200]!r}")
        epoch, version, generation, chunks, done, *reach = numbers
        return cls(epoch, version, generation, chunks, done, Half(*reach))


class Notes(NamedTuple):
    """Both notes of a group; None: not there."""

    pending: Note | None
    filling: Note | None


class Ledger:
    """What a writer knows of the notes of one group.

    Parameters
    ----------
    sink
        Name for messages.
    """

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._last: Notes = Notes(None, None)
        self._maybe: Notes = Notes(None, None)

    def reset(self, notes: Notes) -> None:
        """Begin from what was read after the fence became ours."""
        self._last = self._maybe = notes

    def next(
        self, observed: Notes, *, epoch: int, version: int, generation: int, of: int, seal: bool
    ) -> Notes:
        """Return the notes that the next write leaves. Raises as `check`.

        `generation` writes; the version is `of` this one or an older one, whose entry is shipped.
        """
        self.check(observed)
        snapshot = epoch == version
        last = observed.filling if snapshot else observed.pending
        # A delta's epoch begins with a snapshot, whose own note says whether it was completed.
        chunks, done, reach = 1, 0 if snapshot else epoch, Half(version, of)
        if last is not None:
            if last[:3] == (epoch, version, generation):
                chunks = last.chunks + 1
            if last.epoch == epoch:
                reach = max(reach, last.reach)
            if last.epoch == epoch or snapshot:
                done = last.done
        done = version if seal else min(done, version - 1)
        note = Note(epoch, version, generation, chunks, done, reach)
        return observed._replace(filling=note) if snapshot else observed._replace(pending=note)

    def before_dropping(self, observed: Notes, keep: int) -> Notes | None:
        """Return the notes to leave before rows of all epochs but `keep` go; None: as they are.

        A snapshot that was completed, and never went live, is not complete any more when its rows
        are about to go. Raises as `check`.
        """
        self.check(observed)
        filling = observed.filling
        if filling is None or filling.done <= keep:
            return None
        return observed._replace(filling=filling._replace(chunks=filling.chunks + 1, done=0))

    def check(self, observed: Notes) -> None:
        """Compare what a sink notes with what was written to it.

        Raises
        ------
        SinkLostTime
            The notes found are not those left last. After a write whose outcome is not known,
            the notes from before and after it will both do.
        """
        for found, last, maybe in zip(observed, self._last, self._maybe, strict=True):
            if found not in (last, maybe):
                raise SinkLostTime(
                    f"sink {self._sink!r} is older than what it acknowledged: it notes {found},"
                    f" {last} was written"
                )

    def sent(self, notes: Notes) -> None:
        """Take note that a write that leaves these notes is on its way."""
        self._maybe = notes

    def acknowledged(self, notes: Notes) -> None:
        """Take note that the write that leaves these notes took effect."""
        self._last = self._maybe = notes


def judge(head: Head, groups: Iterable[Notes]) -> Head:
    """Say of a head what the notes of all groups tell.

    It is *whole* when its epoch is the one completed last, and its version was completed in it
    unless the snapshot made it. It has a *half* above it when a larger version was begun.
    """
    whole = True
    half: Half | None = None
    for pending, filling in groups:
        whole = whole and filling is not None and filling.done == head.epoch
        if pending is not None and pending.epoch == head.epoch:
            whole = whole and pending.done >= head.version
            if pending.reach.version > head.version:
                half = pending.reach if half is None else max(half, pending.reach)
        else:
            whole = whole and head.version == head.epoch
    return replace(head, whole=whole, half=half)
