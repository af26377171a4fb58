"""What `doctor` and `check` say of a machine and of services, well and unwell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamtrain import cli, doctor, embedded
from streamtrain.clickfeed import make_topic
from tests.small import config_in


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    with embedded.broker() as broker, embedded.redis() as redis:
        make_topic(broker.address, "clicks", partitions=3)
        yield broker.address, f"redis://{redis.address}/0"


def test_a_sound_machine() -> None:
    found = {finding.what: finding for finding in doctor.machine()}
    assert [f for f in found.values() if not f.ok] == []
    assert found["packages"].said == "all four are ours"
    assert found["kernels"].said.startswith("work")
    assert {"python", "tensorflow", "numba", "cpu", "threads", "kernel cache"} <= set(found)


def test_strangers_are_told_and_their_kernels_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "strangers", lambda: ["`exporters` is gone"])
    found = {finding.what: finding for finding in doctor.machine()}
    assert not found["packages"].ok
    assert "kernels" not in found


def test_a_kernel_cache_that_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a read-only root every start would compile for a minute, and nobody would know why."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = {finding.what: finding for finding in doctor.machine()}
    assert not found["kernel cache"].ok
    assert "NUMBA_CACHE_DIR" in found["kernel cache"].said


def test_check_reaches_what_the_configuration_names(
    servers: tuple[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    brokers, url = servers
    monkeypatch.setenv("TEST_REDIS_URL", url)
    config_in(tmp_path, brokers=brokers, redis_env="TEST_REDIS_URL")
    words = ["check", "-c", str(tmp_path / "small.yaml")]
    cli.main(words)
    out, err = capsys.readouterr()
    assert json.loads(out)["batch"]["size"] == 32
    lines = dict(line.split(maxsplit=2)[1:] for line in err.splitlines() if line[:3] == "ok ")
    assert lines["kafka"] == f"{brokers} has clicks (3 partitions)"
    assert lines["redis"].endswith("holds nothing of the model small")
    assert "will be made" in lines["checkpoints"]
    assert "dense weights" in lines["model"]
    assert not (tmp_path / "cuts").exists()


def test_check_names_everything_that_is_not_well(
    servers: tuple[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    brokers, _ = servers
    monkeypatch.delenv("TEST_REDIS_URL", raising=False)
    config_in(tmp_path, brokers=brokers, topic="none", redis_env="TEST_REDIS_URL")
    (tmp_path / "cuts").touch()
    words = ["check", "-c", str(tmp_path / "small.yaml"), "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--set", "features.user.field=usr", "--set", "model.build=nowhere:build"])
    assert ended.value.code == 1
    answer = json.loads(capsys.readouterr().out)
    found = {line["what"]: line for line in answer["services"]}
    assert not any(line["ok"] for line in found.values())
    assert "usr" in found["schema"]["said"]
    assert "TEST_REDIS_URL" in found["redis"]["said"]
    assert "nowhere" in found["model"]["said"]
    assert "can't be written to" in found["checkpoints"]["said"]


def test_doctor_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = doctor.Finding("cpu", "on fire", ok=False)
    monkeypatch.setattr(doctor, "machine", lambda: iter([bad]))
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out) == [{"what": "cpu", "said": "on fire", "ok": False}]
