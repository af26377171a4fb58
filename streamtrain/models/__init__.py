"""The zoo of models, and what a model of one's own is given.

A model is named in the configuration as ``module:function``. The function takes a `ModelSpec` and
returns a Keras 3 model from a dict of inputs to a dict ``task -> logits [B, 1]``.
"""

from streamtrain.models.spec import InputSpec, ModelSpec, ModelSpecError
from streamtrain.models.zoo import deepfm, fm, logistic_regression

__all__ = [
    "InputSpec",
    "ModelSpec",
    "ModelSpecError",
    "deepfm",
    "fm",
    "logistic_regression",
]
