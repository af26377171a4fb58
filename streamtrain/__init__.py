"""streamtrain: continuous training of sparse models from sample streams."""

from __future__ import annotations

import typing as _typing

if _typing.TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from streamtrain.config import Config
    from streamtrain.report import Report

__all__ = ["replay"]

__version__ = "0.1.0"
__distribution__ = "streamtrain"


def replay(
    config: Config,
    paths: Sequence[str],
    *,
    until_samples: int | None = None,
    publish: bool = False,
    save: str | Path | None = None,
) -> Report:
    """Train on recorded samples; see `streamtrain.replaying.replay`.

    Parameters
    ----------
    config : Config
        From `streamtrain.config.load`.
    paths : sequence of str
        Avro container files.
    until_samples : int or None
        Stop once so many samples were learned.
    publish : bool
        Continue from ``checkpoint.dir``, write cuts there, and ship to the sinks.
    save : str or Path or None
        Without `publish`: write the final state as the first cut of an empty directory.
    """
    # TensorFlow is loaded when a replay is asked for, not when the package is.
    from streamtrain.replaying import replay as _replay

    return _replay(config, paths, until_samples=until_samples, publish=publish, save=save)
