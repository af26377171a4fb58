"""Rules of the kernel rooms, checked on their source and on what was compiled.

A kernel room is a module ``_<subject>_kernels.py``; only there may Numba be used. Each rule closes
a trap that says nothing when it bites: a stale cache, a second signature, a frozen global.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_architecture import PACKAGES, ROOT, SOURCES, name_of, tree_of

ROOMS = [path for path in SOURCES if path.name.startswith("_") and path.stem.endswith("_kernels")]
OTHERS = [path for path in SOURCES if path not in ROOMS]
COMPILERS = {"njit", "jit", "vectorize", "guvectorize", "cfunc", "jitclass", "stencil", "overload"}
REQUIRED = {"cache": True, "nogil": True}
FORBIDDEN = {"fastmath", "parallel", "forceobj", "looplift"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
SCALARS = {
    "bool_", "float32", "float64",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
}  # fmt: skip

every_room = pytest.mark.parametrize("path", ROOMS, ids=name_of)


def test_there_are_rooms() -> None:
    """An empty list of rooms would make every rule below hold."""
    assert [name_of(path) for path in ROOMS] == [
        "consumers/_decode_kernels.py",
        "sparse_store/_optim_kernels.py",
        "sparse_store/_table_kernels.py",
    ]


# what the source must look like


def decorators(tree: ast.Module) -> Iterator[tuple[str, ast.expr, str]]:
    """(function, decorator, its last name) of everything that is decorated."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                last = called.attr if isinstance(called, ast.Attribute) else ""
                yield node.name, decorator, called.id if isinstance(called, ast.Name) else last


def flag_faults(tree: ast.Module) -> list[str]:
    """Compiled functions whose flags break a rule, with the rule."""
    faults = []
    for function, decorator, name in decorators(tree):
        if name not in COMPILERS:
            continue
        if name != "njit" or not isinstance(decorator, ast.Call):
            faults.append(f"{function}: must be @njit(cache=True, nogil=True)")
            continue
        if decorator.args:
            faults.append(f"{function}: an explicit signature compiles at import")
        flags = {word.arg: getattr(word.value, "value", ...) for word in decorator.keywords}
        faults += [
            f"{function}: {flag} must be {value}"
            for flag, value in REQUIRED.items()
            if flags.get(flag) is not value
        ]
        faults += [f"{function}: {flag} is not allowed" for flag in sorted(FORBIDDEN & set(flags))]
    return faults


@pytest.mark.parametrize(
    ("decorator", "fault"),
    [
        ("@njit", "f: must be"),
        ("@numba.njit", "f: must be"),
        ("@jit(cache=True, nogil=True)", "f: must be"),
        ("@njit(cache=True)", "f: nogil must be True"),
        ("@njit(cache=False, nogil=True)", "f: cache must be True"),
        ("@njit(cache=True, nogil=True, fastmath=True)", "f: fastmath is not allowed"),
        ("@njit(cache=True, nogil=True, parallel=True)", "f: parallel is not allowed"),
        ("@njit('void()', cache=True, nogil=True)", "f: an explicit signature"),
    ],
)
def test_the_search_for_wrong_flags(decorator: str, fault: str) -> None:
    [found] = flag_faults(ast.parse(f"{decorator}\ndef f(): ..."))
    assert found.startswith(fault)


@every_room
def test_every_kernel_declares_its_flags(path: Path) -> None:
    """A kernel without `nogil` stops every other thread; fast maths and threads change bits."""
    assert flag_faults(tree_of(path)) == []


@every_room
def test_kernels_are_functions_of_the_module(path: Path) -> None:
    """A kernel compiled as a closure is compiled anew by every call of the function around it."""
    tree = tree_of(path)
    at_top = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    compiled = {function for function, _, name in decorators(tree) if name in COMPILERS}
    assert compiled
    assert compiled <= at_top


@every_room
def test_rooms_import_no_other_module_of_ours(path: Path) -> None:
    """The disk cache looks at the kernel's own file alone: what a kernel calls must live there."""
    imported = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
    assert [name for name in imported if name.split(".")[0] in PACKAGES] == []


@pytest.mark.parametrize("path", OTHERS, ids=name_of)
def test_nothing_is_compiled_outside_the_rooms(path: Path) -> None:
    tree = tree_of(path)
    assert [function for function, _, name in decorators(tree) if name in COMPILERS] == []
    calls = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in COMPILERS
    ]
    assert calls == []


def mutable_globals(tree: ast.Module) -> list[int]:
    """Lines at module level that hold something mutable, or that rebind a global later."""
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
            continue
        if any(_is_mutable(part) for part in ast.walk(node.value)):
            lines.append(node.lineno)
    return sorted(lines)


def _is_mutable(part: ast.AST) -> bool:
    return isinstance(part, MUTABLE) or (isinstance(part, ast.Call) and not _is_scalar(part))


def _is_scalar(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.attr in SCALARS
    return isinstance(function, ast.Name) and function.id in {"float", "int", "TypeVar", "NewType"}


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("A: Final = 3\nB = np.uint64(A) << np.uint64(2)\nC = (1, 2)", []),
        ("A = [1]", [1]),
        ("A = {}", [1]),
        ("A = np.zeros(3)", [1]),
        ("A = 1\ndef f():\n    global A\n    A = 2", [3]),
        ("def f():\n    a = [1]", []),
    ],
)
def test_the_search_for_mutable_globals(code: str, lines: list[int]) -> None:
    assert mutable_globals(ast.parse(code)) == lines


@every_room
def test_rooms_hold_no_mutable_globals(path: Path) -> None:
    """The compiler freezes a global: changing one later changes nothing that was compiled."""
    assert mutable_globals(tree_of(path)) == []


# what was compiled


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def signatures(module: Any) -> dict[str, list[str]]:
    """The signatures that each kernel of a loaded room was compiled for."""
    return {
        f"{module.__name__}.{name}": [str(signature) for signature in value.signatures]
        for name, value in vars(module).items()
        if hasattr(value, "py_func") and hasattr(value, "signatures")
    }


_WARMS_UP = """
import importlib, json, sys
from tests.test_kernel_rooms import signatures
room = importlib.import_module(sys.argv[1])
warm_up = getattr(room, "warm_up", None)
if warm_up is None:
    warm_up = importlib.import_module(sys.argv[1].split(".")[0]).warm_up
warm_up()
print(json.dumps(signatures(room)))
"""


@every_room
def test_warm_up_compiles_every_kernel_once(path: Path) -> None:
    """A kernel missed by `warm_up` (the room's or its package's) would compile amid training."""
    done = subprocess.run(
        [sys.executable, "-c", _WARMS_UP, module_of(path)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert compiled
    assert {name: found for name, found in compiled.items() if len(found) > 1} == {}
    # a kernel called by another one is inside it when that one comes from the disk cache
    missed = {name for name, found in compiled.items() if not found}
    assert missed - {f"{module_of(path)}.{name}" for name in called_by_kernels(path)} == set()


def called_by_kernels(path: Path) -> set[str]:
    """Names of the functions that the kernels of a room call."""
    tree = tree_of(path)
    compiled = {function for function, _, name in decorators(tree) if name in COMPILERS}
    return {
        call.func.id
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in compiled
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }


def test_every_kernel_ends_the_run_with_one_signature() -> None:
    """Runs after all other tests. A stray dtype compiles a second kernel, at half the speed."""
    loaded = [sys.modules[name] for path in ROOMS if (name := module_of(path)) in sys.modules]
    compiled = {name: found for room in loaded for name, found in signatures(room).items()}
    assert {name: found for name, found in compiled.items() if len(found) > 1} == {}
