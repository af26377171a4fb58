"""What a long run shows while it runs: a table that moves on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

_LINE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """How things stand; None where nothing is known yet.

    Attributes
    ----------
    elapsed_s, total_s : float
    samples : int
        Learned since birth.
    rate : float
        Samples per second, lately.
    loss, auc : float or None
        Of the newest predictions, each made before its sample was learned.
    rows : int
        That the replica holds.
    version : int
        That the replica serves.
    fresh_ms : float or None
        From event to servable, lately.
    """

    elapsed_s: float
    total_s: float
    samples: int
    rate: float
    loss: float | None
    auc: float | None
    rows: int
    version: int
    fresh_ms: float | None


class Display(Protocol):
    """Shows what goes on."""

    def note(self, text: str) -> None:
        """Say what happens now."""

    def show(self, glance: Glance) -> None:
        """Say how things stand; called a few times a second."""

    def close(self) -> None:
        """Let go of the terminal."""


class Lines:
    """A line every few seconds."""

    def __init__(self, out: Callable[[str], object]) -> None:
        self._out = out
        self._next = 0.0

    def note(self, text: str) -> None:
        """Say what happens now."""
        self._out(f"{text}\n")

    def show(self, glance: Glance) -> None:
        """Say how things stand, unless that was said just now."""
        if glance.elapsed_s < self._next:
            return
        self._next = glance.elapsed_s + _LINE_EVERY_S
        cells = [f"{name} {value}" for name, value in _cells(glance)]
        self._out(f"{glance.elapsed_s:5.0f} s  {'  '.join(cells)}\n")

    def close(self) -> None:
        """Nothing to let go of."""


class Moving:
    """A table that moves."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def note(self, text: str) -> None:
        """Say what happens now."""
        self._console.print(text, style="dim")

    def show(self, glance: Glance) -> None:
        """Say how things stand."""
        table = Table(
            title=f"{glance.elapsed_s:.0f} of {glance.total_s:.0f} s", title_justify="left"
        )
        for name, _ in _cells(glance):
            table.add_column(name, justify="right", min_width=11)
        table.add_row(*(value for _, value in _cells(glance)))
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Let go of the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def display(stream: TextIO = sys.stderr) -> Display:
    """Return what suits the stream."""
    if stream.isatty():
        return Moving(Console(file=stream))

    def out(text: str) -> None:
        stream.write(text)
        stream.flush()

    return Lines(out)


def _cells(glance: Glance) -> list[tuple[str, str]]:
    return [
        ("samples/s", f"{glance.rate:,.0f}"),
        ("samples", f"{glance.samples:,}"),
        ("log loss", "-" if glance.loss is None else f"{glance.loss:.4f}"),
        ("AUC", "-" if glance.auc is None else f"{glance.auc:.4f}"),
        ("rows", f"{glance.rows:,}"),
        ("version", f"{glance.version}"),
        ("freshness", "-" if glance.fresh_ms is None else f"{glance.fresh_ms:.0f} ms"),
    ]
