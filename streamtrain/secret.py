"""Secrets come from the environment or from a file, and are never part of a config or a repr."""

import os
from collections.abc import Mapping
from pathlib import Path

from streamtrain.errors import ConfigError


def from_env(variable: str, *, path: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what an environment variable holds.

    Parameters
    ----------
    variable : str
        Its name.
    path : str
        Where the configuration names it, for the error.

    Raises
    ------
    ConfigError
        It is not set, or empty.
    """
    value = environment.get(variable)
    if not value:
        raise ConfigError([f"{path}: the environment variable {variable} is not set"])
    return value


def from_file(file: str, *, path: str) -> str:
    """Return what a file holds, without the newline at its end.

    Raises
    ------
    ConfigError
        It can't be read, or is empty.
    """
    try:
        value = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise ConfigError([f"{path}: {file} can't be read: {error.strerror}"]) from error
    if not value:
        raise ConfigError([f"{path}: {file} is empty"])
    return value
