"""Files that survive a power cut: written, fsynced, renamed, and the folder fsynced after."""

import hashlib
import os
import secrets
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write and fsync a file that nobody reads before its folder is renamed or fsynced."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Put a whole file in the place of another: readers see the old or the new one."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    write(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Fsync every folder of a tree, the deepest first."""
    for path, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(path))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
