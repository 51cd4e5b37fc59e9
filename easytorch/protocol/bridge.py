"""`BridgeMixin`: a native model as a plain transformers model, and its weights to and from JAX/Flax."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.families import rules_for
from easytorch.bridge.state import state_dict_to_tree, tree_to_state_dict
from easytorch.layers.attention import INTERFACES

if TYPE_CHECKING:
    _Base = PreTrainedModel
else:
    _Base = object  # `PreTrainedModel` stands behind the mixin in the bases

StateDict = Mapping[str, torch.Tensor]
# A nested dict of arrays, as `flax.linen` modules take under "params".
Tree = dict[str, Any]


class BridgeMixin(_Base):
    """The names are those of EasyDeL's `EasyBridgeMixin`, and work for bf16 and for tied weights too."""

    config: PreTrainedConfig

    def to_torch(self, *, copy_weights: bool = False) -> PreTrainedModel:
        """transformers' own class of the same name, on the same device, in the same dtypes, training or not.

        It shares the parameters, so training one trains the other; with `copy_weights` it has its own.
        """
        config = copy.deepcopy(self.config)
        if config._attn_implementation in INTERFACES:
            config._attn_implementation = None
        weights = self.state_dict(keep_vars=True)
        if copy_weights:
            weights = copy.deepcopy(dict(weights))  # one call: what was tied stays tied
        plain = {name: weight.detach() for name, weight in weights.items()}
        theirs = getattr(transformers, type(self).__name__)
        model = theirs.from_pretrained(None, config=config, state_dict=plain, dtype=self.dtype).to(self.device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(weights[name].requires_grad)  # assigning gives a weight the flag it replaces
        model.load_state_dict(weights, assign=True)
        model.train(self.training)
        return model

    def to_flax(self) -> Tree:
        """The weights as a nested dict of numpy arrays in HF Flax naming: `flax_model.apply({"params": tree}, ...)`.

        Arrays of a CPU model share its memory where the layouts allow; bf16 is `ml_dtypes.bfloat16`, which jax takes.
        """
        return self.transform_fn(self.state_dict())

    @classmethod
    def from_flax(cls, config: PreTrainedConfig, params: Mapping[str, Any], **kwargs: Any) -> Self:
        """A model of `config` with the weights of a Flax tree of numpy or jax arrays. kwargs: `from_pretrained`'s.

        `CheckpointError` when a weight is missing, left over or of another shape.
        """
        tie = bool(config.tie_word_embeddings)
        weights = tree_to_state_dict(params, rules_for(config.model_type), tie_word_embeddings=tie)
        kwargs |= {"config": config, "state_dict": weights, "output_loading_info": True}
        loaded: Any = cls.from_pretrained(None, **kwargs)
        model, info = loaded
        for what, names in (("is missing from", info["missing_keys"]), ("is left over in", info["unexpected_keys"])):
            if names:
                raise CheckpointError(f"{what} the Flax params of {cls.__name__}", tensor=min(names))
        return model

    @property
    def transform_fn(self) -> Callable[[StateDict], Tree]:
        """torch state dict -> Flax tree, for this model's family and its tied weights."""
        return self.pure_transform_fn

    @property
    def pure_transform_fn(self) -> Callable[[StateDict], Tree]:
        """The same function; it keeps nothing of the model but its rules and whether its embeddings are tied."""
        rules, tie = rules_for(self.config.model_type), bool(self.config.tie_word_embeddings)

        def transform(state_dict: StateDict) -> Tree:
            plain = {name: tensor.detach().cpu() for name, tensor in state_dict.items()}
            return state_dict_to_tree(plain, rules, tie_word_embeddings=tie)

        return transform
