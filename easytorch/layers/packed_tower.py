"""Vision towers over images and videos of any size, whose patches are packed in one row (arXiv:2409.12191).

Legend: N patches of all images together, D hidden size, I images and videos.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from easytorch.layers.attention import interface_of
from easytorch.layers.basics import without_adapter
from easytorch.layers.config import attn_implementation
from easytorch.layers.encoder import check_heads
from easytorch.layers.linear import linear, watched
from easytorch.layers.norm import LayerNorm
from easytorch.layers.patches import pair
from easytorch.layers.rotary import AxialRotaryTables, rotary
from easytorch.layers.stock_names import given_by, product_of

Segments = list[tuple[int, int]]  # runs of segments of equal length: (number of segments, patches of each)


def segments_of(boundaries: torch.Tensor) -> Segments:
    """boundaries (S + 1,): the cumulative lengths of S segments, each of which attends to itself."""
    lengths = boundaries.diff().tolist()
    return [(len(list(run)), length) for length, run in itertools.groupby(lengths) if length]


class PackedPatches(nn.Module):
    """The patch embedding: (N, channels * frames * height * width of a patch) -> (N, D)."""

    patch_size = given_by("config.patch_size")
    temporal_patch_size = given_by("config.temporal_patch_size")
    in_channels = given_by("config.in_channels")
    embed_dim = given_by("proj.out_channels")

    def __init__(self, config: Any, hidden_size: int, *, bias: bool = False) -> None:
        super().__init__()
        size = (pair(config.temporal_patch_size)[0], *pair(config.patch_size))
        self.proj = nn.Conv3d(config.in_channels, hidden_size, kernel_size=size, stride=size, bias=bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        layer = self.proj
        plain = without_adapter(layer)
        shape = (plain.in_channels, *plain.kernel_size)
        if patches.dim() != 2 or patches.shape[1] != torch.Size(shape).numel():
            raise ValueError(
                f"pixel values {tuple(patches.shape)} must be (patches, {torch.Size(shape).numel()}): {shape[0]} "
                f"channels of {shape[1]} frames of {shape[2]} x {shape[3]} pixels, as the processor makes them"
            )
        weight = layer._parameters.get("weight")
        if watched(layer) or weight is None:
            return layer(patches.unflatten(1, shape).to(layer.weight.dtype)).flatten(1)
        # as one matrix product: the patches do not overlap, and Conv3d takes many small products
        return F.linear(patches.to(weight.dtype), weight.flatten(1), layer.bias)


class VisionRotaryEmbedding(AxialRotaryTables):
    """cos and sin of rows and columns, each of which rotates half of a head."""

    def __init__(self, config: Any, hidden_size: int) -> None:
        check_heads(hidden_size, config.num_heads, "hidden_size or num_heads")
        super().__init__(config, hidden_size // config.num_heads)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (N, 2), row and column of each patch -> cos and sin (N, head_dim), float32."""
        if self.head_dim % 4:  # checked here: in transformers such a model still runs on text
            heads = self.config.num_heads
            raise ValueError(
                f"{self.config.model_type}: config.num_heads={heads} gives heads of {self.head_dim}, which must be a "
                f"multiple of 4: rows and columns each rotate pairs within half a head"
            )
        angles = (position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float32)).flatten(1)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class PackedAttention(nn.Module):
    """Self-attention within segments (images, frames or windows): (N, D) -> (N, D)."""

    dim = product_of("num_heads", "head_dim")
    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: Any, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        self.head_dim = hidden_size // config.num_heads
        self.scaling, self.attention_dropout = self.head_dim**-0.5, 0.0
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        segments: Segments,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        """position_embeddings: cos and sin (N, head_dim), float32; queries and keys are rotated in float32."""
        qkv = linear(self.qkv, hidden_states).view(1, -1, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.unbind(2)
        cos, sin = (table[None] for table in position_embeddings)
        query, key = rotary(query, key, cos, sin)
        attend, start, attended = interface_of(attn_implementation(self.config)), 0, []
        dropout = self.attention_dropout if self.training else 0.0
        how = {"scaling": self.scaling, "dropout": dropout, "is_causal": False}
        for (
            count,
            length,
        ) in segments:  # one call for a run of equal lengths, not for each segment
            here = slice(start, start := start + count * length)
            parts = (one[0, here].unflatten(0, (count, length)).transpose(1, 2) for one in (query, key, value))
            output, _ = attend(self, *parts, None, **how, **kwargs)
            attended.append(output.reshape(count * length, -1))
        return linear(self.proj, torch.cat(attended))


class PackedBlock(GradientCheckpointingLayer):
    """x + attn(norm1(x)), then x + mlp(norm2(x)): (N, D) -> (N, D)."""

    norm_class: ClassVar[type[nn.Module]] = LayerNorm
    attention_class: ClassVar[type[PackedAttention]]

    def __init__(self, config: Any, hidden_size: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1: nn.Module = self.norm_class(hidden_size, eps=1e-6)
        self.norm2: nn.Module = self.norm_class(hidden_size, eps=1e-6)
        self.attn = self.attention_class(config, hidden_size)
        self.mlp = mlp

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.norm2(hidden_states))


def check_grids(patches: torch.Tensor, grids: torch.Tensor | None, merge: int) -> torch.Tensor:
    """grids (I, 3) of the patches (N, ...). `ValueError` where they do not match, or cannot be merged."""
    if grids is None:
        raise ValueError(
            "images need image_grid_thw, and videos video_grid_thw: (number, 3), the frames, rows and columns of "
            "patches of each, as the processor gives them"
        )
    if torch.compiler.is_compiling():
        return grids
    found = int(grids.prod(-1).sum())
    if found != patches.shape[0]:
        raise ValueError(
            f"pixel values {tuple(patches.shape)} have {patches.shape[0]} patches; grids {grids.tolist()} have {found}"
        )
    if bool((grids[:, 1:] % merge).any()):
        raise ValueError(f"grids {grids.tolist()}: rows and columns must be multiples of spatial_merge_size={merge}")
    return grids
