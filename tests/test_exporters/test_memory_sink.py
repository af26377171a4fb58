"""The double keeps the contract, so that what is tried on it holds for the real thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exporters.sink import Feed, Sink
from tests.contracts.sink import Rows, SinkContract
from tests.doubles.memory_sink import MemoryFeed, MemoryServer, MemorySink


class TestMemorySink(SinkContract):
    @pytest.fixture
    def place(self) -> MemoryServer:
        return MemoryServer()

    def make(self, place: MemoryServer) -> Sink:
        return MemorySink(place)

    def make_feed(self, place: MemoryServer) -> Feed:
        return MemoryFeed(place)

    def rows(self, place: MemoryServer, epoch: int) -> Rows:
        return {
            key: (version, np.frombuffer(row, np.float32).tolist())
            for (_, key), (version, row) in place.state.rows.get(epoch, {}).items()
        }

    def save(self, place: MemoryServer) -> Any:
        return place.save()

    def restore(self, place: MemoryServer, saved: Any) -> None:
        place.restore(saved)
