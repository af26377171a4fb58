"""The house's rules that no linter knows: public names, light imports, who speaks, who reads time.

Who may import whom is said in pyproject.toml and checked by ``lint-imports``.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("consumers", "exporters", "sparse_store", "streamtrain")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CLOCKS = {
    "time": {
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
        "process_time", "process_time_ns", "thread_time", "localtime", "gmtime",
    },
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}  # fmt: skip


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


every_source = pytest.mark.parametrize("path", SOURCES, ids=name_of)
every_package = pytest.mark.parametrize("package", PACKAGES)


# public names


def by_kind_and_name(name: str) -> tuple[bool, bool, str]:
    """CONSTANTS, then Classes, then functions: the order that ``make fix`` gives `__all__`."""
    return not name.isupper(), not name[0].isupper(), name


@every_package
def test_all_is_sorted_and_every_name_in_it_exists(package: str) -> None:
    module = importlib.import_module(package)
    names = list(module.__all__)
    assert names == sorted(set(names), key=by_kind_and_name)
    assert [name for name in names if not hasattr(module, name)] == []


@every_package
def test_all_leaves_nothing_out_and_lets_nothing_leak(package: str) -> None:
    """A name that can be imported will be; it is either promised or has an underscore."""
    module = importlib.import_module(package)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations"} == {name for name in module.__all__ if name[0] != "_"}


@every_package
def test_package_carries_stamp_types_and_docstring(package: str) -> None:
    """`consumers` and `exporters` are other people's names on PyPI: the stamp tells them apart."""
    module = importlib.import_module(package)
    assert module.__distribution__ == "streamtrain"
    assert module.__doc__
    assert (ROOT / package / "py.typed").is_file()


# what an import brings along


def loaded_by(code: str, *heavy: str) -> list[str]:
    """Which of the modules `heavy` a fresh interpreter has loaded after `code`."""
    lines = [code, "import sys", f"print(*(name for name in {heavy!r} if name in sys.modules))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_the_probe_for_loaded_modules_can_fail() -> None:
    assert loaded_by("import json", "json", "tensorflow") == ["json"]


def test_a_replica_needs_neither_tensorflow_nor_numba_nor_arrow() -> None:
    """It runs inside other people's serving processes."""
    heavy = ("tensorflow", "keras", "numba", "pyarrow", "confluent_kafka")
    assert loaded_by("import exporters", *heavy) == []


_HELPS = """
import runpy, sys
sys.argv = ["streamtrain", "--help"]
try:
    runpy.run_module("streamtrain", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("code", ["import streamtrain.cli", _HELPS], ids=["import", "help"])
def test_the_command_line_answers_at_once(code: str) -> None:
    assert loaded_by(code, "tensorflow", "keras", "numba") == []


# who speaks, and how one arrow is written


@every_source
def test_nobody_prints_but_the_command_line(path: Path) -> None:
    if name_of(path) == "streamtrain/cli.py":
        return
    prints = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name) and node.id in {"print", "pprint"}
    ]
    assert prints == []


@every_source
def test_imports_are_absolute(path: Path) -> None:
    """So that grep finds every arrow between modules."""
    relative = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


# who reads time


def clock_reads(tree: ast.Module) -> Iterator[int]:
    """Lines that read a clock by its name; a default argument value may name one (injection)."""
    defaults: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            defaults.update([*node.defaults, *(d for d in node.kw_defaults if d is not None)])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            if CLOCKS["time"].intersection(alias.name for alias in node.names):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node not in defaults:
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if isinstance(node.value, ast.Attribute):  # datetime.datetime.now
                owner = node.value.attr
            if node.attr in CLOCKS.get(owner, ()):
                yield node.lineno


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import time\ntime.time()", [2]),
        ("import time\nx = time.monotonic", [2]),
        ("from time import monotonic", [1]),
        ("from time import sleep", []),
        ("import time\ndef f(now=time.monotonic): return now()", []),
        ("import time\ndef f(*, now=time.monotonic): return now()", []),
        ("import time\ndef f(now=time.monotonic()): ...", [2]),
        ("import datetime\ndatetime.datetime.now()", [2]),
        ("from datetime import datetime\ndatetime.now()", [2]),
        ("clock.time()", []),
    ],
)
def test_the_search_for_clock_reads(code: str, lines: list[int]) -> None:
    assert list(clock_reads(ast.parse(code))) == lines


@every_source
def test_nobody_reads_time_but_the_clock(path: Path) -> None:
    """Whatever depends on time is handed it, or a replay would not equal the live run."""
    if name_of(path) == "streamtrain/clock.py":
        return
    assert list(clock_reads(tree_of(path))) == []
