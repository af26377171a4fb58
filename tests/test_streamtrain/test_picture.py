"""Curves as SVG: well-formed, and true to the numbers."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from streamtrain.picture import Curve, svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*curves: Curve) -> ET.Element:
    return ET.fromstring(svg("a < b", "seconds", "loss", curves))


def points(root: ET.Element) -> list[list[tuple[float, float]]]:
    return [
        [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in line.attrib["points"].split())
        ]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_lower_values_lie_lower_and_later_ones_further_right() -> None:
    [line] = points(drawn(Curve("live", [0, 1, 2], [0.7, 0.6, 0.5])))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)  # SVG counts from the top
    assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.1)
    assert line[1][1] == pytest.approx((line[0][1] + line[2][1]) / 2, abs=0.1)


def test_everything_lies_within_the_picture() -> None:
    for low, high in ((0.1234, 0.1235), (-5.0, 1e6), (0.5, 0.5)):
        root = drawn(Curve("a", [10.0, 70.0], [low, high]), Curve("b", [40.0], [low], dashed=True))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for line in points(root):
            assert all(0 <= x <= width and 0 <= y <= height for x, y in line)


def test_names_are_escaped_and_all_there() -> None:
    root = drawn(Curve("live", [0], [1]), Curve("best & last", [], [], dashed=True))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "seconds", "loss", "live", "best & last"} <= set(texts)


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="no curve has a point"):
        svg("t", "x", "y", [Curve("empty", [], [])])
