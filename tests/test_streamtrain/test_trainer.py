"""One step at a time: the loss, the clock, padding, and the same model trained by Keras alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from consumers.source import Batch, Columns, Ids, Partition
from streamtrain import assembly
from streamtrain.config import Config
from streamtrain.errors import ConfigError, ConservationBroken
from streamtrain.models.layers import Pairs
from streamtrain.trainer import Trainer
from tests.small import config_in

CLICKS = Partition("clicks", 0)
FEATURES = (
    "user: {tables: [user, user_bias]}, item: {tables: [item, item_bias]}, price: {dense: []}"
)
PLAIN = (
    f"features={{{FEATURES}}}",
    "tables={user: {dim: 4}, item: {dim: 4}, user_bias: {dim: 1}, item_bias: {dim: 1}}",
)


def _batch(
    rng: np.random.Generator,
    n: int,
    *,
    first: int = 0,
    times: list[int] | None = None,
    weights: list[float] | None = None,
) -> Batch:
    splits = np.arange(n + 1, dtype=np.int64)
    ids = {
        name: Ids(rng.integers(0, 5, n).astype(np.uint64), splits, None)
        for name in ("user", "item")
    }
    columns = Columns(
        size=n,
        ids=ids,
        dense={"price": rng.random((n, 1)).astype(np.float32)},
        labels={"click": (rng.random(n) < 0.4).astype(np.float32)},
        weight=np.ones(n, np.float32) if weights is None else np.array(weights, np.float32),
        time_ms=np.arange(n, dtype=np.int64) if times is None else np.array(times, np.int64),
    )
    return Batch(
        columns=columns,
        position={CLICKS: first + n},
        partitions=(CLICKS,),
        partition_index=np.zeros(n, np.int32),
        offsets=np.arange(first, first + n),
        bad=(),
        consumed=n,
        append_time_ms=None,
    )


def _trainer(folder: Path, *overrides: str, build: str = "fm") -> Trainer:
    return assembly.trainer(config_in(folder, *PLAIN, *overrides, build=build), None)


def _rows(trainer: Trainer) -> dict[str, np.ndarray[Any, Any]]:
    return {table: trainer.store.dump(table).values for table in trainer.store.tables}


@pytest.mark.parametrize("build", ["logistic_regression", "fm", "deepfm"])
def test_padding_changes_nothing(tmp_path: Path, build: str) -> None:
    """The divisor counts real samples, so a partial batch learns as if nothing were padded."""
    exact = _trainer(tmp_path, "batch.size=20", "batch.shapes=[20]", build=build)
    padded = _trainer(tmp_path, "batch.size=20", "batch.shapes=[64]", build=build)
    for step in range(5):
        one = exact.step(_batch(np.random.default_rng(step), 20))
        two = padded.step(_batch(np.random.default_rng(step), 20))
        np.testing.assert_allclose(one.predictions, two.predictions, rtol=1e-5, atol=1e-6)
    for table, rows in _rows(exact).items():
        np.testing.assert_allclose(rows, _rows(padded)[table], rtol=1e-4, atol=1e-6)


def test_a_weight_is_a_repetition(tmp_path: Path) -> None:
    """Mean over real samples of weight x loss: doubling every weight doubles the gradient."""
    sgd = "model.optimizer={sgd: {rate: 1.0}}"
    single = _trainer(tmp_path, sgd, build="logistic_regression")
    double = _trainer(tmp_path, sgd, build="logistic_regression")
    single.step(_batch(np.random.default_rng(0), 8))
    double.step(_batch(np.random.default_rng(0), 8, weights=[2.0] * 8))
    np.testing.assert_allclose(double.dense.vector(), 2 * single.dense.vector(), rtol=1e-5)


def test_samples_of_weight_zero_teach_nothing_and_are_not_judged(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "model.optimizer={sgd: {rate: 1.0}}", build="logistic_regression")
    before = trainer.dense.vector()
    trainer.step(_batch(np.random.default_rng(0), 8, weights=[0.0] * 8))
    np.testing.assert_array_equal(trainer.dense.vector(), before)
    assert trainer.validation["click"].figures().samples == 0


def test_the_clock_takes_the_lower_median_and_only_rises_by_max_step(tmp_path: Path) -> None:
    """One message from the future must not evict a whole table."""
    trainer = _trainer(tmp_path, "clock.max_step=10s")
    rng = np.random.default_rng(0)
    seen = []
    for times in ([5, 9, 1, 7], [3, 3, 3, 3], [99_000, 99_000, 99_000, 4]):
        trainer.step(_batch(rng, 4, times=times))
        seen.append(trainer.clock)
    assert seen == [5, 5, 10_005]
    assert trainer.future == 3


@pytest.mark.parametrize("build", ["logistic_regression", "fm", "deepfm"])
def test_ours_equals_the_same_model_trained_by_keras_alone(tmp_path: Path, build: str) -> None:
    """Every row touched in every step, the sparse side is Keras' Adagrad and nothing else."""
    trainer = _trainer(
        tmp_path,
        "batch.size=64",
        "batch.shapes=[64]",
        "model.optimizer={sgd: {rate: 0.1}}",
        build=build,
    )
    rng = np.random.default_rng(3)
    batches = [_batch(rng, 64, first=64 * n) for n in range(50)]
    # A first step gives every key its row; Keras starts from what is there then.
    trainer.step(batches[0])
    peer = _Peer(trainer, build)
    for batch in batches[1:]:
        ours = trainer.step(batch).predictions[:, 0]
        np.testing.assert_allclose(ours, peer.step(batch), atol=1e-5)
    for table, rows in _rows(trainer).items():
        np.testing.assert_allclose(rows, peer.rows(table), atol=1e-5)


class _Peer:
    """The same model with Keras variables for rows and Keras' own Adagrad on them."""

    def __init__(self, trainer: Trainer, build: str) -> None:
        self.model = keras.models.clone_model(trainer.dense.model)  # type: ignore[attr-defined]
        self.model.set_weights(trainer.dense.model.get_weights())  # type: ignore[attr-defined]
        self.tables = {}
        self.adagrad = {}
        for table in trainer.store.tables:
            dump = trainer.store.dump(table)
            rows = keras.Variable(dump.values)
            optimizer = keras.optimizers.Adagrad(0.05)
            optimizer.build([rows])
            slot = optimizer.variables[-1]
            slot.assign(dump.slots)
            self.tables[table], self.adagrad[table] = rows, optimizer
        self.sgd = keras.optimizers.SGD(0.1)
        self.build = build

    def rows(self, table: str) -> np.ndarray[Any, Any]:
        return np.asarray(self.tables[table].numpy())

    def step(self, batch: Batch) -> np.ndarray[Any, Any]:
        columns = batch.columns
        rows = [*self.tables.values()]
        with tf.GradientTape() as tape:
            inputs = {"price": tf.constant(columns.dense["price"])}
            for feature in ("user", "item"):
                at = columns.ids[feature].keys.astype(np.int64)
                for table in (feature, f"{feature}_bias"):
                    name = feature if table == feature else f"{feature}.{table}"
                    inputs[name] = tf.gather(self.tables[table].value, at)
            logit = self.model(inputs, training=True)["click"][:, 0]
            label = tf.constant(columns.labels["click"])
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, logit))
        weights = [w.value for w in self.model.trainable_variables]
        sparse, dense = tape.gradient(
            loss, ([r.value for r in rows], weights), unconnected_gradients="zero"
        )
        for (table, variable), gradient in zip(self.tables.items(), sparse, strict=True):
            self.adagrad[table].apply([tf.convert_to_tensor(gradient)], [variable])
        self.sgd.apply(dense, self.model.trainable_variables)
        return np.asarray(tf.sigmoid(logit))


def test_pairs_are_the_sum_of_all_inner_products() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    expected = [sum(float(s[i] @ s[j]) for i in range(4) for j in range(i + 1, 4)) for s in rows]
    np.testing.assert_allclose(np.asarray(Pairs()(rows))[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_traces_stay_at_one_per_shape(tmp_path: Path) -> None:
    """Every new shape would be a graph that TensorFlow keeps for ever."""
    trainer = _trainer(tmp_path, "batch.shapes=[8, 32]")
    rng = np.random.default_rng(0)
    for n in (1, 7, 8, 9, 31, 32, 3):
        trainer.step(_batch(rng, n))
    assert trainer.dense.traces == 2  # type: ignore[attr-defined]


def test_lost_samples_are_noticed(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.step(_batch(np.random.default_rng(0), 8))
    trainer.check_conservation()
    trainer.consumed += 1
    with pytest.raises(ConservationBroken, match="consumed 9 is not learned 8"):
        trainer.check_conservation()


def silent(spec: object) -> object:
    """Return what no model function may return."""
    return spec


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("nowhere.models:fm", "no module 'nowhere'"),
        ("streamtrain.models:nothing", "has no function 'nothing'"),
        (
            "tests.test_streamtrain.test_trainer:silent",
            r"expected the function to return a keras\.Model",
        ),
    ],
)
def test_a_model_that_can_t_be_built_is_named(tmp_path: Path, build: str, message: str) -> None:
    config: Config = config_in(tmp_path, f"model.build={build}")
    with pytest.raises(ConfigError, match=message):
        assembly.trainer(config, None)


def test_fm_says_what_tables_it_needs(tmp_path: Path) -> None:
    config = config_in(
        tmp_path, "features={user: {tables: [user]}}", "tables={user: {dim: 4}}", build="fm"
    )
    with pytest.raises(ConfigError, match="fm needs at least two features"):
        assembly.trainer(config, None)
