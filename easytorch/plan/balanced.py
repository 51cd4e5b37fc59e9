"""Experts to which tokens go evenly, for the memory and the communication of a step whose routing is not known.

Lepikhin et al. 2021, GShard, arXiv:2006.16668, section 3.2, at capacity 1: each group of tokens, those of one device,
sends as many to each expert. What is computed is meaningless, sizes and operations are those of a balanced batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from easytorch.distributed.mesh import DATA
from easytorch.distributed.specs import entry
from easytorch.frontend.partition_ops import with_sharding

NAME = "easytorch_balanced"


def balance_experts(model: nn.Module, axes: Mapping[str, int]) -> None:
    """Makes the experts of `model` take tokens evenly, over a mesh with these axes."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return balanced(module, hidden_states, top_k_index, top_k_weights, axes)

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            config._experts_implementation = NAME


def balanced(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, axes: Mapping[str, int]
) -> Tensor:
    """hidden_states (N, D), top_k_index and top_k_weights (N, k) -> (N, D)."""
    tokens, width = hidden_states.shape
    picks, experts = top_k_index.shape[1], module.num_experts
    data = [axis for axis in axes if axis in DATA and axes[axis] > 1]
    groups = math.prod(axes[axis] for axis in data)
    each = math.ceil(tokens * picks / groups / experts)
    own, others = entry(data), entry(axis for axis in data if axis != "ep")
    owner = "ep" if axes.get("ep", 1) > 1 else None
    rows = hidden_states[:, None].expand(tokens, picks, width).reshape(groups, tokens * picks // groups, width)
    rows = nn.functional.pad(rows, (0, 0, 0, experts * each - rows.shape[1]))
    rows = rows.view(groups, experts, each, width)
    rows = _placed(rows, (own, None, None, None), axes)
    rows = _placed(rows.transpose(0, 1), (owner, others, None, None), axes).reshape(experts, groups * each, width)
    first = module.gate_up_proj if module.has_gate else module.up_proj
    inner = torch.bmm(rows, (first if module.is_transposed else first.transpose(1, 2)).to(rows.dtype))
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    last = module.down_proj if module.is_transposed else module.down_proj.transpose(1, 2)
    rows = torch.bmm(inner, last.to(inner.dtype)).view(experts, groups, each, width)
    rows = _placed(rows, (owner, others, None, None), axes).transpose(0, 1)
    rows = _placed(rows, (own, None, None, None), axes).reshape(groups, experts * each, width)
    rows = rows[:, : tokens * picks // groups].reshape(tokens, picks, width)
    return (rows * top_k_weights[..., None].to(rows.dtype)).sum(1).to(hidden_states.dtype)


def _placed(x: Tensor, sharding: Any, axes: Mapping[str, int]) -> Tensor:
    return with_sharding(x, sharding, both_ways=True) if any(size > 1 for size in axes.values()) else x
