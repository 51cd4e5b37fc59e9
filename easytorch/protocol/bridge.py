"""`BridgeMixin`: a native model as a plain transformers model, and its weights to and from JAX/Flax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.bridge.memory.tree import Framework, Shardings, Tree
from easytorch.protocol import conversion

if TYPE_CHECKING:
    _Base = PreTrainedModel
else:
    _Base = object  # `PreTrainedModel` stands behind the mixin in the bases


class BridgeMixin(_Base):
    """The methods of EasyDeL's `EasyBridgeMixin`, for bf16, tied weights and experts too."""

    config: PreTrainedConfig

    def to_torch(self, *, copy_weights: bool = False) -> PreTrainedModel:
        """transformers' own class of the same name, on the same device, in the same dtypes, training or not.

        It shares the parameters, so training one trains the other; with `copy_weights` it has its own.
        """
        return conversion.to_torch(self, copy_weights=copy_weights)

    def to_flax(
        self,
        *,
        framework: Framework = "numpy",
        shardings: Shardings = None,
        copy: bool | None = None,
        scheme: str = "flax",
    ) -> Tree:
        """The weights as a nested dict of arrays in HF Flax naming: `flax_model.apply({"params": tree}, ...)`.

        framework: "numpy", whose arrays share a CPU model's memory where the layouts allow, or "jax", whose arrays are
        copies, placed by `shardings`: a Sharding, a tree of them, or a function of the path. `copy`: False
        shares with jax too, True with neither. scheme: the names of another program, as in `bridge.convert`.
        """
        return conversion.to_flax(self, framework=framework, shardings=shardings, copy=copy, scheme=scheme)

    @classmethod
    def from_flax(cls, config: PreTrainedConfig, params: Any, *, copy: bool | None = None, **kwargs: Any) -> Self:
        """A model of `config` with the weights of a tree: linen's, nnx's, or nested numpy or jax arrays.

        jax's arrays are copied, numpy's shared where the layout allows; `copy` is False to share both and True to share
        neither (`bridge.memory.tree`). kwargs: `from_pretrained`'s.
        `CheckpointError` when a weight is missing, left over or of another shape.
        """
        model: Self = conversion.from_flax(cls, config, params, copy=copy, **kwargs)
        return model

    @property
    def transform_fn(self) -> Callable[[Mapping[str, torch.Tensor]], Tree]:
        """torch state dict -> Flax tree, for this model's family and its tied weights."""
        return conversion.transform_fn(self)

    @property
    def pure_transform_fn(self) -> Callable[[Mapping[str, torch.Tensor]], Tree]:
        """The same function: it keeps nothing of the model but its names and its config."""
        return conversion.transform_fn(self)
