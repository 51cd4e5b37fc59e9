"""ResNet: in layers of the basic type (resnet-18, resnet-34) Flax calls the convolutions `layer_0` and `layer_1`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.bridge.rules.table import Rules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAVES = (
    ("convolution.weight", "convolution/kernel", "conv2d"),
    ("normalization.weight", "normalization/scale", "identity"),
    ("normalization.bias", "normalization/bias", "identity"),
    ("normalization.running_mean", "normalization/mean", "identity"),
    ("normalization.running_var", "normalization/var", "identity"),
)


def rules(model: PreTrainedModel) -> Rules:
    """The rows of the two convolutions of each layer."""
    if model.config.layer_type != "basic":
        return ()
    torch, flax = "[resnet.]encoder.stages.{stage}.layers.{i}.layer", "[resnet/]encoder/stages/{stage}/layers/{i}/layer"
    return tuple(
        (f"{torch}.{place}.{weight}", f"{flax}/layer_{place}/{leaf}", transform)
        for place in range(2)
        for weight, leaf, transform in _LEAVES
    )
