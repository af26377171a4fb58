"""Optimizer kernels: bits against the twin, figures against Keras and the published formula."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_store import optim
from sparse_store.config import Adagrad, Ftrl
from tests.reference import optim as twin

ADAGRADS = [
    Adagrad(),
    Adagrad(rate=0.5, clip=1.0),
    Adagrad(rate=0.5, l2=0.1, decay=0.9, floor=0.2),
    Adagrad(rate=1.0, initial=0.0, epsilon=1e-3, clip=0.1, l2=0.3),
]
FTRLS = [Ftrl(), Ftrl(alpha=0.5, l1=0.3), Ftrl(alpha=2.0, beta=0.1, l1=0.1, l2=0.7)]


class Row:
    """One row under the kernels, beside two that must not move."""

    def __init__(self, optimizer: Adagrad | Ftrl, values: np.ndarray) -> None:
        self.optimizer = optimizer
        self.dim = values.size
        row = [values.astype(np.float32), optim.slot_start(optimizer, values.size)]
        self.rows = np.tile(np.concatenate(row), (3, 1))

    @property
    def values(self) -> np.ndarray:
        return self.rows[:, : self.dim]

    @property
    def slots(self) -> np.ndarray:
        return self.rows[:, self.dim :]

    def step(self, gradient: np.ndarray) -> None:
        others = self.rows[[0, 2]].copy()
        sums = np.concatenate([gradient * 9, gradient * 7, gradient]).astype(np.float32)
        numbers = np.array([0, -1, 1], np.int32)
        optim.step(self.optimizer, self.rows, numbers, (1, 3), sums, self.dim)
        np.testing.assert_array_equal(self.rows[[0, 2]], others)


@pytest.mark.parametrize("optimizer", [ADAGRADS[1], FTRLS[1]], ids=repr)
@pytest.mark.parametrize("dim", [1, 8, 1025])
def test_many_rows_are_each_one_row(optimizer: Adagrad | Ftrl, dim: int) -> None:
    """Rows go through in blocks; where a block ends decides nothing."""
    random = np.random.default_rng(dim)
    size = 2500 // dim + 3
    numbers = random.permutation(size).astype(np.int32)
    numbers[::5] = -1
    start = np.concatenate([np.ones(dim, np.float32), optim.slot_start(optimizer, dim)])
    rows = np.tile(start, (size, 1)) * random.random((size, 1)).astype(np.float32)
    wanted = rows.copy()
    sums = random.normal(size=size * dim).astype(np.float32)
    for u in range(size):
        optim.step(optimizer, wanted, numbers, (u, u + 1), sums, dim)
    optim.step(optimizer, rows, numbers, (0, size), sums, dim)
    np.testing.assert_array_equal(rows.view("u4"), wanted.view("u4"))
    assert (rows != np.tile(start, (size, 1))).any()


@pytest.mark.parametrize("optimizer", [*ADAGRADS, *FTRLS], ids=repr)
@given(st.integers(0, 2**32 - 1), st.integers(1, 17), st.sampled_from([0.01, 1.0, 1000.0]))
def test_every_bit_is_the_twin_s(
    optimizer: Adagrad | Ftrl, seed: int, dim: int, size: float
) -> None:
    random = np.random.default_rng(seed)
    row = Row(optimizer, random.normal(size=dim))
    values, slots = list(row.values[1]), twin.slot_start(optimizer, dim)
    for _ in range(5):
        gradient = (random.normal(size=dim) * size).astype(np.float32)
        gradient[random.random(dim) < 0.2] = 0.0
        row.step(gradient)
        values, slots = twin.step(optimizer, values, slots, list(gradient))
    for found, wanted in ((row.values[1], values), (row.slots[1], slots)):
        np.testing.assert_array_equal(
            found.copy().view("u4"), np.array(wanted, np.float32).view("u4")
        )


def in_keras(
    optimizer: keras.optimizers.Optimizer, values: np.ndarray, gradients: list[np.ndarray]
) -> np.ndarray:
    variable = keras.Variable(values.astype(np.float32))
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    return np.asarray(variable.numpy())


@pytest.mark.parametrize(("steps", "tolerance"), [(1, 1e-6), (200, 5e-6)])
def test_adagrad_is_keras_own(steps: int, tolerance: float) -> None:
    random = np.random.default_rng(steps)
    start = random.normal(size=16)
    gradients = [random.normal(size=16).astype(np.float32) for _ in range(steps)]
    row = Row(Adagrad(rate=0.05), start)
    for gradient in gradients:
        row.step(gradient)
    wanted = in_keras(
        keras.optimizers.Adagrad(learning_rate=0.05, initial_accumulator_value=0.1, epsilon=1e-7),
        start,
        gradients,
    )
    np.testing.assert_allclose(row.values[1], wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("steps", "tolerance"), [(1, 1e-6), (200, 2e-5)])
def test_ftrl_is_keras_own(steps: int, tolerance: float) -> None:
    """Keras halves l2 in its formula, and starts its accumulator where it is told: at 0 here."""
    random = np.random.default_rng(steps)
    start = random.normal(size=16)
    gradients = [random.normal(size=16).astype(np.float32) for _ in range(steps)]
    row = Row(Ftrl(alpha=0.1, beta=1.0, l1=0.5, l2=0.2), start)
    for gradient in gradients:
        row.step(gradient)
    wanted = in_keras(
        keras.optimizers.Ftrl(
            learning_rate=0.1,
            initial_accumulator_value=0.0,
            l1_regularization_strength=0.5,
            l2_regularization_strength=0.1,
            beta=1.0,
        ),
        start,
        gradients,
    )
    np.testing.assert_allclose(row.values[1], wanted, atol=tolerance, rtol=0)
    if steps == 1:
        assert 0 < np.count_nonzero(row.values[1] == 0.0) < 16


def test_ftrl_is_algorithm_1_of_the_paper() -> None:
    """Written from McMahan et al. 2013 in float64: the weight is derived from z and n anew."""
    alpha, beta, l1, l2 = 0.3, 0.7, 0.4, 0.05
    row = Row(Ftrl(alpha=alpha, beta=beta, l1=l1, l2=l2), np.zeros(1))
    z = n = 0.0
    for t in range(300):
        w = 0.0
        if abs(z) > l1:
            w = -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
        assert float(row.values[1, 0]) == pytest.approx(w, abs=2e-5)
        assert (row.values[1, 0] == 0) == (w == 0)
        g = math.sin(t * 1.7) * 0.5
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
        z += g - sigma * w
        n += g * g
        row.step(np.array([g]))


def test_clip_bounds_the_length_of_the_summed_gradient() -> None:
    """With a huge accumulator the step is g over a constant, so its length shows g's."""
    gradient = np.array([300.0, -400.0])
    row = Row(Adagrad(rate=1.0, initial=1e12, clip=5.0), np.zeros(2))
    row.step(gradient)
    np.testing.assert_allclose(row.values[1], [-3e-6, 4e-6], rtol=1e-5)
    row = Row(Adagrad(rate=1.0, initial=1e12, clip=500.0), np.zeros(2))
    row.step(gradient)
    np.testing.assert_allclose(row.values[1], [-3e-4, 4e-4], rtol=1e-5)


def test_decay_and_floor_keep_an_endless_stream_learning() -> None:
    plain, decayed = Row(Adagrad(), np.zeros(1)), Row(Adagrad(decay=0.99), np.zeros(1))
    for _ in range(3000):
        plain.step(np.ones(1))
        decayed.step(np.ones(1))
    assert plain.slots[1, 0] == pytest.approx(3000.1)
    assert decayed.slots[1, 0] == pytest.approx(100, rel=1e-3)
    floored = Row(Adagrad(decay=0.5, floor=0.25), np.zeros(1))
    for _ in range(10):
        floored.step(np.zeros(1))
    assert floored.slots[1, 0] == 0.25
