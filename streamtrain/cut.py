"""Cuts: the consistent state of everything at one step boundary, on disk.

The order, which a crash after any step must survive:

====  ====================================================================================
C1    note the lengths of the files written with each step; they are fsynced before C4
C2    freeze store, dense side, validation, position, counters           [training thread]
C3    write into ``tmp-<random>``, fsync files and folders
C4    manifest (sizes, checksums), fsync, rename to ``cut-<generation>-<step>``, fsync parent
C5    ack the checkpoint reader at the next boundary                     [training thread]
C6    prune cuts by retention, then the log below what any kept cut or sink needs
C7    commit the position to the source, a courtesy
====  ====================================================================================

A cut's folder is whole in itself: parts written by earlier cuts are hard links, so that pruning
is removing a folder, and a kept cut keeps its parts. Layout, format 1::

    cut-0000000003-000000000120/
        manifest.json           format, generation, step, version, files: {name: {size, sha256}}
        state.json              clock, position, counters, lengths, signature, environment
        dense.npz               every variable of model and optimizer
        validation.npz          windows of progressive validation
        sparse/00000/ ...       parts of the store, base first
"""

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sparse_store.files import merge
from streamtrain import files
from streamtrain.errors import CutCorrupt, LockHeld, StartRefused, Superseded

FORMAT: Final = 1
_NAME: Final = re.compile(r"cut-(\d{10})-(\d{15})")
_OWN: Final = re.compile(r"lock|GENERATION|tmp-.*|GENERATION\.tmp-.*|cut-.*|log|schemas")
# Increments are folded into a new base when they outweigh it, or when there are many of them.
_MOST_PARTS: Final = 32

_log = logging.getLogger(__name__)

OnStep = Callable[[str], None]


class FrozenStore(Protocol):
    """What `sparse_store` freezes; written away from the training thread."""

    @property
    def until(self) -> int: ...  # noqa: D102
    def write(self, folder: Path) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything at one boundary, frozen in C2 and independent of further training.

    Attributes
    ----------
    generation, step, version : int
        Owner, step of the boundary, last acked version.
    store : FrozenStore
        What changed since the last cut.
    dense : mapping of str to array
    validation : mapping of str to mapping of str to array
        Per task.
    state : mapping
        Trainer state and whatever else JSON can hold.
    lengths : mapping of str to int
        C1: bytes of each file that is written with its step.
    """

    generation: int
    step: int
    version: int
    store: FrozenStore
    dense: Mapping[str, NDArray[Any]]
    validation: Mapping[str, Mapping[str, NDArray[np.float64]]]
    state: Mapping[str, Any]
    lengths: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut on disk whose files were found whole."""

    path: Path
    generation: int
    step: int
    version: int
    manifest: Mapping[str, Any]

    @property
    def order(self) -> tuple[int, int]:
        """What the newest cut has the largest of."""
        return self.generation, self.step

    def parts(self) -> list[Path]:
        """Return the folders of the store, base first."""
        return sorted((self.path / "sparse").iterdir())

    def state(self) -> dict[str, Any]:
        """Return trainer state and the rest that JSON holds."""
        return json.loads((self.path / "state.json").read_bytes())  # type: ignore[no-any-return]

    def dense(self) -> dict[str, NDArray[Any]]:
        """Return the variables of model and optimizer."""
        with np.load(self.path / "dense.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    def validation(self) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Return the state of progressive validation per task."""
        tasks: dict[str, dict[str, NDArray[np.float64]]] = {}
        with np.load(self.path / "validation.npz", allow_pickle=False) as arrays:
            for name in arrays.files:
                task, _, key = name.rpartition("/")
                tasks.setdefault(task, {})[key] = arrays[name]
        return tasks


class Checkpoints:
    """The directory of cuts: its lock, its GENERATION, writing, finding the newest, pruning.

    Parameters
    ----------
    folder : Path
        Made if missing. Rename and fsync must hold there: a local file system.
    keep : int
        Cuts that retention leaves.
    on_step : callable
        Told ``"C3"``, ``"C4"``, ``"C6"`` after each; a test raises or kills in it.
    """

    def __init__(self, folder: Path, *, keep: int, on_step: OnStep = lambda _: None) -> None:
        self.folder = folder
        self._keep = keep
        self._on_step = on_step
        self._lock_file: IO[str] | None = None
        self._pins: list[str] = []
        self._pins_guard = threading.Lock()

    def lock(self) -> None:
        """S1: take the directory, or raise `LockHeld`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = (self.folder / "lock").open("a+")
        except OSError as error:
            raise StartRefused(
                f"checkpoint.dir: {self.folder} can't be used: {error.strerror}; name a local "
                "directory that this user may write"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise LockHeld(
                f"checkpoint.dir: {self.folder} is held by a running trainer; stop it first, or name "
                "another directory"
            ) from error
        self._lock_file = handle
        for left in self.folder.glob("tmp-*"):
            shutil.rmtree(left, ignore_errors=True)

    def unlock(self) -> None:
        """Give the directory back."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def generation(self) -> int:
        """Return the newest generation that was ever claimed here, 0 if none."""
        try:
            return int((self.folder / "GENERATION").read_text())
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise CutCorrupt(
                f"{self.folder / 'GENERATION'} does not hold a number; write the largest generation "
                "seen in the names of the cuts and in the sinks' fences into it"
            ) from error

    def claim(self, generation: int) -> None:
        """S3: make a generation durable before anyone is told of it."""
        files.replace(self.folder / "GENERATION", f"{generation}\n".encode())

    def refuse_superseded(self, generation: int) -> None:
        """Raise `Superseded` when a newer trainer has claimed the directory.

        The lock keeps two trainers apart. Where it was not honoured (a file system that does not
        know it, a machine that slept while its lock went to another one) this keeps the older one
        from adding to a timeline that is not its own any more.
        """
        newest = self.generation()
        if newest > generation:
            raise Superseded(
                f"checkpoint.dir: {self.folder} belongs to generation {newest} now, and this trainer "
                f"is generation {generation}; nothing more is written by it. Stop it, or the other one"
            )

    def strangers(self) -> list[str]:
        """Return what the directory holds beside what a trainer puts there before its first cut."""
        if not self.folder.exists():
            return []
        found = []
        for path in sorted(self.folder.iterdir()):
            ours = _OWN.fullmatch(path.name) is not None
            full = path.name == "log" and any(path.iterdir())
            if not ours or full or path.name.startswith("cut-"):
                found.append(path.name)
        return found

    def names(self) -> list[str]:
        """Return the names of all cuts, the newest first, whole or not."""
        if not self.folder.exists():
            return []
        found = [p.name for p in self.folder.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, reverse=True)

    def newest(self) -> Cut | None:
        """S2: return the newest valid cut; each invalid one before it is reported in the log."""
        for name in self.names():
            try:
                return self.open(name)
            except CutCorrupt as error:
                _log.error("%s; looking for an older one", error)
        return None

    def open(self, name: str) -> Cut:
        """Read a cut's manifest and check every file against it.

        Raises
        ------
        CutCorrupt
            A file is missing, torn or altered.
        """
        path = self.folder / name
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            if manifest["format"] != FORMAT:
                raise CutCorrupt(
                    f"cut {path}: format {manifest['format']} is not known here (this version reads "
                    f"{FORMAT}); use the version that wrote it"
                )
            for file, facts in manifest["files"].items():
                if (path / file).stat().st_size != facts["size"]:
                    raise CutCorrupt(f"cut {path}: {file} has the wrong size")
                if files.digest(path / file) != facts["sha256"]:
                    raise CutCorrupt(f"cut {path}: {file} has the wrong checksum")
            return Cut(
                path, manifest["generation"], manifest["step"], manifest["version"], manifest
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CutCorrupt(f"cut {path}: not whole: {error}") from error

    def write(self, moment: Moment, previous: Cut | None) -> Cut:
        """C3 and C4: write what was frozen; parts of the previous cut are linked or folded in.

        Raises
        ------
        OSError
            The disk is full or failing. Nothing was renamed, and what was written is gone again.
        Superseded
            A newer trainer owns the directory. As above.
        """
        temporary = self.folder / f"tmp-{secrets.token_hex(8)}"
        try:
            known = self._write_parts(temporary, moment, previous)
            _write_arrays(temporary / "dense.npz", moment.dense)
            windows = {
                f"{task}/{key}": array
                for task, arrays in moment.validation.items()
                for key, array in arrays.items()
            }
            _write_arrays(temporary / "validation.npz", windows)
            state = {**moment.state, "lengths": dict(moment.lengths)}
            files.write(temporary / "state.json", json.dumps(state, indent=1).encode())
            files.sync_tree(temporary)
            self._on_step("C3")
            manifest = {
                "format": FORMAT,
                "generation": moment.generation,
                "step": moment.step,
                "version": moment.version,
                "files": _listed(temporary, known),
            }
            files.write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
            files.sync_folder(temporary)
            path = self.folder / f"cut-{moment.generation:010d}-{moment.step:015d}"
            self.refuse_superseded(moment.generation)
            temporary.rename(path)
            files.sync_folder(self.folder)
        except (OSError, Superseded):
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._on_step("C4")
        return Cut(path, moment.generation, moment.step, moment.version, manifest)

    @contextmanager
    def pinned(self, cut: Cut) -> Iterator[None]:
        """Keep a cut from being pruned while its files are read."""
        with self._pins_guard:
            self._pins.append(cut.path.name)
        try:
            yield
        finally:
            with self._pins_guard:
                self._pins.remove(cut.path.name)

    def prune(self) -> int:
        """C6, first half: remove cuts beyond retention; return the oldest kept cut's version."""
        kept = self.names()[: self._keep]
        with self._pins_guard:
            gone = [n for n in self.names()[self._keep :] if n not in self._pins]
            kept += [n for n in self.names()[self._keep :] if n in self._pins]
            for name in gone:
                # Renamed first: a folder that is half removed must not look like a cut.
                trash = self.folder / f"tmp-{secrets.token_hex(8)}"
                (self.folder / name).rename(trash)
                shutil.rmtree(trash, ignore_errors=True)
        files.sync_folder(self.folder)
        versions = []
        for name in kept:
            try:
                manifest = json.loads((self.folder / name / "manifest.json").read_bytes())
                versions.append(int(manifest["version"]))
            except (OSError, ValueError, KeyError):
                _log.warning("cut %s has no readable manifest; it does not hold the log", name)
        self._on_step("C6")
        return min(versions, default=0)

    def _write_parts(
        self, temporary: Path, moment: Moment, previous: Cut | None
    ) -> dict[str, dict[str, Any]]:
        """Lay out ``sparse/``; return what the manifest already knows of linked files."""
        sparse = temporary / "sparse"
        sparse.mkdir(parents=True)
        old = previous.parts() if previous is not None else []
        known: dict[str, dict[str, Any]] = {}
        fresh = sparse / f"{len(old):05d}"
        fresh.mkdir()
        moment.store.write(fresh)
        if old and _outweighs([*old[1:], fresh], old[0]):
            into = temporary / "merged"
            into.mkdir()
            merge([*old, fresh], into)
            shutil.rmtree(fresh)
            into.rename(sparse / "00000")
            return known
        for n, part in enumerate(old):
            target = sparse / f"{n:05d}"
            target.mkdir()
            for file in part.iterdir():
                _link(file, target / file.name)
                name = f"sparse/{target.name}/{file.name}"
                assert previous is not None
                facts = previous.manifest["files"].get(f"sparse/{part.name}/{file.name}")
                if facts is not None:
                    known[name] = facts
        return known


def _outweighs(increments: list[Path], base: Path) -> bool:
    return len(increments) >= _MOST_PARTS or sum(map(_bytes, increments)) > _bytes(base)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Some file systems have no hard links; then a cut costs a copy.
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def _listed(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    listed = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            facts = known.get(name)
            listed[name] = facts or {"size": path.stat().st_size, "sha256": files.digest(path)}
    return listed
