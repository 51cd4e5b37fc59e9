"""Pixtral's vision tower (arXiv:2410.07073): images of any size in one row, with rotary rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PixtralVisionConfig, initialization
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.config import wants_attentions
from easytorch.layers.encoder import check_heads
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import RotaryTables
from easytorch.layers.tower import TowerAttention, TowerEncoder, TowerLayer
from easytorch.protocol.native import NativeModel


class PixtralAttention(TowerAttention):
    """Each patch attends to its image: by a mask, or, of `images` images of one size, by a row of each."""

    output_name = "o_proj"
    order = ("k_proj", "v_proj", "q_proj")

    def __init__(self, config: Any, layer_idx: int) -> None:
        check_heads(config.hidden_size, config.num_attention_heads)
        super().__init__(config, layer_idx, bias=False)

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        super().make_projections(bias, out_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.config.hidden_size, bias=False)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        images: int = 1,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (1, N, D), cos and sin (1, N, R) -> (1, N, D)."""
        rows = [one.unflatten(1, (images, -1)).squeeze(0) for one in (hidden_states, *position_embeddings)]
        output, weights = super().forward(rows[0], (rows[1], rows[2]), attention_mask, **kwargs)
        return output.reshape(hidden_states.shape), weights


class PixtralMLP(GatedMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)


class PixtralAttentionLayer(TowerLayer):
    mlp_name = "feed_forward"
    norms = ("attention_norm", "ffn_norm")

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, eps=1e-5)
        self.feed_forward = PixtralMLP(config)
        self.attention = PixtralAttention(config, layer_idx)
        self.ffn_norm = RMSNorm(config.hidden_size, eps=1e-5)


class PixtralTransformer(TowerEncoder):
    pass


class PixtralVisionRotaryEmbedding(RotaryTables):
    """cos and sin of rows and columns: every other frequency turns by the row, those between by the column."""

    rope_type, attention_scaling = "axial", 1.0
    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rope: dict[str, Any] = config.rope_parameters or {}
        self.head_dim = config.hidden_size // config.num_attention_heads
        if self.rope.get("rope_type") != "axial":
            raise ValueError(f"pixtral: config.rope_parameters={self.rope} must have the rope type 'axial'")
        if self.head_dim % 4:
            raise ValueError(
                f"pixtral: config.num_attention_heads={config.num_attention_heads} gives heads of {self.head_dim}, "
                f"which must be a multiple of 4: rows and columns each rotate pairs within half a head"
            )
        for name in ("inv_freq", "original_inv_freq"):
            self.register_buffer(name, self._inverse(), persistent=False)

    def _inverse(self) -> torch.Tensor:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inverse = 1.0 / self.rope["rope_theta"] ** exponents
        return torch.cat([inverse[0::2], inverse[1::2]])

    def init_buffers(self) -> None:
        for buffer in (self.inv_freq, self.original_inv_freq):
            initialization.copy_(buffer, self._inverse())

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (N, 2), row and column of each patch -> cos and sin (1, N, head_dim), of x's dtype."""
        inverse = self.inv_freq.to(x.device, torch.float32).unflatten(0, (2, -1))
        angles = (position_ids[..., None].float() * inverse).flatten(1)
        angles = torch.cat((angles, angles), dim=-1)[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class PixtralPreTrainedModel(NativeModel):
    config: PixtralVisionConfig
    config_class = PixtralVisionConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["PixtralAttentionLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": PixtralAttentionLayer, "attentions": PixtralAttention}  # noqa: RUF012


class PixtralVisionModel(PixtralPreTrainedModel):
    base_model_prefix = "vision_encoder"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.patch_size
        self.patch_conv = nn.Conv2d(config.num_channels, config.hidden_size, size, stride=size, bias=False)
        self.patch_size = size
        self.ln_pre = RMSNorm(config.hidden_size, eps=1e-5)
        self.transformer = PixtralTransformer(config, PixtralAttentionLayer)
        self.patch_positional_embedding = PixtralVisionRotaryEmbedding(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.patch_conv

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        pixel_values: torch.Tensor,
        image_sizes: torch.Tensor | Sequence[tuple[int, int]] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """pixel_values (I, C, height, width), image_sizes (I, 2), the pixels of each image without its padding ->
        last_hidden_state (1, N, D), the patches of all images in one row."""
        if image_sizes is None:
            image_sizes = [(pixel_values.shape[-2], pixel_values.shape[-1])] * pixel_values.shape[0]
        grids = [(int(height) // self.patch_size, int(width) // self.patch_size) for height, width in image_sizes]
        if len(grids) != pixel_values.shape[0]:
            raise ValueError(f"image_sizes has {len(grids)} rows for {pixel_values.shape[0]} images in pixel_values")
        embedded = self.patch_conv(pixel_values.to(self.patch_conv.weight.dtype))
        patches = [one[:, :rows, :columns].flatten(1).T for one, (rows, columns) in zip(embedded, grids, strict=True)]
        hidden_states = self.ln_pre(torch.cat(patches)[None])
        places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids]
        positions = self.patch_positional_embedding(hidden_states, torch.cat(places).to(hidden_states.device))
        lengths = [len(one) for one in places]
        weights = kwargs.get("output_attentions") or wants_attentions(self.config)
        if len(set(lengths)) == 1 and not weights:
            states = self.transformer(hidden_states, None, positions, images=len(lengths), **kwargs)
        else:
            image = torch.repeat_interleave(torch.tensor(lengths)).to(hidden_states.device)
            states = self.transformer(hidden_states, (image[:, None] == image)[None, None], positions, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=states)
