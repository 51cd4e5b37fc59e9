"""Gemma 4's sound tower: a Conformer (arXiv:2303.01037) whose frames attend to those near them, chunk by chunk.

Legend: B recordings, F frames of sound, M mels, T tokens, D hidden size, H heads, C tokens of a chunk, S those that a
chunk attends to.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Gemma4AudioConfig, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import CACHE
from easytorch.layers.basics import activation
from easytorch.layers.encoder import check_heads
from easytorch.layers.linear import linear
from easytorch.layers.norm import Float32RMSNorm, LayerNorm
from easytorch.layers.stock_names import given_by, same_as
from easytorch.models.gemma4_text import NO_SPLIT
from easytorch.models.gemma4_vision import Gemma4ClippableLinear
from easytorch.protocol.native import NativeModel


def clamp_finite(hidden_states: torch.Tensor, bound: float) -> torch.Tensor:
    """Clamped to +-bound, or to what the dtype holds."""
    bound = min(bound, torch.finfo(hidden_states.dtype).max)
    return torch.clamp(hidden_states, -bound, bound)


class Gemma4AudioRelPositionalEncoding(nn.Module):
    """Sines, then cosines, of the distances to the tokens that one attends to: (S // 2 + 1, D), the furthest first."""

    hidden_size = same_as("width")
    inv_timescales: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width = config.hidden_size
        self.context_size = context_size(config)
        self.furthest = self.context_size // 2
        self.register_buffer("inv_timescales", self._inverse(), persistent=False)

    def _inverse(self) -> torch.Tensor:
        count = self.width // 2
        step = math.log(10000.0) / max(count - 1, 1)
        return torch.exp(torch.arange(count) * -step)[None, None]

    def init_buffers(self) -> None:
        initialization.copy_(self.inv_timescales, self._inverse())

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        distances = torch.arange(self.furthest, -1, -1, device=hidden_states.device)
        angles = distances[:, None] * self.inv_timescales[0].to(hidden_states.device)
        return torch.cat((angles.sin(), angles.cos()), dim=-1).to(hidden_states.dtype)


def context_size(config: Any) -> int:
    """The tokens that a chunk attends to: its own, those before it and those after it."""
    before, after = config.attention_context_left - 1, config.attention_context_right
    return int(config.attention_chunk_size + before + after)


class Gemma4AudioAttention(nn.Module):
    """Each chunk of queries over its context, with relative positions (arXiv:1901.02860) in the scores."""

    attention_logits_soft_cap = given_by("config.attention_logit_cap")
    chunk_size = same_as("chunk")
    max_past_horizon = same_as("before")
    max_future_horizon = same_as("after")
    context_size = same_as("context")
    softcap: torch.Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        check_heads(config.hidden_size, config.num_attention_heads)
        self.config = config
        self.layer_idx = layer_idx
        hidden = config.hidden_size
        self.num_heads, self.head_dim = config.num_attention_heads, hidden // config.num_attention_heads
        self.q_scale = self.head_dim**-0.5 / math.log(2)
        self.k_scale = math.log(1 + math.e) / math.log(2)
        self.chunk, self.context = config.attention_chunk_size, context_size(config)
        self.before, self.after = config.attention_context_left - 1, config.attention_context_right
        project = partial(Gemma4ClippableLinear, hidden, hidden, clips=config.use_clipped_linears)
        self.q_proj, self.k_proj, self.v_proj, self.post = (project() for _ in range(4))
        self.relative_k_proj = nn.Linear(hidden, hidden, bias=False)
        self.per_dim_scale = nn.Parameter(torch.zeros(self.head_dim))
        self.register_buffer("softcap", torch.tensor(config.attention_logit_cap), persistent=False)

    def init_buffers(self) -> None:
        initialization.constant_(self.softcap, self.config.attention_logit_cap)

    def contexts(self, one: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (B, chunks, S, ...): what each chunk attends to, zeros beyond the ends."""
        tail = (0, 0) * (one.dim() - 2)
        padded = F.pad(one, (*tail, self.before, self.after + self.chunk - 1))
        return padded.unfold(1, self.context, self.chunk).movedim(-1, 2)

    def relative(self, queries: torch.Tensor, position_embeddings: torch.Tensor) -> torch.Tensor:
        """queries (B, H, chunks, C, head_dim), position_embeddings (P, D) -> scores (B, H, chunks, C, S) of distances.

        Row by row the P scores are shifted by one token more, by reading them out of rows of S + 1.
        """
        keys = linear(self.relative_k_proj, position_embeddings).unflatten(-1, (self.num_heads, -1))
        scores = queries.flatten(2, 3) @ keys.to(queries.dtype).permute(1, 2, 0)
        scores = F.pad(scores, (0, self.context + 1 - scores.shape[-1])).unflatten(2, (-1, self.chunk))
        return scores.flatten(3)[..., : self.chunk * self.context].unflatten(-1, (self.chunk, self.context))

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states (B, T, D), attention_mask (B, chunks, C, S), True attends -> (B, T, D), and weights
        (B, H, chunks, C, S)."""
        length = hidden_states.shape[1]
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        projected = (layer(hidden_states).to(wide) for layer in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (one.unflatten(-1, (self.num_heads, -1)) for one in projected)
        query = F.pad(query * self.q_scale * F.softplus(self.per_dim_scale), (0, 0, 0, 0, 0, -length % self.chunk))
        queries = query.unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4)
        keys, values = self.contexts(key * self.k_scale), self.contexts(value)
        scores = queries @ keys.permute(0, 3, 1, 4, 2) + self.relative(queries, position_embeddings)
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~attention_mask[:, None], self.config.attention_invalid_logits_value)
        weights = F.softmax(scores, dim=-1)
        attended = (weights @ values.permute(0, 3, 1, 2, 4)).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)
        return self.post(attended[:, :length].to(hidden_states.dtype)), weights


class Gemma4AudioSubSampleConvProjectionLayer(nn.Module):
    """Half of the frames and half of the mels: (B, c, F, M) -> (B, C, F / 2, M / 2)."""

    def __init__(self, channels: int, out_channels: int, eps: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, stride=2, padding=1, bias=False)
        self.norm = LayerNorm(out_channels, eps=eps, bias=False)

    def forward(self, sound: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if mask is not None:
            mask = mask.to(sound.device)
            sound = sound * mask[:, None, :, None]
        channels_last = self.conv(sound.to(self.conv.weight.dtype)).permute(0, 2, 3, 1)
        halved = F.relu(self.norm(channels_last)).permute(0, 3, 1, 2)
        return halved.contiguous(), None if mask is None else mask[:, ::2]


class Gemma4AudioSubSampleConvProjection(nn.Module):
    """Sound as tokens: (B, F, M) -> (B, F / 4, D), and the mask of those that are not padding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if len(config.subsampling_conv_channels) != 2 or min(config.subsampling_conv_channels) < 1:
            raise ValueError(
                f"{config.model_type}: config.subsampling_conv_channels={config.subsampling_conv_channels} must be two "
                "numbers of 1 or more"
            )
        first, second = config.subsampling_conv_channels
        self.layer0 = Gemma4AudioSubSampleConvProjectionLayer(1, first, config.rms_norm_eps)
        self.layer1 = Gemma4AudioSubSampleConvProjectionLayer(first, second, config.rms_norm_eps)
        # transformers' width, which is that of the mels where there are as many as channels, 128
        self.input_proj_linear = nn.Linear(first // 4 * second, config.hidden_size, bias=False)

    def forward(
        self, input_features: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sound, mask = self.layer0(input_features[:, None], mask)
        sound, mask = self.layer1(sound, mask)
        rows = sound.permute(0, 2, 3, 1).flatten(2)
        width = self.input_proj_linear.in_features
        if rows.shape[-1] != width:
            raise ValueError(
                f"input_features {tuple(input_features.shape)} must be (recordings, frames, mels), of mels that become "
                f"{width} numbers a token; these become {rows.shape[-1]}"
            )
        return linear(self.input_proj_linear, rows), mask


class Gemma4AudioFeedForward(nn.Module):
    """x + norm(layer2(act(layer1(norm(x))))) * residual_weight: (B, T, D) -> (B, T, D)."""

    gradient_clipping = same_as("bound")

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, project = config.hidden_size, partial(Gemma4ClippableLinear, clips=config.use_clipped_linears)
        self.ffw_layer_1, self.ffw_layer_2 = project(hidden, hidden * 4), project(hidden * 4, hidden)
        self.pre_layer_norm, self.post_layer_norm = Float32RMSNorm(hidden), Float32RMSNorm(hidden)
        self.act_fn = activation(config.hidden_act)
        self.bound, self.post_layer_scale = config.gradient_clipping, config.residual_weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.pre_layer_norm(clamp_finite(hidden_states, self.bound))
        mixed = clamp_finite(self.ffw_layer_2(self.act_fn(self.ffw_layer_1(normed))), self.bound)
        return self.post_layer_norm(mixed) * self.post_layer_scale + hidden_states


class Gemma4AudioCausalConv1d(nn.Conv1d):
    """(B, D, T) -> (B, D, T): of each token and those before it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (self.kernel_size[0] - 1, 0)))


class Gemma4AudioLightConv1d(nn.Module):
    """x + end(act(norm(conv(glu(start(norm(x))))))): (B, T, D) -> (B, T, D)."""

    gradient_clipping = same_as("bound")

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, project = config.hidden_size, partial(Gemma4ClippableLinear, clips=config.use_clipped_linears)
        self.linear_start, self.linear_end = project(hidden, hidden * 2), project(hidden, hidden)
        self.depthwise_conv1d = Gemma4AudioCausalConv1d(
            hidden, hidden, config.conv_kernel_size, groups=hidden, bias=False
        )
        self.pre_layer_norm, self.conv_norm = (Float32RMSNorm(hidden, config.rms_norm_eps) for _ in range(2))
        self.act_fn = activation(config.hidden_act)
        self.bound = config.gradient_clipping

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixed = F.glu(self.linear_start(self.pre_layer_norm(hidden_states)), dim=-1)
        mixed = self.depthwise_conv1d(mixed.transpose(1, 2)).transpose(1, 2)
        mixed = self.act_fn(self.conv_norm(clamp_finite(mixed, self.bound)))
        return self.linear_end(mixed) + hidden_states


class Gemma4AudioLayer(GradientCheckpointingLayer):
    gradient_clipping = same_as("bound")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.feed_forward1 = Gemma4AudioFeedForward(config)
        self.feed_forward2 = Gemma4AudioFeedForward(config)
        self.self_attn = Gemma4AudioAttention(config, layer_idx)
        self.lconv1d = Gemma4AudioLightConv1d(config)
        self.norm_pre_attn, self.norm_post_attn, self.norm_out = (Float32RMSNorm(config.hidden_size) for _ in range(3))
        self.bound = config.gradient_clipping

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, position_embeddings: torch.Tensor
    ) -> torch.Tensor:
        bound = min(self.bound, torch.finfo(self.norm_pre_attn.weight.dtype).max)
        hidden_states = self.feed_forward1(hidden_states)
        normed = self.norm_pre_attn(hidden_states.clamp(-bound, bound))
        attended, _ = self.self_attn(
            hidden_states=normed, position_embeddings=position_embeddings, attention_mask=attention_mask
        )
        hidden_states = self.norm_post_attn(attended.clamp(-bound, bound)) + hidden_states
        hidden_states = self.feed_forward2(self.lconv1d(hidden_states))
        return self.norm_out(hidden_states.clamp(-bound, bound))


class Gemma4AudioModel(NativeModel):
    config: Gemma4AudioConfig
    config_class = Gemma4AudioConfig
    base_model_prefix = "model.audio_tower"  # as in files of the whole model
    main_input_name = "input_features"
    input_modalities: Any = ("image", "text", "video", "audio")
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _no_split_modules = NO_SPLIT
    _can_record_outputs = {"hidden_states": Gemma4AudioLayer, "attentions": Gemma4AudioAttention}  # noqa: RUF012

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As transformers answers for every class beside the text model's experts; there are none here."""
        return True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.subsample_conv_projection = Gemma4AudioSubSampleConvProjection(config)
        self.rel_pos_enc = Gemma4AudioRelPositionalEncoding(config)
        self.layers = nn.ModuleList(Gemma4AudioLayer(config, index) for index in range(config.num_hidden_layers))
        self.output_proj = nn.Linear(config.hidden_size, config.output_proj_dims, bias=True)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Gemma4ClippableLinear):
            module.reset_bounds()
        elif isinstance(module, Gemma4AudioRelPositionalEncoding | Gemma4AudioAttention):
            module.init_buffers()
        if isinstance(module, Gemma4AudioAttention):
            initialization.zeros_(module.per_dim_scale)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self, input_features: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Gemma4AudioModelOutput:
        """input_features (B, F, M), attention_mask (B, F), True for sound -> last_hidden_state (B, T, output width) of
        a fourth of the frames, and their attention_mask (B, T)."""
        hidden_states, mask = self.subsample_conv_projection(input_features, attention_mask)
        positions, seen = self.rel_pos_enc(hidden_states), self._seen(hidden_states, mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=seen, position_embeddings=positions)
        hidden_states = linear(self.output_proj, hidden_states)
        return Gemma4AudioModelOutput(last_hidden_state=hidden_states, attention_mask=mask)

    def _seen(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(B, chunks, C, S): True for the tokens of a chunk's context that each of its queries attends to."""
        batch, length, _ = hidden_states.shape
        chunk, context = self.config.attention_chunk_size, context_size(self.config)
        before, after = self.config.attention_context_left - 1, self.config.attention_context_right
        here = mask.bool() if mask is not None else hidden_states.new_ones(batch, length, dtype=torch.bool)
        keys = F.pad(here, (before, after + chunk - 1)).unfold(1, context, chunk)
        device = hidden_states.device
        distances = torch.arange(chunk, device=device)[:, None] - torch.arange(context, device=device) + before
        near = torch.where(distances >= 0, distances < before, -distances < after)
        queries = torch.arange(keys.shape[1] * chunk, device=device).view(-1, chunk, 1) < length
        return keys[:, :, None] & near & queries
