"""The recurrence of the selective scan by ATen, with a gradient that keeps only every 64th state.

Blocks of 64 tokens and a few hundred channels, so that the states in between stay in the cache: they are computed, read
and dropped, and recomputed in the backward pass. Within a block a token costs one multiply and add.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from easytorch.kernels.recurrence.precision import without_autocast

TOKENS = 64
# Elements of a block: TOKENS * batch * state size * channels, 2 MiB in float32; two or three blocks exist at a time.
BLOCK = 2**19


@torch.library.custom_op("easytorch::ssm1_scan", mutates_args=())
def scan(
    step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """step, x (B, T, C), A (1 or B, N, C), B, C (B, T, N), state (B, N, C), first (B, T) bool, where the state is reset
    -> outputs (B, T, C), the last state, and that before every block of tokens (blocks, B, N, C).

    All of one dtype, float32 or float64.
    """
    outputs, last, kept = outputs_like(x, A)
    with without_autocast(x):
        for columns in _channels(x, A):
            part = _Part.of(step, x, A, B, C, first, columns)
            current = state[..., columns]
            for index, tokens in enumerate(_tokens(x)):
                kept[index, ..., columns] = current
                states = part.states(tokens, part.decay(tokens), current)
                outputs[:, tokens, columns] = (part.C[tokens].unsqueeze(2) @ states).squeeze(2).transpose(0, 1)
                current = states[-1]
            last[..., columns] = current
    return outputs, last, kept


@scan.register_fake
def _scan_fake(
    step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return outputs_like(x, A)


def outputs_like(x: torch.Tensor, A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors of the shapes that `scan` returns."""
    shape = (x.shape[0], A.shape[1], x.shape[2])
    return x.new_empty(x.shape), x.new_empty(shape), x.new_empty(-(-x.shape[1] // TOKENS), *shape)


@torch.library.custom_op("easytorch::ssm1_scan_backward", mutates_args=())
def scan_backward(
    grad: torch.Tensor, last_grad: torch.Tensor, step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, first: torch.Tensor | None, kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of step, x, A, B, C and state, from those of the outputs and the last state."""
    d_step, d_x, d_A, d_B, d_C, d_state = _backward_fake(grad, last_grad, step, x, A, B, C, first, kept)
    for total in (d_A, d_B, d_C):
        total.zero_()
    with without_autocast(x):
        for columns in _channels(x, A):
            part = _Part.of(step, x, A, B, C, first, columns)
            grads, carry = grad[..., columns].transpose(0, 1), last_grad[..., columns]
            for index, tokens in reversed(list(enumerate(_tokens(x)))):
                before, upstream = kept[index, ..., columns], grads[tokens]
                decay = part.decay(tokens)
                states = part.states(tokens, decay, before)
                d_C[:, tokens] += _columns_sum(states, upstream)
                d_states = part.state_grads(tokens, decay, upstream, carry)
                d_B[:, tokens] += _columns_sum(d_states, part.given[tokens])
                d_given = (part.B[tokens].unsqueeze(2) @ d_states).squeeze(2)
                carry = decay[0] * d_states[0]
                # from here on `decay` holds the gradient of step * A, its logarithm
                d_log = decay.mul_(d_states)
                d_log[0].mul_(before)
                d_log[1:].mul_(states[:-1])
                from_decay = torch.mul(d_log, part.A, out=d_states).sum(2)
                d_step[:, tokens, columns] = (from_decay + d_given * part.x[tokens]).transpose(0, 1)
                d_x[:, tokens, columns] = (d_given * part.step[tokens]).transpose(0, 1)
                by_sequence = d_log.mul_(part.step[tokens].unsqueeze(2)).sum(0)
                d_A[..., columns] += by_sequence.sum_to_size(part.A.shape)
            d_state[..., columns] = carry
    return d_step, d_x, d_A, d_B, d_C, d_state


@scan_backward.register_fake
def _backward_fake(
    grad: torch.Tensor, last_grad: torch.Tensor, step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, first: torch.Tensor | None, kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    d_step, d_x, d_A, d_B, d_C = (tensor.new_empty(tensor.shape) for tensor in (step, x, A, B, C))
    return d_step, d_x, d_A, d_B, d_C, kept.new_empty(kept.shape[1:])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    step, x, A, B, C, _, first = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(step, x, A, B, C, first, output[2])


def autograd(ctx: Any, grad: torch.Tensor, last_grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    return *scan_backward(grad, last_grad, *ctx.saved_tensors), None


scan.register_autograd(autograd, setup_context=setup_context)


class Scan(torch.autograd.Function):
    """`scan` for torch.func's transforms, which do not use the gradient registered with an operator."""

    generate_vmap_rule = True
    setup_context = staticmethod(setup_context)

    @staticmethod
    def forward(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return scan(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, last_grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        return *_ScanGradients.apply(grad, last_grad, *ctx.saved_tensors), None


class _ScanGradients(torch.autograd.Function):
    """`scan_backward` for torch.func, which always records a gradient of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return scan_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError(
            "ssm1: the gradient of its scan has no gradient of its own; for second derivatives force the definition, "
            "OperationMetadata(backend='native') or EASYTORCH_OPS=ssm1=native"
        )


@scan.register_vmap
def _scan_vmap(
    info: Any, in_dims: tuple[int | None, ...], *tensors: torch.Tensor | None
) -> tuple[Any, tuple[int, ...]]:
    outputs, last, kept = scan(*_fold(info.batch_size, in_dims, tensors, per_sequence=(2,)))
    size = info.batch_size
    return (outputs.unflatten(0, (size, -1)), last.unflatten(0, (size, -1)), kept.unflatten(1, (size, -1))), (0, 0, 1)


@scan_backward.register_vmap
def _backward_vmap(
    info: Any, in_dims: tuple[int | None, ...], *tensors: torch.Tensor | None
) -> tuple[Any, tuple[int, ...]]:
    size, A, kept = info.batch_size, tensors[4], tensors[-1]
    assert A is not None and kept is not None
    folded = _fold(size, in_dims[:-1], tensors[:-1], per_sequence=(4,))
    kept = _leading(kept, in_dims[-1], size).transpose(0, 1).flatten(1, 2)
    grads = [grad.unflatten(0, (size, -1)) for grad in scan_backward(*folded, kept)]
    if _leading(A, in_dims[4], size).shape[1] == 1:
        grads[2] = grads[2].sum(1, keepdim=True)
    return tuple(grads), (0,) * len(grads)


def _fold(
    size: int, in_dims: tuple[int | None, ...], tensors: tuple[torch.Tensor | None, ...], per_sequence: tuple[int, ...]
) -> list[torch.Tensor | None]:
    """The tensors with the mapped dimension folded into the batch; those at `per_sequence` get one row per sequence."""
    leading = [None if t is None else _leading(t, dim, size) for t, dim in zip(tensors, in_dims, strict=True)]
    assert leading[0] is not None
    batch = leading[0].shape[1]
    for index in per_sequence:
        tensor = leading[index]
        assert tensor is not None
        leading[index] = tensor.expand(size, batch, *tensor.shape[2:])
    return [None if tensor is None else tensor.flatten(0, 1) for tensor in leading]


def _leading(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """The tensor with the mapped dimension first."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class _Part(NamedTuple):
    """The channels of one block, the sequence first: step, x, given = step * x (T, B, c), A (1 or B, N, c), B and C
    (T, B, N), and where states are reset (T, B)."""

    step: torch.Tensor
    x: torch.Tensor
    given: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    first: torch.Tensor | None

    @classmethod
    def of(
        cls, step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
        first: torch.Tensor | None, columns: slice,
    ) -> _Part:  # fmt: skip
        step, x = (tensor[..., columns].transpose(0, 1) for tensor in (step, x))
        forgotten = None if first is None else first.transpose(0, 1)
        return cls(step, x, step * x, A[..., columns], B.transpose(0, 1), C.transpose(0, 1), forgotten)

    def decay(self, tokens: slice) -> torch.Tensor:
        """exp(step * A) (K, B, N, c), 0 where the state is reset."""
        decay = (self.step[tokens].unsqueeze(2) * self.A).exp_()
        return decay if self.first is None else decay.masked_fill_(self.first[tokens, :, None, None], 0.0)

    def states(self, tokens: slice, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The states after each token (K, B, N, c); `state` is the one before the first."""
        states = self.given[tokens].unsqueeze(2) * self.B[tokens].unsqueeze(3)
        for new, factor in zip(states.unbind(0), decay.unbind(0), strict=True):
            state = torch.addcmul(new, factor, state, out=new)
        return states

    def state_grads(
        self, tokens: slice, decay: torch.Tensor, upstream: torch.Tensor, carry: torch.Tensor
    ) -> torch.Tensor:
        """The gradients of `states`; `carry` is the last one's, from later tokens."""
        grads = upstream.unsqueeze(2) * self.C[tokens].unsqueeze(3)
        grads[-1] += carry
        rows, factors = grads.unbind(0), decay.unbind(0)
        for t in range(len(rows) - 2, -1, -1):
            torch.addcmul(rows[t], factors[t + 1], rows[t + 1], out=rows[t])
        return grads


def _columns_sum(states: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """(K, B, N, c), (K, B, c) -> (B, K, N): summed over the channels."""
    return (states @ vectors.unsqueeze(3)).squeeze(3).transpose(0, 1)


def _tokens(x: torch.Tensor) -> Iterator[slice]:
    for start in range(0, x.shape[1], TOKENS):
        yield slice(start, min(start + TOKENS, x.shape[1]))


def _channels(x: torch.Tensor, A: torch.Tensor) -> Iterator[slice]:
    size = max(64, BLOCK // max(1, TOKENS * x.shape[0] * A.shape[1]))
    for start in range(0, x.shape[2], size):
        yield slice(start, min(start + size, x.shape[2]))
