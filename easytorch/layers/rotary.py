"""Rotary positions: a model's cos and sin, and their application through the `rotary` operation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, initialization

from easytorch.kernels.rotary.frequencies import ROPE_TYPES, cos_sin, inverse_frequencies
from easytorch.kernels.rotary.frequencies import Frequencies as Frequencies
from easytorch.layers.config import config_of_layer
from easytorch.layers.stock_names import given_by
from easytorch.operations import OperationRegistry
from easytorch.operations.rotary import Rotary

rotary = cast(Rotary, OperationRegistry.create("rotary"))

# Rope types whose frequencies depend on the largest position of a call.
_BY_LENGTH = ("dynamic", "longrope")


class RotaryTables(nn.Module):
    """cos and sin of a model's positions, for each type of its layers."""

    max_seq_len_cached = given_by("config.max_position_embeddings")
    original_max_seq_len = given_by("config.max_position_embeddings")
    table_dtype: ClassVar[torch.dtype | None] = None  # dtype of cos and sin; None: that of the hidden states

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config

    def by_layer_type(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_types: Collection[str]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """position_ids (B, T) -> cos, sin (B, T, R) by type of layer; x: hidden states, for their dtype and device."""
        return dict.fromkeys(layer_types, self(x, position_ids=position_ids))

    def init_buffers(self) -> None:
        """Fill the buffers after a load on the meta device."""
        raise NotImplementedError


class AxialRotaryTables(RotaryTables):
    """The frequencies of the columns and rows of an image, each of which rotates half of a head of `head_dim`."""

    rope_type, attention_scaling = "axial", 1.0
    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: PreTrainedConfig, head_dim: int) -> None:
        super().__init__(config)
        self.head_dim = head_dim
        # older versions of transformers have one base for every tower, and none in the config
        self.rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {"rope_type": "axial"}
        kind = self.rope["rope_type"]
        if kind != "axial":
            raise ValueError(f"{config.model_type}: config.rope_parameters has rope type {kind!r}; a tower has 'axial'")
        self.register_buffer("inv_freq", self._inverse(), persistent=False)
        self.register_buffer("original_inv_freq", self._inverse(), persistent=False)

    def _inverse(self) -> torch.Tensor:
        half = self.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        return 1.0 / self.rope.get("rope_theta", 10000.0) ** exponents

    def init_buffers(self) -> None:
        for buffer in (self.inv_freq, self.original_inv_freq):
            initialization.copy_(buffer, self._inverse())


class RotaryEmbedding(RotaryTables):
    """cos and sin of every position, for each rope type of transformers (linear, dynamic, yarn, longrope, llama3, ...).

    Frequencies that depend on the length (dynamic, longrope) use the largest position of the call.
    """

    partial: ClassVar[bool] = False  # rotates only `partial_rotary_factor` of a head if True, else all of it
    default_section: ClassVar[Sequence[int] | None] = None  # `mrope_section` where the rope parameters have none
    mrope_interleaved: ClassVar[bool] = False  # of the family, whatever the config says

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.rope_type: str = config.rope_parameters["rope_type"]
        if (section := config.rope_parameters.get("mrope_section", self.default_section)) is not None:
            self.mrope_section = list(section)
        inv_freq, self.attention_scaling = self.initial_frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @classmethod
    def frequencies(cls, config: PreTrainedConfig, rope: dict[str, Any], **how: Any) -> Frequencies:
        """The inverse frequencies of `rope`, `config.rope_parameters` or a part of it; how: the length and the
        device."""
        return _frequencies(config, rope if cls.partial else _of_whole_heads(config, rope), **how)

    def initial_frequencies(self) -> Frequencies:
        """The frequencies of the buffers, which are those of the trained length."""
        return self.frequencies(self.config, self.config.rope_parameters)

    def init_buffers(self) -> None:
        inverse = self.initial_frequencies().inverse
        for buffer in (self.inv_freq, self.original_inv_freq):
            initialization.copy_(buffer, inverse)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (B, T) -> cos, sin (B, T, R) in `table_dtype` or that of `x`; the angles are float32 throughout.

        With `mrope_section` among the rope parameters position_ids may be (3, B, T): time, height and width.
        """
        frequencies = Frequencies(self.inv_freq.to(x.device), self.attention_scaling)
        if self.rope_type in _BY_LENGTH:
            longest = position_ids.max() + 1
            frequencies = self.frequencies(self.config, self.config.rope_parameters, device=x.device, seq_len=longest)
        section = getattr(self, "mrope_section", None) if position_ids.dim() == 3 else None
        dtype = self.table_dtype or x.dtype
        return cos_sin(
            position_ids, frequencies, dtype, mrope_section=section, mrope_interleaved=self.mrope_interleaved
        )


class PartialRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` of the part of a head that `partial_rotary_factor` gives."""

    partial = True


class Float32RotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` with float32 cos and sin, so that queries and keys are rotated in float32."""

    table_dtype = torch.float32


class LayerTypeRotaryEmbedding(RotaryTables):
    """`RotaryEmbedding` where `config.rope_parameters` has an entry for each layer type: buffers `<type>_inv_freq`.

    Heads may have another width in each type.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.layer_types = sorted(set(config.layer_types))
        for layer_type in self.layer_types:
            inv_freq, scaling = self._frequencies(layer_type)
            self.register_buffer(f"{layer_type}_inv_freq", inv_freq, persistent=False)
            self.register_buffer(f"{layer_type}_original_inv_freq", inv_freq.clone(), persistent=False)
            setattr(self, f"{layer_type}_attention_scaling", scaling)

    def init_buffers(self) -> None:
        for layer_type in self.layer_types:
            for name in ("inv_freq", "original_inv_freq"):
                initialization.copy_(getattr(self, f"{layer_type}_{name}"), self._frequencies(layer_type).inverse)

    def _frequencies(self, layer_type: str, **how: Any) -> Frequencies:
        rope = _of_whole_heads(self.config, self.config.rope_parameters[layer_type])
        return _frequencies(config_of_layer(self.config, layer_type), rope, **how)

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (B, T) -> cos, sin (B, T, R) of one type of layer, in `table_dtype` or the dtype of `x`."""
        inverse = getattr(self, f"{layer_type}_inv_freq").to(x.device)
        frequencies = Frequencies(inverse, getattr(self, f"{layer_type}_attention_scaling"))
        if self.config.rope_parameters[layer_type]["rope_type"] in _BY_LENGTH:
            frequencies = self._frequencies(layer_type, device=x.device, seq_len=position_ids.max() + 1)
        return cos_sin(position_ids, frequencies, self.table_dtype or x.dtype)

    def by_layer_type(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_types: Collection[str]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {layer_type: self(x, position_ids, layer_type) for layer_type in dict.fromkeys(layer_types)}


def _of_whole_heads(config: PreTrainedConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """`rope` for a family that rotates whole heads: transformers' default type ignores partial_rotary_factor there."""
    factor, kind = rope.get("partial_rotary_factor", 1.0), rope.get("rope_type", "default")
    if factor == 1.0 or kind == "proportional" or kind not in ROPE_TYPES:  # whose tables are of whole heads; refused
        return rope
    if kind != "default":
        raise ValueError(
            f"{config.model_type} rotates whole heads: rope type {kind!r} with partial_rotary_factor={factor} in "
            f"config.rope_parameters cannot be carried; leave the factor out"
        )
    return rope | {"partial_rotary_factor": 1.0}


def _frequencies(config: PreTrainedConfig, rope: dict[str, Any], **how: Any) -> Frequencies:
    longest = config.max_position_embeddings
    return inverse_frequencies(rope, head_dim=head_dim_of(config), max_position_embeddings=longest, **how)


def head_dim_of(config: PreTrainedConfig) -> int:
    """The width of a head: what the config says, else its share of the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
