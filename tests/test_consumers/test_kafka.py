"""The Kafka source on a real broker."""

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from consumers import Batch, Partition, PositionLost, SourceUnavailable, SpecError
from consumers.avro import AvroDecoder
from consumers.config import Kafka, Latest, Registry, Timestamp
from consumers.kafka import RELIST_S, KafkaSource
from consumers.registry import RegistrySchemas
from tests.contracts.source import Maker, Opener, Records, SourceContract, drain, ids
from tests.doubles.registry import StubRegistry
from tests.services.service import free_ports
from tests.test_consumers.clicks import SCHEMA, SPEC, START_MS, click, decoder, encode


def produce(bootstrap: str, topic: str, messages: Sequence[tuple[int, bytes | None]]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for partition, value in messages:
        producer.produce(topic, value, key=b"k", partition=partition)
    assert producer.flush(20) == 0


def source_of(bootstrap: str, topic: str, **config: Any) -> KafkaSource:
    return KafkaSource(Kafka(brokers=bootstrap, topics=[topic], **config), decoder())


class TestKafkaContract(SourceContract):
    finite = False
    ordered = False

    @pytest.fixture
    def maker(self, kafka_broker: Any, kafka_topic: Any) -> Maker:
        def make(records: Sequence[Records]) -> Opener:
            topic = kafka_topic(partitions=len(records))
            produce(
                kafka_broker.bootstrap,
                topic,
                [(p, encode(record)) for p, part in enumerate(records) for record in part],
            )
            return lambda: source_of(kafka_broker.bootstrap, topic)

        return make


def read(source: KafkaSource, messages: int) -> list[Batch]:
    return drain(source, 1000, messages, wait_ms=100)


def numbers(batches: Sequence[Batch]) -> list[int]:
    return [n for batch in batches for n in ids(batch)]


@pytest.fixture
def bootstrap(kafka_broker: Any) -> str:
    return str(kafka_broker.bootstrap)


def test_bad_messages_leave_their_neighbours_alone(bootstrap: str, kafka_topic: Any) -> None:
    """One unreadable message in the middle must neither stop the stream nor shift a position."""
    topic = kafka_topic()
    values = [encode(click(n)) for n in range(20)]
    values[3] = values[3][:-1]
    messages: list[bytes | None] = [*values]
    messages[5:7] = [None, b""]
    messages[9] = b"\xff" * 30
    produce(bootstrap, topic, [(0, value) for value in messages])
    with closing(source_of(bootstrap, topic)) as source:
        source.open(None)
        batches = drain(source, 8, 20)
        assert numbers(batches) == [n for n in range(20) if n not in (3, 5, 6, 9)]
        bad = [(b.topic, b.offset, b.reason, b.value) for batch in batches for b in batch.bad]
        assert bad == [
            (topic, 3, "truncated", messages[3]),
            (topic, 5, "tombstone", None),
            (topic, 6, "empty", b""),
            (topic, 9, "range", messages[9]),
        ]
        assert [batch.consumed for batch in batches] == [12, 8]
        assert batches[-1].append_time_ms is not None
        assert abs(batches[-1].append_time_ms / 1000 - time.time()).max() < 3600


def test_latest_is_pinned_by_open(bootstrap: str, kafka_topic: Any) -> None:
    """A restart before the first batch must not skip what came in between."""
    topic = kafka_topic()
    produce(bootstrap, topic, [(0, encode(click(n))) for n in range(3)])
    with closing(source_of(bootstrap, topic, start=Latest())) as source:
        position = source.open(None)
        assert position == {Partition(topic, 0): 3}
    produce(bootstrap, topic, [(0, encode(click(n))) for n in range(3, 6)])
    with closing(source_of(bootstrap, topic, start=Latest())) as source:
        assert source.open(position) == position
        assert numbers(read(source, 3)) == [3, 4, 5]


def test_a_start_time_is_looked_up_per_partition(bootstrap: str, kafka_topic: Any) -> None:
    """Behind the last message of a partition a time means its end, as it is now."""
    topic = kafka_topic(partitions=3)
    producer = Producer({"bootstrap.servers": bootstrap})
    for n in range(10):
        value, moment = encode(click(n)), START_MS + 1000 * n
        producer.produce(topic, value, partition=0, timestamp=moment)
        producer.produce(topic, value, partition=1, timestamp=moment - 60_000)
    assert producer.flush(20) == 0
    start = Timestamp(timestamp=START_MS + 3_500)
    with closing(source_of(bootstrap, topic, start=start)) as source:
        assert source.open(None) == {
            Partition(topic, 0): 4,
            Partition(topic, 1): 10,
            Partition(topic, 2): 0,
        }


def test_several_topics(bootstrap: str, kafka_topic: Any) -> None:
    topics = [kafka_topic(), kafka_topic(partitions=2)]
    produce(bootstrap, topics[0], [(0, encode(click(0)))])
    produce(bootstrap, topics[1], [(0, encode(click(1))), (1, encode(click(2)))])
    source = KafkaSource(Kafka(brokers=bootstrap, topics=topics), decoder())
    with closing(source):
        source.open(None)
        batches = read(source, 3)
        assert sorted(numbers(batches)) == [0, 1, 2]
        assert len(batches[-1].position) == 3


def test_a_new_partition_is_read_from_its_beginning(bootstrap: str, kafka_topic: Any) -> None:
    """Its first messages come before anybody has listed it; with `latest` they would be lost."""
    topic = kafka_topic()
    produce(bootstrap, topic, [(0, encode(click(0)))])
    ahead = 0.0
    source = KafkaSource(
        Kafka(brokers=bootstrap, topics=[topic], start=Latest()),
        decoder(),
        now=lambda: time.monotonic() + ahead,
    )
    with closing(source):
        source.open(None)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(20)
        deadline = time.monotonic() + 20
        while len(admin.list_topics(topic).topics[topic].partitions) < 3:
            assert time.monotonic() < deadline
        produce(bootstrap, topic, [(2, encode(click(1))), (2, encode(click(2)))])
        ahead = RELIST_S + 1
        batches = read(source, 2)
        assert numbers(batches) == [1, 2]
        assert dict(batches[-1].position) == {
            Partition(topic, 0): 1,
            Partition(topic, 1): 0,
            Partition(topic, 2): 2,
        }


def delete_below(bootstrap: str, topic: str, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    target = TopicPartition(topic, 0, offset)
    admin.delete_records([target])[target].result(20)


def test_offsets_below_the_log_are_counted_as_lost(
    bootstrap: str, kafka_topic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention was quicker: going on is right, going on silently is not."""
    topic = kafka_topic()
    produce(bootstrap, topic, [(0, encode(click(n))) for n in range(10)])
    delete_below(bootstrap, topic, 6)
    with closing(source_of(bootstrap, topic)) as source:
        assert source.open({Partition(topic, 0): 2}) == {Partition(topic, 0): 6}
        assert source.lost == {Partition(topic, 0): 4}
        assert "offsets 2 to 5 are gone" in caplog.text
        assert numbers(read(source, 4)) == [6, 7, 8, 9]


def test_a_log_cut_while_it_is_read(bootstrap: str, kafka_topic: Any) -> None:
    """The client holds the first megabytes when the log is cut ahead of what it fetches next."""
    topic = kafka_topic()
    values = [encode(click(n, user="u" * 900_000)) for n in range(30)]
    produce(bootstrap, topic, [(0, value) for value in values])
    with closing(source_of(bootstrap, topic, memory=8 << 20)) as source:
        source.open(None)
        [batch] = drain(source, 1, 1)
        delete_below(bootstrap, topic, 28)
        batches = [batch]
        while batches[-1].position[Partition(topic, 0)] != 30:
            batches += drain(source, 1, 1)
        got = numbers(batches)
        assert got[-2:] == [28, 29]
        read_before = len(got) - 2
        assert got[:read_before] == list(range(read_before))
        assert source.lost == {Partition(topic, 0): 28 - read_before}


def test_a_log_that_ends_before_the_position(bootstrap: str, kafka_topic: Any) -> None:
    """The topic was made anew behind our back: to read on would mean to train on other samples."""
    topic = kafka_topic()
    produce(bootstrap, topic, [(0, encode(click(n))) for n in range(3)])
    partition = Partition(topic, 0)
    with closing(source_of(bootstrap, topic)) as source:
        source.open({partition: 3})
        source._client.incremental_unassign([TopicPartition(topic, 0)])
        source._client.incremental_assign([TopicPartition(topic, 0, 1000)])
        source._next[partition] = 1000
        with pytest.raises(PositionLost, match="ends at offset 3, but the position is 1000"):
            drain(source, 1, 1)


def test_a_closed_port(caplog: pytest.LogCaptureFixture) -> None:
    [port] = free_ports(1)
    config = Kafka(brokers=f"127.0.0.1:{port}", topics=["clicks"])
    source = KafkaSource(config, decoder(), connect_s=1.0)
    before = time.monotonic()
    with pytest.raises(SourceUnavailable, match=rf"no answer from Kafka at 127\.0\.0\.1:{port}"):
        source.open(None)
    assert time.monotonic() - before < 8
    source.close()


def test_a_topic_that_is_not_there(bootstrap: str) -> None:
    with (
        closing(source_of(bootstrap, "no-such-topic")) as source,
        pytest.raises(SourceUnavailable, match="topic no-such-topic"),
    ):
        source.open(None)


def test_an_option_that_the_client_does_not_know(bootstrap: str) -> None:
    source = source_of(bootstrap, "clicks", options={"fetch.wait.max.sm": 10})
    with pytest.raises(SpecError, match="fetch.wait.max.sm"):
        source.open(None)


def test_a_source_that_is_not_open() -> None:
    source = source_of("127.0.0.1:1", "clicks")
    source.commit({})
    source.close()
    assert source.lag() == {}
    with pytest.raises(SourceUnavailable, match="call open"):
        source.batch(1, None, lambda: False)


def test_transactions(bootstrap: str, kafka_topic: Any) -> None:
    """Aborted messages are no samples, and markers behind the last message are no lag."""
    topic = kafka_topic()
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic})
    producer.init_transactions(20)
    for outcome, some in (("commit", (0, 1)), ("abort", (2, 3)), ("commit", (4,))):
        producer.begin_transaction()
        for n in some:
            producer.produce(topic, encode(click(n)), partition=0)
        if outcome == "commit":
            producer.commit_transaction(20)
        else:
            producer.flush(20)
            producer.abort_transaction(20)
    with closing(source_of(bootstrap, topic)) as source:
        source.open(None)
        batches = read(source, 3)
        assert numbers(batches) == [0, 1, 4]
        assert [o for batch in batches for o in batch.offsets.tolist()] == [0, 1, 6]
        deadline = time.monotonic() + 10
        while sum(source.lag().values()):
            assert source.batch(1, 10, lambda: False) is None
            assert time.monotonic() < deadline
        position = batches[-1].position
    with closing(source_of(bootstrap, topic)) as source:
        assert source.open(position) == {Partition(topic, 0): 7}
        assert source.batch(1, 10, lambda: False) is None


@pytest.mark.parametrize("group", [None, "lag-board"])
def test_a_position_is_shown_to_a_group_if_one_is_named(
    bootstrap: str, kafka_topic: Any, group: str | None
) -> None:
    topic = kafka_topic()
    produce(bootstrap, topic, [(0, encode(click(n))) for n in range(4)])
    with closing(source_of(bootstrap, topic, group=group)) as source:
        source.open(None)
        [batch] = drain(source, 3, 1)
        source.commit(batch.position)
        board = Consumer({"bootstrap.servers": bootstrap, "group.id": group or "streamtrain"})
        with closing(board):
            deadline = time.monotonic() + (15 if group else 1)
            shown = -1001
            while shown < 0 and time.monotonic() < deadline:
                source.batch(1000, None, lambda: False)
                shown = board.committed([TopicPartition(topic, 0)], timeout=10)[0].offset
        assert shown == (3 if group else -1001)


@pytest.mark.slow
def test_a_broker_that_goes_and_comes_back(kafka_broker: Any, kafka_topic: Any) -> None:
    """Kafka down is a state with a reason, not an end; nothing is lost or read twice over it."""
    topic = kafka_topic()
    produce(kafka_broker.bootstrap, topic, [(0, encode(click(n))) for n in range(5)])
    ahead = 0.0
    source = KafkaSource(
        Kafka(brokers=kafka_broker.bootstrap, topics=[topic]),
        decoder(),
        now=lambda: time.monotonic() + ahead,
    )
    with closing(source):
        source.open(None)
        learned = []
        time.sleep(1)  # so that the client has fetched them
        for round_ in range(2):
            kafka_broker.stop()
            ahead += RELIST_S + 1
            deadline = time.monotonic() + 30
            while source.trouble() is None:
                batch = source.batch(1, 10, lambda: False)
                learned += ids(batch) if batch is not None else []
                assert time.monotonic() < deadline
            assert kafka_broker.bootstrap in (source.trouble() or "")
            learned += numbers(read(source, 5 - len(learned))) if round_ == 0 else []
            kafka_broker.start()
            fresh = [5 * (round_ + 1) + n for n in range(5)]
            produce(kafka_broker.bootstrap, topic, [(0, encode(click(n))) for n in fresh])
            deadline = time.monotonic() + 40
            while learned[-1] != fresh[-1]:
                batch = source.batch(10, 50, lambda: False)
                learned += ids(batch) if batch is not None else []
                assert time.monotonic() < deadline
            ahead += RELIST_S + 1
            source.batch(1, 10, lambda: False)
            assert source.trouble() is None
        assert learned == list(range(15))


def test_framed_messages_with_the_schema_in_front_and_in_a_header(
    bootstrap: str, kafka_topic: Any
) -> None:
    """Producers of the newest clients put the id into a header, and the old ones stay."""
    topic = kafka_topic()
    prefix = b"\x00\x00\x00\x00\x07"
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    producer.produce(topic, prefix + encode(click(0)), partition=0)
    producer.produce(
        topic,
        encode(click(1)),
        partition=0,
        headers={"trace": b"x", "__value_schema_id": prefix},
    )
    producer.produce(topic, encode(click(2)), partition=0)
    assert producer.flush(20) == 0
    with StubRegistry() as registry:
        registry.add("ids/7", SCHEMA)
        framed = AvroDecoder(
            SCHEMA,
            SPEC,
            framing="confluent",
            schemas=RegistrySchemas(Registry(url=registry.url, timeout=500)),
        )
        config = Kafka(brokers=bootstrap, topics=[topic])
        registry.status = 503
        with closing(KafkaSource(config, framed, header=framed.header)) as source:
            source.open(None)
            until = time.monotonic() + 20
            while source.trouble() is None:
                assert source.batch(10, 50, lambda: False) is None
                assert time.monotonic() < until
            assert "doesn't answer" in str(source.trouble())
            registry.status = 200
            [*batches] = drain(source, 10, 3, wait_ms=50)
            assert source.trouble() is None
    assert numbers(batches) == [0, 1]
    [bad] = [b for batch in batches for b in batch.bad]
    assert (bad.offset, bad.reason) == (2, "bad_magic")
