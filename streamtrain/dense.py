"""The dense step: a Keras model over rows that are handed in, and its optimizer, in TensorFlow.

TensorFlow sees only dense tensors of a few static shapes. Every shape is traced once, at start,
so that nothing is retraced in a process that runs for months.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from streamtrain import config
from streamtrain.models.spec import ModelSpec, ModelSpecError

Floats = NDArray[np.float32]
Build = Callable[[ModelSpec], keras.Model]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Feed:
    """The buffers of one shape, filled before a step and reused by the next.

    Attributes
    ----------
    inputs : dict of str to float32 array, shape ``(S, ...)``
    labels, weights : float32 array, shape ``(S, tasks)``
        Rows beyond the real samples have weight 0.
    """

    inputs: dict[str, Floats]
    labels: Floats
    weights: Floats


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step gave: logits ``(S, tasks)`` from before it, gradients per input, and whether all is finite."""

    logits: Floats
    gradients: dict[str, Floats]
    finite: bool


def resolve_build(path: str) -> Build:
    """Import ``module:function``.

    Raises
    ------
    ModelSpecError
        There is no such module or function.
    """
    module_name, _, function_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), function_name)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise ModelSpecError(
            f"model.build: no module {error.name!r}; is it installed, or on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise ModelSpecError(
            f"model.build: the module {module_name!r} has no function {function_name!r}"
        ) from error


def limit_threads(threads: int) -> None:
    """Bound TensorFlow's threads; has an effect only before its first operation in a process."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        _log.warning("TensorFlow has already started: its thread numbers stay as they are")


class DenseStep:
    """Predict, score and learn the dense side of one batch.

    Parameters
    ----------
    build : callable
        From `ModelSpec` to a Keras model ``dict of inputs -> dict task -> logits [B, 1]``.
    spec : ModelSpec
        Inputs and tasks.
    optimizer : config.Adam, config.Sgd or config.Adagrad
        For the dense weights.
    losses : mapping of str to str
        Per task ``binary`` or ``squared``.
    shapes : sequence of int
        Batch sizes to trace; a batch is padded to the next of them.

    Raises
    ------
    ModelSpecError
        The model does not answer what the spec asks for.
    """

    def __init__(
        self,
        build: Build,
        spec: ModelSpec,
        *,
        optimizer: config.Adam | config.Sgd | config.Adagrad,
        losses: Mapping[str, str],
        shapes: Sequence[int],
    ) -> None:
        keras.utils.set_random_seed(spec.seed)
        self.spec = spec
        self.model = _checked(build(spec), spec)
        self.optimizer = _optimizer(optimizer)
        self._trainable = self.model.trainable_variables
        if self._trainable:
            self.optimizer.build(self._trainable)
        self._losses = tuple(losses[task] for task in spec.tasks)
        self._learnable = [i.name for i in spec.of_kind("pooled", "sequence")]
        self.traces = 0
        self._feeds: dict[int, Feed] = {}
        self._steps: dict[int, Any] = {}
        step = tf.function(self._step)
        for size in shapes:
            self._feeds[size] = self._new_feed(size)
            self._steps[size] = step.get_concrete_function(*self._signature(size))

    def feed(self, samples: int) -> Feed:
        """Return the buffers of the smallest shape that holds `samples`."""
        for size, feed in self._feeds.items():
            if samples <= size:
                return feed
        raise ValueError(f"{samples} samples are more than the largest of batch.shapes")

    def learn(self, feed: Feed, samples: int) -> Learned:
        """Run one step over a filled `Feed`; the dense side moves only if everything is finite."""
        size = len(feed.labels)
        inputs = {name: tf.convert_to_tensor(array) for name, array in feed.inputs.items()}
        logits, gradients, finite = self._steps[size](
            inputs,
            tf.convert_to_tensor(feed.labels),
            tf.convert_to_tensor(feed.weights),
            tf.constant(float(samples), tf.float32),
        )
        return Learned(
            logits=np.asarray(logits),
            gradients={name: np.asarray(value) for name, value in gradients.items()},
            finite=bool(np.asarray(finite)),
        )

    def weights(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return path and shape of each floating variable of the model, in the order of `vector`."""
        return [(v.path, tuple(v.shape)) for v in self._floating()]

    def vector(self) -> Floats:
        """Return the model's floating variables as one float32 vector, in the order of ``.variables``."""
        parts = [np.asarray(v.numpy(), np.float32).ravel() for v in self._floating()]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of every variable of model and optimizer, by its number in their order."""
        return {f"{n:04d}": np.array(v.numpy()) for n, v in enumerate(self._all_variables())}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Assign what `state` returned.

        Raises
        ------
        ModelSpecError
            The model has other variables than the saved one. Names are not compared: Keras counts
            them up within a process.
        """
        variables = self._all_variables()
        cure = "start from another checkpoint.dir, or bring the old model back"
        if len(variables) != len(state):
            raise ModelSpecError(
                f"model.build: model and optimizer have {len(variables)} dense variables, the cut has "
                f"{len(state)}; {cure}"
            )
        for variable, name in zip(variables, sorted(state), strict=True):
            if tuple(variable.shape) != state[name].shape:
                raise ModelSpecError(
                    f"model.build: the dense variable {variable.path} has the shape "
                    f"{tuple(variable.shape)}, the cut has {state[name].shape}; {cure}"
                )
        for variable, name in zip(variables, sorted(state), strict=True):
            variable.assign(state[name])

    def _all_variables(self) -> list[keras.Variable]:
        # The rate is the configuration's to say, not the cut's.
        own = [v for v in self.optimizer.variables if not v.path.endswith("learning_rate")]
        return [*self.model.variables, *own]

    def _floating(self) -> list[keras.Variable]:
        return [
            v for v in self.model.variables if "float" in keras.backend.standardize_dtype(v.dtype)
        ]

    def _new_feed(self, size: int) -> Feed:
        tasks = len(self.spec.tasks)
        return Feed(
            inputs={
                name: np.zeros((size, *spec.shape), np.float32)
                for name, spec in self.spec.inputs.items()
            },
            labels=np.zeros((size, tasks), np.float32),
            weights=np.zeros((size, tasks), np.float32),
        )

    def _signature(self, size: int) -> tuple[Any, ...]:
        tasks = len(self.spec.tasks)
        inputs = {
            name: tf.TensorSpec((size, *spec.shape), tf.float32)
            for name, spec in self.spec.inputs.items()
        }
        return (
            inputs,
            tf.TensorSpec((size, tasks), tf.float32),
            tf.TensorSpec((size, tasks), tf.float32),
            tf.TensorSpec((), tf.float32),
        )

    def _step(self, inputs: dict[str, Any], labels: Any, weights: Any, samples: Any) -> Any:
        """Trace one step: mean over the real samples of weight x loss, padding out of the divisor."""
        self.traces += 1
        rows = [inputs[name] for name in self._learnable]
        dense = [v.value for v in self._trainable]
        with tf.GradientTape() as tape:
            tape.watch(rows)
            answers = self.model(inputs, training=True)
            logits = tf.concat([tf.cast(answers[t], tf.float32) for t in self.spec.tasks], axis=1)
            losses = []
            for n, kind in enumerate(self._losses):
                if kind == "binary":
                    each = tf.nn.sigmoid_cross_entropy_with_logits(labels[:, n], logits[:, n])
                else:
                    each = tf.square(logits[:, n] - labels[:, n])
                losses.append(each)
            loss = tf.reduce_sum(tf.stack(losses, axis=1) * weights) / samples
        by_row, by_weight = tape.gradient(
            loss, (rows, dense), unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        finite = tf.reduce_all(
            [
                tf.math.is_finite(loss),
                *(tf.reduce_all(tf.math.is_finite(g)) for g in (*by_row, *by_weight)),
            ]
        )

        def apply() -> Any:
            if self._trainable:
                self.optimizer.apply(by_weight, self._trainable)
            return tf.constant(value=True)

        moved = tf.cond(finite, apply, lambda: tf.constant(value=False))
        return logits, dict(zip(self._learnable, by_row, strict=True)), moved


def _checked(model: Any, spec: ModelSpec) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ModelSpecError(
            f"model.build: expected the function to return a keras.Model, got {type(model).__name__}"
        )
    inputs = {name: np.zeros((2, *i.shape), np.float32) for name, i in spec.inputs.items()}
    answers = model(inputs, training=False)
    if not isinstance(answers, dict) or set(answers) != set(spec.tasks):
        found = sorted(answers) if isinstance(answers, dict) else type(answers).__name__
        raise ModelSpecError(
            f"model.build: the model must answer a dict with the tasks {sorted(spec.tasks)}, got {found}"
        )
    for task, answer in answers.items():
        if tuple(answer.shape) != (2, 1):
            raise ModelSpecError(
                f"model.build: logits of {task!r} must have the shape [B, 1], "
                f"got {('B', *answer.shape[1:])}"
            )
    return model


def _optimizer(choice: config.Adam | config.Sgd | config.Adagrad) -> keras.optimizers.Optimizer:
    if isinstance(choice, config.Adam):
        return keras.optimizers.Adam(learning_rate=choice.rate)
    if isinstance(choice, config.Adagrad):
        return keras.optimizers.Adagrad(learning_rate=choice.rate)
    return keras.optimizers.SGD(learning_rate=choice.rate, momentum=choice.momentum)
