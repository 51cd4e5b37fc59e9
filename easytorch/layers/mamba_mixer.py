"""The mixer of Mamba (arXiv:2312.00752): projection, convolution and a scan whose steps, B and C each token selects."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, initialization
from transformers.integrations.accelerate import force_accelerate_hooks

from easytorch.cache_names import takes_states
from easytorch.layers.basics import plain_activation
from easytorch.layers.linear import linear, plain_weight
from easytorch.layers.mamba2_mixer import initial_time_steps
from easytorch.layers.recurrent import convolve, per_sequence, recurrent_state, without_padding
from easytorch.layers.stock_names import given_by, of_layer
from easytorch.operations import OperationRegistry

ssm1 = OperationRegistry.create("ssm1")


class MambaMixer(nn.Module):
    """out_proj(ssm1(conv(x)) * silu(gate)): (B, T, D) -> (B, T, D).

    Legend: B batch, T tokens, D hidden size, C channels, N state size, R rank of the time step.
    """

    layer_type = of_layer("config.layer_types")
    use_mambapy = given_by("config.use_mambapy")
    use_associative_scan = given_by("config.use_associative_scan")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        if config.time_step_init_scheme not in ("constant", "random"):
            raise ValueError(
                f"mamba: config.time_step_init_scheme={config.time_step_init_scheme!r}; it is 'constant' or 'random'"
            )
        self.layer_idx, self.activation = layer_idx, config.hidden_act
        self.act = plain_activation(config.hidden_act)  # by name refused here, not at the first token; not called
        channels, hidden = config.intermediate_size, config.hidden_size
        if not channels:
            raise ValueError(f"mamba: config.intermediate_size={channels} must be 1 or more")
        rank, size = int(config.time_step_rank), config.state_size
        self.hidden_size, self.intermediate_size = hidden, channels
        self.ssm_state_size, self.time_step_rank, self.conv_kernel_size = size, rank, config.conv_kernel
        self.use_bias, self.use_conv_bias = config.use_bias, config.use_conv_bias
        self.parts = (rank, size, size)  # of x_proj: time step, B, C
        kernel = config.conv_kernel
        self.conv1d = nn.Conv1d(
            channels, channels, kernel, groups=channels, padding=kernel - 1, bias=config.use_conv_bias
        )
        self.in_proj = nn.Linear(hidden, 2 * channels, bias=config.use_bias)
        self.x_proj = nn.Linear(channels, sum(self.parts), bias=False)
        self.dt_proj = nn.Linear(rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, size))
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, hidden, bias=config.use_bias)

    def reset_parameters(self, config: Any) -> None:
        channels, size = self.A_log.shape
        decays = torch.arange(1.0, size + 1, device=self.A_log.device).log()
        initialization.copy_(self.A_log, decays.expand(channels, -1))
        initialization.ones_(self.D)
        std = self.parts[0] ** -0.5 * config.time_step_scale
        if config.time_step_init_scheme == "constant":
            initialization.constant_(self.dt_proj.weight, std)
        else:
            initialization.uniform_(self.dt_proj.weight, -std, std)
        initialization.copy_(self.dt_proj.bias, initial_time_steps(config, channels, self.dt_proj.bias.device))

    @takes_states
    @force_accelerate_hooks(["conv1d", "dt_proj"])
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
        x, gate = linear(self.in_proj, without_padding(hidden_states, attention_mask)).chunk(2, dim=-1)
        x = convolve(self.conv1d, x, self.activation, cache, self.layer_idx, seq_idx)
        x = without_padding(x, attention_mask)
        steps, B, C = linear(self.x_proj, x).split(self.parts, dim=-1)
        dt, dt_bias = self.time_steps(steps)
        scanned = ssm1(
            x,
            dt,
            -self.A_log.float().exp(),
            B,
            C,
            D=self.D,
            z=gate,
            dt_bias=dt_bias,
            dt_softplus=True,
            initial_state=state,
            segment_ids=seq_idx,
        )
        if cache is not None:
            cache.update_recurrent_state(scanned.final_state, self.layer_idx)
        return linear(self.out_proj, scanned.outputs)

    def time_steps(self, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """steps (B, T, R) -> (B, T, C), and the bias, which in half precision is not to be rounded with each sum."""
        weight = plain_weight(self.dt_proj)
        if weight is None or self.dt_proj.bias is None:
            return linear(self.dt_proj, steps), None
        return F.linear(steps, weight), self.dt_proj.bias
