"""Gated DeltaNet (arXiv:2412.06464), the linear attention of Qwen3-Next: convolution, delta rule, and a gated norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, initialization
from transformers.integrations.accelerate import force_accelerate_hooks

from easytorch.cache_names import takes_states
from easytorch.kernels.recurrence.softplus import softplus
from easytorch.layers.basics import activation
from easytorch.layers.linear import linear
from easytorch.layers.norm import RMSNorm, rms_norm
from easytorch.layers.recurrent import convolve, per_sequence, recurrent_state, segments, without_padding
from easytorch.layers.stock_names import given_by, of_layer, product_of, same_as
from easytorch.operations import OperationRegistry

gated_delta_rule = OperationRegistry.create("gated_delta_rule")


def log_decays(log_rates: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """-exp(log_rates) softplus(steps), in float32: the logarithm of what a state keeps over a token."""
    return -log_rates.float().exp() * softplus(steps)


class GatedRMSNorm(RMSNorm):
    """rms_norm(x) * silu(gate), the product in float32: (..., D) -> (..., D)."""

    activation = "silu"

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        normalized = rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return (normalized * F.silu(gate.float())).to(hidden_states.dtype)


class GatedDeltaNet(nn.Module):
    """out_proj(norm(delta_rule(conv(query, key, value)), gate)): (B, T, D) -> (B, T, D).

    A family overrides `add_modules` and `project` by how its checkpoints store them. Legend: B batch, T tokens,
    D hidden size, H heads of queries and keys, Dk their width, Hv heads of values, a multiple of H, Dv their width.
    """

    num_k_heads = same_as("heads")
    num_v_heads = same_as("value_heads")
    head_k_dim = same_as("key_width")
    head_v_dim = same_as("value_width")
    key_dim, value_dim = product_of("heads", "key_width"), product_of("value_heads", "value_width")
    conv_dim = given_by("conv1d.out_channels")
    hidden_size = given_by("config.hidden_size")
    conv_kernel_size = given_by("config.linear_conv_kernel_dim")
    layer_norm_epsilon = given_by("config.rms_norm_eps")
    layer_type = of_layer("config.layer_types")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        activation(config.hidden_act)  # refused here by name, not at the first token
        self.layer_idx, self.activation = layer_idx, config.hidden_act
        self.heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        if self.value_heads % self.heads:
            raise ValueError(
                f"{config.model_type}: config.linear_num_value_heads={self.value_heads} must be a multiple of "
                f"config.linear_num_key_heads={self.heads}"
            )
        keys, values = self.heads * self.key_width, self.value_heads * self.value_width
        self.convolved = (keys, keys, values)  # query, key, value
        channels, kernel = sum(self.convolved), config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, padding=kernel - 1, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.add_modules(config)

    def add_modules(self, config: Any) -> None:
        """The norm and the last projection; a family adds those that `project` calls, in the order of transformers."""
        self.norm = GatedRMSNorm(self.value_width, eps=config.rms_norm_eps)
        self.out_proj = nn.Linear(self.convolved[2], config.hidden_size, bias=False)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, T, D) -> query, key and value side by side (B, T, 2 H Dk + Hv Dv), a gate (B, T, Hv, Dv), and b and a
        (B, T, Hv), of which the rate and the decay are made."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        initialization.ones_(self.dt_bias)
        # kept away from 0, whose logarithm is minus infinity
        decays = torch.empty(self.value_heads, device=self.A_log.device).uniform_(0.01, 16)
        initialization.copy_(self.A_log, decays.log())

    @takes_states
    @force_accelerate_hooks("conv1d")
    @per_sequence
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """attention_mask (B, T): 0 for padding. seq_idx (B, T), or cu_seq_lens_q (N + 1,): packed sequences."""
        state = recurrent_state(cache, self.layer_idx)
        packed = segments(seq_idx, cu_seq_lens_q, hidden_states)
        x, gate, b, a = self.project(without_padding(hidden_states, attention_mask))
        x = convolve(self.conv1d, x, self.activation, cache, self.layer_idx, packed)
        query, key, value = x.split(self.convolved, dim=-1)
        ruled = gated_delta_rule(
            query.unflatten(-1, (self.heads, self.key_width)),
            key.unflatten(-1, (self.heads, self.key_width)),
            value.unflatten(-1, (self.value_heads, self.value_width)),
            log_decays(self.A_log, a.float() + self.dt_bias),
            b.sigmoid(),
            initial_state=state,
            use_qk_l2norm=True,
            segment_ids=packed,
        )
        if cache is not None:
            cache.update_recurrent_state(ruled.final_state, self.layer_idx)
        return linear(self.out_proj, self.norm(ruled.outputs, gate).flatten(-2))
