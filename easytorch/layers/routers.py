"""Routers: which experts a token goes to, and with what weights.

Each returns what it computed for every expert too, which transformers records as `router_logits`. Legend: N tokens,
D hidden size, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization

from easytorch.layers.kept_in_float32 import dtype_of
from easytorch.layers.stock_names import same_as

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Router(nn.Module):
    """A row of logits for each token, and a family's choice from it: hidden_states (N, D) or (B, T, D)."""

    def __init__(self, config: Any, num_experts: int, *, bias: bool = False, dtype: torch.dtype | None = None) -> None:
        """dtype: the weight's."""
        super().__init__()
        self.top_k, self.num_experts = config.num_experts_per_tok, num_experts
        self.hidden_dim = config.hidden_size
        if not isinstance(self.top_k, int) or num_experts is None or not 1 <= self.top_k <= num_experts:
            raise ValueError(
                f"{config.model_type}: config.num_experts_per_tok={self.top_k} of {num_experts} experts; it must be "
                f"1 to {num_experts}"
            )
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_experts))

    def reset_parameters(self, std: float) -> None:
        for parameter in self.parameters():
            initialization.normal_(parameter, mean=0.0, std=std)
        for buffer in self.buffers():
            initialization.zeros_(buffer)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(N, D) -> (N, E)."""
        return F.linear(hidden_states, self.weight, getattr(self, "bias", None))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (N, E) -> weights (N, k), indices (N, k) of experts."""
        raise NotImplementedError

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        """-> logits (N, E), weights (N, k), indices (N, k)."""
        logits = self.logits(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return logits, *self.choose(logits)


class SoftmaxRouter(Router):
    """The k largest of softmax(logits), in float32; `normalized` to sum to one, `rounded` to the dtype of the logits.

    Mixtral (arXiv:2401.04088) normalizes and does not round; Qwen and OLMoE round and normalize if the config says so.
    """

    norm_topk_prob = same_as("normalized")

    def __init__(self, config: Any, num_experts: int, *, normalized: bool, rounded: bool) -> None:
        super().__init__(config, num_experts)
        self.normalized, self.rounded = normalized, rounded

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = logits.softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(logits.dtype) if self.rounded else weights, indices


class TopKSoftmaxRouter(Router):
    """softmax over the k largest logits, in their dtype."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = logits.topk(self.top_k, dim=-1)
        return weights.softmax(dim=-1), indices


class GroupedSigmoidRouter(Router):
    """sigmoid(logits), chosen with a bias that balances the load, within the best groups (DeepSeek, arXiv:2412.19437).

    A group counts for its two best experts. The weights are without the bias, normalized if the config says so, and
    scaled. Everything is float32, the product with the weight too.
    """

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: Any, num_experts: int) -> None:
        super().__init__(config, num_experts, dtype=dtype_of("gate.weight"))
        self.num_group, self.topk_group = config.n_group, config.topk_group
        _check_groups(config, num_experts, self.num_group, self.topk_group, 2)
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts, dtype=torch.float32))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states.float(), self.weight.float())

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        if self.num_group > 1:
            groups = biased.unflatten(-1, (self.num_group, -1))
            best = groups.topk(2, dim=-1)[0].sum(dim=-1)
            biased = _within(groups, best, self.topk_group, float("-inf"))
        indices = biased.topk(self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, indices)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.routed_scaling_factor, indices


class GroupedSoftmaxRouter(Router):
    """The k largest of softmax(logits), scaled, within the groups that have the best experts (DeepSeek V2).

    Everything is float32, the product with the weight too.
    """

    def __init__(self, config: Any, num_experts: int, num_group: int, topk_group: int) -> None:
        super().__init__(config, num_experts, dtype=dtype_of("gate.weight"))
        self.num_group, self.topk_group = num_group, topk_group
        _check_groups(config, num_experts, num_group, topk_group, 1)
        self.routed_scaling_factor = config.routed_scaling_factor

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states.float(), self.weight.float())

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.softmax(dim=-1)
        if self.num_group > 1:
            groups = scores.unflatten(-1, (self.num_group, -1))
            scores = _within(groups, groups.amax(dim=-1), self.topk_group, 0.0)
        weights, indices = scores.topk(self.top_k, dim=-1, sorted=False)
        return weights * self.routed_scaling_factor, indices


def _check_groups(config: Any, num_experts: int, groups: int | None, taken: int | None, least: int) -> None:
    """`ValueError` unless the experts divide into groups of one size, of `least` experts at least."""
    if groups and taken and num_experts % groups == 0 and num_experts >= least * groups and taken <= groups:
        return
    raise ValueError(
        f"{config.model_type}: {num_experts} experts in config.n_group={groups} groups, of which "
        f"config.topk_group={taken} are taken; groups are of one size, of {least} or more experts"
    )


def _within(groups: torch.Tensor, best: torch.Tensor, topk_group: int, outside: float) -> torch.Tensor:
    """groups (N, G, E / G) -> (N, E), `outside` in all but the `topk_group` groups whose `best` (N, G) is largest."""
    indices = best.topk(topk_group, dim=-1, sorted=False)[1]
    taken = torch.zeros(best.shape, dtype=torch.bool, device=best.device).scatter(1, indices, True)
    return groups.masked_fill(~taken[..., None], outside).flatten(1)


def load_balancing_loss(
    router_logits: tuple[torch.Tensor, ...],
    top_k: int,
    attention_mask: torch.Tensor | None = None,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """E * sum over experts of (share of the choices) * (mean probability), of all layers (arXiv:2101.03961).

    router_logits: (B * T, E) of each layer. attention_mask (B, past + T): padding does not count. Only the
    probabilities have a gradient. An even load gives `top_k`. over_ranks: sums a tensor over ranks that have other
    tokens of the batch; the loss is that of all tokens then.
    """
    experts = router_logits[0].shape[-1]
    device = router_logits[0].device
    counts = torch.zeros(experts, dtype=torch.float32, device=device)
    probabilities = torch.zeros_like(counts)
    rows: torch.Tensor | None = None
    if attention_mask is not None:
        length = router_logits[0].shape[0] // attention_mask.shape[0]
        rows = attention_mask[:, -length:].reshape(-1, 1).to(device, torch.float32)
    for logits in router_logits:
        routed = logits.to(device).softmax(dim=-1)
        chosen = torch.zeros_like(routed, dtype=torch.float32).scatter(1, routed.topk(top_k, dim=-1)[1], 1.0)
        counts = counts + (chosen if rows is None else chosen * rows).sum(0)
        probabilities = probabilities + (routed.float() if rows is None else routed.float() * rows).sum(0)
    total = len(router_logits) * (router_logits[0].shape[0] if rows is None else rows.sum())
    if over_ranks is not None:
        counts, probabilities = over_ranks(counts), over_ranks(probabilities)
        total = over_ranks(torch.as_tensor(total, dtype=torch.float32, device=device))
    return experts * (counts / total * (probabilities / total)).sum()
