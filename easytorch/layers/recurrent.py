"""Shared by recurrent layers: padding, and the convolution and the state that transformers' caches keep of a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache
from transformers.activations import ACT2FN

from easytorch.layers.attention import segment_ids
from easytorch.layers.norm import rms_norm
from easytorch.operations import OperationRegistry

_OPERATION = OperationRegistry.create("causal_conv1d")


def padding_mask(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """(B, past + T) -> (B, T), 1 for tokens and 0 for padding; None where there is no padding.

    A single token over a cache is never padding, as in transformers, and masks that are not 2D are ignored.
    """
    if attention_mask is None or attention_mask.ndim != 2 or length == 1:
        return None
    return attention_mask[:, -length:]


def recurrent_mask(
    *, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor | None:
    """`padding_mask` as the models' table of masks calls it (layers/masks.py)."""
    return padding_mask(attention_mask, inputs_embeds.shape[1])


def segments(
    seq_idx: torch.Tensor | None, cu_seq_lens: torch.Tensor | None, hidden_states: torch.Tensor
) -> torch.Tensor | None:
    """(B, T): which of the packed sequences each token belongs to; None where none are packed.

    cu_seq_lens (N + 1,): where each of them starts in the one row, and its length.
    """
    if seq_idx is not None or cu_seq_lens is None:
        return seq_idx
    return segment_ids(cu_seq_lens, *hidden_states.shape[:2])


def without_padding(hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """hidden_states (B, T, C), zero where mask (B, T) is: padding enters neither a convolution nor a state."""
    return hidden_states if mask is None else hidden_states * mask[:, :, None].to(hidden_states.dtype)


def per_sequence(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorates a mixer's forward: for a `RaggedStep` it runs once per sequence (cache/ragged_step.py)."""

    @functools.wraps(forward)
    def run(self: nn.Module, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
        if not hasattr(cache, "map_sequences"):
            return forward(self, hidden_states, cache, **kwargs)
        step = functools.partial(forward, self, **kwargs)
        output: torch.Tensor = cache.map_sequences(step, hidden_states)
        return output

    setattr(run, _PER_SEQUENCE, True)
    return run


_PER_SEQUENCE = "runs_per_sequence"


def runs_per_sequence(module: nn.Module) -> bool:
    """Whether it is a mixer with a state, which a `RaggedStep` runs once per sequence."""
    return getattr(type(module).forward, _PER_SEQUENCE, False)


def recurrent_state(cache: Cache | None, layer_idx: int) -> torch.Tensor | None:
    """The state of a layer after the tokens so far, or None. Read it before `convolve`, which counts tokens."""
    if cache is None or not cache.has_previous_state(layer_idx):
        return None
    layer: Any = cache.layers[layer_idx]
    state: torch.Tensor = layer.recurrent_states[0]
    # the cache is written in place, and a gradient needs what was there
    return state.clone() if torch.is_grad_enabled() else state


def convolve(
    conv: nn.Conv1d,
    x: torch.Tensor,
    activation: str,
    cache: Cache | None,
    layer_idx: int,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(conv(x)), causal and by channel: (B, T, C) -> (B, T, C). The cache keeps the last inputs, oldest first.

    packed (B, T): which of the packed sequences each token belongs to.
    """
    width, past = conv.kernel_size[0], None
    if cache is not None and cache.has_previous_state(layer_idx):
        layer: Any = cache.layers[layer_idx]
        past = layer.conv_states[0]  # at least `width` of them, but for a cache that records its past
        past = F.pad(past, (width - 1, 0))[..., past.shape[-1] :]
    fused = activation if activation in ("silu", "swish") else None
    output = _OPERATION(x, conv.weight.squeeze(1), conv.bias, past, fused, packed).outputs
    assert output is not None
    if cache is not None:
        cache.update_conv_state(x.transpose(1, 2), layer_idx, conv_kernel_size=width)
    return output if fused is not None else ACT2FN[activation](output)


class GroupedRMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square of each of `groups` parts of the last dimension by itself."""

    def __init__(self, hidden_size: int, groups: int = 1, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.groups, self.variance_epsilon, self.group_size = groups, eps, hidden_size // groups

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.groups == 1:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        parts = hidden_states.unflatten(-1, (self.groups, -1))
        return rms_norm(parts, None, self.variance_epsilon).flatten(-2) * self.weight

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, groups={self.groups}, eps={self.variance_epsilon}"
