"""Sends the generated click stream to Kafka, each click when its event time has come."""

import threading
import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from streamtrain import clock
from streamtrain.clickstream import ClickStream, times
from streamtrain.errors import StreamtrainError

_TICK_S: Final = 0.01
_TIMEOUT_S: Final = 20.0
_AT_ONCE: Final = 5_000


class KafkaUnreachable(StreamtrainError):
    """The broker does not answer, or does not take what is sent."""


def make_topic(
    brokers: str, topic: str, *, partitions: int = 1, timeout_s: float = _TIMEOUT_S
) -> bool:
    """Make a topic; tell whether it is new.

    Raises
    ------
    KafkaUnreachable
    """
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
    made = admin.create_topics(
        [NewTopic(topic, num_partitions=partitions, replication_factor=1)],
        operation_timeout=timeout_s,
        request_timeout=timeout_s,
    )
    try:
        made[topic].result(timeout_s + 1)
    except KafkaException as failure:
        error = failure.args[0]
        if isinstance(error, KafkaError) and error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return False
        raise KafkaUnreachable(
            f"topic {topic} can't be made on {brokers}: {error}; is a broker up there?"
        ) from failure
    return True


def feed(
    stream: ClickStream,
    *,
    brokers: str,
    topic: str,
    rate: float,
    start_ms: int,
    count: int | None,
    stop: threading.Event,
    on_sent: Callable[[int], None] = lambda _: None,
    wall: Callable[[], float] = clock.wall,
) -> int:
    """Send clicks at `rate` a second; return how many were sent.

    Parameters
    ----------
    stream : ClickStream
    brokers, topic : str
    rate : float
    start_ms : int
        Event time of click 0.
    count : int or None
        How many; None goes on until `stop` is set.
    on_sent : callable
        Told how many were handed over so far, after each lot.
    wall : callable
        Seconds since 1970.

    Raises
    ------
    KafkaUnreachable
        A click was not taken.
    """
    producer = Producer(
        {"bootstrap.servers": brokers, "linger.ms": 5, "log_level": 0, "message.timeout.ms": 30_000}
    )
    failed: list[str] = []

    def delivered(error: KafkaError | None, _message: object) -> None:
        if error is not None:
            failed.append(str(error))

    sent = 0
    while not stop.is_set() and not failed and (count is None or sent < count):
        due = int((wall() * 1000 - start_ms) * rate / 1000)
        n = min(due - sent, _AT_ONCE) if count is None else min(due - sent, count - sent, _AT_ONCE)
        if n <= 0:
            producer.poll(0)
            time.sleep(_TICK_S)
            continue
        for value in stream.clicks(sent, times(start_ms, rate, sent, n)).values():
            while True:
                try:
                    producer.produce(topic, value, on_delivery=delivered)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.poll(0)
        sent += n
        on_sent(sent)
    left = producer.flush(_TIMEOUT_S)
    if failed or left:
        why = failed[0] if failed else f"{left} are on their way after {_TIMEOUT_S:g} s"
        raise KafkaUnreachable(f"{brokers} did not take clicks for {topic}: {why}")
    return sent
