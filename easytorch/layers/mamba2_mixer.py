"""The mixer of Mamba 2 (arXiv:2405.21060), which hybrids have beside attention: projection, convolution, scan, norm."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, initialization
from transformers.integrations.accelerate import force_accelerate_hooks

from easytorch.cache_names import takes_states
from easytorch.layers.basics import plain_activation
from easytorch.layers.linear import linear
from easytorch.layers.recurrent import GroupedRMSNorm, convolve, per_sequence, recurrent_state, without_padding
from easytorch.layers.stock_names import of_layer
from easytorch.operations import OperationRegistry

ssm2 = OperationRegistry.create("ssm2")


class Mamba2Mixer(nn.Module):
    """out_proj(norm(ssm2(conv(x)) * silu(gate))): (B, T, D) -> (B, T, D).

    A family overrides `project` and `normalize` where it differs. Legend: B batch, T tokens, D hidden size, H heads,
    P head_dim, G groups of heads that share B and C, N state size. entries: the config's names of heads and groups.
    """

    layer_type = of_layer("config.layer_types")
    entries: ClassVar[tuple[str, str]] = ("mamba_n_heads", "mamba_n_groups")

    def __init__(
        self,
        layer_idx: int,
        *,
        hidden_size: int,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        conv_kernel: int,
        bias: bool,
        conv_bias: bool,
        act: str,
        eps: float,
        time_step_limit: tuple[float, float],
    ) -> None:
        super().__init__()
        if heads % groups:
            raise ValueError(
                f"Mamba 2: {heads} heads in {groups} groups; config.{' and '.join(self.entries)} must divide evenly"
            )
        if len(time_step_limit) != 2:
            raise ValueError(f"Mamba 2: config.time_step_limit={time_step_limit!r} must be (least, greatest)")
        self.act = plain_activation(act)  # by name refused here, not at the first token; not called
        self.norm_before_gate = False
        self.layer_idx, self.activation, self.time_step_limit = layer_idx, act, tuple(time_step_limit)
        self.num_heads, self.head_dim, self.n_groups = heads, head_dim, groups
        self.ssm_state_size, self.conv_kernel_size = state_size, conv_kernel
        inner, shared = heads * head_dim, groups * state_size
        self.hidden_size, self.intermediate_size, self.conv_dim = hidden_size, inner, inner + 2 * shared
        self.use_bias, self.use_conv_bias, self.layer_norm_epsilon = bias, conv_bias, eps
        self.parts = (inner, inner + 2 * shared, heads)  # of in_proj: gate, input of the convolution, time step
        self.convolved = (inner, shared, shared)  # x, B, C
        channels = self.parts[1]
        self.conv1d = nn.Conv1d(
            channels, channels, conv_kernel, groups=channels, padding=conv_kernel - 1, bias=conv_bias
        )
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.norm: nn.Module = GroupedRMSNorm(inner, groups, eps)
        self.D = nn.Parameter(torch.empty(heads))
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias)

    def reset_decays(self) -> None:
        """Sets A_log to the logarithms of 1 to H, and D to ones."""
        initialization.copy_(self.A_log, torch.arange(1.0, self.num_heads + 1, device=self.A_log.device).log())
        initialization.ones_(self.D)

    def reset_parameters(self, config: Any) -> None:
        """The same, and time steps between config.time_step_min and config.time_step_max."""
        self.reset_decays()
        initialization.copy_(self.dt_bias, initial_time_steps(config, self.num_heads, self.dt_bias.device))

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, T, D) -> gate (B, T, H P), input of the convolution (B, T, H P + 2 G N), time step (B, T, H)."""
        return linear(self.in_proj, hidden_states).split(self.parts, dim=-1)

    def normalize(self, scanned: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """scanned (B, T, H P), multiplied by silu(gate) unless `norm_before_gate` -> (B, T, H P)."""
        return self.norm(scanned)

    @takes_states
    @force_accelerate_hooks("conv1d")
    @per_sequence
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """attention_mask (B, T): 0 for padding. seq_idx (B, T): which of the packed sequences a token belongs to."""
        state = recurrent_state(cache, self.layer_idx)
        gate, x, dt = self.project(without_padding(hidden_states, attention_mask))
        x = convolve(self.conv1d, x, self.activation, cache, self.layer_idx, seq_idx)
        x, B, C = without_padding(x, attention_mask).split(self.convolved, dim=-1)
        heads, shared = (self.num_heads, self.head_dim), (self.n_groups, self.ssm_state_size)
        scanned = ssm2(
            x.unflatten(-1, heads),
            dt,
            -self.A_log.float().exp(),
            B.unflatten(-1, shared),
            C.unflatten(-1, shared),
            D=self.D,
            z=None if self.norm_before_gate else gate.unflatten(-1, heads),
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=self.time_step_limit,
            initial_state=state,
            segment_ids=seq_idx,
        )
        if cache is not None:
            cache.update_recurrent_state(scanned.final_state, self.layer_idx)
        return linear(self.out_proj, self.normalize(scanned.outputs.flatten(-2), gate))


def initial_time_steps(config: Any, count: int, device: torch.device) -> torch.Tensor:
    """(count,): the bias whose softplus lies between config.time_step_min and config.time_step_max, log-uniformly."""
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    steps = (torch.rand(count, device=device) * (high - low) + low).exp().clamp(min=config.time_step_floor)
    return steps + torch.log(-torch.expm1(-steps))
