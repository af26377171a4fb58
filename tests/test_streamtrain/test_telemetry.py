"""The page that Prometheus scrapes, and the two questions an orchestrator asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamtrain.telemetry import Telemetry, TelemetryServer


class _Now:
    def __init__(self) -> None:
        self.value = 100.0

    def __call__(self) -> float:
        return self.value


@pytest.fixture
def now() -> _Now:
    return _Now()


@pytest.fixture
def telemetry(now: _Now) -> Telemetry:
    return Telemetry("ctr", now=now)


@pytest.fixture
def url(telemetry: Telemetry) -> Iterator[str]:
    server = TelemetryServer(telemetry, "127.0.0.1:0")
    server.start()
    yield f"http://{server.address}"
    server.stop()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_are_well_formed(telemetry: Telemetry, url: str) -> None:
    telemetry.samples.labels("learned").inc(7)
    telemetry.lag.labels("clicks", "0").set(3)
    status, page = _get(f"{url}/metrics")
    assert status == 200
    families = {f.name: f for f in text_string_to_metric_families(page)}
    (learned,) = [
        s for s in families["streamtrain_samples"].samples if s.name == "streamtrain_samples_total"
    ]
    assert (learned.labels, learned.value) == ({"fate": "learned"}, 7)
    assert families["streamtrain_lag"].samples[0].value == 3


def test_promtool_finds_nothing_to_say(telemetry: Telemetry) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus); the parser above has looked")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=telemetry.page(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_loop_that_hangs_is_unhealthy(telemetry: Telemetry, now: _Now, url: str) -> None:
    telemetry.ready_when(dict)
    now.value += 3600
    assert _get(f"{url}/healthz")[0] == 200, "a long start is no reason to be restarted"
    telemetry.beat()
    now.value += 61
    status, body = _get(f"{url}/healthz")
    assert status == 503
    assert "has not come round for 61 s" in json.loads(body)["reasons"]["loop"]
    telemetry.beat()
    assert _get(f"{url}/healthz")[0] == 200


def test_readiness_gives_reasons(telemetry: Telemetry, url: str) -> None:
    assert _get(f"{url}/readyz") == (503, '{"ok": false, "reasons": {"start": "starting"}}')
    telemetry.ready_when(lambda: {"redis": "can't be reached"})
    assert json.loads(_get(f"{url}/readyz")[1])["reasons"] == {"redis": "can't be reached"}
    telemetry.ready_when(dict)
    assert _get(f"{url}/readyz")[0] == 200


def test_other_paths_say_what_there_is(url: str) -> None:
    status, body = _get(f"{url}/")
    assert status == 404
    assert "/metrics" in body
