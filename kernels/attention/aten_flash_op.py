"""aten_flash.py as torch operators: `easytorch::aten_flash_forward` and `_backward`, on the CPU.

`attention` works under autograd, to any order (beyond the first by blocked.py), torch.func, torch.compile (no graph
break) and torch.export; vmap runs it in turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import aten_flash, blocked
from easytorch.kernels.attention.aten_flash_tiles import Extras, Settings
from easytorch.kernels.attention.contract import band_of, check_features, check_tensors
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.interop.torch_func import transforming


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype."""
    dim = check_tensors(query, key, value)[5]
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    left, right = band_of(causal, sliding_window)
    seed_tensor = None
    if dropout_prob > 0.0:
        seed_tensor = torch.as_tensor(draw_seed() if seed is None else seed, dtype=torch.int64)
    # a tracer takes the operator and not what stands around it, which neither exports nor compiles without a gradient
    run = _Flash.apply if transforming() else aten_flash_forward
    return run(
        query, key, value, mask, bias, query_segment_ids, key_segment_ids, sinks, seed_tensor,
        dim**-0.5 if softmax_scale is None else float(softmax_scale), left, right,
        None if softcap is None else float(softcap), dropout_prob,
    )  # fmt: skip


@torch.library.custom_op("easytorch::aten_flash_forward", mutates_args=(), device_types="cpu")
def aten_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    query_segment_ids: Tensor | None,
    key_segment_ids: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout_prob: float,
) -> Tensor:
    """Output (B, T, H, Dv)."""
    if key.numel() == 0 or query.numel() == 0 or value.numel() == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    extras = Extras(_four(mask), _four(bias), query_segment_ids, key_segment_ids, sinks, seed)
    return aten_flash.flash_forward(query, key, value, extras, Settings(scale, left, right, softcap, dropout_prob))


@aten_flash_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op("easytorch::aten_flash_backward", mutates_args=(), device_types="cpu")
def aten_flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    query_segment_ids: Tensor | None,
    key_segment_ids: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout_prob: float,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none to give."""
    wants_bias = bias is not None and bias_grad
    if key.numel() == 0 or query.numel() == 0 or value.numel() == 0:
        zeros = [query.new_zeros(0) if x is None else x.new_zeros(x.shape) for x in (query, key, value, bias, sinks)]
        return *zeros[:3], zeros[3] if wants_bias else query.new_zeros(0), zeros[4]  # type: ignore[return-value]
    extras = Extras(_four(mask), _four(bias), query_segment_ids, key_segment_ids, sinks, seed)
    settings = Settings(scale, left, right, softcap, dropout_prob)
    *grads, dbias, dsinks = aten_flash.flash_backward(grad, query, key, value, extras, settings, bias_grad)
    return (
        *grads,
        query.new_empty(0) if dbias is None or bias is None else dbias.to(bias.dtype).reshape(bias.shape),
        query.new_empty(0) if dsinks is None or sinks is None else dsinks.to(sinks.dtype),
    )  # type: ignore[return-value]


@aten_flash_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Tensor | None, query_segments: Any,
    key_segments: Any, sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    bias_grad = rest[-1]
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        query.new_empty(0) if bias is None or not bias_grad else bias.new_empty(bias.shape),
        query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.static = inputs[:9], inputs[9:]
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_bias, needs_sinks = ctx.needs_input_grad[4], ctx.needs_input_grad[7]
    # autograd asks for a graph of the gradients themselves, or torch.func, which always does
    run = _Gradients.apply if torch.is_grad_enabled() and not torch.compiler.is_compiling() else aten_flash_backward
    dq, dk, dv, dbias, dsinks = run(grad, *ctx.saved_tensors, *ctx.static, needs_bias)
    tensors = (dq, dk, dv, None, dbias if needs_bias else None, None, None, dsinks if needs_sinks else None, None)
    return *tensors, *(None,) * len(ctx.static)


aten_flash_forward.register_autograd(_gradients, setup_context=_keep)


class _Flash(torch.autograd.Function):
    """The same gradient for torch.func, which takes none that is registered with an operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with torch.no_grad():  # torch.func leaves it on here
            return aten_flash_forward(*arguments)

    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)  # type: ignore[assignment]


class _Gradients(torch.autograd.Function):
    """`aten_flash_backward`, whose own gradient is that of the definition's: it forms all scores."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return aten_flash_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:10])
        ctx.static = inputs[10:]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, query, key, value, mask, bias, query_ids, key_ids, sinks, seed = ctx.saved_tensors
        scale, left, right, softcap, dropout_prob, bias_grad = ctx.static
        leaves: dict[str, Tensor] = {"query": query, "key": key, "value": value}
        if bias is not None and bias_grad:
            leaves["bias"] = bias
        if sinks is not None:
            leaves["sinks"] = sinks

        def attend(leaves: dict[str, Tensor]) -> Tensor:
            return blocked.attention(
                mask=mask, query_segment_ids=query_ids, key_segment_ids=key_ids, sliding_window=(left, right),
                softcap=softcap, softmax_scale=scale, dropout_prob=dropout_prob, seed=seed,
                **({"bias": bias, "sinks": sinks} | leaves),
            )  # fmt: skip

        def gradients(grad: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            return torch.func.vjp(attend, leaves)[1](grad)[0]

        given = dict(zip(("query", "key", "value", "bias", "sinks"), cotangents, strict=True))
        of_grad, found = torch.func.vjp(gradients, grad, leaves)[1]({name: given[name] for name in leaves})
        names = ("query", "key", "value", "mask", "bias", "query_ids", "key_ids", "sinks", "seed")
        return of_grad, *(found.get(name) for name in names), *(None,) * len(ctx.static)


def _in_turn(operator: Any) -> Any:
    """A batching rule that runs the operator for each entry of the batch."""

    def rule(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        results = [
            operator(*(x if d is None else x.select(d, i) for x, d in zip(arguments, dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])

    return rule


aten_flash_forward.register_vmap(_in_turn(aten_flash_forward))
aten_flash_backward.register_vmap(_in_turn(aten_flash_backward))


def _four(matrix: Tensor | None) -> Tensor | None:
    """A mask or bias with all of its four dimensions."""
    return None if matrix is None else matrix.reshape((1,) * (4 - matrix.dim()) + tuple(matrix.shape))
