"""Running the real daemon as a process, killing it, and reading what it left behind."""

from __future__ import annotations

import codecs
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from confluent_kafka import Producer

from sparse_store.store import SparseStore
from streamtrain.cut import Checkpoints, Cut
from streamtrain.faults import VARIABLE
from tests.small import SCHEMA, config_text

KILLED = -9
TIMEOUT_S = 120


@dataclass(frozen=True)
class Life:
    """One model: its folder, its topic and its Redis, over any number of processes.

    Attributes
    ----------
    folder : Path
        Config, cuts, dead letters.
    redis_url : str
        Where versions go.
    model : str
        Its name there.
    """

    folder: Path
    redis_url: str
    model: str = "small"

    @classmethod
    def begin(
        cls, folder: Path, *, brokers: str, topic: str, redis_url: str, model: str = "small"
    ) -> Life:
        """Write schema and config of the small model."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "click.avsc").write_text(json.dumps(SCHEMA))
        text = config_text(
            build="fm",
            brokers=brokers,
            topic=topic,
            redis_env="TEST_REDIS_URL",
            every="30ms",
            cut_every="60ms",
        )
        (folder / "small.yaml").write_text(text.replace("name: small", f"name: {model}"))
        return cls(folder, redis_url, model)

    def start(
        self, *, until: int | None = None, fault: str | None = None, words: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start the daemon; its log goes on in ``daemon.log``."""
        command = [
            sys.executable,
            "-m",
            "streamtrain",
            "run",
            "-c",
            str(self.folder / "small.yaml"),
        ]
        command += ["--json", *words]
        if until is not None:
            command += ["--until-samples", str(until)]
        environment = {
            **os.environ,
            "TEST_REDIS_URL": self.redis_url,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        environment.pop(VARIABLE, None)
        if fault is not None:
            environment[VARIABLE] = fault
        with (self.folder / "daemon.log").open("a") as log:
            log.write(f"--- until {until}, fault {fault}\n")
            log.flush()
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def run(self, *, until: int, fault: str | None = None) -> dict[str, Any]:
        """Run to a clean end and return the report, or to the kill and return nothing."""
        process = self.start(until=until, fault=fault)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        if fault is not None:
            assert process.returncode == KILLED, self.tail()
            return {}
        assert process.returncode == 0, self.tail()
        report: dict[str, Any] = json.loads(out)
        return report

    def tail(self) -> str:
        """Return the end of the daemon's log, for a failing test."""
        return "\n".join((self.folder / "daemon.log").read_text().splitlines()[-40:])

    def cut(self) -> Cut:
        """Return the newest valid cut."""
        cut = Checkpoints(self.folder / "cuts", keep=1).newest()
        assert cut is not None
        return cut

    def store(self) -> SparseStore:
        """Return the store of the newest valid cut."""
        return SparseStore.load(self.cut().parts())


def produce(brokers: str, topic: str, messages: Sequence[bytes | None], partitions: int) -> None:
    """Send values round robin over the partitions, in order within each."""
    producer = Producer({"bootstrap.servers": brokers, "log_level": 0})
    for n, value in enumerate(messages):
        producer.produce(topic, value, partition=n % partitions)
    assert producer.flush(30) == 0


def rows_by_redis_cli(url: str, model: str) -> Mapping[str, Mapping[int, bytes]]:
    """Read every row of the head's epoch with plain ``redis-cli``: table -> key -> float bytes."""
    head = _hash(url, f"st:{{{model}}}:head")
    epoch = head[b"epoch"].decode()
    found: dict[str, dict[int, bytes]] = {}
    for name in _cli(url, "--scan", "--pattern", f"st:{{{model}/*}}:{epoch}:*").splitlines():
        table = name.split(":")[-2]
        for field, value in _hash(url, name).items():
            key = int.from_bytes(field, "little")
            assert key not in found.setdefault(table, {}), f"{table} {key} stands in two buckets"
            found[table][key] = value[4:]
    return found


def head_by_redis_cli(url: str, model: str) -> Mapping[bytes, bytes]:
    """Return the fields of the head."""
    return _hash(url, f"st:{{{model}}}:head")


def _hash(url: str, name: str) -> dict[bytes, bytes]:
    text = _cli(url, "--no-raw", "HGETALL", name)
    items = [_unquoted(line) for line in text.splitlines() if line.strip()]
    return dict(zip(items[::2], items[1::2], strict=True))


def _unquoted(line: str) -> bytes:
    match = re.fullmatch(r'\s*\d+\) "(.*)"', line)
    assert match is not None, line
    return codecs.escape_decode(match[1])[0]  # type: ignore[attr-defined,no-any-return]


def _cli(url: str, *words: str) -> str:
    where = urlparse(url)
    command = ["redis-cli", "-h", where.hostname or "", "-p", str(where.port), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
