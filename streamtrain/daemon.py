"""The process: start, loop, stop, signals.

Between two steps lies the boundary, and there, in this order, D3, C5, D1 and C2 happen when they
are due. Everything else runs beside: writing the log (D2), shipping (D4, D5), writing the cut (C3,
C4), pruning and committing (C6, C7).
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from consumers.source import Batch, Partition, Source
from exporters.errors import StaleGeneration
from exporters.log import Log
from exporters.publisher import Publisher
from exporters.sink import Sink
from streamtrain import clock, start
from streamtrain.background import Job
from streamtrain.config import Config, effective, signature
from streamtrain.cut import Checkpoints, Cut, Moment
from streamtrain.dead_letters import DeadLetters
from streamtrain.delta import draft
from streamtrain.errors import Superseded
from streamtrain.faults import OnStep, nothing
from streamtrain.report import Report, report_of
from streamtrain.snapshots import CutSnapshots
from streamtrain.telemetry import Telemetry, TelemetryServer
from streamtrain.trainer import Stepped, Trainer

if TYPE_CHECKING:
    from exporters.version import Delta

_log = logging.getLogger(__name__)

# How often figures that cost something to compute are refreshed for whoever scrapes them.
_FIGURES_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What a daemon is made of; `streamtrain.assembly` builds the real ones.

    Attributes
    ----------
    source : Source
        Not opened yet.
    sinks : list of Sink
    trainer : callable
        From the loaded cut, or None, to a trainer.
    environment : mapping
        Kept in every cut.
    on_cut : callable
        Told the cut that is loaded, before it is.
    """

    source: Source
    sinks: list[Sink]
    trainer: Callable[[Cut | None], Trainer]
    environment: Mapping[str, Any]
    on_cut: Callable[[Cut], None] = lambda _: None


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
        self._fresh = fresh
        self._until = until_samples
        self._on_step = on_step
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
            with self._publisher:
                self._loop()
                self._finish()
            return report_of(self._trainer, version=self._version)
        except StaleGeneration as error:
            raise Superseded(
                f"{error}. Nothing more is written by this trainer; stop it, or the other one"
            ) from error
        finally:
            self._close(server)

    # ---- start

    def _start(self) -> None:
        """S1 to S6, and the first cut of an empty start."""
        config, parts = self._config, self._parts
        claimed = start.claim(
            self._checkpoints, parts.sinks, fresh=self._fresh, on_step=self._on_step
        )
        self._generation = claimed.generation
        self.telemetry.generation.set(claimed.generation)
        if claimed.cut is not None:
            _log.info("continuing from %s", claimed.cut.path.name)
            parts.on_cut(claimed.cut)
        self._trainer = parts.trainer(claimed.cut)
        self._cut = claimed.cut
        self._version = claimed.cut.version if claimed.cut else 0
        log = Log(self._checkpoints.folder / "log", max_bytes=config.export.log.max_bytes)
        if claimed.cut is None:
            # Published state without a cut could never be continued, so the cut comes first.
            self._trainer.position = dict(parts.source.open(None))
            self._cut = self._checkpoints.write(self._moment(), None)
        self._trainer.check_conservation()
        snapshots = CutSnapshots(self._checkpoints, log, generation=self._generation)
        self._snapshots = snapshots
        assert self._cut is not None
        snapshots.use(self._cut)
        repair, repairing = start.repair(self._trainer, claimed, log, floor=self._version)
        self._publisher = Publisher(
            log,
            parts.sinks,
            generation=self._generation,
            floor=self._version,
            snapshots=snapshots,
            snapshot_sinks=repair.snapshot_sinks,
            on_step=self._on_step,
            max_rows_per_s=config.export.redis.max_rows_per_s if config.export.redis else None,
        )
        for head in claimed.heads.values():
            if head is not None:
                self._publisher.note_head(head.version)
        if self._fresh:
            for shipper in self._publisher.shippers:
                shipper.accept_small()
        self._logged: Delta | None = self._publisher.append(repairing, since=repair.m)
        self._on_step("S5")
        lengths = self._cut.state()["lengths"]
        if self._letters is not None and claimed.cut is not None:
            self._letters.cut_back(lengths.get("dead_letters", 0))
        if claimed.cut is not None:
            self._trainer.position = dict(parts.source.open(self._trainer.position))
        self._on_step("S6")
        self._exporting = clock.Timer(config.export.every / 1000)
        self._checkpointing = clock.Timer(config.checkpoint.every / 1000)
        self._figures = clock.Timer(_FIGURES_EVERY_S)
        self._version_at = self._cut_at = clock.monotonic()
        self._drafted = self._trainer.store.step
        self._started = True

    # ---- loop

    def _loop(self) -> None:
        trainer, source, config = self._trainer, self._parts.source, self._config
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
            stepped = self._trainer.step(batch)
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
        """D3, C5, D1, C2: what is due between two steps, in this order."""
        self._ack_version()
        self._ack_cut()
        if self._publisher.fatal is not None:
            raise self._publisher.fatal
        if self._exporting.due() and self._may_begin_delta():
            self._begin_delta()
            self._exporting.restart()
        if self._checkpointing.due():
            self._checkpointing.restart()
            if self._cutting.busy:
                self.telemetry.cuts_skipped.inc()
            else:
                self._begin_cut()
        if self._figures.due():
            self._figures.restart()
            self._show_figures()

    def _may_begin_delta(self) -> bool:
        """Whether something was learned since the last one, which is out of the way by now."""
        return (
            not self._logging.busy
            and self._trainer.store.step > self._drafted
            and self._publisher.may_begin()
        )

    def _begin_delta(self) -> None:
        """D1, and D2 beside."""
        made = draft(self._trainer, generation=self._generation)
        self._drafted = made.step
        self._on_step("D1")
        self._logging.submit(lambda: self._publisher.append(made))

    def _ack_version(self, timeout_s: float = 0.0) -> None:
        """D3."""
        if self._logging.busy:
            self._logged = self._logging.take(timeout_s)
        if self._logged is None:
            return
        self._trainer.store.ack("serving", self._logged.step)
        self._version = self._logged.version
        self._logged = None
        self._version_at = clock.monotonic()
        self._on_step("D3")

    def _begin_cut(self) -> None:
        """C1 and C2, and the rest beside."""
        if self._cut is not None and self._cut.order == (
            self._generation,
            self._trainer.store.step,
        ):
            return
        moment, previous = self._moment(), self._cut
        self._cutting.submit(lambda: self._write_cut(moment, previous))

    def _moment(self) -> Moment:
        """C1 and C2: freeze everything at this boundary."""
        trainer = self._trainer
        trainer.check_conservation()
        lengths = {}
        if self._letters is not None:
            lengths["dead_letters"] = self._letters.length()
        self._on_step("C1")
        moment = Moment(
            generation=self._generation,
            step=trainer.store.step,
            version=self._version,
            store=trainer.store.freeze("checkpoint"),
            dense=trainer.dense.state(),
            validation={task: p.state() for task, p in trainer.validation.items()},
            state={
                "trainer": trainer.state(),
                "rows": {name: trainer.store.rows(name) for name in trainer.store.tables},
                "signature": signature(self._config),
                "environment": dict(self._parts.environment),
            },
            lengths=lengths,
        )
        self._on_step("C2")
        return moment

    def _write_cut(self, moment: Moment, previous: Cut | None) -> Cut | None:
        """C3, C4, C6 and C7, beside the training thread; None when the disk refused."""
        try:
            if self._letters is not None:
                self._letters.sync()
            cut = self._checkpoints.write(moment, previous)
        except OSError as error:
            self.telemetry.cuts_failed.inc()
            _log.error(
                "the cut of step %d could not be written (%s); training goes on, and a restart goes "
                "back to %s",
                moment.step,
                error,
                previous.path.name if previous else "the beginning",
            )
            return None
        self._snapshots.use(cut)
        self._publisher.prune(self._checkpoints.prune())
        self._on_step("C6")
        self._parts.source.commit(_position(moment))
        self._on_step("C7")
        return cut

    def _ack_cut(self, timeout_s: float | None = 0.0) -> None:
        """C5."""
        if not self._cutting.busy:
            return
        cut = self._cutting.take(timeout_s)
        if cut is None:
            return
        self._cut = cut
        self._cut_at = clock.monotonic()
        self._trainer.store.ack("checkpoint", cut.step)
        self._on_step("C5")

    # ---- end

    def _finish(self) -> None:
        """Ship the last delta within the deadline, then write the last cut."""
        deadline = clock.Deadline(self._config.shutdown.deadline / 1000)
        self._ack_version(deadline.remaining())
        self._ack_cut(None)
        if self._trainer.store.step > self._drafted and not self._logging.busy:
            self._begin_delta()
            self._ack_version(deadline.remaining())
        if not self._publisher.drain(deadline.remaining()):
            _log.warning("ended before every sink had the newest version; the next start ships it")
        if self._publisher.fatal is not None:
            raise self._publisher.fatal
        self._begin_cut()
        self._ack_cut(None)
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
        t, trainer = self.telemetry, self._trainer
        t.step.set(trainer.store.step)
        t.clock.set((trainer.clock or 0) / 1000)
        t.version.set(self._version)
        now = clock.monotonic()
        t.version_age.set(now - self._version_at)
        t.cut_age.set(now - self._cut_at)
        for partition, lag in self._parts.source.lag().items():
            t.lag.labels(partition.topic, str(partition.number)).set(lag)
        for table, counts in trainer.store.metrics().items():
            t.rows.labels(table).set(counts["rows"])
            t.candidates.labels(table).set(counts["candidates"])
            t.evicted.labels(table).set(counts["evicted"])
            t.forgotten.labels(table).set(counts["forgotten"])
        for status in self._publisher.status:
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
        for status in self._publisher.status:
            if status.reason:
                reasons[status.sink] = status.reason
        return reasons


def _position(moment: Moment) -> Mapping[Partition, int]:
    return {Partition(t, n): offset for t, n, offset in moment.state["trainer"]["position"]}


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
