"""The command line: reports, and the exit code and words of each kind of trouble."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamtrain import cli, faults
from streamtrain.cut import Checkpoints
from streamtrain.errors import ConfigError
from tests.small import config_in, records, write_container


@pytest.fixture(autouse=True)
def _the_root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config_in(tmp_path)
    write_container(tmp_path / "a.avro", list(records(200)))
    return tmp_path


def _ends_with(code: int, *words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == code


def test_replay_reports_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "-c", str(folder / "small.yaml"), "--json", "--until-samples", "150"]
    cli.main([*words, str(folder / "a.avro")])
    report = json.loads(capsys.readouterr().out)
    assert (report["learned"], report["consumed"], report["dropped"]) == (150, 150, {})
    assert report["rows"]["own"] == 150
    assert report["window"]["click"]["samples"] == 150


def test_replay_reports_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["replay", "-c", str(folder / "small.yaml"), str(folder / "a.avro")])
    out = capsys.readouterr().out
    assert "learned   200 samples in 7 steps" in out
    assert "dropped   none" in out
    assert "AUC" in out


def test_backfill_then_go_on(folder: Path) -> None:
    """What a replay saved is a cut like any other."""
    words = ["replay", "-c", str(folder / "small.yaml"), str(folder / "a.avro")]
    cli.main([*words, "--save", str(folder / "cuts")])
    cut = Checkpoints(folder / "cuts", keep=1).newest()
    assert cut is not None
    assert cut.state()["trainer"]["learned"] == 200
    # Published from the same files: nothing is learned twice.
    cli.main([*words, "--publish"])
    cut = Checkpoints(folder / "cuts", keep=1).newest()
    assert cut is not None
    assert cut.state()["trainer"]["learned"] == 200


def test_a_replay_leaves_a_live_trainer_s_directory_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = Checkpoints(folder / "cuts", keep=1)
    live.lock()
    words = ["replay", "-c", str(folder / "small.yaml"), str(folder / "a.avro")]
    _ends_with(3, *words, "--publish")
    _ends_with(3, *words, "--save", str(folder / "cuts"))
    live.unlock()
    assert "is held by a running trainer; stop it first" in capsys.readouterr().err


def test_save_wants_an_empty_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "thesis.tex").touch()
    words = ["replay", "-c", str(folder / "small.yaml"), str(folder / "a.avro")]
    _ends_with(3, *words, "--save", str(folder / "other"))
    assert "is not empty" in capsys.readouterr().err


def test_mistakes_in_the_config_end_with_2_and_their_paths(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "-c", str(folder / "small.yaml"), "--set", "batch.sise=1"]
    _ends_with(2, *words, "--set", "checkpoint.every=1")
    err = capsys.readouterr().err
    assert "streamtrain: batch.sise: unknown key; did you mean `size`?" in err
    assert "streamtrain: checkpoint.every: expected a duration" in err


def test_a_config_that_does_not_fit_the_schema_ends_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", "-c", str(folder / "small.yaml"), str(folder / "a.avro")]
    _ends_with(2, *words, "--set", "features.user.field=usr")
    assert "usr" in capsys.readouterr().err


def test_a_missing_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ends_with(1, "replay", "-c", str(folder / "small.yaml"), str(folder / "none.avro"))
    assert "none.avro" in capsys.readouterr().err


def test_a_checkpoint_directory_that_can_t_be_made_ends_with_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", "-c", str(folder / "small.yaml"), str(folder / "a.avro"), "--publish"]
    _ends_with(3, *words, "--set", "checkpoint.dir=/proc/nowhere/cuts")
    assert "checkpoint.dir: /proc/nowhere/cuts can't be used" in capsys.readouterr().err


def test_a_bad_redis_url_ends_with_2_and_keeps_its_password(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_REDIS", "redis://:sec/ret@1@127.0.0.1:6379")
    words = ["replay", "-c", str(folder / "small.yaml"), str(folder / "a.avro"), "--publish"]
    _ends_with(2, *words, "--set", "export.redis={url_env: MY_REDIS}")
    err = capsys.readouterr().err
    assert "not a valid URL" in err
    assert "sec" not in err


def test_usage_ends_with_2() -> None:
    _ends_with(2, "run")
    _ends_with(2, "replay", "-c", "x.yaml", "--publish", "--save", "y", "z.avro")


def test_check_shows_what_is_in_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "-c", str(folder / "small.yaml"), "--offline"]
    cli.main([*words, "--set", "batch.size=16"])
    assert json.loads(capsys.readouterr().out)["batch"]["size"] == 16


def test_logs_can_be_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--log-format", "json", "replay", "-c", str(folder / "small.yaml")]
    cli.main([*words, str(folder / "a.avro"), "--publish"])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    assert any(line["message"].startswith("effective configuration: ") for line in lines)


def test_fault_points_exist_only_when_asked_for() -> None:
    assert faults.hook({}) is faults.nothing
    with pytest.raises(ConfigError, match="write it as STEP:COUNT"):
        faults.hook({faults.VARIABLE: "D4"})
    faults.hook({faults.VARIABLE: "D4:3"})("D5")
