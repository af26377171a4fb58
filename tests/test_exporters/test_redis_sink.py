"""The Redis sink, on a real server."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from exporters import Corrupt, OutcomeUnknown, SinkRefused, SinkUnavailable, SinkUnfit
from exporters.config import Redis
from exporters.redis_feed import RedisFeed
from exporters.redis_sink import RedisSink
from exporters.sink import Feed, Sink
from exporters.wire import Kind, cut_chunks
from tests.contracts.sink import (
    TOP,
    Rows,
    SinkContract,
    delta,
    follow_on,
    head_of,
    send,
    snapshot,
)
from tests.reference.wire import mix


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


@pytest.fixture
def place(redis_url: str) -> Iterator[Place]:
    place = Place(redis_url, 1)
    yield place
    place.close()


def open_sink(place: Place, **options: Any) -> RedisSink:
    sink = RedisSink(place.url, model="ctr", **options)
    place.opened.append(sink)
    return sink


def cli(place: Place, *words: str, raw: bytes | None = None) -> bytes:
    """Ask redis-cli, a reader that knows nothing of us; `raw` is given as the last word."""
    port = place.url.rsplit(":", 1)[1].split("/")[0]
    command = ["redis-cli", "-p", port, *(["-x"] if raw is not None else []), *words]
    return subprocess.run(command, input=raw, capture_output=True, check=True).stdout


def test_redis_cli_reads_a_row_from_the_page(place: Place) -> None:
    """Head, then bucket, then field, as docs/wire.md tells it."""
    sink = open_sink(place)
    sink.take_fence(1)
    what = delta(5, 0, {7: [0.5, -2.0], TOP: [3.0, 4.0]}, dense=[1.25])
    snapshot(sink, what, generation=1)
    head = cli(place, "HGETALL", "st:{ctr}:head").decode().split("\n")
    fields = dict(zip(head[::2], head[1::2], strict=False))
    assert (fields["wire"], fields["version"], fields["generation"]) == ("1", "5", "1")
    table = json.loads(fields["tables"])["user"]
    assert table == {"dim": 2, "buckets": 3, "rows": 5}
    assert json.loads(fields["positions"]) == {"clicks/0": 5}
    for key, row in {7: [0.5, -2.0], TOP: [3.0, 4.0]}.items():
        bucket = mix(key) % table["buckets"]
        name = f"st:{{ctr/00}}:{fields['epoch']}:user:{bucket:05x}"
        value = cli(place, "HGET", name, raw=struct.pack("<Q", key))
        assert value.removesuffix(b"\n") == struct.pack("<I2f", 5, *row)
    assert cli(place, "GET", f"st:{{ctr}}:dense:{fields['dense']}")[:4] == struct.pack("<f", 1.25)
    assert cli(place, "GET", "st:{ctr}:fence").strip() == b"1"


def test_out_of_memory_publishes_nothing(place: Place) -> None:
    """A pipeline without a transaction would write some rows and then the head."""
    sink = open_sink(place)
    sink.take_fence(1)
    first = snapshot(sink, delta(1, 0, {1: [1, 1]}), generation=1)
    what = delta(2, 1, {k: [k, k] for k in range(3000)})
    head = head_of(what, epoch=1)
    place.client.config_set("maxmemory", place.client.info("memory")["used_memory"] - 1)
    with pytest.raises(SinkRefused, match="maxmemory"):
        send(sink, what, head, generation=1)
    with pytest.raises(SinkRefused, match="maxmemory"):
        sink.commit(head, since=1, generation=1, expect=first, chunks=0)
    assert sink.read_head() == first
    assert len(place.client.xrange("st:{ctr}:log")) == 1
    place.client.config_set("maxmemory", 0)
    follow_on(sink, what, first, generation=1)


def test_a_replica_of_redis_refuses_writes(place: Place) -> None:
    sink = open_sink(place)
    sink.take_fence(1)
    what = delta(1, 0, {1: [1, 1]})
    place.client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(SinkRefused, match="read only"):
            send(sink, what, head_of(what, epoch=1), generation=1, payload=False)
    finally:
        place.client.replicaof("NO", "ONE")
    snapshot(sink, what, generation=1)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("hash-max-listpack-value", "64", "set hash-max-listpack-value to 68"),
        ("hash-max-listpack-entries", "128", "set hash-max-listpack-entries to 200"),
    ],
)
def test_a_redis_that_would_spoil_the_rows_is_told(
    place: Place, name: str, value: str, text: str
) -> None:
    place.client.config_set("hash-max-listpack-entries", 512)
    dims = {"user": 16, "bias": 1}
    assert open_sink(place).check(dims) == []
    before = place.client.config_get(name)[name]
    place.client.config_set(name, value)
    try:
        (problem,) = open_sink(place).check(dims)
        assert text in problem
    finally:
        place.client.config_set(name, before)


def test_a_redis_that_may_drop_rows_is_refused_unless_that_is_allowed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Every reply would be OK while rows go missing under the head."""
    place.client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(SinkUnfit, match="may drop rows silently: maxmemory-policy is allkeys-lru"):
        open_sink(place).check({"user": 16})
    assert open_sink(place, allow_eviction=True).check({"user": 16}) == []
    assert "may drop rows silently" in caplog.text


def test_volatile_policies_are_harmless(place: Place) -> None:
    """No key of ours expires."""
    place.client.config_set("maxmemory-policy", "volatile-lru")
    assert open_sink(place).check({}) == []
    sink = open_sink(place)
    sink.take_fence(1)
    follow_on(
        sink,
        delta(2, 1, {1: [1, 1]}, dense=[1]),
        snapshot(sink, delta(1, 0, {}), generation=1),
        generation=1,
    )
    assert {place.client.ttl(name) for name in place.client.scan_iter()} == {-1}


def test_a_write_that_arrives_late_changes_nothing(place: Place) -> None:
    """A packet kept back by the network, delivered after the connection was given up."""
    sink = open_sink(place)
    sink.take_fence(1)
    first = snapshot(sink, delta(1, 0, {}), generation=1)
    stale = delta(2, 1, {7: [2, 2]})
    head = head_of(stale, epoch=1)
    (chunk,) = [c for c in cut_chunks(stale) if c.kind is Kind.ROWS]
    kept: list[bytes] = []
    session = sink._session
    send_raw = session.raw

    def keep_back(data: list[bytes], answers: int) -> list[Any]:
        if data[0].startswith(b"*1\r\n$5\r\nMULTI"):
            kept.append(data[0])
            raise SinkUnavailable("timed out")
        return send_raw(data, answers)

    session.raw = keep_back  # type: ignore[method-assign, assignment]
    with pytest.raises(SinkUnavailable):
        sink.put(chunk, head, generation=1)
    old, session._socket = session._socket, None
    assert old is not None
    session.raw = send_raw  # type: ignore[method-assign]
    session._connection = redis.ConnectionPool.from_url(place.url, protocol=2).make_connection()
    second = follow_on(sink, stale, first, generation=1)
    follow_on(sink, delta(3, 2, {7: [3, 3]}), second, generation=1)
    old.sendall(kept[0])
    answer = b""
    while not answer.endswith(b"*-1\r\n"):
        more = old.recv(1000)
        assert more, answer
        answer += more
    assert TestRedisSink().rows(place, 1) == {7: (3, [3.0, 3.0])}
    old.close()


def test_the_stream_is_trimmed_by_bytes_with_its_chunks(place: Place) -> None:
    sink = open_sink(place, stream_bytes=1500)
    sink.take_fence(1)
    head = snapshot(sink, delta(1, 0, {}), generation=1)
    for version in range(2, 12):
        rows = {k: [version, version] for k in range(20)}
        head = follow_on(sink, delta(version, version - 1, rows), head, generation=1)
        sink.trim(generation=1)
    left = [int(name.split(b"-")[0]) for name, _ in place.client.xrange("st:{ctr}:log")]
    chunks = {int(name.split(b":")[3]) for name in place.client.scan_iter("st:{ctr}:d:*")}
    assert left == sorted(chunks)
    assert 1 <= len(left) < 6
    assert left[-1] == 11
    size = sum(place.client.strlen(name) for name in place.client.scan_iter("st:{ctr}:d:*"))
    assert size <= 1500
    # A new sink object finds the same by what Redis holds.
    other = open_sink(place, stream_bytes=10)
    other.take_fence(2)
    other.trim(generation=2)
    assert [name for name, _ in place.client.xrange("st:{ctr}:log")] == [b"11-0"]


def test_a_stream_ahead_of_the_head_is_begun_anew(place: Place) -> None:
    sink = open_sink(place)
    sink.take_fence(1)
    first = snapshot(sink, delta(1, 0, {}), generation=1)
    place.client.xadd("st:{ctr}:log", {"kind": "?"}, id="99-0")
    follow_on(sink, delta(2, 1, {}), first, generation=1)
    assert [name for name, _ in place.client.xrange("st:{ctr}:log")] == [b"2-0"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wire", "2"),
        ("version", "-1"),
        ("version", "many"),
        ("version", "9" * 30),
        ("tables", "{"),
        ("tables", '{"a b": {"dim": 1, "buckets": 1, "rows": 1}}'),
        ("tables", '{"t": {"dim": 0, "buckets": 1, "rows": 1}}'),
        ("tables", '{"t": {"dim": 1, "buckets": 99999999999, "rows": 1}}'),
        ("groups", "0"),
        ("checksum", "x"),
        ("positions", "[]"),
    ],
)
def test_a_head_that_makes_no_sense_is_refused(place: Place, field: str, value: str) -> None:
    sink = open_sink(place)
    sink.take_fence(1)
    snapshot(sink, delta(1, 0, {}), generation=1)
    place.client.hset("st:{ctr}:head", field, value)
    with pytest.raises(SinkRefused, match="head"):
        sink.read_head()
    feed = RedisFeed(place.url, model="ctr")
    place.opened.append(feed)
    with pytest.raises(Corrupt, match="head"):
        feed.read_head()


def test_notes_buckets_and_fences_that_make_no_sense_are_refused(place: Place) -> None:
    sink = open_sink(place)
    sink.take_fence(1)
    head = snapshot(sink, delta(1, 0, {1: [1, 1]}), generation=1)
    feed = RedisFeed(place.url, model="ctr")
    place.opened.append(feed)
    (bucket,) = place.client.scan_iter("st:{ctr/00}:1:user:*")
    place.client.hset(bucket, "short", b"x")
    with pytest.raises(Corrupt, match="other sizes"):
        list(feed.read_rows(head))
    place.client.set("st:{ctr/00}:pending", "1 2 3")
    with pytest.raises(SinkRefused, match="not a note"):
        sink.read_head()
    place.client.set("st:{ctr/00}:fence", "mine")
    with pytest.raises(SinkRefused, match="no number"):
        sink.read_fence()


def test_two_models_in_one_redis_do_not_meet(place: Place) -> None:
    sinks = []
    for model in ("ctr", "ctr2", "ctr.x"):
        sink = RedisSink(place.url, model=model)
        place.opened.append(sink)
        sink.take_fence(1)
        snapshot(sink, delta(1, 0, {1: [1, 1]}), generation=1)
        sinks.append(sink)
    first = sinks[0].read_head()
    snapshot(sinks[0], delta(2, 0, {1: [2, 2]}), generation=1, expect=first)
    sinks[0].drop_old_epochs(2, generation=1)
    assert len(list(place.client.scan_iter("st:{ctr2/00}:1:user:*"))) == 1
    assert len(list(place.client.scan_iter("st:{ctr.x/00}:1:user:*"))) == 1
    assert list(place.client.scan_iter("st:{ctr/00}:1:user:*")) == []


def test_a_sink_that_is_not_there_says_so_without_its_password() -> None:
    sink = RedisSink("redis://user:hush@127.0.0.1:1/0", model="ctr", timeout_s=0.5)
    for call in (sink.read_head, sink.read_fence, lambda: sink.take_fence(1)):
        with pytest.raises(SinkUnavailable, match="can't be reached") as caught:
            call()
        assert "hush" not in str(caught.value)
    sink.close()


def test_a_wrong_password_is_no_riddle(place: Place) -> None:
    sink = RedisSink(place.url.replace("redis://", "redis://nobody:hush@"), model="ctr")
    with pytest.raises(SinkUnavailable, match="(?i)password|auth") as caught:
        sink.read_head()
    assert "hush" not in str(caught.value)
    sink.close()


def test_a_commit_whose_answer_is_lost_is_unknown_and_then_already(place: Place) -> None:
    sink = open_sink(place)
    sink.take_fence(1)
    first = snapshot(sink, delta(1, 0, {}), generation=1)
    what = delta(2, 1, {})
    head = head_of(what, epoch=1)
    chunks = send(sink, what, head, generation=1)
    script = sink._session.script

    def lose(*words: Any) -> Any:
        script(*words)
        raise SinkUnavailable("connection reset")

    sink._session.script = lose  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        sink.commit(head, since=1, generation=1, expect=first, chunks=chunks)
    sink._session.script = script  # type: ignore[method-assign]
    assert sink.commit(head, since=1, generation=1, expect=first, chunks=chunks) == "already"
    assert len(place.client.xrange("st:{ctr}:log")) == 2


def test_rows_are_kept_as_listpacks(place: Place) -> None:
    sink = open_sink(place, expected_rows={"user": 5000})
    sink.take_fence(1)
    what = delta(1, 0, {k * 2654435761: [k, k] for k in range(5000)})
    head = head_of(what, epoch=1, buckets=sink.buckets("user", 0))
    for chunk in cut_chunks(what):
        if chunk.kind is Kind.ROWS:
            sink.put(chunk, head, generation=1)
    names = list(place.client.scan_iter("st:{ctr/00}:1:user:*"))
    assert len(names) == 50
    assert max(place.client.hlen(name) for name in names) < 150
    assert {place.client.object("encoding", name) for name in names} == {b"listpack"}


def test_a_config_makes_a_sink(place: Place) -> None:
    config = Redis(url_env="WHERE", expected_rows={"user": 250}, groups=2)
    sink = RedisSink.from_config(config, model="ctr", environ={"WHERE": place.url})
    place.opened.append(sink)
    assert (sink.buckets("user", 0), sink.buckets("user", 1000), sink.groups) == (3, 10, 2)
    assert sink.buckets("other", 0) == 10_000
    assert sink.take_fence(1) is None
    with pytest.raises(ValueError, match="WHERE is not set"):
        RedisSink.from_config(config, model="ctr", environ={})
