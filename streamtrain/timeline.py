"""What one trainer does to cuts, log and sinks between its start and its end, step by step.

The order of the numbered steps lives here, without threads, signals, time of day or TensorFlow:
the daemon drives it with threads beside it, the crash model drives it by chance.

====== ====================== ==========================================================
thread method                 steps
====== ====================== ==========================================================
train  `Timeline.start`       S1 to S6, and the first cut of an empty start
train  `Timeline.boundary`    at one boundary, when due: D3, C5, D1, C2
beside submitted by D1        D2
beside submitted by C2        C3, C4, C6, C7
sinks  `Publisher`            D4, D5
train  `Timeline.finish`      the last delta and the last cut
====== ====================== ==========================================================
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from consumers.source import Partition, Source
from exporters.errors import SinkRefused, SinkUnavailable, SinkUnfit
from exporters.log import Log
from exporters.publisher import Publisher
from exporters.sink import Sink
from exporters.version import Delta
from streamtrain import start
from streamtrain.cut import Checkpoints, Cut, Moment
from streamtrain.dead_letters import DeadLetters
from streamtrain.delta import draft
from streamtrain.errors import StartRefused
from streamtrain.faults import OnStep, nothing
from streamtrain.snapshots import CutSnapshots
from streamtrain.trainer import Trainer

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Beside(Protocol[T]):
    """A slot for one piece of work beside the training thread; see `streamtrain.background.Job`."""

    @property
    def busy(self) -> bool: ...  # noqa: D102
    def submit(self, work: Callable[[], T]) -> None: ...  # noqa: D102
    def take(self, timeout_s: float | None = 0.0) -> T | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trainer is made of; `streamtrain.assembly` builds the real ones.

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


class Passed(NamedTuple):
    """What happened at a boundary."""

    version_acked: bool
    cut_acked: bool
    delta_begun: bool
    cut_skipped: bool


class Timeline:
    """One generation of a model, from its start to its end.

    Parameters
    ----------
    checkpoints : Checkpoints
    parts : Parts
    logging_, cutting : Beside
        Slots for D2, and for C3 to C7.
    signature : mapping
        Of the configuration; kept in every cut.
    letters : DeadLetters or None
        The file that is written with each step.
    fresh : bool
        Start empty even where something was stored or published.
    log_max_bytes : int
        Size of the log beyond which sinks that hold it are marked for a snapshot.
    max_rows_per_s : int or None
        Bound on rows written per sink.
    on_cut_failed : callable
        Called beside the training thread when the disk refused a cut.
    on_step : callable
        Told each numbered step after it; tests kill in it.
    now : callable
        Monotonic seconds, for the sinks' pace.

    Attributes
    ----------
    generation : int
    trainer : Trainer
    publisher : Publisher
    cut : Cut
        The newest that was acknowledged.
    version : int
        The newest that was acknowledged.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        parts: Parts,
        *,
        logging_: Beside[Delta],
        cutting: Beside[Cut | None],
        signature: Mapping[str, Any],
        letters: DeadLetters | None = None,
        fresh: bool = False,
        log_max_bytes: int,
        max_rows_per_s: int | None = None,
        on_cut_failed: Callable[[], None] = lambda: None,
        on_step: OnStep = nothing,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._parts = parts
        self._logging = logging_
        self._cutting = cutting
        self._signature = signature
        self._letters = letters
        self._fresh = fresh
        self._log_max_bytes = log_max_bytes
        self._max_rows_per_s = max_rows_per_s
        self._on_cut_failed = on_cut_failed
        self._on_step = on_step
        self._now = now

    # ---- start

    def start(self) -> None:
        """S1 to S6, and the first cut of an empty start.

        Raises
        ------
        StartRefused
            See `streamtrain.start`.
        """
        parts = self._parts
        claimed = start.claim(
            self._checkpoints, parts.sinks, fresh=self._fresh, on_step=self._on_step
        )
        self.generation = claimed.generation
        if claimed.cut is not None:
            _log.info("continuing from %s", claimed.cut.path.name)
            parts.on_cut(claimed.cut)
        self.trainer = parts.trainer(claimed.cut)
        self._look_at_sinks()
        self.version = claimed.cut.version if claimed.cut else 0
        log = Log(self._checkpoints.folder / "log", max_bytes=self._log_max_bytes)
        if claimed.cut is None:
            # Published state without a cut could never be continued, so the cut comes first.
            self.trainer.position = dict(parts.source.open(None))
            self.cut = self._checkpoints.write(self._moment(), None)
        else:
            self.cut = claimed.cut
        self.trainer.check_conservation()
        self._snapshots = CutSnapshots(self._checkpoints, log, generation=self.generation)
        self._snapshots.use(self.cut)
        repair, repairing = start.repair(self.trainer, claimed, log, floor=self.version)
        self.publisher = Publisher(
            log,
            parts.sinks,
            generation=self.generation,
            floor=self.version,
            snapshots=self._snapshots,
            snapshot_sinks=repair.snapshot_sinks,
            on_step=self._on_step,
            now=self._now,
            max_rows_per_s=self._max_rows_per_s,
        )
        for head in claimed.heads.values():
            if head is not None:
                self.publisher.note_head(head.version)
        if self._fresh:
            for shipper in self.publisher.shippers:
                shipper.accept_small()
        self._logged: Delta | None = self._append(repairing, since=repair.m)
        self._drafted = self.trainer.store.step
        self._on_step("S5")
        if claimed.cut is not None:
            if self._letters is not None:
                self._letters.cut_back(self.cut.state()["lengths"].get("dead_letters", 0))
            self.trainer.position = dict(parts.source.open(self.trainer.position))
        self._on_step("S6")

    def _look_at_sinks(self) -> None:
        """Refuse a sink that may lose rows silently; say what would make one costly."""
        dims = {name: table.dim for name, table in self.trainer.store.tables.items()}
        for sink in self._parts.sinks:
            try:
                for problem in sink.check(dims):
                    _log.warning("%s", problem)
            except SinkUnfit as error:
                raise StartRefused(str(error)) from error
            except (SinkUnavailable, SinkRefused) as error:
                _log.warning("%s can't be looked at: %s", sink.name, error)

    # ---- boundary

    def boundary(self, *, export_due: bool, cut_due: bool) -> Passed:
        """D3, C5, D1, C2: what is due between two steps, in this order.

        Raises
        ------
        StaleGeneration, Superseded
            A newer trainer owns the model.
        """
        version_acked = self.ack_version()
        cut_acked = self.ack_cut()
        if self.publisher.fatal is not None:
            raise self.publisher.fatal
        delta_begun = export_due and self.may_begin_delta()
        if delta_begun:
            self.begin_delta()
        cut_skipped = cut_due and self._cutting.busy
        if cut_due and not cut_skipped:
            self.begin_cut()
        return Passed(version_acked, cut_acked, delta_begun, cut_skipped)

    def may_begin_delta(self) -> bool:
        """Whether something was learned since the last one, which is out of the way by now."""
        return (
            not self._logging.busy
            and self.trainer.store.step > self._drafted
            and self.publisher.may_begin()
        )

    def begin_delta(self) -> None:
        """D1, and D2 beside."""
        made = draft(self.trainer, generation=self.generation)
        self._drafted = made.step
        self._on_step("D1")
        self._logging.submit(lambda: self._append(made))

    def ack_version(self, timeout_s: float = 0.0) -> bool:
        """D3; tell whether there was something to acknowledge."""
        if self._logging.busy:
            self._logged = self._logging.take(timeout_s)
        if self._logged is None:
            return False
        self.trainer.store.ack("serving", self._logged.step)
        self.version = self._logged.version
        self._logged = None
        self._on_step("D3")
        return True

    def begin_cut(self) -> None:
        """C1 and C2, and the rest beside; nothing when this boundary has its cut already."""
        if self.cut.order == (self.generation, self.trainer.store.step):
            return
        moment, previous = self._moment(), self.cut
        self._cutting.submit(lambda: self._write_cut(moment, previous))

    def ack_cut(self, timeout_s: float | None = 0.0) -> bool:
        """C5; tell whether there was something to acknowledge."""
        if not self._cutting.busy:
            return False
        cut = self._cutting.take(timeout_s)
        if cut is None:
            return False
        self.cut = cut
        self.trainer.store.ack("checkpoint", cut.step)
        self._on_step("C5")
        return True

    def _append(self, made: Delta, since: int | None = None) -> Delta:
        """D2, unless the log is a newer trainer's by now."""
        self._checkpoints.refuse_superseded(self.generation)
        return self.publisher.append(made, since=since)

    # ---- end

    def finish(self, remaining: Callable[[], float]) -> None:
        """Ship the last delta within the `remaining` seconds, then write the last cut.

        Raises
        ------
        StaleGeneration, Superseded
            A newer trainer owns the model.
        """
        self.ack_version(remaining())
        self.ack_cut(None)
        if self.trainer.store.step > self._drafted and not self._logging.busy:
            self.begin_delta()
            self.ack_version(remaining())
        if not self.publisher.drain(remaining()):
            _log.warning("ended before every sink had the newest version; the next start ships it")
        if self.publisher.fatal is not None:
            raise self.publisher.fatal
        self.begin_cut()
        self.ack_cut(None)

    # ---- cuts

    def _moment(self) -> Moment:
        """C1 and C2: freeze everything at this boundary."""
        trainer = self.trainer
        trainer.check_conservation()
        lengths = {}
        if self._letters is not None:
            lengths["dead_letters"] = self._letters.length()
        self._on_step("C1")
        moment = Moment(
            generation=self.generation,
            step=trainer.store.step,
            version=self.version,
            store=trainer.store.freeze("checkpoint"),
            dense=trainer.dense.state(),
            validation={task: p.state() for task, p in trainer.validation.items()},
            state={
                "trainer": trainer.state(),
                "rows": {name: trainer.store.rows(name) for name in trainer.store.tables},
                "signature": dict(self._signature),
                "environment": dict(self._parts.environment),
            },
            lengths=lengths,
        )
        self._on_step("C2")
        return moment

    def _write_cut(self, moment: Moment, previous: Cut) -> Cut | None:
        """C3, C4, C6 and C7, beside the training thread; None when the disk refused."""
        try:
            if self._letters is not None:
                self._letters.sync()
            cut = self._checkpoints.write(moment, previous)
        except OSError as error:
            self._on_cut_failed()
            _log.error(
                "the cut of step %d could not be written (%s); training goes on, and a restart goes "
                "back to %s",
                moment.step,
                error,
                previous.path.name,
            )
            return None
        self._snapshots.use(cut)
        self._checkpoints.refuse_superseded(self.generation)
        self.publisher.prune(self._checkpoints.prune())
        self._on_step("C6")
        self._parts.source.commit(_position(moment))
        self._on_step("C7")
        return cut


def _position(moment: Moment) -> Mapping[Partition, int]:
    return {Partition(t, n): offset for t, n, offset in moment.state["trainer"]["position"]}
