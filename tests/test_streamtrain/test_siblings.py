"""Other distributions' packages of our names are found, and the cure is named."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from streamtrain import _siblings, cli


def test_ours_are_ours() -> None:
    assert _siblings.strangers() == []


def test_a_hollow_package_is_found() -> None:
    """What is left when the stranger was uninstalled: a folder without our `__init__`."""
    found = _siblings.strangers(lambda name: None if name == "exporters" else find_spec(name))
    [text] = found
    assert "`exporters` is gone or hollow" in text
    assert "pip install --force-reinstall" in text


def test_a_folder_that_hides_ours_is_found(tmp_path: Path) -> None:
    stranger = tmp_path / "consumers" / "__init__.py"
    stranger.parent.mkdir()
    stranger.write_text('__distribution__ = "streamtrain"\n')
    [text] = _siblings.strangers(_finding("consumers", stranger))
    assert str(stranger) in text
    assert "python -P" in text


def test_an_overwritten_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip overwrites in place: the folder is the right one, the content is not."""
    monkeypatch.setattr(_siblings, "__file__", str(tmp_path / "streamtrain" / "_siblings.py"))
    for name in _siblings.PACKAGES:
        (tmp_path / name).mkdir()
        own = (
            '__distribution__ = "streamtrain"\n' if name != "consumers" else "__version__ = '0.6'\n"
        )
        (tmp_path / name / "__init__.py").write_text(own)
    [text] = _siblings.strangers(
        lambda name: ModuleSpec(name, None, origin=str(tmp_path / name / "__init__.py"))
    )
    assert "pip uninstall consumers" in text


def test_the_command_line_refuses_to_work_with_strangers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "strangers", lambda: ["`consumers` is another's; cure: ..."])
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "-c", "nothing.yaml"])
    assert ended.value.code == 3
    assert "`consumers` is another's" in capsys.readouterr().err


def _finding(package: str, path: Path):
    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=str(path)) if name == package else find_spec(name)

    return find
