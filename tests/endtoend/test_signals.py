"""How the real process ends, and what it says while it lives."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import TopicMaker
from tests.endtoend.life import Life, head_by_redis_cli, produce
from tests.services.kafka import Broker
from tests.services.service import free_ports
from tests.small import values

pytestmark = pytest.mark.endtoend

SAMPLES = 640
PATIENCE_S = 90


@pytest.fixture
def life(tmp_path: Path, kafka_broker: Broker, kafka_topic: TopicMaker, redis_url: str) -> Life:
    topic = kafka_topic(partitions=1)
    produce(kafka_broker.bootstrap, topic, values(SAMPLES), 1)
    return Life.begin(tmp_path, brokers=kafka_broker.bootstrap, topic=topic, redis_url=redis_url)


def _answers(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def _learned(url: str, process: subprocess.Popen[str], samples: int) -> None:
    """Wait until the metrics say that so many samples were learned."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None
        status, page = _answers(f"{url}/metrics")
        if status == 200 and _metric(page, "streamtrain_samples_total", fate="learned") == samples:
            return
        time.sleep(0.1)
    raise AssertionError(f"not {samples} samples within {PATIENCE_S} s: {_answers(url)}")


def _metric(page: str, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return None


def test_sigterm_ships_the_last_delta_writes_the_last_cut_and_ends_with_0(life: Life) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    # Nothing is due while it runs: what is there afterwards was written because it was told to end.
    quiet = ["export.every=1h", "checkpoint.every=1h", f"telemetry.listen=127.0.0.1:{port}"]
    process = life.start(words=[word for pair in quiet for word in ("--set", pair)])
    _learned(url, process, SAMPLES)
    assert _answers(f"{url}/healthz")[0] == 200
    assert _answers(f"{url}/readyz") == (200, '{"ok": true, "reasons": {}}')
    page = _answers(f"{url}/metrics")[1]
    assert _metric(page, "streamtrain_info", model="small") == 1
    assert _metric(page, "streamtrain_step_seconds_count") == SAMPLES / 32
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, life.tail()
    report = json.loads(out)
    assert report["learned"] == SAMPLES
    cut = life.cut()
    assert cut.state()["trainer"]["learned"] == SAMPLES
    assert cut.version == report["version"]
    assert int(head_by_redis_cli(life.redis_url, "small")[b"version"]) == report["version"]
    assert "effective configuration: {" in life.tail()


def test_a_second_signal_ends_at_once(life: Life) -> None:
    (port,) = free_ports(1)
    process = life.start(words=["--set", f"telemetry.listen=127.0.0.1:{port}"])
    _learned(f"http://127.0.0.1:{port}", process, SAMPLES)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT), life.tail()
    # Whatever it was in the middle of, the next one goes on.
    assert life.run(until=SAMPLES)["learned"] == SAMPLES


def test_a_sink_that_is_down_does_not_stop_a_trainer_that_has_a_cut(life: Life) -> None:
    life.run(until=320)
    (port,) = free_ports(1)
    elsewhere = Life(life.folder, f"redis://127.0.0.1:{port}/0")
    process = elsewhere.start(until=480, words=["--set", "shutdown.deadline=500ms"])
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, life.tail()
    report = life.run(until=SAMPLES)
    assert report["learned"] == SAMPLES
    assert int(head_by_redis_cli(life.redis_url, "small")[b"version"]) == report["version"]


def test_a_broker_that_is_not_there_is_named(tmp_path: Path, redis_url: str) -> None:
    (port,) = free_ports(1)
    life = Life.begin(tmp_path, brokers=f"127.0.0.1:{port}", topic="clicks", redis_url=redis_url)
    process = life.start(until=1)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in life.tail().splitlines()[-1]
    # A start that led nowhere leaves nothing in the way of the next one.
    assert "unexpected" not in life.tail()


def test_an_empty_volume_under_a_live_head_ends_with_3(life: Life) -> None:
    life.run(until=320)
    lost = ["--set", "checkpoint.dir=elsewhere"]
    process = life.start(until=SAMPLES, words=lost)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    assert "serves version" in life.tail()
