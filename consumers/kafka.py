"""Samples out of Kafka: all partitions of the topics, by static assignment.

No group is joined and no stored offset is looked at: the position comes from whoever holds what
was learned. Offsets that are gone or never were aren't bridged silently: below the start of the
log the source goes on there and counts what is lost; beyond the end it stops, since only a topic
made anew, or another cluster, looks like that.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from consumers._kafka_client import client_logger, client_options
from consumers.config import Earliest, Kafka, Latest
from consumers.errors import PositionLost, SourceUnavailable, SpecError
from consumers.gather import Gathering
from consumers.source import Batch, Decoder, Message, Partition

logger = logging.getLogger(__name__)

RELIST_S = 30.0
"""How often topics are listed again, to find new partitions."""

RETRY_S = 5.0
"""How often that happens while there is trouble."""

_ANSWER_S = 2.0
_CLOSE_S = 5.0
_ANEW = "was the topic made anew? Start from a cut of the right cluster, or afresh"
_DOWN = {
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._AUTHENTICATION,  # noqa: SLF001
    KafkaError._SSL,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
}
_OUT_OF_RANGE = {
    KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001
    KafkaError._LOG_TRUNCATION,  # noqa: SLF001
    KafkaError.OFFSET_OUT_OF_RANGE,
}


class KafkaSource:
    """A source over Kafka topics that never ends.

    Parameters
    ----------
    config
        Brokers, topics, start policy.
    decoder
        Turns message values into samples.
    header
        Header that names the schema of a value, for decoders that look at it.
    connect_s
        How long :meth:`open` may wait for each answer.
    now
        Clock for waits, in seconds.
    """

    exhausted = False

    def __init__(
        self,
        config: Kafka,
        decoder: Decoder,
        *,
        header: str | None = None,
        connect_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._header = header
        self._connect_s = connect_s
        self._now = now
        self._consumer: Consumer | None = None
        self._gathering = Gathering(decoder, self._fetch, ended=lambda: False, timed=True, now=now)
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._next: dict[Partition, int] = {}
        self._ends: dict[Partition, int] = {}
        self._displaced: set[Partition] = set()
        self._lost: dict[Partition, int] = {}
        self._trouble: str | None = None
        self._relist_at = 0.0

    @property
    def lost(self) -> Mapping[Partition, int]:
        """Offsets that the log dropped before they were read, per partition."""
        return dict(self._lost)

    def open(self, position: Mapping[Partition, int] | None) -> Mapping[Partition, int]:
        """Start at ``position``, or where the config says.

        Raises
        ------
        SourceUnavailable
            No broker answers, or a topic is missing or forbidden.
        PositionLost
            An offset lies beyond the end of its partition, or the partition is gone.
        SpecError
            A client option is refused.
        """
        options = client_options(self._config)
        options |= {"error_cb": self._on_error, "on_commit": _on_commit}
        try:
            self._consumer = Consumer(
                options, logger=client_logger(f"{__name__}.client", self._now)
            )
        except KafkaException as error:
            raise SpecError(f"Kafka client: {_words(error)}; check source.kafka") from error
        try:
            start = self._resolve(position)
        except BaseException:
            self.close()
            raise
        self._next = dict(start)
        self._gathering.position = dict(start)
        self._client.assign([TopicPartition(*p, offset) for p, offset in start.items()])
        self._relist_at = self._now() + RELIST_S
        return start

    def batch(self, size: int, wait_ms: int | None, stop: Callable[[], bool]) -> Batch | None:
        """Return the next batch, or None when it isn't complete yet.

        Raises
        ------
        PositionLost
            A partition ends before the position.
        SourceUnavailable
            The client has given up for good.
        """
        return self._gathering.batch(size, wait_ms, stop)

    def lag(self) -> Mapping[Partition, int]:
        """Offsets of each partition between its end and what is in a batch already."""
        staged = self._gathering.staged
        lags = {}
        for partition, offset in self._gathering.position.items():
            end = self._ends.get(partition, 0)
            if self._consumer is not None:
                try:
                    cached = self._consumer.get_watermark_offsets(
                        TopicPartition(*partition), cached=True
                    )
                except KafkaException:
                    cached = None
                if cached is not None:
                    end = max(end, cached[1])
            # Behind the last message there may be transaction markers that nobody is given.
            read = offset if partition in staged else max(offset, self._next[partition])
            lags[partition] = max(0, end - read)
        return lags

    def trouble(self) -> str | None:
        """Why Kafka can't be read at the moment, or None."""
        return self._trouble or self._gathering.trouble

    def commit(self, position: Mapping[Partition, int]) -> None:
        """Show a position to lag dashboards, if the config names a group."""
        if self._config.group is None or self._consumer is None:
            return
        offsets = [TopicPartition(*p, offset) for p, offset in position.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            logger.info("commit to group %s refused: %s", self._config.group, _words(error))

    def close(self) -> None:
        """Leave the cluster; a client that hangs is left behind after a few seconds."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            closing = threading.Thread(target=consumer.close, name="kafka-close", daemon=True)
            closing.start()
            closing.join(_CLOSE_S)
            if closing.is_alive():
                logger.warning("the Kafka client didn't close within %g s", _CLOSE_S)

    @property
    def _client(self) -> Consumer:
        if self._consumer is None:
            raise SourceUnavailable("the Kafka source isn't open; call open() first")
        return self._consumer

    def _resolve(self, position: Mapping[Partition, int] | None) -> dict[Partition, int]:
        partitions = [
            p for topic in self._config.topics for p in self._list(topic, self._connect_s)
        ]
        known = dict(position or {})
        topics = {partition.topic for partition in known}
        for topic in self._config.topics if position is not None else ():
            if topic not in topics:
                logger.warning(
                    "topic %s has no position in the cut: it is read as at a first start, from "
                    "source.kafka.start; what was learned from elsewhere may be in it, too",
                    topic,
                )
        for partition, offset in known.items():
            if partition.topic not in self._config.topics:
                logger.warning(
                    "%s stands at %d in the cut and is not read by this source any more",
                    partition.topic,
                    offset,
                )
            elif partition not in partitions:
                raise PositionLost(
                    f"{_name(partition)} is in the position but not in the cluster; {_ANEW}"
                )
        start = {}
        for partition in partitions:
            low, high = self._bounds(partition, self._connect_s)
            self._ends[partition] = high
            if partition.topic not in topics:
                start[partition] = self._first(partition, low, high)
            elif partition in known:
                start[partition] = self._within(partition, known[partition], low, high)
            else:
                start[partition] = low
        return start

    def _list(self, topic: str, timeout_s: float) -> list[Partition]:
        try:
            found = self._client.list_topics(topic, timeout=timeout_s).topics[topic]
        except KafkaException as error:
            if not self._next:  # else this would throw a message away
                self._client.poll(0)  # lets error_cb say what the client met meanwhile
            reason = self._trouble or _words(error)
            raise SourceUnavailable(
                f"no answer from Kafka at {self._config.brokers} within {timeout_s:g} s: {reason}"
            ) from error
        if found.error is not None or not found.partitions:
            reason = found.error.str() if found.error is not None else "it has no partitions"
            raise SourceUnavailable(f"topic {topic} at {self._config.brokers}: {reason}")
        numbers = sorted(found.partitions)
        return [self._partitions.setdefault((topic, n), Partition(topic, n)) for n in numbers]

    def _bounds(self, partition: Partition, timeout_s: float) -> tuple[int, int]:
        try:
            found = self._client.get_watermark_offsets(
                TopicPartition(*partition), timeout=timeout_s
            )
        except KafkaException as error:
            raise SourceUnavailable(
                f"{_name(partition)} doesn't tell its offsets: {_words(error)}"
            ) from error
        if found is None:
            raise SourceUnavailable(f"{_name(partition)} didn't tell its offsets in time")
        return found

    def _first(self, partition: Partition, low: int, high: int) -> int:
        start = self._config.start
        if isinstance(start, Earliest):
            return low
        if isinstance(start, Latest):
            return high
        asked = TopicPartition(*partition, start.ms)
        try:
            [found] = self._client.offsets_for_times([asked], timeout=self._connect_s)
        except KafkaException as error:
            raise SourceUnavailable(
                f"{_name(partition)} doesn't tell the offset of a time: {_words(error)}"
            ) from error
        if found.error is not None:
            raise SourceUnavailable(f"{_name(partition)}: {found.error.str()}")
        return found.offset if found.offset >= 0 else high

    def _within(self, partition: Partition, offset: int, low: int, high: int) -> int:
        """Return where to go on: at ``offset``, or at the start of the log if that is higher."""
        if not 0 <= offset <= high:
            raise PositionLost(
                f"{_name(partition)} ends at offset {high}, but the position is {offset}; {_ANEW}"
            )
        if offset < low:
            self._lost[partition] = self._lost.get(partition, 0) + low - offset
            logger.warning(
                "%s: offsets %d to %d are gone from the log and were never read; going on at %d",
                _name(partition), offset, low - 1, low,
            )  # fmt: skip
        return max(offset, low)

    def _fetch(self, count: int, timeout_s: float) -> list[Message]:
        if self._now() >= self._relist_at:
            self._relist()
        for partition in list(self._displaced):
            self._replace(partition)
        fetched = []
        for message in self._client.consume(count, timeout_s):
            error = message.error()
            if error is not None:
                self._on_fetch_error(message, error)
                continue
            found = self._message(message)
            # What was fetched before a partition was set elsewhere may still come.
            if found.offset >= self._next[found.partition]:
                self._next[found.partition] = found.offset + 1
                fetched.append(found)
        return fetched

    def _message(self, message: KafkaMessage) -> Message:
        partition = self._partitions[message.topic(), message.partition()]  # type: ignore[index]
        offset: int = message.offset()  # type: ignore[assignment]
        schema_id = None if self._header is None else _header(message, self._header)
        return Message(
            partition, offset, message.value(), message.timestamp()[1], schema_id=schema_id
        )

    def _relist(self) -> None:
        """Find new partitions, and whether the cluster answers."""
        try:
            for topic in self._config.topics:
                for partition in self._list(topic, _ANSWER_S):
                    if partition not in self._next:
                        low, _ = self._bounds(partition, _ANSWER_S)
                        self._client.incremental_assign([TopicPartition(*partition, low)])
                        self._next[partition] = self._gathering.position[partition] = low
                        logger.info("%s is new; reading it from %d", _name(partition), low)
        except (SourceUnavailable, KafkaException) as error:
            self._trouble = _words(error)
            self._relist_at = self._now() + RETRY_S
        else:
            self._trouble = None
            self._relist_at = self._now() + RELIST_S

    def _replace(self, partition: Partition) -> None:
        """Set a partition whose offset the broker refused to where it can go on."""
        try:
            low, high = self._bounds(partition, _ANSWER_S)
        except SourceUnavailable as error:
            self._trouble = str(error)
            return
        offset = self._within(partition, self._next[partition], low, high)
        self._next[partition] = offset
        if partition not in self._gathering.staged:
            self._gathering.position[partition] = offset
        self._client.incremental_unassign([TopicPartition(*partition)])
        self._client.incremental_assign([TopicPartition(*partition, offset)])
        self._displaced.discard(partition)

    def _on_fetch_error(self, message: KafkaMessage, error: KafkaError) -> None:
        topic, number = message.topic(), message.partition()
        partition = self._partitions.get((topic or "", -1 if number is None else number))
        code = error.code()
        if code == KafkaError._PARTITION_EOF:  # noqa: SLF001
            offset = message.offset()
            if partition is not None and offset is not None:
                self._next[partition] = max(self._next[partition], offset)
        elif code in _OUT_OF_RANGE and partition is not None:
            self._displaced.add(partition)
        elif error.fatal():
            raise SourceUnavailable(f"the Kafka client gave up: {error.str()}")
        else:
            self._on_error(error, lasting=True)

    def _on_error(self, error: KafkaError, *, lasting: bool = False) -> None:
        if lasting or error.code() in _DOWN:
            self._trouble = f"Kafka at {self._config.brokers}: {error.str()}"
            self._relist_at = min(self._relist_at, self._now() + RETRY_S)


def _header(message: KafkaMessage, name: str) -> bytes | None:
    """Return the last header of this name that holds bytes."""
    found = None
    headers: Any = message.headers()
    for key, value in headers or ():
        if key == name and isinstance(value, bytes):
            found = value
    return found


def _on_commit(error: KafkaError | None, _: Any) -> None:
    if error is not None:
        logger.debug("commit for lag dashboards failed: %s", error.str())


def _words(error: Exception) -> str:
    cause = error.args[0] if error.args else error
    return str(cause.str()) if isinstance(cause, KafkaError) else str(cause)


def _name(partition: Partition) -> str:
    return f"{partition.topic}/{partition.number}"
