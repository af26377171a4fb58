"""The source over Avro container files."""

from collections.abc import Sequence
from pathlib import Path

import fastavro
import pytest

from consumers.files import Files
from tests.contracts.source import Maker, Opener, Records, SourceContract
from tests.test_consumers.clicks import PARSED, decoder


def write(path: Path, records: Records, codec: str = "null", interval: int = 200) -> str:
    with path.open("wb") as out:
        fastavro.writer(out, PARSED, records, codec=codec, sync_interval=interval)
    return str(path)


class TestFilesContract(SourceContract):
    @pytest.fixture
    def maker(self, tmp_path: Path) -> Maker:
        def make(records: Sequence[Records]) -> Opener:
            paths = [write(tmp_path / f"{p}.avro", part) for p, part in enumerate(records)]
            return lambda: Files(paths, decoder())

        return make
