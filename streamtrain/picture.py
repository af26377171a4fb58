"""Curves as an SVG file, without a plotting library."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 860
HEIGHT: Final = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 50, 55
_COLOURS: Final = ("#1668b8", "#c8451b", "#5a5a5a", "#2f8f4e")


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line through points; `dashed` for what is only there to compare with."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def svg(title: str, x_label: str, y_label: str, curves: Sequence[Curve]) -> str:
    """Return a picture of the curves with axes and a legend.

    Raises
    ------
    ValueError
        There is no point at all.
    """
    xs = [x for curve in curves for x in curve.x]
    ys = [y for curve in curves for y in curve.y]
    if not xs:
        raise ValueError("there is nothing to draw: no curve has a point")
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    x_low, x_high = min(xs[0], *xs), max(*xs, x_ticks[0] + 1e-9)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys, y_ticks[0] + 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low or 1)
        up = (y - y_low) / (y_high - y_low or 1)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="28" font-size="17">{escape(title)}</text>',
        (
            f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2:.0f}" y="{HEIGHT - 14}" '
            f'text-anchor="middle">{escape(x_label)}</text>'
        ),
        (
            f'<text x="18" y="{HEIGHT / 2:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 18 {HEIGHT / 2:.0f})">{escape(y_label)}</text>'
        ),
    ]
    for y in y_ticks:
        left, level = at(x_low, y)
        right, _ = at(x_high, y)
        parts.append(
            f'<path d="M{left:.1f} {level:.1f}H{right:.1f}" stroke="#dddddd"/>'
            f'<text x="{left - 8:.1f}" y="{level + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    for x in (x for x in x_ticks if x_low <= x <= x_high):
        across, floor = at(x, y_low)
        parts.append(
            f'<text x="{across:.1f}" y="{floor + 20:.1f}" text-anchor="middle">{x:g}</text>'
        )
    for n, curve in enumerate(curves):
        colour = _COLOURS[n % len(_COLOURS)]
        style = f'stroke="{colour}" stroke-width="2" fill="none"'
        style += ' stroke-dasharray="6 4"' if curve.dashed else ""
        if len(curve.x):
            points = (at(x, y) for x, y in zip(curve.x, curve.y, strict=True))
            path = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
            parts.append(f'<polyline points="{path}" {style}/>')
        row = _TOP + 20 + 22 * n
        parts.append(
            f'<path d="M{WIDTH - _RIGHT + 14} {row - 4}h26" {style}/>'
            f'<text x="{WIDTH - _RIGHT + 46}" y="{row}">{escape(curve.name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """Return some six round numbers that enclose a range."""
    span = max(high - low, 1e-9)
    size = 10.0 ** _floor_log10(span / 5)
    step = next(m * size for m in (1, 2, 5, 10) if m * size * 5.001 >= span)
    first = int(low // step)
    count = int(-((first * step - high) // step))
    return [round((first + n) * step, 10) for n in range(count + 1)]


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".split("e")[1])
