"""Progressive figures against scikit-learn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sk_log_loss
from sklearn.metrics import roc_auc_score

from streamtrain.validation import Progressive, auc, log_loss


def _window(seed: int, n: int, ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p = rng.random(n)
    if ties:
        p = np.round(p, 1)
    y = (rng.random(n) < 0.3).astype(np.float64)
    y[:2] = [0, 1]
    return p, y, rng.random(n) + 0.1


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 300), ties=st.booleans())
def test_auc_equals_sklearn(seed: int, n: int, ties: bool) -> None:
    p, y, w = _window(seed, n, ties)
    assert auc(p, y, w) == pytest.approx(roc_auc_score(y, p, sample_weight=w), abs=1e-9)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 300))
def test_log_loss_equals_sklearn(seed: int, n: int) -> None:
    p, y, w = _window(seed, n, ties=False)
    assert log_loss(p, y, w) == pytest.approx(sk_log_loss(y, p, sample_weight=w), rel=1e-9)


def test_a_window_with_one_class_has_no_auc() -> None:
    """A false 0.5 would look like a model that knows nothing."""
    ones = np.ones(5)
    assert auc(np.linspace(0, 1, 5), ones, ones) is None
    assert auc(np.linspace(0, 1, 5), 0 * ones, ones) is None


def test_an_empty_window_has_no_figures() -> None:
    figures = Progressive(10).figures()
    assert (figures.samples, figures.loss, figures.auc, figures.calibration) == (
        0,
        None,
        None,
        None,
    )


def test_a_certain_mistake_is_finite() -> None:
    loss = log_loss(np.array([0.0]), np.array([1.0]), np.array([1.0]))
    assert loss is not None
    assert math.isfinite(loss)


@given(
    window=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 60), max_size=8),
    split=st.integers(0, 8),
)
def test_the_window_holds_the_newest_and_survives_a_restore(
    window: int, sizes: list[int], split: int
) -> None:
    """A restart must not change a figure: the window and the sums are part of the cut."""
    rng = np.random.default_rng(1)
    live, everything = Progressive(window), np.zeros((0, 3))
    for n, size in enumerate(sizes):
        if n == split:
            restored = Progressive(window)
            restored.restore(live.state())
            live = restored
        rows = np.stack([rng.random(size), (rng.random(size) < 0.5) * 1.0, np.ones(size)], axis=1)
        live.add(rows[:, 0], rows[:, 1], rows[:, 2])
        everything = np.concatenate([everything, rows])
    np.testing.assert_array_equal(np.stack(live.newest(), axis=1), everything[-window:])
    assert live.seen == len(everything)
    if len(everything):
        expected = log_loss(everything[:, 0], everything[:, 1], everything[:, 2])
        assert live.mean_loss() == pytest.approx(expected)


def test_a_squared_task_is_judged_by_its_error() -> None:
    task = Progressive(4, loss="squared")
    task.add(np.array([1.0, 3.0]), np.array([2.0, 3.0]), np.array([1.0, 3.0]))
    figures = task.figures()
    assert figures.loss == pytest.approx(0.25)
    assert figures.auc is None
