"""The two-minute tour: the real trainer on a generated stream, and what came of it.

An embedded broker, an embedded Redis, the sender of the stream and a replica run in processes of
their own; the trainer runs in this one. Everything is stopped and removed at the end.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import fastavro
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from consumers.source import Batch, Partition, Source
from exporters.log import Log
from streamtrain import assembly, clock, embedded
from streamtrain.clickfeed import make_topic
from streamtrain.clickstream import SCHEMA, ClickStream, Shape, times
from streamtrain.config import Config, loads
from streamtrain.cut import Checkpoints, Cut
from streamtrain.daemon import Daemon
from streamtrain.dense import DenseStep
from streamtrain.display import Display, Glance
from streamtrain.errors import StreamtrainError
from streamtrain.following import Served
from streamtrain.picture import Curve, svg
from streamtrain.replaying import replay
from streamtrain.timeline import Parts
from streamtrain.trainer import Trainer
from streamtrain.validation import Progressive, auc, log_loss

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]

_log = logging.getLogger(__name__)

MODEL: Final = "quickstart"
TOPIC: Final = "clicks"
CONFIG: Final = """
model: {{name: quickstart, build: "streamtrain.models:deepfm", optimizer: {{adam: {{rate: 0.002}}}}, seed: 7}}
source:
  kafka: {{brokers: "{brokers}", topics: [clicks], options: {{fetch.wait.max.ms: 20}}}}
  decode: {{avro: {{schema: click.avsc}}}}
sample:
  time: {{field: ts, unit: ms}}
  labels: {{click: {{field: click}}}}
features:
  user: {{tables: [user, user_bias]}}
  segment: {{tables: [segment]}}
  item: {{tables: [item, item_bias]}}
tables:
  user: {{dim: 16, admit: {{count: 2}}, optimizer: {{adagrad: {{rate: 0.2}}}}}}
  segment: {{dim: 16, optimizer: {{adagrad: {{rate: 0.2}}}}}}
  item: {{dim: 16, admit: {{count: 2}}, evict: {{ttl: {ttl}}}, optimizer: {{adagrad: {{rate: 0.2}}}}}}
  user_bias: {{dim: 1, optimizer: {{ftrl: {{alpha: 0.1, l1: 1.0}}}}}}
  item_bias: {{dim: 1, optimizer: {{ftrl: {{alpha: 0.1}}}}, evict: {{ttl: {ttl}}}}}
batch: {{size: 1024, wait: 50ms, shapes: [256, 1024]}}
validation: {{window: 20_000}}
checkpoint: {{dir: cuts, every: {cut_every}, keep: 1_000}}
export:
  every: 200ms
  redis: {{url: "{redis}", expected_rows: {{user: 5_000, item: 1_000, user_bias: 5_000, item_bias: 1_000, segment: 100}}}}
telemetry: {{listen: null}}
"""

_FEATURES: Final = ("user", "segment", "item")
_LEAD_MS: Final = 2_000  # between the sender's launch and its first click
_GRACE_S: Final = 20.0
_REFRESH_S: Final = 0.5


class QuickstartFailed(StreamtrainError):
    """A part of the tour broke; the message says which and what it said."""


@dataclass(frozen=True, slots=True)
class Score:
    """How well predictions did on some samples."""

    samples: int
    loss: float | None
    auc: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of the tour.

    Attributes
    ----------
    seconds, samples, samples_per_s
        Of the stream as it was learned.
    start, end : Score
        Of the live model on the first and on the last tenth.
    frozen : Score
        On the last tenth, of the model as a cut at half time held it.
    best_start, best_end : Score
        Of the true probabilities: what nobody can beat.
    frozen_at : int
        Samples that the frozen model had learned.
    admitted, evicted, rows : int
        Over all tables.
    deltas : int
        Versions that were published.
    fresh_p50_ms, fresh_p99_ms : float
        From a sample's event time to a replica that serves what was learned from it.
    compared_rows, different_rows : int
        Rows of the replica beside the trainer's, and those that are not equal bit for bit.
    dense_equal : bool
        Whether the dense weights are equal, too.
    picture : str
        Path of the learning curve.
    """

    seconds: float
    samples: int
    samples_per_s: float
    start: Score
    end: Score
    frozen: Score
    best_start: Score
    best_end: Score
    frozen_at: int
    admitted: int
    evicted: int
    rows: int
    deltas: int
    fresh_p50_ms: float
    fresh_p99_ms: float
    compared_rows: int
    different_rows: int
    dense_equal: bool
    picture: str

    @property
    def equal(self) -> bool:
        """Whether the replica equals the trainer."""
        return self.dense_equal and self.different_rows == 0 and self.compared_rows > 0

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**asdict(self), "equal": self.equal}


def quickstart(*, seconds: float, rate: float, seed: int, picture: Path, shown: Display) -> Outcome:
    """Run the tour.

    Parameters
    ----------
    seconds : float
        How long the stream lasts.
    rate : float
        Clicks per second.
    seed : int
        Of the stream.
    picture : Path
        Where the learning curve goes, as SVG.
    shown : Display

    Raises
    ------
    ServerMissing, ServerFailed
        See `streamtrain.embedded`.
    QuickstartFailed
        The sender or the replica broke.
    KeyboardInterrupt
        Somebody asked for the end; everything is stopped and removed by then.
    """
    # Items live for a third of the stream, and from half to end taste turns by 60 degrees.
    shape = Shape(life_ms=round(seconds * 1000 / 3), drift_ms=round(seconds * 3000))
    with ExitStack() as stack:
        stack.callback(shown.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamtrain-")))
        shown.note("starting an embedded Kafka and an embedded Redis")
        broker, redis = embedded.broker(), embedded.redis()
        stack.enter_context(broker)
        stack.enter_context(redis)
        make_topic(broker.address, TOPIC)
        config = _config(folder, broker.address, f"redis://{redis.address}/0", seconds)
        shown.note("compiling kernels, which are kept for the next time")
        stream = ClickStream(seed=seed, shape=shape)
        _warm_up(folder / "warm", config, stream)
        replica = stack.enter_context(Child([
            sys.executable, "-m", "streamtrain.following", f"redis://{redis.address}/0", MODEL,
        ], "the replica"))  # fmt: skip
        tour = Tour(
            config, stream, brokers=broker.address, seconds=seconds, rate=rate, seed=seed,
            replica=replica, shown=shown,
        )  # fmt: skip
        with _interruptible(tour.interrupt):
            tour.run()
        shown.note("scoring the frozen model; comparing the replica with the trainer")
        return tour.outcome(picture, folder)


class Recorded(Progressive):
    """Progressive validation that keeps everything it saw."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.predictions: list[Floats] = []
        self.labels: list[Floats] = []

    def add(
        self,
        predictions: NDArray[np.floating],
        labels: NDArray[np.floating],
        weights: NDArray[np.floating],
    ) -> None:
        """Take the predictions of one step."""
        super().add(predictions, labels, weights)
        self.predictions.append(np.array(predictions, np.float64))
        self.labels.append(np.array(labels, np.float64))


class Watched:
    """A source that keeps what passed through it: offsets, event times and keys, by batch."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.offsets: list[Longs] = []
        self.times: list[Longs] = []
        self.keys: list[dict[str, NDArray[np.uint64]]] = []

    @property
    def exhausted(self) -> bool:  # noqa: D102
        return self._source.exhausted

    def open(self, position: Mapping[Partition, int] | None) -> Mapping[Partition, int]:  # noqa: D102
        return self._source.open(position)

    def batch(self, size: int, wait_ms: int | None, stop: Callable[[], bool]) -> Batch | None:  # noqa: D102
        batch = self._source.batch(size, wait_ms, stop)
        if batch is not None and batch.columns.size:
            self.offsets.append(batch.offsets.copy())
            self.times.append(batch.columns.time_ms.copy())
            self.keys.append({name: batch.columns.ids[name].keys.copy() for name in _FEATURES})
        return batch

    def lag(self) -> Mapping[Partition, int]:  # noqa: D102
        return self._source.lag()

    def trouble(self) -> str | None:  # noqa: D102
        return self._source.trouble()

    def commit(self, position: Mapping[Partition, int]) -> None:  # noqa: D102
        self._source.commit(position)

    def close(self) -> None:  # noqa: D102
        self._source.close()


class Child:
    """A Python process of ours that speaks JSON lines, and ends with us.

    Parameters
    ----------
    command : list of str
    name : str
        For messages.
    """

    def __init__(self, command: list[str], name: str) -> None:
        self._command = command
        self._name = name
        self.said: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._watchdog = embedded.watch(process.pid)
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            embedded.end(self._process, self._watchdog)
            self._reader.join(5)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        self._errors.close()

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def ask(self, line: str) -> None:
        """Write a line to it."""
        pipe = self._process.stdin if self._process else None
        if pipe is None:
            raise QuickstartFailed(f"{self._name} does not run")
        try:
            pipe.write(f"{line}\n".encode())
            pipe.flush()
        except BrokenPipeError as error:
            raise QuickstartFailed(self.complaint()) from error

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float) -> None:
        """Wait until it says something.

        Raises
        ------
        QuickstartFailed
            It ended, or did not say it in time.
        """
        with self._heard:
            if not self._heard.wait_for(
                lambda: any(wanted(line) for line in self.said) or self.code is not None, timeout_s
            ) or not any(wanted(line) for line in self.said):
                raise QuickstartFailed(self.complaint())

    def complaint(self) -> str:
        """Say that it broke, with the end of what it wrote."""
        self._errors.seek(0)
        tail = "\n".join(self._errors.read().decode(errors="replace").splitlines()[-10:])
        state = "does not answer" if self.code is None else f"ended with code {self.code}"
        return f"{self._name} {state}; it said:\n{tail or '(nothing)'}"

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        for line in process.stdout or ():
            with self._heard, suppress(ValueError):
                self.said.append(json.loads(line))
                self._heard.notify_all()
        with self._heard:
            self._heard.notify_all()


class Tour:
    """One run of the trainer over the stream, watched from beside."""

    def __init__(
        self,
        config: Config,
        stream: ClickStream,
        *,
        brokers: str,
        seconds: float,
        rate: float,
        seed: int,
        replica: Child,
        shown: Display,
    ) -> None:
        self._config = config
        self._stream = stream
        self._brokers = brokers
        self._seconds, self._rate, self._seed = seconds, rate, seed
        self._count = max(1, round(seconds * rate))
        self._replica = replica
        self._shown = shown
        self._recorded = Recorded(config.validation.window)
        self._source = Watched(assembly.kafka_source(config))
        self._trainer: Trainer | None = None
        self._failure: str | None = None
        self._interrupted = False
        self._done = threading.Event()
        self._start_ms = 0
        parts = Parts(
            source=self._source,
            sinks=assembly.sinks(config),
            trainer=self._build,
            environment=assembly.environment(config),
        )
        self._daemon = Daemon(config, parts, until_samples=self._count)

    def interrupt(self) -> None:
        """Ask for the end before there is an outcome."""
        self._interrupted = True
        self._daemon.stop()

    def run(self) -> None:
        """Train until the stream was learned.

        Raises
        ------
        QuickstartFailed
            The sender broke.
        KeyboardInterrupt
            `interrupt` was called.
        """
        beside = threading.Thread(target=self._beside, name="quickstart", daemon=True)
        beside.start()
        try:
            self._version = self._daemon.run().version
        finally:
            self._done.set()
            beside.join()
            self._shown.close()
        if self._interrupted:
            raise KeyboardInterrupt
        if self._failure is not None:
            raise QuickstartFailed(self._failure)

    def outcome(self, picture: Path, folder: Path) -> Outcome:
        """Say what came of it, and draw the picture."""
        predictions = np.concatenate(self._recorded.predictions)
        labels = np.concatenate(self._recorded.labels)
        offsets, event_ms = (np.concatenate(x) for x in (self._source.offsets, self._source.times))
        best = np.empty(len(labels))
        for at in range(0, len(labels), 50_000):
            part = slice(at, min(at + 50_000, len(labels)))
            first, n = int(offsets[part][0]), len(offsets[part])
            best[part] = self._stream.clicks(
                first, times(self._start_ms, self._rate, first, n)
            ).best
        tenth = max(1, len(labels) // 10)
        head, tail = slice(0, tenth), slice(len(labels) - tenth, len(labels))
        frozen_at, frozen = self._frozen(folder, len(labels))
        fresh = self._freshness(event_ms, folder)
        store = self._kept().store
        counts = store.metrics().values()
        compared, different, dense_equal = self._compare(folder)
        _draw(picture, event_ms, labels, predictions, frozen_at, frozen, best)
        entries = Log(folder / "cuts" / "log", max_bytes=2**40).entries()
        took = (int(event_ms[-1]) - int(event_ms[0])) / 1000
        return Outcome(
            seconds=round(took, 3),
            samples=len(labels),
            samples_per_s=round(len(labels) / max(took, 1e-3), 1),
            start=_score(predictions[head], labels[head]),
            end=_score(predictions[tail], labels[tail]),
            frozen=_score(
                frozen[max(0, tail.start - frozen_at) :], labels[max(frozen_at, tail.start) :]
            ),
            best_start=_score(best[head], labels[head]),
            best_end=_score(best[tail], labels[tail]),
            frozen_at=frozen_at,
            admitted=sum(c["admitted"] for c in counts),
            evicted=sum(c["evicted"] for c in counts),
            rows=sum(c["rows"] for c in counts),
            deltas=len(entries),
            fresh_p50_ms=round(float(np.percentile(fresh, 50)), 1),
            fresh_p99_ms=round(float(np.percentile(fresh, 99)), 1),
            compared_rows=compared,
            different_rows=different,
            dense_equal=dense_equal,
            picture=str(picture),
        )

    # ---- beside the trainer

    def _build(self, cut: Cut | None) -> Trainer:
        self._trainer = trainer = assembly.trainer(self._config, cut)
        trainer.validation["click"] = self._recorded
        return trainer

    def _beside(self) -> None:
        """Start the sender when the trainer is ready, and show how things stand until the end."""
        try:
            while "start" in self._daemon.telemetry.unready():
                if self._done.wait(0.02):
                    return
            self._start_ms = round(clock.wall() * 1000) + _LEAD_MS
            with Child(self._sender(), "the sender of clicks") as sender:
                self._watch(sender)
        except StreamtrainError as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001
            _log.exception("beside the trainer")
            self._failure = f"{type(error).__name__}: {error}"
        if self._failure is not None:
            self._daemon.stop()

    def _sender(self) -> list[str]:
        shape = self._stream.shape
        return [
            sys.executable, "-m", "streamtrain", "clicks", "--brokers", self._brokers,
            "--topic", TOPIC, "--rate", str(self._rate), "--count", str(self._count),
            "--start-ms", str(self._start_ms), "--seed", str(self._seed),
            "--life", str(shape.life_ms / 1000), "--drift", str(shape.drift_ms / 1000),
        ]  # fmt: skip

    def _watch(self, sender: Child) -> None:
        end = self._start_ms / 1000 + self._seconds + _GRACE_S
        before = (clock.monotonic(), 0)
        while not self._done.wait(_REFRESH_S):
            if sender.code not in (None, 0):
                raise QuickstartFailed(sender.complaint())
            if self._replica.code is not None:
                raise QuickstartFailed(self._replica.complaint())
            if clock.wall() > end:
                self._daemon.stop()  # this machine is too slow for the rate; what was learned counts
            now = (clock.monotonic(), self._recorded.seen)
            figures = self._recorded.figures()
            served = self._served()
            newest = served[-1] if served else None
            self._shown.show(Glance(
                elapsed_s=max(0.0, clock.wall() - self._start_ms / 1000),
                total_s=self._seconds,
                samples=now[1],
                rate=(now[1] - before[1]) / max(now[0] - before[0], 1e-3),
                loss=figures.loss,
                auc=figures.auc,
                rows=sum(newest.rows.values()) if newest else 0,
                version=newest.version if newest else 0,
                fresh_ms=newest.age_s * 1000 if newest and newest.watermark else None,
            ))  # fmt: skip
            before = now

    # ---- after it

    def _kept(self) -> Trainer:
        if self._trainer is None or not self._recorded.seen:
            raise QuickstartFailed("nothing was learned; is this machine much too slow?")
        return self._trainer

    def _served(self) -> list[Served]:
        return [Served(**line) for line in list(self._replica.said) if "version" in line]

    def _freshness(self, event_ms: Longs, folder: Path) -> Floats:
        """Return, per sample, ms from its event to a replica that serves what was learned from it."""
        entries = Log(folder / "cuts" / "log", max_bytes=2**40).entries()
        newest = entries[-1].version
        self._replica.wait_for(lambda line: line.get("version", 0) >= newest, 30)
        served = self._served()
        sizes = [len(times_ms) for times_ms in self._source.times]
        steps = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        by_step = np.searchsorted([entry.step for entry in entries], steps)
        version = np.array([entry.version for entry in entries])[by_step]
        at = np.searchsorted([s.version for s in served], version)
        return np.array([s.at_ms for s in served])[at] - event_ms

    def _frozen(self, folder: Path, total: int) -> tuple[int, Floats]:
        """Return what the cut nearest to half time had learned, and predicts of all that came after."""
        checkpoints = Checkpoints(folder / "cuts", keep=1)
        cuts = [checkpoints.open(name) for name in checkpoints.names()]
        learned = [int(cut.state()["trainer"]["learned"]) for cut in cuts]
        chosen = int(np.argmin([abs(n - total / 2) for n in learned]))
        # Nothing is learned here, so that the smallest shape will do to be traced.
        traced = replace(self._config, batch=replace(self._config.batch, size=1, shapes=[1]))
        trainer, first = assembly.trainer(traced, cuts[chosen]), learned[chosen]
        dense = trainer.dense
        if not isinstance(dense, DenseStep):
            raise TypeError(f"expected a DenseStep, got {type(dense).__name__}")
        keys = {
            name: np.concatenate([batch[name] for batch in self._source.keys])[first:]
            for name in _FEATURES
        }
        found = assembly.inputs(self._config)
        parts: list[Floats] = []
        for at in range(0, total - first, 4096):
            rows = {
                s.name: trainer.store.lookup(s.table, keys[s.feature][at : at + 4096])[0]
                for s in found.sparse
            }
            logits = np.asarray(dense.model(rows)["click"], np.float64)[:, 0]
            parts.append(1 / (1 + np.exp(-logits)))
        return first, np.concatenate(parts) if parts else np.zeros(0)

    def _compare(self, folder: Path) -> tuple[int, int, bool]:
        """Compare the replica with the trainer bit for bit: rows, rows that differ, dense weights."""
        trainer = self._kept()
        asked, answered = folder / "keys.npz", folder / "rows.npz"
        dumps = {name: trainer.store.dump(name) for name in trainer.store.tables}
        np.savez(asked, **{name: dump.keys for name, dump in dumps.items()})  # type: ignore[arg-type]
        self._replica.ask(f"{self._version}\t{asked}\t{answered}")
        self._replica.wait_for(lambda line: "answered" in line, 60)
        compared = different = 0
        with np.load(answered, allow_pickle=False) as answer:
            for name, dump in dumps.items():
                same = (answer[f"{name}.rows"].view(np.uint32) == dump.values.view(np.uint32)).all(
                    axis=1
                )
                same &= answer[f"{name}.found"]
                # Rows that only the replica has differ, too.
                different += int((~same).sum()) + abs(int(answer[f"{name}.size"]) - len(dump.keys))
                compared += len(dump.keys)
            dense = answer["dense"] if "dense" in answer.files else np.zeros(0, np.float32)
        return compared, different, bool(np.array_equal(dense, trainer.dense.vector()))


def _config(folder: Path, brokers: str, redis: str, seconds: float) -> Config:
    (folder / "click.avsc").write_text(json.dumps(SCHEMA))
    text = CONFIG.format(
        brokers=brokers,
        redis=redis,
        ttl=f"{max(1, round(seconds * 1000 / 12))}ms",
        cut_every=f"{max(500, round(seconds * 1000 / 12))}ms",
    )
    return loads(text, base=folder)


def _warm_up(folder: Path, config: Config, stream: ClickStream) -> None:
    """Go once through everything that compiles or loads lazily, on samples of another time."""
    folder.mkdir()
    path = folder / "clicks.avro"
    with path.open("wb") as file:
        records = stream.clicks(0, times(0, 1000.0, 0, 4000)).records()
        fastavro.writer(file, fastavro.parse_schema(SCHEMA), records)
    (folder / "click.avsc").write_text(json.dumps(SCHEMA))
    text = CONFIG.format(
        brokers="127.0.0.1:1", redis="redis://127.0.0.1:1/0", ttl="1s", cut_every="500ms"
    )
    alone = loads(text, ["export.redis=null", "export.every=50ms"], base=folder)
    replay(alone, [str(path)], publish=True)


@contextmanager
def _interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM ask for a clean end; a second one ends at once."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        if asked:
            os._exit(128 + number)
        asked = True
        interrupt()

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _score(predictions: Floats, labels: Floats) -> Score:
    ones = np.ones(len(labels))
    loss, area = log_loss(predictions, labels, ones), auc(predictions, labels, ones)
    return Score(
        len(labels),
        None if loss is None else round(loss, 5),
        None if area is None else round(area, 5),
    )


def _draw(
    path: Path,
    event_ms: Longs,
    labels: Floats,
    live: Floats,
    frozen_at: int,
    frozen: Floats,
    best: Floats,
) -> None:
    """Write the learning curve: log loss by time, some forty points."""
    edges = np.linspace(0, len(labels), 41).astype(int)
    seconds = (event_ms - event_ms[0]) / 1000

    def curve(name: str, predictions: Floats, first: int, *, dashed: bool = False) -> Curve:
        points = []
        for low, high in pairwise(edges.tolist()):
            if low < first or high <= low:
                continue
            part = slice(low, high)
            loss = log_loss(
                predictions[low - first : high - first], labels[part], np.ones(high - low)
            )
            points.append((float(seconds[part].mean()), loss or 0.0))
        return Curve(name, [x for x, _ in points], [y for _, y in points], dashed)

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        svg(
            "Log loss of each sample before it was learned",
            "seconds of stream",
            "log loss",
            [
                curve("live model", live, 0),
                curve("frozen at half time", frozen, frozen_at),
                curve("best possible", best, 0, dashed=True),
            ],
        ),
        encoding="utf-8",
    )
