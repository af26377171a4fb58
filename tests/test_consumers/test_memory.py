"""The source over memory."""

from collections.abc import Sequence

import pytest

from consumers import Partition
from consumers.memory import Memory
from tests.contracts.source import Maker, Opener, Records, SourceContract
from tests.test_consumers.clicks import decoder, encode


class TestMemoryContract(SourceContract):
    @pytest.fixture
    def maker(self) -> Maker:
        def make(records: Sequence[Records]) -> Opener:
            messages = {
                Partition("clicks", p): [encode(record) for record in part]
                for p, part in enumerate(records)
            }
            return lambda: Memory(messages, decoder())

        return make


class TestEndlessMemoryContract(SourceContract):
    finite = False

    @pytest.fixture
    def maker(self) -> Maker:
        def make(records: Sequence[Records]) -> Opener:
            messages = {
                Partition("clicks", p): [encode(record) for record in part]
                for p, part in enumerate(records)
            }
            return lambda: Memory(messages, decoder(), finite=False)

        return make
