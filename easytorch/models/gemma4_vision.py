"""Gemma 4's vision tower: patches of images of any size, padded to one number, with rotary columns and rows.

Legend: I images, N patches with padding, D hidden size, n the tokens of all images.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Gemma4VisionConfig, initialization
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import torch_compilable_check
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import CACHE
from easytorch.layers.clipped_linear import ClippedLinear
from easytorch.layers.decoder import PrePostNormLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.linear import linear
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import Float32RMSNorm, PlainRMSNorm
from easytorch.layers.rotary import AxialRotaryTables, head_dim_of, rotary
from easytorch.layers.stock_names import given_by, same_as
from easytorch.models.gemma4_text import NO_SPLIT
from easytorch.protocol.native import NativeModel


class Gemma4ClippableLinear(ClippedLinear):
    use_clipped_linears = same_as("clips")


class Gemma4VisionAttention(GroupedAttention):
    """Queries, keys and values are normalised head by head; the column turns the first half of a head, the row the
    second."""

    is_causal = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, scaling=1.0)

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        config = self.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width, kv_width = (heads * self.head_dim for heads in (self.num_heads, self.num_key_value_heads))
        project = partial(Gemma4ClippableLinear, clips=config.use_clipped_linears)
        self.q_proj = project(hidden, width)
        self.k_proj = project(hidden, kv_width)
        self.v_proj = project(hidden, kv_width)
        self.o_proj = project(width, hidden)
        self.q_norm, self.k_norm = (Float32RMSNorm(self.head_dim, eps) for _ in range(2))
        self.v_norm = PlainRMSNorm(eps)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = super().project(hidden_states)
        return self.q_norm(query), self.k_norm(key), self.v_norm(value)

    def rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        position_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert position_embeddings is not None, "the encoder passes them"
        halves = zip(*(one.chunk(2, dim=-1) for one in (query, key, *position_embeddings)), strict=True)
        queries, keys = zip(*(rotary(*half) for half in halves), strict=True)
        return torch.cat(queries, dim=-1), torch.cat(keys, dim=-1)


class Gemma4VisionMLP(GatedMLP):
    def __init__(self, config: Any) -> None:
        layer = partial(Gemma4ClippableLinear, clips=config.use_clipped_linears)
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_activation, layer=layer)


class Gemma4VisionEncoderLayer(PrePostNormLayer):
    layer_idx = given_by("self_attn.layer_idx")
    attention_class = Gemma4VisionAttention
    mlp_class = Gemma4VisionMLP
    norm_class = Float32RMSNorm


class Gemma4VisionRotaryEmbedding(AxialRotaryTables):
    """cos and sin of columns, then of rows, each for half a head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, head_dim_of(config))
        if self.head_dim % 4:
            raise ValueError(
                f"{config.model_type}: config.head_dim={self.head_dim} must be a multiple of 4: rows and columns each "
                f"rotate pairs within half a head"
            )

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (I, N, 2), column and row of each patch -> cos and sin (I, N, head_dim), of x's dtype."""
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float32)
        angles = torch.cat((angles, angles), dim=-1).flatten(-2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Gemma4VisionEncoder(nn.Module):
    num_layers = given_by("config.num_hidden_layers")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.rotary_emb = Gemma4VisionRotaryEmbedding(config)
        self.layers = nn.ModuleList(
            Gemma4VisionEncoderLayer(config, index) for index in range(config.num_hidden_layers)
        )

    def forward(
        self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, pixel_position_ids: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """inputs_embeds (I, N, D), attention_mask (I, N), pixel_position_ids (I, N, 2) -> (I, N, D)."""
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask)
        positions = self.rotary_emb(inputs_embeds, pixel_position_ids)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=positions, **kwargs)
        return hidden_states


class Gemma4VisionPatchEmbedder(nn.Module):
    """A projection of a patch's values, and learned embeddings of its column and its row."""

    hidden_size = given_by("config.hidden_size")
    patch_size = given_by("config.patch_size")
    position_embedding_size = given_by("config.position_embedding_size")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_proj = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=False)
        table = torch.ones(2, config.position_embedding_size, config.hidden_size)
        self.position_embedding_table = nn.Parameter(table)

    def forward(
        self, pixel_values: torch.Tensor, pixel_position_ids: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        """pixel_values (I, N, values of a patch) from 0 to 1, pixel_position_ids (I, N, 2), padding (I, N), True where
        there is no patch -> (I, N, D)."""
        weight = self.input_proj.weight
        centred = 2 * (pixel_values - 0.5)
        if weight.dtype.is_floating_point:  # not of a quantized layer
            centred = centred.to(weight.dtype)
        places, table = pixel_position_ids.clamp(min=0), self.position_embedding_table
        torch_compilable_check(
            (places < table.shape[1]).all(),
            lambda: (
                f"image_position_ids reach {int(places.max())}; the tower has embeddings of "
                f"config.position_embedding_size={table.shape[1]} columns and rows"
            ),
        )
        positions = F.embedding(places[..., 0], table[0]) + F.embedding(places[..., 1], table[1])
        return linear(self.input_proj, centred) + torch.where(padding[..., None], 0.0, positions)


class Gemma4VisionPooler(nn.Module):
    """The mean of each square of patches, times sqrt(D), in float32, which float16 could not hold."""

    hidden_size = given_by("config.hidden_size")
    root_hidden_size = same_as("scale")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count = config.pooling_kernel_size**2  # of patches in a square
        self.scale = config.hidden_size**0.5

    def squares(self, patches: int) -> tuple[int, int]:
        """How many there are of so many patches, and the side of one.

        As transformers counts them: (side + 1)**2 patches, which are no two squares, are one of that side. The side is
        0 for a number of patches that does not divide into squares.
        """
        tokens = patches // self.count
        side = math.isqrt(patches // tokens) if tokens else 0
        return tokens, side if side**2 * tokens == patches else 0

    def forward(
        self, hidden_states: torch.Tensor, pixel_position_ids: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (I, N, D) -> (n, D), float32: the squares that have patches, in order of rows."""
        tokens, side = self.squares(hidden_states.shape[1])
        places = pixel_position_ids.clamp(min=0)
        columns = (places[..., 0].amax(-1, keepdim=True) + 1) // side
        squares = places // side
        index = squares[..., 0] + columns * squares[..., 1]
        torch_compilable_check(
            (index < tokens).all(),
            lambda: (
                f"pixel_position_ids do not divide into squares of {side} by {side} patches, of which the number of "
                f"patches, {hidden_states.shape[1]}, makes {tokens}; an image has whole squares of them"
            ),
        )
        # (I, N, tokens), as transformers': a product has the same sums in every run, which adding by index has not
        shares = F.one_hot(index.long(), tokens).float() / side**2
        kept = hidden_states.masked_fill(padding[..., None], 0.0)
        pooled = (shares.transpose(1, 2) @ kept.float()).to(kept.dtype)
        return (pooled.float() * self.scale)[(shares != 0).any(1)]


class Gemma4VisionPreTrainedModel(NativeModel):
    config: Gemma4VisionConfig
    config_class = Gemma4VisionConfig
    base_model_prefix = "model"
    input_modalities: Any = ("image", "text", "video", "audio")
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _no_split_modules = NO_SPLIT
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Gemma4VisionEncoderLayer,
        "attentions": Gemma4VisionAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Gemma4VisionPatchEmbedder):
            initialization.ones_(module.position_embedding_table)
        elif isinstance(module, ClippedLinear):
            module.reset_bounds()
        elif isinstance(module, Gemma4VisionModel) and module.config.standardize:
            initialization.zeros_(module.std_bias)
            initialization.ones_(module.std_scale)


class Gemma4VisionModel(Gemma4VisionPreTrainedModel):
    std_bias: torch.Tensor
    std_scale: torch.Tensor

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As transformers answers for every class beside the text model's experts; there are none here."""
        return True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.pooling_kernel_size < 2:
            raise ValueError(
                f"{config.model_type}: config.pooling_kernel_size={config.pooling_kernel_size} must be 2 or more: "
                f"without pooling transformers' class returns the padding in place of the patches"
            )
        self.patch_embedder = Gemma4VisionPatchEmbedder(config)
        self.encoder = Gemma4VisionEncoder(config)
        self.pooler = Gemma4VisionPooler(config)
        if config.standardize:
            self.register_buffer("std_bias", torch.empty(config.hidden_size))
            self.register_buffer("std_scale", torch.empty(config.hidden_size))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self, pixel_values: torch.Tensor, pixel_position_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """pixel_values (I, N, values of a patch), from 0 to 1; pixel_position_ids (I, N, 2), the column and the row of
        each patch, -1 for padding -> last_hidden_state (n, D): a token of each square of patches."""
        positions = self._check(pixel_values, pixel_position_ids)
        padding = (positions == -1).all(dim=-1)
        embedded = self.patch_embedder(pixel_values, positions, padding)
        tokens = self.pooler(self.encoder(embedded, ~padding, positions, **kwargs), positions, padding)
        if self.config.standardize:  # in float32: the subtraction cancels large values
            tokens = (tokens - self.std_bias.float()) * self.std_scale.float()
        return BaseModelOutputWithPooling(last_hidden_state=tokens.to(embedded.dtype))

    def _check(self, pixel_values: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        count, values = self.config.pooling_kernel_size**2, 3 * self.config.patch_size**2
        if positions is None:
            raise ValueError(
                "images need pixel_position_ids (images, patches, 2), the column and the row of each patch, which the "
                "processor returns as image_position_ids and video_position_ids"
            )
        if (
            pixel_values.dim() != 3
            or pixel_values.shape[-1] != values
            or not self.pooler.squares(pixel_values.shape[1])[1]
        ):
            raise ValueError(
                f"pixel_values {tuple(pixel_values.shape)} must be (images, patches, {values}), the values of a patch "
                f"of config.patch_size={self.config.patch_size}, with a number of patches that is a multiple of "
                f"config.pooling_kernel_size**2={count}"
            )
        if positions.shape != (*pixel_values.shape[:2], 2):
            raise ValueError(
                f"pixel_position_ids {tuple(positions.shape)} must be {(*pixel_values.shape[:2], 2)} for pixel_values "
                f"{tuple(pixel_values.shape)}"
            )
        return positions
