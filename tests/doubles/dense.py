"""A dense side without TensorFlow: a sum and a few weights, the same bits everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SumFeed:
    """Buffers of one batch."""

    inputs: dict[str, Floats]
    labels: Floats
    weights: Floats


@dataclass(frozen=True, slots=True)
class SumLearned:
    """What a step gave."""

    logits: Floats
    gradients: dict[str, Floats]
    finite: bool = True


class SumDense:
    """logit = sum over everything that is fed + the first weight; squared error, plain SGD.

    The other weights count steps, so that a state that was not restored shows.

    Parameters
    ----------
    inputs
        By name the shape of one sample's input.
    weights
        How many dense weights there are, at least 1.
    """

    def __init__(self, inputs: Mapping[str, tuple[int, ...]], *, weights: int = 3) -> None:
        self._inputs = dict(inputs)
        self._weights = np.zeros(weights, np.float32)

    def feed(self, samples: int) -> SumFeed:
        shape = (samples, 1)
        return SumFeed(
            inputs={
                name: np.zeros((samples, *each), np.float32) for name, each in self._inputs.items()
            },
            labels=np.zeros(shape, np.float32),
            weights=np.zeros(shape, np.float32),
        )

    def learn(self, feed: SumFeed, samples: int) -> SumLearned:
        logits = np.full((samples, 1), self._weights[0], np.float32)
        for rows in feed.inputs.values():
            logits[:, 0] += rows[:samples].reshape(samples, -1).sum(axis=1)
        errors = (logits - feed.labels[:samples]) * feed.weights[:samples] / np.float32(samples)
        gradients = {}
        for name, rows in feed.inputs.items():
            gradients[name] = np.zeros_like(rows)
            gradients[name][:samples] = errors.reshape(samples, *(1,) * (rows.ndim - 1))
        self._weights[0] -= np.float32(0.25) * errors.sum()
        self._weights[1:] += 1
        return SumLearned(logits, gradients)

    def vector(self) -> Floats:
        return self._weights.copy()

    def state(self) -> dict[str, NDArray[Any]]:
        return {"weights": self._weights.copy()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._weights = state["weights"].astype(np.float32, copy=True)
