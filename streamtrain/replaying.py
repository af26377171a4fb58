"""The same trainer over recorded samples: for studies, for backfill, and to reproduce a live run."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from consumers.source import Source
from streamtrain import assembly
from streamtrain.config import Config, signature
from streamtrain.cut import Checkpoints, Moment
from streamtrain.daemon import Daemon
from streamtrain.errors import StartRefused
from streamtrain.report import Report, report_of
from streamtrain.timeline import Parts
from streamtrain.trainer import Stepped, Trainer

_log = logging.getLogger(__name__)


def replay(
    config: Config,
    paths: Sequence[str],
    *,
    until_samples: int | None = None,
    publish: bool = False,
    save: str | Path | None = None,
    watch: Callable[[Trainer, Stepped], None] | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Train on Avro container files, merged by (event time, path, record number).

    Parameters
    ----------
    config : Config
        As for a live run; ``source.kafka`` is not looked at.
    paths : sequence of str
        Avro container files.
    until_samples : int or None
        Stop once so many samples were learned.
    publish : bool
        Continue from ``checkpoint.dir``, write cuts there and publish to the configured sinks, as
        a live trainer does. Without it the run starts empty, and touches neither.
    save : str or Path or None
        Without `publish`: write the final state as the first cut of this empty directory, from
        which ``run`` can go on.
    watch : callable or None
        Without `publish`: told each step.
    stop : threading.Event or None
        Without `publish`: ends the run at the next step when set.

    Raises
    ------
    StartRefused
        A live trainer holds the directory, or `save` names one that is not empty.
    """
    source = assembly.files_source(config, paths)
    if publish:
        parts = Parts(
            source=source,
            sinks=assembly.sinks(config),
            trainer=lambda cut: assembly.trainer(config, cut),
            environment=assembly.environment(config),
        )
        return Daemon(config, parts, until_samples=until_samples).run()
    stop = stop or threading.Event()
    with _reserved(save) as checkpoints:
        trainer = assembly.trainer(config, None)
        try:
            trainer.position = dict(source.open(None))
            for stepped in _steps(config, trainer, source, until_samples, stop):
                if checkpoints is None:
                    # Nobody will read what changed; without this, removals would be kept for ever.
                    for reader in ("serving", "checkpoint"):
                        trainer.store.ack(reader, trainer.store.step)
                if watch is not None:
                    watch(trainer, stepped)
        finally:
            source.close()
        trainer.check_conservation()
        if checkpoints is not None:
            _save(config, trainer, checkpoints)
        return report_of(trainer, version=0)


@contextmanager
def _reserved(save: str | Path | None) -> Iterator[Checkpoints | None]:
    """Hold the directory to save into; an empty one, and nobody else's."""
    if save is None:
        yield None
        return
    checkpoints = Checkpoints(Path(save), keep=1)
    if checkpoints.strangers():
        raise StartRefused(f"--save: {save} is not empty; name a new directory")
    checkpoints.lock()
    try:
        yield checkpoints
    finally:
        checkpoints.unlock()


def _steps(
    config: Config,
    trainer: Trainer,
    source: Source,
    until_samples: int | None,
    stop: threading.Event,
) -> Iterator[Stepped]:
    """Learn batch after batch; yield at each boundary."""
    while not stop.is_set():
        size = config.batch.size
        if until_samples is not None:
            size = min(size, until_samples - trainer.learned)
            if size <= 0:
                return
        batch = source.batch(size, None, stop.is_set)
        if batch is not None:
            for bad in batch.bad:
                _log.warning("%s record %d: %s (%s)", bad.topic, bad.offset, bad.reason, bad.detail)
            yield trainer.step(batch)
        elif source.exhausted:
            return


def _save(config: Config, trainer: Trainer, checkpoints: Checkpoints) -> None:
    checkpoints.claim(1)
    moment = Moment(
        generation=1,
        step=trainer.store.step,
        version=0,
        store=trainer.store.freeze("checkpoint"),
        dense=trainer.dense.state(),
        validation={task: p.state() for task, p in trainer.validation.items()},
        state={
            "trainer": trainer.state(),
            "rows": {name: trainer.store.rows(name) for name in trainer.store.tables},
            "signature": signature(config),
            "environment": assembly.environment(config),
        },
    )
    checkpoints.write(moment, None)
