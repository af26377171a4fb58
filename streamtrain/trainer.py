"""One step: resolve, pull, predict, score, learn, push. No input or output, no time of day.

The trainer owns the model's state between two boundaries: the store, the dense step, progressive
validation, the clock, the position and the counters. Whoever holds that state holds the position.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from consumers.source import Batch, Columns, Partition
from sparse_store.errors import NonFinite as GradientTooLarge
from sparse_store.store import Keys, SparseStore
from streamtrain.errors import ConservationBroken, NonFinite
from streamtrain.validation import Progressive

Floats = NDArray[np.float32]


class Feed(Protocol):
    """Buffers of one batch shape; see `streamtrain.dense.Feed`."""

    @property
    def inputs(self) -> dict[str, Floats]: ...  # noqa: D102
    @property
    def labels(self) -> Floats: ...  # noqa: D102
    @property
    def weights(self) -> Floats: ...  # noqa: D102


class Learned(Protocol):
    """What a dense step gave; see `streamtrain.dense.Learned`."""

    @property
    def logits(self) -> Floats: ...  # noqa: D102
    @property
    def gradients(self) -> dict[str, Floats]: ...  # noqa: D102
    @property
    def finite(self) -> bool: ...  # noqa: D102


class Dense(Protocol):
    """What the trainer needs of the dense side; `streamtrain.dense.DenseStep` is the real one."""

    def feed(self, samples: int) -> Any: ...  # noqa: D102
    def learn(self, feed: Any, samples: int) -> Any: ...  # noqa: D102
    def vector(self) -> Floats: ...  # noqa: D102
    def state(self) -> dict[str, NDArray[Any]]: ...  # noqa: D102
    def restore(self, state: Mapping[str, NDArray[Any]]) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Sparse:
    """One model input that is read from a table.

    Attributes
    ----------
    name, feature, table : str
        Input name; where its ids come from; where its rows live.
    pool : str
        ``sum``, ``mean`` or ``sqrtn``.
    length : int or None
        Of a sequence: rows are kept apart instead of pooled.
    """

    name: str
    feature: str
    table: str
    pool: str
    length: int | None


@dataclass(frozen=True, slots=True)
class Task:
    """One label: its name, its loss (``binary`` or ``squared``) and its weight in the sum."""

    name: str
    loss: str
    weight: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step did, for those who watch.

    Attributes
    ----------
    samples : int
        Learned from; 0 for a batch that held only bad messages.
    predictions : float32 array, shape ``(samples, tasks)``
        From before the step.
    """

    samples: int
    predictions: Floats


class Trainer:
    """Learns from batches, one at a time.

    Parameters
    ----------
    store : SparseStore
        Owned by the trainer from here on.
    dense : Dense
        The dense side.
    sparse : sequence of Sparse
        In the order in which inputs are resolved; it is part of the result's bits.
    dense_inputs : sequence of str
        Names of the dense features.
    tasks : sequence of Task
    window : int
        Of progressive validation, in predictions.
    clock_max_step_ms : int
        How far one step may raise the clock.
    """

    def __init__(
        self,
        store: SparseStore,
        dense: Dense,
        *,
        sparse: Sequence[Sparse],
        dense_inputs: Sequence[str],
        tasks: Sequence[Task],
        window: int,
        clock_max_step_ms: int,
    ) -> None:
        self.store = store
        self.dense = dense
        self.validation = {
            task.name: Progressive(window, loss="binary" if task.loss == "binary" else "squared")
            for task in tasks
        }
        self.position: dict[Partition, int] = {}
        self.clock: int | None = None
        self.consumed = 0
        self.learned = 0
        self.dropped: Counter[str] = Counter()
        self.future = 0
        self._sparse = tuple(sparse)
        self._dense_inputs = tuple(dense_inputs)
        self._tasks = tuple(tasks)
        self._max_step = clock_max_step_ms

    def step(self, batch: Batch) -> Stepped:
        """Predict, score and learn one batch, and move the position behind it.

        Raises
        ------
        NonFinite
            Loss or gradient is not finite. Neither the dense side nor any row has moved, and the
            position stands where it was; the state is no longer fit for a cut.
        """
        samples = batch.columns.size
        predictions = np.zeros((0, len(self._tasks)), np.float32)
        if samples:
            predictions = self._learn(batch)
        self.consumed += batch.consumed
        self.learned += samples
        self.dropped.update(bad.reason for bad in batch.bad)
        self.position.update(batch.position)
        return Stepped(samples=samples, predictions=predictions)

    def check_conservation(self) -> None:
        """Raise `ConservationBroken` unless ``consumed = learned + dropped``."""
        dropped = sum(self.dropped.values())
        if self.consumed != self.learned + dropped:
            raise ConservationBroken(
                f"consumed {self.consumed} is not learned {self.learned} + dropped {dropped}: "
                "samples were lost or counted twice; this is a defect of streamtrain, please report it "
                "with the last log lines"
            )

    def state(self) -> dict[str, Any]:
        """Return everything beside store, dense side and validation, as JSON can hold it."""
        return {
            "clock": self.clock,
            "consumed": self.consumed,
            "learned": self.learned,
            "dropped": dict(self.dropped),
            "future": self.future,
            "position": [[p.topic, p.number, offset] for p, offset in self.position.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.clock = state["clock"]
        self.consumed = state["consumed"]
        self.learned = state["learned"]
        self.dropped = Counter(state["dropped"])
        self.future = state["future"]
        self.position = {
            Partition(topic, number): offset for topic, number, offset in state["position"]
        }

    def _learn(self, batch: Batch) -> Floats:
        columns = batch.columns
        samples = columns.size
        clock = self._next_clock(columns.time_ms)
        feed = self.dense.feed(samples)
        plan = self.store.resolve(self._keys(columns), clock=clock)
        self.clock = clock
        self.store.pull(plan, feed.inputs)
        self._fill(feed, columns)
        learned = self.dense.learn(feed, samples)
        if not learned.finite:
            raise NonFinite(_blame(batch, learned, samples))
        predictions = self._score(columns, learned.logits[:samples])
        try:
            self.store.push(plan, learned.gradients)
        except GradientTooLarge as error:
            raise NonFinite(f"{_blame(batch, learned, samples)} ({error})") from error
        return predictions

    def _next_clock(self, times: NDArray[np.int64]) -> int:
        """Raise the clock to the lower median event time, by at most `clock.max_step`."""
        middle = int(np.partition(times, (len(times) - 1) // 2)[(len(times) - 1) // 2])
        if self.clock is None:
            return middle
        limit = self.clock + self._max_step
        self.future += int(np.count_nonzero(times > limit))
        return min(max(self.clock, middle), limit)

    def _keys(self, columns: Columns) -> dict[str, Keys]:
        keys = {}
        for s in self._sparse:
            ids = columns.ids[s.feature]
            keys[s.name] = Keys(
                s.table, ids.keys, ids.row_splits, weights=ids.weights, pool=s.pool, length=s.length
            )
        return keys

    def _fill(self, feed: Feed, columns: Columns) -> None:
        n = columns.size
        for name in self._dense_inputs:
            feed.inputs[name][:n] = columns.dense[name]
            feed.inputs[name][n:] = 0
        for s in self._sparse:
            if s.length is not None and f"{s.feature}.mask" in feed.inputs:
                mask = feed.inputs[f"{s.feature}.mask"]
                lengths = np.diff(columns.ids[s.feature].row_splits)
                mask[:n] = np.arange(s.length)[None, :] < lengths[:, None]
                mask[n:] = 0
        for t, task in enumerate(self._tasks):
            feed.labels[:n, t] = columns.labels[task.name]
            feed.weights[:n, t] = columns.weight * np.float32(task.weight)
        feed.labels[n:] = 0
        feed.weights[n:] = 0

    def _score(self, columns: Columns, logits: Floats) -> Floats:
        predictions = np.empty_like(logits)
        for t, task in enumerate(self._tasks):
            answer = logits[:, t].astype(np.float64)
            if task.loss == "binary":
                answer = _sigmoid(answer)
            predictions[:, t] = answer
            self.validation[task.name].add(answer, columns.labels[task.name], columns.weight)
        return predictions


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logistic function, in the form that does not overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _blame(batch: Batch, learned: Learned, samples: int) -> str:
    """Name the samples whose logits or row gradients are not finite."""
    bad = ~np.isfinite(learned.logits[:samples]).all(axis=1)
    for gradient in learned.gradients.values():
        rows = gradient[:samples].reshape(samples, -1)
        bad |= ~np.isfinite(rows).all(axis=1)
    named = np.flatnonzero(bad) if bad.any() else np.arange(samples)
    places = []
    for i in named[:20].tolist():
        partition = batch.partitions[int(batch.partition_index[i])]
        places.append(f"{partition.topic}-{partition.number}@{int(batch.offsets[i])}")
    more = f" and {len(named) - 20} more" if len(named) > 20 else ""
    which = "sample(s)" if bad.any() else "no single sample stands out; the batch is"
    return (
        f"loss or gradient is not finite: {which} {', '.join(places)}{more}; nothing was learned from "
        "this batch. Look at these messages, lower the rates or clip the dense features, and start "
        "again: the position is still before them"
    )
