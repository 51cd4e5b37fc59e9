"""The next token of each request of a step, each by its own parameters.

A request's token is a function of its logits, parameters, seed and the number of its tokens, and of no other request:
the one that `generate_tokens` gives for the same prompt, parameters and seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from easytorch.generation.engine.request import Request
from easytorch.generation.sampling import gumbel_noise, keep_min_p, keep_top_k, keep_top_p, penalize_repetition
from easytorch.kernels.random.counter import LOW


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """logits (B, V), those after the last token of each of B requests -> their next tokens."""
    logits = logits.to(torch.float32)
    changed = [_adjust(logits[row], request) for row, request in enumerate(requests)]
    if any(row is not None for row in changed):
        logits = torch.stack([logits[i] if row is None else row for i, row in enumerate(changed)])
    tokens = logits.argmax(dim=-1)
    rows = [row for row, request in enumerate(requests) if not request.params.greedy]
    if rows:
        drawn = _draw(logits[rows], [requests[row] for row in rows])
        tokens[torch.tensor(rows, device=tokens.device)] = drawn
    chosen: list[int] = tokens.tolist()
    return chosen


def _adjust(logits: Tensor, request: Request) -> Tensor | None:
    """logits (V,) with the request's penalties and biases, and -inf for tokens that are not allowed yet; None if
    nothing changes."""
    params, device = request.params, logits.device
    before = logits
    if params.repetition_penalty != 1.0:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[torch.tensor(request.tokens, device=device)] = True
        logits = penalize_repetition(logits, seen, params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and request.generated:
        counts = torch.bincount(torch.tensor(request.output_tokens, device=device), minlength=logits.shape[0])
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.logit_bias:
        places = torch.tensor(list(params.logit_bias), device=device)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
        logits = logits.index_add(0, places, biases)
    if params.allowed_token_ids is not None:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[torch.tensor(params.allowed_token_ids, device=device)] = False
        logits = logits.masked_fill(others, float("-inf"))
    if last := [word[-1] for word in request.bad_words if request.ends_with(word[:-1])]:
        logits = logits.index_fill(0, torch.tensor(last, device=device), float("-inf"))
    if request.generated < params.min_tokens and (ends := request.end_tokens | request.stop_tokens):
        logits = logits.index_fill(0, torch.tensor(sorted(ends), device=device), float("-inf"))
    if request.structure is not None:
        allowed = request.structure.allowed(logits.shape[0])
        logits = logits.masked_fill(~allowed.to(device), float("-inf"))
    return None if logits is before else logits


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """logits (B, V) -> tokens (B,), filtered in the order of transformers: temperature, top-k, top-p, min-p."""
    device = logits.device

    def column(name: str) -> Tensor:
        return torch.tensor([[getattr(request.params, name)] for request in requests], device=device)

    # inf would make nan of the tokens that are not allowed
    logits = logits / column("temperature").clamp(max=torch.finfo(torch.float32).max)
    for most in {request.params.top_k for request in requests if request.params.top_k > 0}:
        rows = [row for row, request in enumerate(requests) if request.params.top_k == most]
        logits[rows] = keep_top_k(logits[rows], most)
    for name, neutral, keep in (("top_p", 1.0, keep_top_p), ("min_p", 0.0, keep_min_p)):
        rows = [row for row, request in enumerate(requests) if getattr(request.params, name) != neutral]
        if rows:
            logits[rows] = keep(logits[rows], column(name)[rows])
    seeds = torch.tensor([[request.seed & LOW] for request in requests], device=device)
    steps = torch.tensor([[request.generated] for request in requests], device=device)
    alone = torch.zeros(len(requests), dtype=torch.int64, device=device)  # as the only row of a batch
    shape = (logits.shape[0], logits.shape[1])
    return (logits + gumbel_noise(seeds, steps, shape, alone)).argmax(dim=-1)
