"""What a long run shows, on a terminal and elsewhere."""

from __future__ import annotations

import io

from streamtrain.display import Glance, Lines, Moving, display


def glance(elapsed_s: float, *, loss: float | None = 0.5) -> Glance:
    return Glance(
        elapsed_s=elapsed_s, total_s=60, samples=12_345, rate=5000, loss=loss, auc=None,
        rows=7, version=3, fresh_ms=180.4,
    )  # fmt: skip


def test_lines_come_every_few_seconds() -> None:
    """A log that is written to a file must not grow by two lines a second."""
    out: list[str] = []
    lines = Lines(out.append)
    for tenths in range(110):
        lines.show(glance(tenths / 10))
    assert len(out) == 3
    assert "samples/s 5,000  samples 12,345  log loss 0.5000  AUC -" in out[0]
    assert "version 3  freshness 180 ms" in out[0]


def test_no_terminal_no_colours() -> None:
    stream = io.StringIO()
    shown = display(stream)
    shown.note("starting")
    shown.show(glance(0, loss=None))
    shown.close()
    assert stream.getvalue().startswith("starting\n")
    assert "\x1b" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table_that_is_gone_at_the_end() -> None:
    stream = Terminal()
    shown = display(stream)
    assert isinstance(shown, Moving)
    shown.show(glance(1))
    shown.show(glance(2))
    shown.close()
    shown.close()
    assert "12,345" in stream.getvalue()
