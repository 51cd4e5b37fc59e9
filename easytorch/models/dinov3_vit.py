"""DINOv3's ViT (arXiv:2508.10104): DINOv2's layers, register tokens, and rotary positions in two dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import DINOv3ViTConfig
from transformers import initialization as init
from transformers.modeling_outputs import BackboneOutput
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTBackboneOutput

from easytorch.layers.image_backbone import DinoBackbone, DinoEncoder, DinoFeatures, DinoModel, init_dino
from easytorch.layers.mlp import GatedMLP, PlainMLP
from easytorch.layers.patches import grid_of, masked_tokens, pair, patch_projection, patch_tokens
from easytorch.layers.rotary import RotaryTables
from easytorch.layers.stock_names import given_by
from easytorch.layers.tower import ScaledTowerLayer, TowerAttention
from easytorch.protocol.native import NativeModel


class DINOv3ViTEmbeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        grid_of(config)
        self.cls_token = nn.Parameter(torch.randn(1, 1, config.hidden_size))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.register_tokens = nn.Parameter(torch.zeros(1, config.num_register_tokens, config.hidden_size))
        self.patch_embeddings = patch_projection(config)

    def forward(self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor | None = None) -> torch.Tensor:
        """pixel_values (B, C, height, width), bool_masked_pos (B, N) -> (B, 1 + registers + N, D)."""
        tokens = masked_tokens(patch_tokens(self.patch_embeddings, pixel_values), self.mask_token, bool_masked_pos)
        before = (one.expand(tokens.shape[0], -1, -1) for one in (self.cls_token, self.register_tokens))
        return torch.cat((*before, tokens), dim=1)


class DINOv3ViTRopePositionEmbedding(RotaryTables):
    """cos and sin of each patch's row and column, both in [-1, 1]; the tokens before the patches do not rotate."""

    base = given_by("config.rope_theta")
    inv_freq: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_patches_h, self.num_patches_w = grid_of(config)
        if self.head_dim % 4:
            raise ValueError(
                f"{config.model_type}: heads of {self.head_dim} numbers (config.hidden_size / "
                "num_attention_heads); rows and columns need a multiple of 4"
            )
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def _frequencies(self) -> torch.Tensor:
        return 1 / self.config.rope_theta ** torch.arange(0, 1, 4 / self.head_dim, dtype=torch.float32)

    def init_buffers(self) -> None:
        init.copy_(self.inv_freq, self._frequencies())

    @torch.no_grad()
    def forward(self, pixel_values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """pixel_values (B, C, height, width) -> cos, sin (1, 1 + registers + N, head_dim) in `dtype`."""
        sizes = [
            size // patch for size, patch in zip(pixel_values.shape[-2:], pair(self.config.patch_size), strict=True)
        ]
        centers = [torch.arange(0.5, size, device=pixel_values.device) / size for size in sizes]
        places = 2.0 * torch.stack(torch.meshgrid(*centers, indexing="ij"), dim=-1).flatten(0, 1) - 1.0
        if self.training:
            places = self.augmented(places)
        angles = (2 * math.pi * places[:, :, None] * self.inv_freq).flatten(1).tile(2)
        angles = torch.nn.functional.pad(angles, (0, 0, 1 + self.config.num_register_tokens, 0))
        return angles.cos().to(dtype)[None], angles.sin().to(dtype)[None]

    def augmented(self, places: torch.Tensor) -> torch.Tensor:
        """places (N, 2) shifted, stretched by dimension and as a whole, at random and as the config says."""
        if (shift := self.config.pos_embed_shift) is not None:
            places = places + places.new_empty(1, 2).uniform_(-shift, shift)
        for most, shape in ((self.config.pos_embed_jitter, (1, 2)), (self.config.pos_embed_rescale, (1,))):
            if most is not None:
                places = places * places.new_empty(shape).uniform_(-math.log(most), math.log(most)).exp()
        return places


class DINOv3ViTAttention(TowerAttention):
    output_name = "o_proj"

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        config, hidden = self.config, self.config.hidden_size
        biases = {"k_proj": config.key_bias, "v_proj": config.value_bias, "q_proj": config.query_bias}
        for name, has_bias in (biases | {"o_proj": config.proj_bias}).items():
            setattr(self, name, nn.Linear(hidden, hidden, bias=has_bias))


class DINOv3ViTLayer(ScaledTowerLayer):
    attention_class = DINOv3ViTAttention

    def new_mlp(self, config: Any) -> nn.Module:
        mlp = GatedMLP if config.use_gated_mlp else PlainMLP
        return mlp(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)


class DINOv3ViTPreTrainedModel(NativeModel):
    config: DINOv3ViTConfig
    config_class = DINOv3ViTConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embeddings"
    _no_split_modules = ["DINOv3ViTEmbeddings", "DINOv3ViTLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": DINOv3ViTLayer, "attentions": DINOv3ViTAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_dino(module, self.config)
        if isinstance(module, DINOv3ViTEmbeddings):
            for token in (module.cls_token, module.register_tokens):
                init.trunc_normal_(token, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.mask_token)


class DINOv3ViTEncoder(DinoEncoder, DINOv3ViTPreTrainedModel):
    layer_class = DINOv3ViTLayer


class DINOv3ViTParts(DinoBackbone):
    embeddings_class = DINOv3ViTEmbeddings
    encoder_class = DINOv3ViTEncoder
    encoder_name, norm_name = "model", "norm"

    def add_modules(self, config: Any) -> None:
        self.embeddings = DINOv3ViTEmbeddings(config)
        self.rope_embeddings = DINOv3ViTRopePositionEmbedding(config)
        super().add_modules(config)

    def context(
        self, hidden_states: torch.Tensor, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> dict[str, Any]:
        positions = self.rope_embeddings(pixel_values, hidden_states.dtype)
        return {"attention_mask": attention_mask, "position_embeddings": positions}


class DINOv3ViTModel(DinoModel, DINOv3ViTParts, DINOv3ViTPreTrainedModel):
    pass


class DINOv3ViTBackbone(DinoFeatures, DINOv3ViTParts, DINOv3ViTPreTrainedModel):
    def stage_tokens(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        last = index == self.config.num_hidden_layers  # normalized always
        return self.normalized(hidden_states) if last else super().stage_tokens(index, hidden_states)

    def prefix(self) -> int:
        return 1 + self.config.num_register_tokens

    def output(self, maps: Any, tokens: dict[int, torch.Tensor]) -> BackboneOutput:
        wanted = [index for index, stage in enumerate(self.stage_names) if stage in self.out_features]
        classes: Any = tuple(tokens[index][:, 0] for index in wanted)
        output: Any = DINOv3ViTBackboneOutput(
            feature_maps=maps, cls_tokens=classes if getattr(self.config, "return_class_token", False) else None
        )
        output.last_hidden_state = tokens[self.config.num_hidden_layers]  # no key of the output, as in transformers
        return output
