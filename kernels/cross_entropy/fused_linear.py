"""The cross entropy of a linear layer without its logits: chunk by chunk of rows, gradients in the same pass.

For "mean" and "sum" the gradient of every row's loss is known up to one factor, so the forward pass computes the
gradients of hidden and weight from each chunk's logits while they are there, for the sum of the losses (a mean's 1 / N
would underflow in float16), and the backward pass multiplies them by the factor. For "none" the backward pass computes
the logits again. Memory beyond the inputs and gradients: one chunk of logits, and the gradient of weight in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from easytorch.kernels.cross_entropy import aten, chunk
from easytorch.kernels.cross_entropy.native import (
    check_arguments,
    check_linear,
    counted,
    cross_entropy,
    linear_cross_entropy,
    reduce,
)
from easytorch.kernels.interop.arguments import check_int64
from easytorch.kernels.interop.torch_func import batched_by_autograd, eager, transforming, untraced
from easytorch.kernels.linear import products
from easytorch.kernels.linear.products import product

_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph

# Logits of one chunk: 128 MiB in float32, and still 256 rows of a vocabulary of 128k, enough to keep a matmul busy.
LOGITS_AT_ONCE = 2**25
# On a CPU 256 rows are enough whatever the vocabulary, and what is at most 32 MiB its allocator uses again.
LOGITS_ON_CPU, ROWS_ON_CPU = 2**23, 256
# The most logits that are materialized at once on a CPU: 4 MiB in float32. Time over that of chunks, forward and
# backward, float32 / bfloat16: 0.58 / 0.58 for 2**16, 0.88 / 0.80 for 2**18, 0.92 / 0.84 for 2**20, 1.02 / 1.13 for
# 2**21.
SMALL = 2**20
# Numbers of the gradient of the weight that are widened at once on a CPU.
PRODUCT_IN_CACHE = 2**20

# logits (n, V), labels and losses_grad (n,), settings -> losses (n,) and the gradient of the logits, if asked for
Step = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, chunk.Settings], tuple[torch.Tensor, torch.Tensor | None]
]


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
    library: str = "torch",
) -> torch.Tensor:
    """hidden (..., D), weight (V, D), labels (...), bias (V,) -> the loss, float32 (float64 for float64 inputs).

    `native.linear_cross_entropy` defines it. chunk_size: rows at once, None for about 2**25 logits, on a CPU 2**23.
    library: "torch" or "triton", which computes the losses and gradients of a chunk's logits. "mean" and "sum" are
    differentiable any number of times, beyond the first with all logits at once, "none" once. Raises `ValueError` for
    what does not fit. Few logits are materialized at once, unless there is a chunk_size, and all under `torch.func`.
    """
    check_linear(hidden, weight, bias, labels)
    vocabulary = weight.shape[0]
    shape = (*hidden.shape[:-1], vocabulary)
    check_arguments(shape, labels, label_smoothing, softcap, z_loss, reduction, ignore_index)
    check_chunk_size(chunk_size)
    if transforming() or (chunk_size is None and _is_small(hidden, labels.numel() * vocabulary)):
        loss = aten.cross_entropy if aten.supports(softcap, z_loss) is None else cross_entropy
        return loss(
            F.linear(hidden, weight, bias), labels, ignore_index=ignore_index, label_smoothing=label_smoothing,
            softcap=softcap, z_loss=z_loss, reduction=reduction,
        )  # fmt: skip
    rows, flat = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1)
    size = default_chunk_size(vocabulary, hidden.device) if chunk_size is None else chunk_size
    settings = (ignore_index, label_smoothing, softcap, z_loss, size, library)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    # which gradients an exported program is asked for is not known yet
    if reduction == "none" or not any(wanted) or torch.compiler.is_exporting():
        losses = _losses(rows, weight, bias, flat, *settings).reshape(labels.shape)
        return reduce(losses, labels, ignore_index, reduction)
    # while it is compiled the number of rows may be unknown, and would be fixed by asking
    one_chunk = not torch.compiler.is_compiling() and rows.shape[0] <= size
    total = _sum(rows, weight, bias, flat, *settings, one_chunk, wanted)[0]
    return total if reduction == "sum" else total / counted(labels, ignore_index)


def check_chunk_size(chunk_size: int | None) -> None:
    """An error for a number of rows that cannot be computed at once."""
    check_int64("fused_linear_cross_entropy", "chunk_size", chunk_size)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, or None to choose, got {chunk_size}")


def _is_small(hidden: torch.Tensor, logits: int) -> bool:
    """Whether the logits are so few that to materialize them costs little memory, and less time than this operator."""
    return hidden.is_cpu and eager() and logits <= SMALL


def default_chunk_size(vocabulary: int, device: torch.device) -> int:
    """Rows whose logits are at most `LOGITS_AT_ONCE`, a power of two; on a CPU fewer, if enough rows are left."""
    logits = LOGITS_AT_ONCE
    if device.type == "cpu":
        logits = min(logits, max(LOGITS_ON_CPU, ROWS_ON_CPU * vocabulary))
    return 1 << max(logits // vocabulary, 1).bit_length() - 1


def over_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
    losses_grad: torch.Tensor | None, settings: chunk.Settings, chunk_size: int, step: Step, wanted: list[bool],
    one_chunk: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The losses (N,), and the gradients of hidden, weight and bias: empty where not wanted, of the last two wide.

    step: of a chunk's logits, as `chunk.step`. one_chunk: there is no more than one, and the gradient of weight, which
    is not summed then, has its dtype.
    """
    losses, hidden_grads = [], []
    # parts are concatenated, not written into slices: inside an operator torch_xla loses what is written to a view
    _, weight_grad, bias_grad = _empty_grads(hidden, weight, wanted, one_chunk)
    bias_grad.zero_()
    if torch.is_autocast_enabled(hidden.device.type):  # once, where autocast would for each product
        dtype = torch.get_autocast_dtype(hidden.device.type)
        parts, weight = hidden.to(dtype), weight.to(dtype)
    else:
        parts = hidden
    buffer = _buffer_of_logits(parts, weight, bias, chunk_size)
    for start in range(0, max(hidden.shape[0], 1), chunk_size):
        rows = slice(start, start + chunk_size)
        part = parts[rows]
        upstream = losses_grad[rows] if losses_grad is not None and any(wanted) else None
        if bias is not None or not part.is_cpu:
            logits = F.linear(part, weight, bias)
        else:
            logits = product(part, weight, output=None if buffer is None else buffer[: len(part)])
        loss, grad = step(logits, labels[rows], upstream, settings)
        del logits  # or those of two chunks would be there at once
        losses.append(loss)
        if grad is None:
            continue
        if wanted[0]:
            hidden_grads.append(_product(grad, weight.t()).to(hidden.dtype))
        if wanted[1] and weight_grad.dtype == grad.dtype in products.HALVES:  # there is one chunk
            weight_grad.copy_(_product(grad.t(), part.t()))
        elif wanted[1] and weight_grad.dtype == grad.dtype:
            weight_grad.addmm_(grad.t(), part, beta=float(start > 0))  # of beta 0 nothing is read
        elif wanted[1]:
            _add_wide(weight_grad, grad, part, first=start == 0)
        if wanted[2]:
            bias_grad += grad.sum(0, dtype=bias_grad.dtype)
        del grad
    hidden_grad = torch.cat(hidden_grads) if hidden_grads else hidden.new_empty(0)
    return torch.cat(losses), hidden_grad, weight_grad, bias_grad


def _buffer_of_logits(
    parts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk_size: int
) -> torch.Tensor | None:
    """Memory for the logits of each chunk in turn; None for one chunk. On a CPU blocks of that size are mapped anew at
    each allocation: four chunks of 32 MiB were 32,000 page faults."""
    if not parts.is_cpu or bias is not None or len(parts) <= chunk_size or not untraced():
        return None
    return parts.new_empty(chunk_size, len(weight))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) @ b.T, b (N, K)."""
    return product(a, b) if a.is_cpu else a @ b.t()


def _add_wide(total: torch.Tensor, grad: torch.Tensor, part: torch.Tensor, *, first: bool) -> None:
    """total (V, D) += grad (n, V).T @ part (n, D), which are narrower; first: total is not read.

    On a CPU a few classes at a time, whose product stays in the cache.
    """
    classes = max(1, PRODUCT_IN_CACHE // part.shape[1]) if total.is_cpu else len(total)
    for start in range(0, len(total), classes):
        rows = slice(start, start + classes)
        product_of_rows = _product(grad[:, rows].t(), part.t())
        total[rows].copy_(product_of_rows) if first else total[rows].add_(product_of_rows)


@torch.library.custom_op("easytorch::fused_linear_cross_entropy_sum", mutates_args=())
def _sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, ignore_index: int,
    label_smoothing: float, softcap: float | None, z_loss: float, chunk_size: int, library: str, one_chunk: bool,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sum of the losses, and its gradients by hidden, weight and bias, empty where not wanted."""
    settings = chunk.Settings(ignore_index, label_smoothing, softcap, z_loss)
    ones = torch.ones((), dtype=torch.float32, device=hidden.device).expand(labels.shape)
    losses, *grads = over_chunks(
        hidden, weight, bias, labels, ones, settings, chunk_size, _step(library), wanted, one_chunk
    )
    return losses.sum(), grads[0], grads[1], grads[2]


@_sum.register_fake
def _sum_fake(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.empty((), dtype=_wide(hidden), device=hidden.device)
    return total, *_empty_grads(hidden, weight, rest[-1], rest[-2])


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of the gradients, which have none: zeros of the weight's size
    ctx.save_for_backward(*output[1:], *inputs[:4])
    ctx.arguments = inputs[4:]


def _sum_autograd(ctx: Any, total_grad: torch.Tensor | None, *others: Any) -> tuple[torch.Tensor | None, ...]:
    if total_grad is None:
        return (None,) * (4 + len(ctx.arguments))
    *grads, hidden, weight, bias, labels = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # autograd asks for a graph of the gradients themselves, to which those of the forward pass are constants
        ignore_index, label_smoothing, softcap, z_loss = ctx.arguments[:4]

        def total(*leaves: torch.Tensor) -> torch.Tensor:
            given = iter(leaves)
            parts = [next(given) if want else x for want, x in zip(wanted, (hidden, weight, bias), strict=True)]
            return linear_cross_entropy(
                parts[0], parts[1], labels, parts[2], ignore_index=ignore_index, label_smoothing=label_smoothing,
                softcap=softcap, z_loss=z_loss, reduction="sum",
            )  # fmt: skip

        leaves = [x for want, x in zip(wanted, (hidden, weight, bias), strict=True) if want]
        again = iter(torch.func.vjp(total, *leaves)[1](total_grad))
        needed = [next(again) if want else None for want in wanted]
    else:
        scaled = [_scaled(grad, total_grad, hidden.dtype) for grad in grads]
        needed = [grad if want else None for grad, want in zip(scaled, wanted, strict=True)]
    return *needed, *[None] * (1 + len(ctx.arguments))


_sum.register_autograd(_sum_autograd, setup_context=_sum_context)


@torch.library.custom_op("easytorch::fused_linear_cross_entropy", mutates_args=())
def _losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, ignore_index: int,
    label_smoothing: float, softcap: float | None, z_loss: float, chunk_size: int, library: str,
) -> torch.Tensor:  # fmt: skip
    """The loss of each row."""
    settings = chunk.Settings(ignore_index, label_smoothing, softcap, z_loss)
    return over_chunks(hidden, weight, bias, labels, None, settings, chunk_size, _step(library), [False] * 3)[0]


@_losses.register_fake
def _losses_fake(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return torch.empty(labels.shape, dtype=_wide(hidden), device=hidden.device)


@torch.library.custom_op("easytorch::fused_linear_cross_entropy_backward", mutates_args=())
def _losses_backward(
    losses_grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    labels: torch.Tensor, ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float,
    chunk_size: int, library: str, wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    settings = chunk.Settings(ignore_index, label_smoothing, softcap, z_loss)
    _, *grads = over_chunks(hidden, weight, bias, labels, losses_grad, settings, chunk_size, _step(library), wanted)
    return grads[0], grads[1], grads[2]


@_losses_backward.register_fake
def _losses_backward_fake(
    losses_grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_grads(hidden, weight, rest[-1])


def _losses_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _losses_autograd(ctx: Any, losses_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    grads = _losses_backward(losses_grad, *ctx.saved_tensors, *ctx.settings, wanted)
    dtype = ctx.saved_tensors[0].dtype
    needed = [grad.to(dtype) if n else None for grad, n in zip(grads, wanted, strict=True)]
    return *needed, *[None] * (1 + len(ctx.settings))


_losses.register_autograd(_losses_autograd, setup_context=_losses_context)


def _step(library: str) -> Step:
    if library == "torch":
        return chunk.step
    from easytorch.kernels.cross_entropy import triton_chunk

    return triton_chunk.step


def _scaled(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """grad * factor in `dtype`. Multiplied in place where the graph is freed by this backward pass, which ends the use
    of grad: another product, with a narrower `out=` too, is held in float32 beside it first."""
    if eager() and not torch.is_grad_enabled() and not _keep_graph() and not batched_by_autograd(factor):
        return grad.mul_(factor).to(dtype)
    return (grad * factor).to(dtype)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _empty_grads(
    hidden: torch.Tensor, weight: torch.Tensor, wanted: list[bool], one_chunk: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of hidden in its dtype, written once; of weight and bias in float32, summed over the chunks, if of several."""
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    dtypes = (hidden.dtype, weight.dtype if one_chunk else _wide(hidden), _wide(hidden))
    grads = [
        torch.empty(shape if want else (0,), dtype=dtype, device=hidden.device)
        for shape, dtype, want in zip(shapes, dtypes, wanted, strict=True)
    ]
    return grads[0], grads[1], grads[2]
