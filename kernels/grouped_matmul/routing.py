"""From the experts a router chose to the groups of `grouped_matmul`, and back."""

from __future__ import annotations

import torch


def sort_by_expert(expert_indices: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """expert_indices (T, k) integer -> order (T * k,) int64 and group_sizes (num_experts,) int64.

    `hidden[order // k]` are the rows of every expert in turn, tokens in order within each. An index of `num_experts`
    or more (an expert of another device) sorts last and belongs to no group.
    """
    if expert_indices.dim() != 2 or expert_indices.is_floating_point():
        raise ValueError(
            f"sort_by_expert takes integer indices (tokens, k), got {tuple(expert_indices.shape)} of "
            f"{expert_indices.dtype}"
        )
    flat = expert_indices.reshape(-1).to(torch.int64)
    sizes = flat.new_zeros(num_experts + 1).scatter_add(0, flat.clamp(max=num_experts), torch.ones_like(flat))
    return flat.argsort(stable=True), sizes[:num_experts]


def rows_of_experts(hidden: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """hidden (T, D), order (T * k,) of `sort_by_expert` -> (T * k, D), `hidden[order // k]`.

    The gradient of that index adds a token's k rows in the order in which threads reach them (ATen's index_put, in
    float32): two equal steps would differ in their last bits. A permutation of repeated rows has one order; torch_xla
    ends the process in its gradient, and adds in one order itself.
    """
    if hidden.device.type == "xla" or not (torch.is_grad_enabled() and hidden.requires_grad):
        return hidden[order // k]
    repeated = hidden.unsqueeze(1).expand(-1, k, -1).reshape(-1, hidden.shape[-1])
    return repeated.index_select(0, order)


def combine_experts(rows: torch.Tensor, order: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
    """rows (T * k, N) as `sort_by_expert` ordered them, expert_weights (T, k) -> (T, N) in rows' dtype.

    Each token's k rows weighted and summed, in float32 (float64 for float64), rounded once.
    """
    tokens, k = expert_weights.shape
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    # On xla index_copy, and the gradient of index_select, end the process.
    on_xla = rows.device.type == "xla"
    unsorted = rows[order.argsort()] if on_xla else torch.empty_like(rows).index_copy(0, order, rows)
    return (
        (unsorted.reshape(tokens, k, rows.shape[-1]).to(wide) * expert_weights.to(wide)[..., None])
        .sum(1)
        .to(rows.dtype)
    )
