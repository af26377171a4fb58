"""What can go wrong while reading samples.

::

    ConsumerError
    ├── SpecError (ValueError)              the config and the schema don't fit: fix either
    ├── SourceUnavailable (ConnectionError) nothing answers: try again later
    │   └── RegistryUnavailable             no schema for a message yet: it waits, and so do later ones
    ├── SourceCorrupt (ValueError)          stored samples are damaged: repair or leave the file out
    ├── PositionLost (LookupError)          the position points to what doesn't exist: decide by hand
    └── DecodeError (ValueError)            one message is bad: a dead letter, never the end of a run

A message that can't be used isn't raised to the caller of a source: it comes back as a
:class:`consumers.source.Bad` beside the good samples of its batch.
"""


class ConsumerError(Exception):
    """Base of all errors of this package."""


class SpecError(ConsumerError, ValueError):
    """The description of samples and features doesn't fit the schema of the messages."""


class SourceUnavailable(ConsumerError, ConnectionError):
    """The source doesn't answer, or answers with a refusal."""


class RegistryUnavailable(SourceUnavailable):
    """The schema of a message can't be had at the moment; the message stays where it is."""


class SourceCorrupt(ConsumerError, ValueError):
    """A stored file is damaged; the message names file and byte offset."""


class PositionLost(ConsumerError, LookupError):
    """The position names offsets or partitions which the source doesn't have."""


class DecodeError(ConsumerError, ValueError):
    """One message can't be read.

    Parameters
    ----------
    reason
        Short code, one of :data:`consumers.source.REASONS`.
    detail
        What exactly was wrong, for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
