"""What can go wrong in the composer, and the exit code each failure ends with.

::

    StreamtrainError                exit 1
    ├── ConfigError (ValueError)    exit 2   what the user wrote; carries every mistake with its path
    ├── StartRefused                exit 3   restarting will not help until someone decides
    │   ├── LockHeld                         another trainer holds the checkpoint directory
    │   ├── EmptyStartRefused                no valid cut, but something was published or stored before
    │   ├── Superseded                       a newer trainer owns the model
    │   └── StrangePackage                   another distribution's package stands where ours should
    ├── CutCorrupt                  exit 4   a cut on disk does not match its manifest
    ├── NonFinite (ArithmeticError) exit 1   a step whose loss or gradient is not finite; names the samples
    └── ConservationBroken          exit 1   samples were lost or counted twice: a defect of ours
"""

from collections.abc import Sequence
from typing import Final

EXIT_DONE: Final = 0
EXIT_UNEXPECTED: Final = 1
EXIT_USAGE: Final = 2
EXIT_REFUSED: Final = 3
EXIT_CORRUPT: Final = 4


class StreamtrainError(Exception):
    """Base of every error that streamtrain raises on purpose."""

    exit_code: int = EXIT_UNEXPECTED


class ConfigError(StreamtrainError, ValueError):
    """The configuration cannot be used; ``mistakes`` holds one line per mistake."""

    exit_code = EXIT_USAGE

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class StartRefused(StreamtrainError):
    """The trainer must not start as things stand; restarting it will not help."""

    exit_code = EXIT_REFUSED


class LockHeld(StartRefused):
    """Another process holds the checkpoint directory."""


class EmptyStartRefused(StartRefused):
    """No valid cut, although something was stored or published before."""


class Superseded(StartRefused):
    """A trainer of a newer generation owns the model."""


class StrangePackage(StartRefused):
    """A package of ours is hidden or overwritten by another distribution's."""


class CutCorrupt(StreamtrainError):
    """A cut on disk does not match its manifest."""

    exit_code = EXIT_CORRUPT


class NonFinite(StreamtrainError, ArithmeticError):
    """A step gave a loss or gradient that is not finite; neither side has moved."""


class ConservationBroken(StreamtrainError):
    """``consumed = learned + dropped`` does not hold."""
