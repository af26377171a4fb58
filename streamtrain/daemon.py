"""The process: start, loop, stop, signals.

What happens in which numbered order is `streamtrain.timeline`'s to say; the daemon gives it
threads, time and signals, and asks for samples in between.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from consumers.source import Batch
from exporters.errors import StaleGeneration
from streamtrain import clock
from streamtrain.background import Job
from streamtrain.config import Config, effective, signature
from streamtrain.cut import Checkpoints, Cut
from streamtrain.dead_letters import DeadLetters
from streamtrain.errors import Superseded
from streamtrain.faults import OnStep, nothing
from streamtrain.report import Report, report_of
from streamtrain.telemetry import Telemetry, TelemetryServer
from streamtrain.timeline import Parts, Timeline
from streamtrain.trainer import Stepped

if TYPE_CHECKING:
    from exporters.version import Delta

_log = logging.getLogger(__name__)

# How often figures that cost something to compute are refreshed for whoever scrapes them.
_FIGURES_EVERY_S = 5.0


class Daemon:
    """Trains until it is told to stop, its source ends, or enough was learned.

    Parameters
    ----------
    config : Config
    parts : Parts
    fresh : bool
        Start empty even where something was stored or published.
    until_samples : int or None
        End cleanly once so many samples were learned since the model's birth.
    on_step : callable
        Told each numbered step after it; tests kill in it.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        *,
        fresh: bool = False,
        until_samples: int | None = None,
        on_step: OnStep = nothing,
    ) -> None:
        self._config = config
        self._parts = parts
        self._until = until_samples
        self._stop = threading.Event()
        self._checkpoints = Checkpoints(
            Path(config.checkpoint.dir), keep=config.checkpoint.keep, on_step=on_step
        )
        self._cutting: Job[Cut | None] = Job("cut")
        self._logging: Job[Delta] = Job("log")
        self._letters = DeadLetters(Path(config.dead_letters.file)) if config.dead_letters else None
        self._started = False
        self.telemetry = Telemetry(config.model.name)
        self.telemetry.ready_when(self._unready)
        self._timeline = Timeline(
            self._checkpoints,
            parts,
            logging_=self._logging,
            cutting=self._cutting,
            signature=signature(config),
            letters=self._letters,
            fresh=fresh,
            log_max_bytes=config.export.log.max_bytes,
            max_rows_per_s=config.export.redis.max_rows_per_s if config.export.redis else None,
            on_cut_failed=self.telemetry.cuts_failed.inc,
            on_step=on_step,
        )

    def stop(self) -> None:
        """Ask for a clean end; the step that runs is finished first."""
        self._stop.set()

    def run(self) -> Report:
        """Start, train, and end cleanly.

        Raises
        ------
        StartRefused
            See `streamtrain.start`.
        Superseded
            A newer trainer took the model over.
        NonFinite, ConservationBroken, ConfigError
            See there. No cut is written then: a restart goes back to the last one.
        """
        _log.info("effective configuration: %s", effective(self._config))
        server = None
        if self._config.telemetry.listen is not None:
            server = TelemetryServer(self.telemetry, self._config.telemetry.listen)
            server.start()
            _log.info("metrics and health: http://%s", server.address)
        try:
            self._start()
            with self._timeline.publisher:
                self._loop()
                self._finish()
            return report_of(self._timeline.trainer, version=self._timeline.version)
        except StaleGeneration as error:
            raise Superseded(
                f"{error}. Nothing more is written by this trainer; stop it, or the other one"
            ) from error
        finally:
            self._close(server)

    def _start(self) -> None:
        """S1 to S6, and the first cut of an empty start."""
        self._timeline.start()
        self.telemetry.generation.set(self._timeline.generation)
        self._exporting = clock.Timer(self._config.export.every / 1000)
        self._checkpointing = clock.Timer(self._config.checkpoint.every / 1000)
        self._figures = clock.Timer(_FIGURES_EVERY_S)
        self._version_at = self._cut_at = clock.monotonic()
        # Asked when scraped: an age must grow while nothing else happens.
        self.telemetry.version_age.set_function(lambda: clock.monotonic() - self._version_at)
        self.telemetry.cut_age.set_function(lambda: clock.monotonic() - self._cut_at)
        self._started = True

    # ---- loop

    def _loop(self) -> None:
        trainer, source, config = self._timeline.trainer, self._parts.source, self._config
        self._show_figures()
        while not self._stop.is_set():
            size = config.batch.size
            if self._until is not None:
                size = min(size, self._until - trainer.learned)
                if size <= 0:
                    return
            batch = source.batch(size, config.batch.wait, self._stop.is_set)
            self.telemetry.beat()
            if batch is not None:
                self._step(batch)
            elif source.exhausted:
                return
            self._boundary()

    def _step(self, batch: Batch) -> Stepped:
        with self.telemetry.step_seconds.time():
            stepped = self._timeline.trainer.step(batch)
        if self._letters is not None:
            self._letters.write(batch.bad)
        self.telemetry.samples.labels("learned").inc(stepped.samples)
        for bad in batch.bad:
            self.telemetry.samples.labels(bad.reason).inc()
            if self._letters is None:
                _log.warning(
                    "dropped %s-%d@%d: %s (%s); name a dead_letters.file to keep such messages",
                    bad.topic,
                    bad.partition,
                    bad.offset,
                    bad.reason,
                    bad.detail,
                )
        return stepped

    def _boundary(self) -> None:
        """Do what is due between two steps."""
        cut_due = self._checkpointing.due()
        passed = self._timeline.boundary(export_due=self._exporting.due(), cut_due=cut_due)
        if passed.version_acked:
            self._version_at = clock.monotonic()
            self.telemetry.version.set(self._timeline.version)
        if passed.cut_acked:
            self._cut_at = clock.monotonic()
        if passed.delta_begun:
            self._exporting.restart()
        if cut_due:
            self._checkpointing.restart()
        if passed.cut_skipped:
            self.telemetry.cuts_skipped.inc()
        if self._figures.due():
            self._figures.restart()
            self._show_figures()

    # ---- end

    def _finish(self) -> None:
        """Ship the last delta within the deadline, then write the last cut."""
        self._timeline.finish(clock.Deadline(self._config.shutdown.deadline / 1000).remaining)
        self._show_figures()

    def _close(self, server: TelemetryServer | None) -> None:
        self._started = False
        self._cutting.close()
        self._logging.close()
        self._parts.source.close()
        if self._letters is not None:
            self._letters.close()
        self._checkpoints.unlock()
        if server is not None:
            server.stop()

    # ---- eyes

    def _show_figures(self) -> None:
        t, trainer = self.telemetry, self._timeline.trainer
        t.step.set(trainer.store.step)
        t.clock.set((trainer.clock or 0) / 1000)
        t.version.set(self._timeline.version)
        for partition, lag in self._parts.source.lag().items():
            t.lag.labels(partition.topic, str(partition.number)).set(lag)
        for table, counts in trainer.store.metrics().items():
            t.rows.labels(table).set(counts["rows"])
            t.candidates.labels(table).set(counts["candidates"])
            t.evicted.labels(table).set(counts["evicted"])
            t.forgotten.labels(table).set(counts["forgotten"])
        for status in self._timeline.publisher.status:
            if status.head is not None:
                t.published.labels(status.sink).set(status.head.version)
        for task, progressive in trainer.validation.items():
            figures = progressive.figures()
            for gauge, value in (
                (t.loss, figures.loss),
                (t.auc, figures.auc),
                (t.calibration, figures.calibration),
            ):
                if value is not None:
                    gauge.labels(task).set(value)

    def _unready(self) -> dict[str, str]:
        if not self._started:
            return {"start": "starting"}
        reasons = {}
        trouble = self._parts.source.trouble()
        if trouble is not None:
            reasons["source"] = trouble
        for status in self._timeline.publisher.status:
            if status.reason:
                reasons[status.sink] = status.reason
        return reasons


@contextmanager
def stopping_on_signals(daemon: Daemon) -> Iterator[None]:
    """Let SIGTERM and SIGINT ask for a clean end; a second one ends at once with 128 + n."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if daemon._stop.is_set():  # noqa: SLF001
            os._exit(128 + number)
        daemon.stop()

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
