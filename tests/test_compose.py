"""The compose file, without an engine: valid, in agreement with the rest, and its commands run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtrain import embedded
from streamtrain.cli import cli
from streamtrain.clickstream import SCHEMA
from streamtrain.config import load
from tests.test_architecture import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if service["image"] == "streamtrain")
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
TIMEOUT_S = 180


def test_it_is_what_the_compose_specification_allows() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, "docker-compose.yml"],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_whoever_is_waited_for_is_there_and_can_say_so() -> None:
    for service in SERVICES.values():
        for name, wait in service.get("depends_on", {}).items():
            assert wait["condition"] in {"service_healthy", "service_completed_successfully"}
            if wait["condition"] == "service_healthy":
                assert SERVICES[name]["healthcheck"]["test"]


def test_every_volume_is_declared_and_every_file_exists() -> None:
    used = set()
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists()
            else:
                used.add(source)
    assert used == set(COMPOSE["volumes"])


def test_nothing_listens_beyond_this_machine() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", OURS)
def test_our_containers_may_write_only_where_they_must(name: str) -> None:
    assert SERVICES[name]["read_only"]
    assert SERVICES[name]["init"]
    assert SERVICES[name]["cap_drop"] == ["ALL"]


def test_the_image_runs_as_nobody_special_and_hands_signals_on() -> None:
    assert "\nUSER 10001" in DOCKERFILE
    assert '\nENTRYPOINT ["streamtrain"]' in DOCKERFILE
    cache = next(
        line.strip() for line in DOCKERFILE.splitlines() if "NUMBA_CACHE_DIR" in line
    ).split("=")[1]
    assert cache.split()[0] in " ".join(SERVICES["trainer"]["volumes"])


def test_a_clean_end_has_the_time_it_needs() -> None:
    """A trainer that is killed at its last cut learns that part again at the next start."""
    config = load(ROOT / "docker" / "clicks.yaml")
    grace = SERVICES["trainer"]["stop_grace_period"]
    assert grace.endswith("m")
    assert int(grace[:-1]) * 60_000 > 2 * config.shutdown.deadline


def test_its_parts_speak_of_the_same_topic_model_and_schema() -> None:
    config = load(ROOT / "docker" / "clicks.yaml")
    assert config.source.kafka is not None
    for name in ("topic", "clicks"):
        words = SERVICES[name]["command"]
        assert words[words.index("--brokers") + 1] == config.source.kafka.brokers
        assert [words[words.index("--topic") + 1]] == config.source.kafka.topics
    words = SERVICES["replica"]["command"]
    assert words[words.index("--model") + 1] == config.model.name
    assert json.loads((ROOT / "docker" / "click.avsc").read_text("utf-8")) == SCHEMA
    for name in ("trainer", "replica"):
        assert SERVICES[name]["environment"]["REDIS_URL"].startswith("redis://redis:6379")


@pytest.mark.parametrize("name", OURS)
def test_a_command_is_one_that_the_parser_knows(name: str) -> None:
    words = list(SERVICES[name]["command"])
    at = next(n for n, word in enumerate(words) if word in cli.commands)
    cli.make_context("streamtrain", [*words[:at], words[at], "--help"], resilient_parsing=True)
    cli.commands[words[at]].make_context(words[at], words[at + 1 :])


@pytest.mark.slow
@pytest.mark.endtoend
def test_the_commands_work_together(tmp_path: Path) -> None:
    """What every container runs, in its order, with addresses and paths of this machine."""
    with embedded.broker() as broker, embedded.redis() as redis:
        environment = {**os.environ, "REDIS_URL": f"redis://{redis.address}/0"}

        def start(name: str, *more: str) -> subprocess.Popen[str]:
            words = [
                # /tmp goes first: the checkout may itself lie below it.
                word.replace("/tmp", str(tmp_path))
                .replace("kafka:19092", broker.address)
                .replace("/etc/streamtrain", str(ROOT / "docker"))
                for word in SERVICES[name]["command"]
            ]
            log = (tmp_path / f"{name}.log").open("w")
            with log:
                return subprocess.Popen(
                    [sys.executable, "-m", "streamtrain", *words, *more],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )

        running: list[subprocess.Popen[str]] = []
        try:
            topic = start("topic")
            topic.communicate(timeout=TIMEOUT_S)
            assert topic.returncode == 0
            running.append(start("clicks"))
            overrides = [
                f"source.kafka.brokers={broker.address}",
                f"checkpoint.dir={tmp_path / 'cuts'}",
                f"dead_letters.file={tmp_path / 'bad.jsonl'}",
                "telemetry.listen=127.0.0.1:0",
            ]
            sets = [word for pair in overrides for word in ("--set", pair)]
            trainer = start("trainer", *sets, "--until-samples", "3000", "--json")
            running.append(trainer)
            replica = start("replica")
            running.append(replica)
            out, _ = trainer.communicate(timeout=TIMEOUT_S)
            assert trainer.returncode == 0, (tmp_path / "trainer.log").read_text()
            report = json.loads(out)
            assert (report["learned"], report["dropped"]) == (3000, {})
            assert replica.stdout is not None
            for line in replica.stdout:
                if line.startswith(f"version {report['version']},"):
                    break
            assert (tmp_path / "served").exists()
            assert (tmp_path / "sent").exists()
            for process in (running[0], replica):
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
        finally:
            for process in running:
                process.kill()
                process.communicate()
