"""What the README shows is what runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import keras
import pytest

from streamtrain.cli import cli
from streamtrain.config import loads
from streamtrain.dense import DenseStep
from streamtrain.models import InputSpec, ModelSpec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _block(language: str, containing: str) -> str:
    for block in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL):
        if containing in block:
            return str(block)
    raise AssertionError(f"no {language} block with {containing!r} in the README")


def test_the_configuration_is_accepted() -> None:
    config = loads(_block("yaml", "checkpoint:"))
    assert config.model.name == "ctr"
    assert config.export.redis is not None


def test_the_model_of_one_s_own_can_be_trained() -> None:
    scope: dict[str, Any] = {}
    exec(_block("python", "def build"), scope)  # noqa: S102  our own README
    spec = ModelSpec(
        inputs={
            "user": InputSpec("user", "pooled", (4,), "user", "user"),
            "price": InputSpec("price", "dense", (1,), "price"),
        },
        tasks=("click", "buy"),
        seed=1,
    )
    config = loads(_block("yaml", "checkpoint:"))
    step = DenseStep(
        scope["build"],
        spec,
        optimizer=config.model.optimizer,
        losses={"click": "binary", "buy": "binary"},
        shapes=[4],
    )
    assert isinstance(step.model, keras.Model)
    learned = step.learn(step.feed(4), 4)
    assert learned.finite
    assert learned.logits.shape == (4, 2)


@pytest.mark.parametrize(
    "line", re.findall(r"^    (streamtrain .*?)(?:\s+#.*)?$", README, re.MULTILINE)
)
def test_a_command_line_is_one_that_the_parser_knows(line: str) -> None:
    _, verb, *words = shlex.split(line)
    command = cli.commands[verb]
    command.make_context(verb, words)
    assert isinstance(command, click.Command)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)", README))))
def test_a_make_verb_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./-]+)\)", README))))
def test_a_link_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"tests/[\w/]+(?:\.py)?", README))))
def test_a_test_that_shows_a_promise_exists(path: str) -> None:
    assert (ROOT / path).exists()
