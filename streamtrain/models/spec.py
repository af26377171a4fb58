"""What a model function is given: the inputs it will be fed, and the tasks it must answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import keras


class ModelSpecError(ValueError):
    """The model function and the configuration do not fit together."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of the model.

    Attributes
    ----------
    name : str
        ``<feature>`` for the first table of a feature and for dense features,
        ``<feature>.<table>`` for each further table, ``<feature>.mask`` for the mask of a sequence.
    kind : {"pooled", "sequence", "mask", "dense"}
        pooled: rows of one table, pooled per sample, shape ``(dim,)``; sequence: rows kept apart,
        shape ``(length, dim)``; mask: 1 where a sequence holds a row, shape ``(length,)``;
        dense: floats, shape ``(n,)``.
    shape : tuple of int
        Without the batch axis. Every input is float32.
    feature : str
        The feature it comes from.
    table : str or None
        The embedding table it is read from; None for dense and mask.
    """

    name: str
    kind: Literal["pooled", "sequence", "mask", "dense"]
    shape: tuple[int, ...]
    feature: str
    table: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything a model function needs to know.

    Attributes
    ----------
    inputs : mapping of str to InputSpec
        By input name, in the order of the configuration.
    tasks : tuple of str
        Names of the labels; the model answers one logit each.
    seed : int
        For initial weights. Keras' global seed is already set from it.
    """

    inputs: Mapping[str, InputSpec]
    tasks: tuple[str, ...]
    seed: int

    def keras_inputs(self) -> dict[str, keras.KerasTensor]:
        """Return a fresh ``keras.Input`` per input."""
        return {
            name: keras.Input(shape=spec.shape, dtype="float32", name=name)
            for name, spec in self.inputs.items()
        }

    def of_kind(self, *kinds: str) -> tuple[InputSpec, ...]:
        """Return the inputs of the given kinds, in order."""
        return tuple(spec for spec in self.inputs.values() if spec.kind in kinds)
