"""What is shipped: one distribution, four packages, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_architecture import PACKAGES, ROOT, SOURCES, name_of


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a wheel and an sdist, built without asking any index."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> set[str]:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_of_the_four_packages(wheel_names: set[str]) -> None:
    """Without its list of packages the build tool ships `streamtrain` alone, and says nothing."""
    assert {name_of(path) for path in SOURCES} - wheel_names == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_tells_type_checkers_that_it_is_typed(package: str, wheel_names: set[str]) -> None:
    assert f"{package}/py.typed" in wheel_names


def test_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    [info] = [name for name in tops if name.endswith(".dist-info")]
    assert tops == {*PACKAGES, info}
    assert [name for name in wheel_names if "__pycache__" in name] == []


def test_wheel_carries_licence_and_command(built: Path, wheel_names: set[str]) -> None:
    [wheel] = built.glob("*.whl")
    [licence] = [name for name in wheel_names if name.endswith("/LICENSE")]
    [commands] = [name for name in wheel_names if name.endswith("entry_points.txt")]
    with zipfile.ZipFile(wheel) as archive:
        assert b"Apache License" in archive.read(licence)
        assert b"streamtrain = streamtrain.cli:main" in archive.read(commands)


def test_sdist_is_an_allow_list(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tops = {name.split("/")[0] for name in names}
    assert {*PACKAGES, "tests", "LICENSE", "README.md", "CHANGELOG.md"} <= tops
    assert tops <= {
        *PACKAGES, "tests", "LICENSE", "README.md", "CHANGELOG.md",
        "PKG-INFO", "pyproject.toml", ".gitignore",
        "docker", "docker-compose.yml", "Dockerfile", ".dockerignore",
    }  # fmt: skip


def test_wheel_works_from_an_empty_folder(built: Path, tmp_path: Path) -> None:
    """Four packages with common names: each import must find the file from the wheel."""
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        f"import {', '.join(PACKAGES)}\n"
        f"print(*(m.__file__ for m in ({', '.join(PACKAGES)})), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        check=False,
        cwd=tmp_path / "empty",
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    homes = [Path(line).parents[1] for line in done.stdout.splitlines()]
    assert homes == [tmp_path / "site"] * len(PACKAGES)
