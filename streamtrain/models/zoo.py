"""Logistic regression, factorisation machine and DeepFM, each short enough to be read whole."""

import keras

from streamtrain.models.layers import Bias, Pairs
from streamtrain.models.spec import InputSpec, ModelSpec, ModelSpecError


def logistic_regression(spec: ModelSpec) -> keras.Model:
    """Sum of one weight per id (rows of ``dim: 1`` tables), dense floats, and a bias.

    Raises
    ------
    ModelSpecError
        There are several tasks, or no table of dim 1 and no dense feature.
    """
    (task,) = _one_task(spec, "logistic_regression")
    inputs = spec.keras_inputs()
    logit = _linear(spec, inputs)
    return keras.Model(inputs, {task: Bias(name="bias")(logit)}, name="logistic_regression")


def fm(spec: ModelSpec) -> keras.Model:
    """Factorisation machine: linear part and inner products of all pairs of embedding rows.

    Rendle, "Factorization Machines", ICDM 2010, equations 1 and 5: the pairs are summed as half of
    (square of the sum minus sum of the squares).

    Raises
    ------
    ModelSpecError
        There are several tasks, or fewer than two embedding inputs, or widths differ.
    """
    (task,) = _one_task(spec, "fm")
    inputs = spec.keras_inputs()
    rows = _stacked(spec, inputs, "fm")
    parts = [Pairs(name="pairs")(rows)]
    if _has_linear(spec):
        parts.append(_linear(spec, inputs))
    logit = keras.layers.Add()(parts) if len(parts) > 1 else parts[0]
    return keras.Model(inputs, {task: Bias(name="bias")(logit)}, name="fm")


def deepfm(spec: ModelSpec) -> keras.Model:
    """FM beside a 256-128 ReLU network over the same rows (Guo et al., IJCAI 2017).

    With several tasks the network is shared, and each task has its own last layer on it.

    Raises
    ------
    ModelSpecError
        There are fewer than two embedding inputs, or their widths differ.
    """
    layers = keras.layers
    inputs = spec.keras_inputs()
    rows = _stacked(spec, inputs, "deepfm")
    shallow = [Pairs(name="pairs")(rows)]
    if _has_linear(spec):
        shallow.append(_linear(spec, inputs))
    wide = [layers.Flatten()(rows), *(inputs[i.name] for i in spec.of_kind("dense"))]
    hidden = layers.Concatenate()(wide) if len(wide) > 1 else wide[0]
    for n, units in enumerate((256, 128)):
        hidden = layers.Dense(units, activation="relu", name=f"hidden_{n}")(hidden)
    outputs = {
        task: layers.Add(name=f"sum_{task}")(
            [*shallow, layers.Dense(1, name=f"logit_{task}")(hidden)]
        )
        for task in spec.tasks
    }
    return keras.Model(inputs, outputs, name="deepfm")


def _one_task(spec: ModelSpec, model: str) -> tuple[str, ...]:
    if len(spec.tasks) != 1:
        raise ModelSpecError(
            f"model.build: {model} answers one task, the config has {len(spec.tasks)} "
            f"({', '.join(spec.tasks)}); use deepfm, or a model of your own"
        )
    return spec.tasks


def _scalars(spec: ModelSpec) -> tuple[InputSpec, ...]:
    return tuple(i for i in spec.of_kind("pooled") if i.shape == (1,))


def _vectors(spec: ModelSpec) -> tuple[InputSpec, ...]:
    return tuple(i for i in spec.of_kind("pooled") if i.shape != (1,))


def _has_linear(spec: ModelSpec) -> bool:
    return bool(_scalars(spec) or spec.of_kind("dense"))


def _linear(spec: ModelSpec, inputs: dict[str, keras.KerasTensor]) -> keras.KerasTensor:
    """Sum the dim-1 rows, plus a learned weighting of the dense floats."""
    if not _has_linear(spec):
        raise ModelSpecError(
            "model.build: the linear part needs a table of dim 1 or a dense feature; "
            "add a table such as `item_bias: {dim: 1}` to each feature's `tables`"
        )
    parts = [inputs[i.name] for i in _scalars(spec)]
    dense = [inputs[i.name] for i in spec.of_kind("dense")]
    if dense:
        floats = keras.layers.Concatenate()(dense) if len(dense) > 1 else dense[0]
        parts.append(
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="linear")(floats)
        )
    return keras.layers.Add()(parts) if len(parts) > 1 else parts[0]


def _stacked(
    spec: ModelSpec, inputs: dict[str, keras.KerasTensor], model: str
) -> keras.KerasTensor:
    """Return the pooled embedding rows as one ``[B, fields, dim]`` tensor."""
    vectors = _vectors(spec)
    widths = {i.shape for i in vectors}
    if len(vectors) < 2 or len(widths) != 1:
        found = ", ".join(f"{i.name}: {i.shape[0]}" for i in vectors) or "none"
        raise ModelSpecError(
            f"model.build: {model} needs at least two features whose tables have one and the same "
            f"dim above 1 (found {found})"
        )
    (width,) = widths
    return keras.layers.Concatenate(axis=1)(
        [keras.layers.Reshape((1, width[0]))(inputs[i.name]) for i in vectors]
    )
