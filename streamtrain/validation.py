"""Progressive validation: every sample is predicted before it is learned from.

A task's figures cover the newest ``window`` predictions exactly, and the whole run by sums.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TINY = 1e-15


@dataclass(frozen=True, slots=True)
class Figures:
    """What a window of predictions says.

    Attributes
    ----------
    samples : int
        Predictions with a weight above zero in the window.
    loss : float or None
        Weighted mean of the task's loss: log loss (natural logarithm) or squared error; None for
        an empty window.
    auc : float or None
        Weighted area under the ROC curve, ties counted half; None unless both classes are there,
        and for a task that is not binary.
    calibration : float or None
        Mean prediction over mean label; None when the labels do not sum to more than zero.
    """

    samples: int
    loss: float | None
    auc: float | None
    calibration: float | None


def log_loss(predictions: Floats, labels: Floats, weights: Floats) -> float | None:
    """Weighted mean of ``-y log p - (1 - y) log(1 - p)``, p kept 1e-15 from 0 and 1."""
    total = float(weights.sum())
    if total <= 0:
        return None
    p = np.clip(predictions, _TINY, 1 - _TINY)
    losses = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    return float((losses * weights).sum()) / total


def squared_error(predictions: Floats, labels: Floats, weights: Floats) -> float | None:
    """Weighted mean of ``(p - y)^2``."""
    total = float(weights.sum())
    if total <= 0:
        return None
    return float((np.square(predictions - labels) * weights).sum()) / total


def auc(predictions: Floats, labels: Floats, weights: Floats) -> float | None:
    """Weighted probability that a positive is ranked above a negative, ties counted half."""
    positive = weights * (labels > 0.5)
    negative = weights * (labels <= 0.5)
    if positive.sum() <= 0 or negative.sum() <= 0:
        return None
    order = np.argsort(predictions, kind="stable")
    _, first = np.unique(predictions[order], return_index=True)
    positives = np.add.reduceat(positive[order], first)
    negatives = np.add.reduceat(negative[order], first)
    below = np.cumsum(negatives) - negatives
    wins = float((positives * (below + 0.5 * negatives)).sum())
    return wins / (float(positives.sum()) * float(negatives.sum()))


class Progressive:
    """The newest predictions of one task, and sums over all of them.

    Parameters
    ----------
    window : int
        How many predictions the windowed figures cover.
    loss : {"binary", "squared"}
        What the task is judged by.
    """

    def __init__(self, window: int, *, loss: Literal["binary", "squared"] = "binary") -> None:
        self._loss = log_loss if loss == "binary" else squared_error
        self._binary = loss == "binary"
        self._ring = np.zeros((window, 3))
        self._seen = 0
        self._loss_sum = 0.0
        self._weight_sum = 0.0

    def add(
        self,
        predictions: NDArray[np.floating],
        labels: NDArray[np.floating],
        weights: NDArray[np.floating],
    ) -> None:
        """Take the predictions of one step, made before it was learned; arrays of shape ``(n,)``."""
        rows = np.stack([predictions, labels, weights], axis=1).astype(np.float64)
        loss = self._loss(rows[:, 0], rows[:, 1], rows[:, 2])
        if loss is not None:
            weight = float(rows[:, 2].sum())
            self._loss_sum += loss * weight
            self._weight_sum += weight
        window = len(self._ring)
        kept = rows[-window:]
        first = self._seen + len(rows) - len(kept)
        self._ring[(first + np.arange(len(kept))) % window] = kept
        self._seen += len(rows)

    @property
    def seen(self) -> int:
        """Predictions taken since birth."""
        return self._seen

    def newest(self) -> tuple[Floats, Floats, Floats]:
        """Return predictions, labels and weights of the window, oldest first."""
        window = len(self._ring)
        if self._seen <= window:
            rows = self._ring[: self._seen]
        else:
            rows = np.roll(self._ring, -(self._seen % window), axis=0)
        return rows[:, 0], rows[:, 1], rows[:, 2]

    def figures(self) -> Figures:
        """Return the figures of the window."""
        p, y, w = self.newest()
        labels = float((y * w).sum())
        return Figures(
            samples=int((w > 0).sum()),
            loss=self._loss(p, y, w),
            auc=auc(p, y, w) if self._binary else None,
            calibration=float((p * w).sum()) / labels if labels > 0 else None,
        )

    def mean_loss(self) -> float | None:
        """Return the mean loss over everything seen since birth."""
        return self._loss_sum / self._weight_sum if self._weight_sum > 0 else None

    def state(self) -> dict[str, Floats]:
        """Return what `restore` needs, as arrays."""
        p, y, w = self.newest()
        sums = np.array([self._seen, self._loss_sum, self._weight_sum])
        return {"window": np.stack([p, y, w], axis=1), "sums": sums}

    def restore(self, state: dict[str, Floats]) -> None:
        """Continue from `state`; a smaller window keeps the newest, a larger one has a hole filled later."""
        rows = state["window"][-len(self._ring) :]
        seen, self._loss_sum, self._weight_sum = (float(x) for x in state["sums"])
        self._seen = int(seen)
        if len(rows) < min(self._seen, len(self._ring)):
            # The window grew: what is missing counts with weight zero until it is overwritten.
            hole = np.zeros((min(self._seen, len(self._ring)) - len(rows), 3))
            rows = np.concatenate([hole, rows])
        first = self._seen - len(rows)
        self._ring[(first + np.arange(len(rows))) % len(self._ring)] = rows
