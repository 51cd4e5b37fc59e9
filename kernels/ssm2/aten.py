"""The scan of Mamba-2 by ATen, chunk by chunk as matrix products: section 6 of https://arxiv.org/abs/2405.21060."""

from __future__ import annotations

import torch

from easytorch.kernels.recurrence import decay, documents
from easytorch.kernels.recurrence.arguments import wide_dtype
from easytorch.kernels.recurrence.precision import without_autocast
from easytorch.kernels.ssm1.native import finish
from easytorch.kernels.ssm2.native import NO_LIMIT, ScanDims, check_arguments, first_state, per_head, time_step

# Scores of a chunk, batch * heads * chunk ** 2, up to which one longer chunk is cheaper than two.
SCORES = 2**17


def ssm2(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    initial_state: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native.ssm2` by ATen: the same shapes, dtypes and errors."""
    sizes = check_arguments(x, dt, A, B, C, D, z, dt_bias, dt_limit, initial_state, segment_ids)
    wide = wide_dtype(x)
    step = time_step(dt, dt_bias, dt_softplus, dt_limit, wide)
    log, B, C = step * A.to(wide), B.to(wide), C.to(wide)
    state = first_state(x, sizes, initial_state)
    with without_autocast(x):
        if sizes.length == 1:
            outputs, state = _step(x.to(wide), step, log, B, C, state, sizes)
        else:
            number = None if segment_ids is None else documents.numbers(segment_ids)
            outputs, state = chunks(x.to(wide), step, log, B, C, state, number, sizes)
        return finish(outputs, x, per_head(D), z), state


def chunk_length(sizes: ScanDims) -> int:
    """256, 128 or 64 tokens: long chunks for few heads, where the calls dominate."""
    rows = max(1, sizes.batch * sizes.heads)
    return next((length for length in (256, 128) if rows * length**2 <= SCORES), 64)


def _step(
    x: torch.Tensor, step: torch.Tensor, log: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    sizes: ScanDims,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token, T = 1."""
    batch, _, heads, width, groups, size = sizes
    grouped = (batch, groups, heads // groups)
    given = (step.unsqueeze(3) * x).reshape(*grouped, width, 1)
    factor = log.exp().reshape(*grouped, 1, 1)
    rows = B.reshape(batch, groups, 1, 1, size)
    state = torch.addcmul(factor * state.reshape(*grouped, width, size), given, rows)
    outputs = state.reshape(batch, groups, heads // groups * width, size) @ C.reshape(batch, groups, size, 1)
    return outputs.reshape(batch, 1, heads, width), state.reshape(batch, heads, width, size)


def chunks(
    x: torch.Tensor, step: torch.Tensor, log: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    number: torch.Tensor | None, sizes: ScanDims,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, length, heads, width, groups, size = sizes
    # (B, G, N, heads of a group * P): one product per group computes all its heads
    state = state.reshape(batch, groups, heads // groups * width, size).transpose(2, 3)
    # split, not sliced: the gradient of a slice is as large as the whole tensor
    parts, chunk = [], chunk_length(sizes)
    inputs = zip(*(tensor.split(chunk, 1) for tensor in (x, step, log, B, C)), strict=True)
    for own, (tokens, steps, logs, keys, queries) in zip(
        documents.of_chunks(number, length, chunk), inputs, strict=True
    ):
        factors = decay.of_chunk(logs.transpose(1, 2), None if own is None else own.unsqueeze(1), x.dtype)
        given = steps.unsqueeze(3) * tokens
        outputs, state = _chunk(given, factors, keys.transpose(1, 2), queries.transpose(1, 2), state)
        parts.append(outputs)
    outputs = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return outputs, state.transpose(2, 3).reshape(batch, heads, width, size)


def _chunk(
    given: torch.Tensor, factors: decay.Decay, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """given (B, L, H, P) = dt * x, B and C (B, G, L, N), state (B, G, N, H / G * P) -> outputs, the next state."""
    batch, length, heads, width = given.shape
    groups = B.shape[1]
    shared = heads // groups
    scores = (C @ B.transpose(2, 3)).unsqueeze(2) * factors.between.unflatten(1, (groups, shared))
    within = (scores.flatten(1, 2) @ given.transpose(1, 2)).transpose(1, 2)
    carried = (C @ state).transpose(1, 2).reshape(batch, length, heads, width)
    outputs = torch.addcmul(within, carried, factors.before.transpose(1, 2).unsqueeze(3))
    left = (given * factors.after.transpose(1, 2).unsqueeze(3)).unflatten(2, (groups, shared)).flatten(3)
    kept = (state.unflatten(3, (shared, width)) * factors.whole.reshape(batch, groups, 1, shared, 1)).flatten(3)
    return outputs, kept + B.transpose(2, 3) @ left.transpose(1, 2)
