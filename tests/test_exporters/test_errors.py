"""The tree of errors is the one in its docstring, and the package is light to import."""

from __future__ import annotations

import subprocess
import sys

import exporters
from exporters import errors


def test_every_error_is_in_the_tree() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.ExportError)
        assert (
            f" {name}" in errors.__doc__ or f"\n{name}" in errors.__doc__ or name == "ExportError"
        )
        assert getattr(exporters, name) is kind


def test_an_unknown_table_reads_as_a_sentence() -> None:
    assert str(errors.UnknownTable("no table 't'")) == "no table 't'"


def test_a_replica_needs_neither_tensorflow_nor_numba_nor_arrow() -> None:
    code = (
        "import sys, exporters, exporters.redis_sink, exporters.replica;"
        "heavy = {'tensorflow', 'numba', 'pyarrow', 'keras'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
