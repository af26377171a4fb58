"""The page that tells other languages how keys are made: its table must hold."""

import re
from pathlib import Path

import pytest

from consumers.keys import fingerprint64

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "keys-in-other-languages.md"
ROWS = re.findall(
    r"^\| (.*?) \| (\d+) \| (\d+) \| (-?\d+) \| `(\w+)` \|$",
    PAGE.read_text(encoding="utf-8"),
    re.MULTILINE,
)


def text_of(cell: str) -> str:
    if cell == "the empty string":
        return ""
    times = re.fullmatch(r"(\d+) times `(.)`", cell)
    return times[2] * int(times[1]) if times else cell.strip("`")


def test_the_page_has_its_table() -> None:
    assert len(ROWS) == 8


@pytest.mark.parametrize(("cell", "size", "unsigned", "signed", "in_redis"), ROWS)
def test_every_row_holds(cell: str, size: str, unsigned: str, signed: str, in_redis: str) -> None:
    """Somebody checks a program in another language against these numbers."""
    value = text_of(cell).encode()
    key = fingerprint64(value)
    assert len(value) == int(size)
    assert key == int(unsigned) == int(signed) % 2**64
    assert key.to_bytes(8, "little").hex() == in_redis
