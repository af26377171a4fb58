"""The two layers that Keras lacks for linear and factorisation models."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="streamtrain")
class Bias(keras.layers.Layer):
    """Adds one learned number per last-axis unit, zero at first."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Create the bias."""
        self.bias = self.add_weight(shape=(input_shape[-1],), initializer="zeros", name="bias")

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Return ``x + bias``."""
        return x + self.bias


@keras.saving.register_keras_serializable(package="streamtrain")
class Pairs(keras.layers.Layer):
    """Sum over all pairs of rows of their inner product: ``[B, fields, dim] -> [B, 1]``."""

    def call(self, rows: keras.KerasTensor) -> keras.KerasTensor:
        """Return half of (square of the sum minus sum of the squares), summed over dim."""
        of_sum = ops.square(ops.sum(rows, axis=1))
        of_rows = ops.sum(ops.square(rows), axis=1)
        return 0.5 * ops.sum(of_sum - of_rows, axis=-1, keepdims=True)
