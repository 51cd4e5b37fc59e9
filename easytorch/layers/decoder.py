"""The decoder that Llama and its descendants share: attention and a feed-forward network, with norms around them.

A family names its parts in class attributes (`attention_class`, `mlp_class`, `norms`, `layer_class`, ...) and overrides
a method where it differs, in its own file. Module, parameter and argument names are transformers'. Legend: B batch, T
tokens, D hidden size.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import CACHE, cache_keyword, takes_cache
from easytorch.layers import decoder_step, layers_step, sequence_parallel, tied_embedding
from easytorch.layers.basics import check_one_input
from easytorch.layers.config_checks import padding_of
from easytorch.layers.masks import MASKS_OF, SLIDING, Masks, check_layer_types, check_windows, masks_by_layer_type
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import RotaryEmbedding, RotaryTables

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` comes after it among the bases


class DecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, D) -> (B, T, D).

    mlp_name: of the attribute that holds the feed-forward network. norms: the names of its norms. They, and the final
    norm of the model, are `norm_class` with the config's `norm_eps` as eps.
    """

    attention_class: ClassVar[type[nn.Module]]
    mlp_class: ClassVar[type[nn.Module]]
    mlp_name: ClassVar[str] = "mlp"
    norm_class: ClassVar[type[nn.Module]] = RMSNorm
    norm_eps: ClassVar[str] = "rms_norm_eps"
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    # the class's forward where it is this class's, which layers_step.py computes for many layers at once
    stepped_forward: ClassVar[Any] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        stepped = None if "forward" in cls.__dict__ else getattr(cls.__mro__[1], "stepped_forward", None)
        inherits = stepped is not None and cls.forward is stepped  # else it was replaced before
        super().__init_subclass__(**kwargs)  # where transformers wraps `forward`
        cls.stepped_forward = cls.forward if inherits else None

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.hidden_size: int = config.hidden_size
        self.add_modules(config, layer_idx)

    def add_modules(self, config: Any, layer_idx: int) -> None:
        """The submodules, in transformers' order, which optimizer states depend on."""
        self.self_attn = self.attention_class(config, layer_idx)
        setattr(self, self.mlp_name, self.new_mlp(config, layer_idx))
        for name in self.norms:
            setattr(self, name, self.new_norm(config))

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        """The feed-forward network of a layer."""
        return self.mlp_class(config)

    @classmethod
    def new_norm(cls, config: Any) -> nn.Module:
        """A norm of hidden states (..., D)."""
        return cls.norm_class(config.hidden_size, eps=getattr(config, cls.norm_eps))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stepped = None
        if steps := decoder_step.steps(hidden_states):
            stepped = decoder_step.attention_step(self.input_layernorm, self.self_attn, hidden_states, kwargs)
        if stepped is None:
            # by keyword, as transformers calls it: hooks and wrappers of the attention look for `hidden_states` there
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            stepped = hidden_states + attended
            steps = steps and decoder_step.steps(stepped)  # of what another attention may have given
        mlp, norm = getattr(self, self.mlp_name), self.post_attention_layernorm
        mixed = decoder_step.feed_forward_step(norm, mlp, stepped) if steps else None
        return stepped + mlp(norm(stepped)) if mixed is None else mixed


DecoderLayer.stepped_forward = DecoderLayer.forward


class PrePostNormLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), as in Gemma 2: (B, T, D) -> (B, T, D)."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(mixed)


class DecoderBackbone(_Base):
    """Embedding, layers and the final norm; a mixin for the family's `PreTrainedModel`.

    A family overrides the step where it differs: `add_modules`, `embedding`, `embed`, `make_masks`,
    `default_positions`, `enter` (scales, positions that are added, dropout) and `leave`.
    """

    layer_class: ClassVar[type[DecoderLayer]]
    rotary_class: ClassVar[type[RotaryTables] | None] = RotaryEmbedding  # None: no rotary positions
    layers_name: ClassVar[str] = "layers"
    norm_name: ClassVar[str] = "norm"
    output_class: ClassVar[type[Any]] = BaseModelOutputWithPast
    # the types of layers and the mask function of each; for layers with several parts, a mapping
    masks_of: ClassVar[Mapping[str, Any]] = MASKS_OF

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.padding_idx, self.vocab_size = padding_of(config), config.vocab_size
        self.layer_types = self.types_of_layers(config)
        check_layer_types(config, self.layer_types, self.masks_of)
        check_windows(config, self.layer_types)
        self.add_modules(config)
        self.rotary_emb: RotaryTables | None = None if self.rotary_class is None else self.rotary_class(config)
        self.gradient_checkpointing = False
        self.post_init()

    def add_modules(self, config: Any) -> None:
        """The embedding, the layers and the final norm, in transformers' order, which optimizer states depend on."""
        setattr(self, self._input_embed_layer, self.embedding(config))
        layers = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        setattr(self, self.layers_name, layers)
        setattr(self, self.norm_name, self.layer_class.new_norm(config))

    @classmethod
    def types_of_layers(cls, config: Any) -> list[str]:
        """The type of each layer (layers/masks.py), from the family's attention class."""
        return cls.layer_class.attention_class.types_of_layers(config)  # type: ignore[attr-defined]

    @property
    def has_sliding_layers(self) -> bool:
        return SLIDING in self.layer_types

    @staticmethod
    def embedding(config: Any) -> nn.Embedding:
        """Token ids (B, T) -> (B, T, D)."""
        return nn.Embedding(config.vocab_size, config.hidden_size, padding_of(config))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, D): what `inputs_embeds` stands for."""
        return tied_embedding.embed(getattr(self, self._input_embed_layer), input_ids)

    def cache(self, cache: Cache | None) -> Cache:
        """The cache of keys and values: the given one, or a new one."""
        return DynamicCache(config=self.config_of_cache()) if cache is None else cache

    def config_of_cache(self) -> Any:
        """The config for transformers' caches, with the model's own layer types."""
        config = self.config
        if getattr(config, "layer_types", None) != self.layer_types:
            config = copy.copy(config)
            config.layer_types = self.layer_types
        return config

    def make_masks(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | Mapping[str, Any] | None,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
    ) -> Masks:
        """The mask of each type of layer; position_ids as the caller gave them."""
        return masks_by_layer_type(
            self.config,
            self.layer_types,
            inputs_embeds,
            attention_mask,
            cache,
            position_ids,
            masks_of=self.masks_of,
        )

    def sequence_refusal(self) -> str | None:
        """Why the ranks of a mesh cannot each compute their own tokens of a sequence; None where they can."""
        if type(self).make_masks is not DecoderBackbone.make_masks:
            return "it makes masks of its own, which the ring does not know"
        return sequence_parallel.refusal(self)

    def default_positions(self, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Cache | None) -> torch.Tensor:
        """position_ids (B or 1, T) where none are given: the tokens come after those in the cache."""
        if (places := getattr(cache, "positions", None)) is not None:  # of a step over pages
            found: torch.Tensor = places
            return found
        # a cache of states alone has no count of its tokens, and its layers need no positions
        layers = getattr(cache, "layers", ())  # an EncoderDecoderCache has none
        states = cache is None or (layers and not any(isinstance(one, CacheLayerMixin) for one in layers))
        past = 0 if cache is None or states else cache.get_seq_length()
        return (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past)[None]

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(B, T, D): the first layer's input, made from the embeddings."""
        return inputs_embeds

    def run_layers(
        self,
        hidden_states: torch.Tensor,
        masks: Masks,
        positions: Mapping[str, Any],
        *,
        first: int = 0,
        last: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, T, D) through the layers `first` to `last` (exclusive); kwargs: the other arguments of each layer."""
        # generate(assistant_early_exit=n) drafts with the first n layers by lowering num_hidden_layers temporarily
        last = self.config.num_hidden_layers if last is None else min(last, self.config.num_hidden_layers)
        layers = list(itertools.islice(getattr(self, self.layers_name), first, last))
        layer_types = self.layer_types[first : first + len(layers)]
        if decoder_step.steps(hidden_states):
            stepped = layers_step.layers_step(self, layers, layer_types, hidden_states, masks, positions, kwargs)
            if stepped is not None:
                return stepped
        for layer, layer_type in zip(layers, layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=positions.get(layer_type),
                **kwargs,
            )
        return hidden_states

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        layers_step.forget(self)  # the weights may be moved to make room
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        layers_step.forget(self)  # the state's tensors may take the weights' place
        super()._load_from_state_dict(*args)

    def leave(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D): the model's output, made from the last layer's."""
        return getattr(self, self.norm_name)(hidden_states)

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D), and the cache when `use_cache`.

        attention_mask: (B, past + T), 1 for tokens and 0 for padding; (B, 1, T, S) of any pattern; or a dict of
        finished masks by layer type. position_ids (B, T) that restart within a row mean packed sequences, which do not
        attend to each other.
        """
        check_one_input(input_ids, inputs_embeds)
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed(input_ids)
        if use_cache:
            cache = self.cache(cache)
        masks = self.make_masks(inputs_embeds, attention_mask, cache, position_ids)
        if position_ids is None:
            position_ids = self.default_positions(inputs_embeds, attention_mask, cache)
        hidden_states = self.enter(inputs_embeds, position_ids)
        positions: Mapping[str, Any] = {}
        if self.rotary_emb is not None:
            positions = self.rotary_emb.by_layer_type(hidden_states, position_ids, self.layer_types)
        kwargs |= {"position_ids": position_ids, CACHE: cache, "use_cache": use_cache}
        hidden_states = self.leave(self.run_layers(hidden_states, masks, positions, **kwargs))
        return self.output_class(last_hidden_state=hidden_states, **cache_keyword(cache))
