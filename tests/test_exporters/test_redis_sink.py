"""The Redis sink, on a real server."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from exporters.redis_feed import RedisFeed
from exporters.redis_sink import RedisSink
from exporters.sink import Feed, Sink
from tests.contracts.sink import Rows, SinkContract


class Place:
    """A Redis server looked at past the sink."""

    def __init__(self, url: str, groups: int) -> None:
        self.url, self.groups = url, groups
        self.client = redis.Redis.from_url(url)
        self.opened: list[RedisSink | RedisFeed] = []

    def close(self) -> None:
        for each in self.opened:
            each.close()
        self.client.close()


class RedisContract(SinkContract):
    groups = 1

    @pytest.fixture
    def place(self, redis_url: str) -> Iterator[Place]:
        place = Place(redis_url, self.groups)
        yield place
        place.close()

    def make(self, place: Place) -> Sink:
        sink = RedisSink(place.url, model="ctr", groups=place.groups)
        place.opened.append(sink)
        return sink

    def make_feed(self, place: Place) -> Feed:
        feed = RedisFeed(place.url, model="ctr")
        place.opened.append(feed)
        return feed

    def rows(self, place: Place, epoch: int) -> Rows:
        found: Rows = {}
        for name in place.client.scan_iter(f"st:{{ctr/*}}:{epoch}:user:*"):
            for key, value in place.client.hgetall(name).items():
                version, *row = struct.unpack("<I2f", value)
                found[struct.unpack("<Q", key)[0]] = (version, row)
        return found

    def save(self, place: Place) -> Any:
        return {name: place.client.dump(name) for name in place.client.scan_iter()}

    def restore(self, place: Place, saved: Any) -> None:
        place.client.flushall()
        for name, data in saved.items():
            place.client.restore(name, 0, data)


class TestRedisSink(RedisContract):
    pass


class TestRedisSinkOfThreeGroups(RedisContract):
    groups = 3
