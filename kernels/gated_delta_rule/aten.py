"""The gated delta rule by ATen, chunk by chunk: https://arxiv.org/abs/2412.06464, section 3.3.

Within a chunk the changes u_i = beta_i (v_i - state_i^T k_i) depend on those before them by a unit triangular system,
whose right hand side knows the state at the chunk's start.
"""

from __future__ import annotations

import torch

from easytorch.kernels.gated_delta_rule import aten_channels
from easytorch.kernels.gated_delta_rule.native import DeltaRuleDims, check_arguments, first_state, prepare
from easytorch.kernels.recurrence import decay, documents
from easytorch.kernels.recurrence.arguments import wide_dtype
from easytorch.kernels.recurrence.precision import without_autocast

CHUNK = 64


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    softmax_scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native.gated_delta_rule` by ATen: the same shapes, dtypes and errors."""
    sizes = check_arguments(query, key, value, g, beta, initial_state, segment_ids)
    wide = wide_dtype(value)
    query, key = prepare(query, key, sizes, softmax_scale, use_qk_l2norm, wide)
    state = first_state(value, sizes, initial_state)
    with without_autocast(value):
        if sizes.length == 1:
            outputs, state = _step(query, key, value.to(wide), g.to(wide), beta.to(wide), state, sizes)
        else:
            number = None if segment_ids is None else documents.numbers(segment_ids)
            run = chunks if g.dim() == 3 else aten_channels.chunks
            outputs, state = run(query, key, value.to(wide), g.to(wide), beta.to(wide), state, number, sizes)
    return outputs.to(value.dtype), state


def _step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, sizes: DeltaRuleDims,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token, T = 1: (B, H, heads of a key, ...)."""
    batch, _, heads, key_width, value_heads, value_width = sizes
    grouped = (batch, heads, value_heads // heads)
    decays = key_width if g.dim() == 4 else 1  # of each head
    state = g.exp().reshape(*grouped, decays, 1) * state.reshape(*grouped, key_width, value_width)
    read = key.reshape(batch, heads, 1, 1, key_width) @ state
    change = beta.reshape(*grouped, 1, 1) * (value.reshape(*grouped, 1, value_width) - read)
    state = torch.addcmul(state, key.reshape(batch, heads, 1, key_width, 1), change)
    outputs = query.reshape(batch, heads, 1, 1, key_width) @ state
    return outputs.reshape(value.shape), state.reshape(batch, value_heads, key_width, value_width)


def chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, number: torch.Tensor | None, sizes: DeltaRuleDims,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    parts, grouped = [], (sizes.heads, sizes.value_heads // sizes.heads)
    state = state.unflatten(1, grouped)
    # split, not sliced: the gradient of a slice is as large as what it was cut from
    owners = documents.of_chunks(number, sizes.length, CHUNK)
    tensors = (tensor.transpose(1, 2).split(CHUNK, 2) for tensor in (query, key, value, g, beta))
    for own, queries, keys, values, logs, rates in zip(owners, *tensors, strict=True):
        values, logs, rates = (tensor.unflatten(1, grouped) for tensor in (values, logs, rates))
        factors = decay.of_chunk(logs, None if own is None else own[:, None, None], value.dtype)
        outputs, state = _chunk(queries, keys, values, factors, rates.unsqueeze(4), state)
        parts.append(outputs.flatten(1, 2).transpose(1, 2))
    outputs = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return outputs, state.flatten(1, 2)


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, factors: decay.Decay, rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """query, key (B, H, L, Dk), value (B, H, R, L, Dv), rate (B, H, R, L, 1), state (B, H, R, Dk, Dv) -> outputs as
    value, the state after. The R value heads of a key share its products."""
    before, columns = factors.before.unsqueeze(4), key.transpose(2, 3)
    system = (key @ columns).unsqueeze(2) * factors.between * rate
    query, key = query.unsqueeze(2), key.unsqueeze(2)
    known = rate * (value - before * (key @ state))
    # the system's diagonal is not read: it counts as one
    changes = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    scores = (query @ columns.unsqueeze(2)) * factors.between
    outputs = torch.addcmul(scores @ changes, before, query @ state)
    left = columns.unsqueeze(2) @ (changes * factors.after.unsqueeze(4))
    return outputs, torch.addcmul(left, factors.whole[..., None, None], state)
