"""Everything that can go wrong while a version is published or followed.

::

    ExportError
    ├── WireError
    │   └── Corrupt (ValueError)             bytes that are no chunk, or not the promised ones
    ├── LogCorrupt (ValueError)              a file of the log is damaged
    ├── SinkError
    │   ├── SinkUnavailable (ConnectionError)  not reached: nothing was decided, try again
    │   ├── OutcomeUnknown (ConnectionError)   broke while deciding: look before going on
    │   ├── SinkRefused                      reached and refused: out of memory, read-only, ...
    │   ├── SinkUnfit                        reached, and may lose rows without a word
    │   ├── SinkLostTime                     the sink is older than what it acknowledged
    │   ├── FenceTaken                       S3: another generation is at or above ours
    │   ├── FenceLost                        the fence is not ours (any more)
    │   └── HeadMismatch                     D5: the head is not the one to build upon
    ├── StaleGeneration                      a newer trainer owns the model: end
    ├── SnapshotHeld                         a snapshot far smaller than what it would replace
    └── ReplicaError
        ├── Duplicate                        a delta that the replica has
        ├── Gap                              a delta that begins above the replica
        ├── NotReady (TimeoutError)          nothing to answer from yet
        └── UnknownTable (KeyError)          no such table in the model

The class says what the caller does next; the text says what was wrong, where, and the cure.
"""

from __future__ import annotations

__all__ = [
    "Corrupt",
    "Duplicate",
    "ExportError",
    "FenceLost",
    "FenceTaken",
    "Gap",
    "HeadMismatch",
    "LogCorrupt",
    "NotReady",
    "OutcomeUnknown",
    "ReplicaError",
    "SinkError",
    "SinkLostTime",
    "SinkRefused",
    "SinkUnavailable",
    "SinkUnfit",
    "SnapshotHeld",
    "StaleGeneration",
    "UnknownTable",
    "WireError",
]


class ExportError(Exception):
    """Root of the errors of this package."""


class WireError(ExportError):
    """Root of what is wrong with bytes from the wire."""


class Corrupt(WireError, ValueError):
    """Bytes that break the layout, or whose checksum differs."""


class LogCorrupt(ExportError, ValueError):
    """A file of the log can't be read, or holds other rows than its checksum says."""


class SinkError(ExportError):
    """Root of what a sink answers."""


class SinkUnavailable(SinkError, ConnectionError):
    """The sink was not reached. Everything sent to it is safe to send again."""


class OutcomeUnknown(SinkError, ConnectionError):
    """The connection broke while the sink decided; the head tells what it decided."""


class SinkRefused(SinkError):
    """The sink was reached and refused to write, for a reason that an operator can see to."""


class SinkUnfit(SinkError):
    """The sink is set up so that it may drop rows silently, and nobody allowed it."""


class SinkLostTime(SinkError):
    """The sink holds less than it had acknowledged, as after a fail-over or a restart."""


class FenceTaken(SinkError):
    """The fence could not be taken.

    Parameters
    ----------
    sink
        Name of the sink.
    fence
        The generation that holds it.
    """

    def __init__(self, sink: str, fence: int) -> None:
        super().__init__(
            f"sink {sink!r}: its fence is held by generation {fence}; start with a larger one"
        )
        self.sink = sink
        self.fence = fence


class FenceLost(SinkError):
    """A write was refused because the fence is another's, or gone.

    Parameters
    ----------
    sink
        Name of the sink.
    observed
        The generation found in the fence, or None when the fence is gone.
    """

    def __init__(self, sink: str, observed: int | None) -> None:
        found = "gone" if observed is None else f"at generation {observed}"
        super().__init__(f"sink {sink!r}: the fence is {found}, not ours")
        self.sink = sink
        self.observed = observed


class HeadMismatch(SinkError):
    """The head is not the one that the version to be published builds upon.

    Parameters
    ----------
    sink
        Name of the sink.
    version
        The version that was to be published.
    observed
        The version found in the head, or None when there is no head.
    """

    def __init__(self, sink: str, version: int, observed: int | None) -> None:
        found = "there is no head" if observed is None else f"the head is at {observed}"
        super().__init__(f"sink {sink!r}: version {version} does not follow on: {found}")
        self.sink = sink
        self.version = version
        self.observed = observed


class StaleGeneration(ExportError):
    """A newer trainer owns the model.

    For a trainer this is the end; for a replica, a delta of an older trainer that it drops.
    """


class SnapshotHeld(ExportError):
    """A snapshot has under half of the rows that the sink serves, and was not written."""


class ReplicaError(ExportError):
    """Root of what a replica answers."""


class Duplicate(ReplicaError):
    """The replica is at or above the delta's version already."""


class Gap(ReplicaError):
    """The delta begins above the replica's version: rows in between are missing."""


class NotReady(ReplicaError, TimeoutError):
    """The replica holds no version yet, or not the one waited for."""


class UnknownTable(ReplicaError, KeyError):
    """The model has no table of this name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
