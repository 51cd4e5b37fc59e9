"""The shapes and dtypes of the C++ operators' results, for tensors without numbers: torch.compile, torch.export and
`FakeTensorMode` ask for them where one of `torch.ops.easytorch_cpu` is called in what they trace.

Results are contiguous, whatever the strides of the arguments; a negative or odd size is left to the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Fake = Callable[..., Tensor | tuple[Tensor, ...]]
_FAKES: dict[str, Fake] = {}


def register() -> None:
    """Registers them; the library of operators is loaded."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"easytorch_cpu::{name}", fake)


def _fake(function: Fake) -> Fake:
    _FAKES[function.__name__] = function
    return function


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _states(x: Tensor, *sizes: Any) -> Tensor:
    """Those that a recurrence ends with, in float32."""
    return x.new_empty(sizes, dtype=torch.float32)


@_fake
def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, level: int) -> tuple[Tensor, Tensor]:
    return _like(query), _like(key)


@_fake
def rms_norm(x: Tensor, weight: Tensor, eps: float, level: int) -> Tensor:
    return _like(x)


@_fake
def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float, centered: bool, level: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), x.new_empty(x.shape[-1:], dtype=weight.dtype), x.new_empty(x.shape[-1:], dtype=bias.dtype)


@_fake
def linear(x: Tensor, weight: Tensor, bias: Tensor, level: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_fake
def linear_argmax(x: Tensor, weight: Tensor, bias: Tensor, level: int) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


@_fake
def quantized_matmul(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, format: int, columns: int, group_size: int,
    level: int,
) -> Tensor:  # fmt: skip
    from easytorch.kernels.quantized_matmul import cpu_layout, interleaved

    name = next(name for name, number in cpu_layout.NUMBERS.items() if number == format)
    return x.new_empty((*x.shape[:-1], interleaved.rows_of(data, name, columns)))


@_fake
def interleave_codes(data: Tensor, format: int, columns: int, group_size: int, back: bool, level: int) -> Tensor:
    rows = data.shape[0] * 16 if back else data.shape[0] // 16
    return data.new_empty((rows, data.numel() // rows))


@_fake
def glu(gate: Tensor, up: Tensor, activation: int, level: int) -> Tensor:
    return _like(gate)


@_fake
def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: int, level: int) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(gate)


@_fake
def cross_entropy_rows(logits: Tensor, labels: Tensor, upstream: Tensor, *settings: Any) -> Tensor:
    return logits.new_empty(labels.shape, dtype=torch.float32)


@_fake
def flash(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@_fake
def flash_training(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    output = query.new_empty((batch, length, heads, value.shape[-1]))
    return output, query.new_empty((batch, heads, 2, length), dtype=torch.float32)


@_fake
def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, mask: Tensor | None,
    bias: Tensor | None, query_segment_ids: Tensor | None, key_segment_ids: Tensor | None, sinks: Tensor | None,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    *_, wants_bias, _ = call
    bias_grad = query.new_empty(0 if bias is None or not wants_bias else bias.shape, dtype=torch.float32)
    sinks_grad = query.new_empty(0 if sinks is None else query.shape[2], dtype=torch.float32)
    return _like(query), _like(key), _like(value), bias_grad, sinks_grad


@_fake
def decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, *call: Any) -> Tensor:
    batch, heads, _, _ = query.shape
    return query.new_empty((batch, 1, heads, value.shape[-1]))


@_fake
def multi_latent(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, up_key: Tensor | None,
    up_value: Tensor | None, *call: Any,
) -> Tensor:  # fmt: skip
    return query.new_empty((*query.shape[:-1], latent.shape[-1] if up_value is None else up_value.shape[1]))


@_fake
def multi_latent_pages(
    query: Tensor, query_rope: Tensor, latent_pages: Tensor, rope_pages: Tensor, context_lens: Tensor,
    block_tables: Tensor, query_start_loc: Tensor, up_key: Tensor | None, up_value: Tensor | None, *call: Any,
) -> Tensor:  # fmt: skip
    return query.new_empty((*query.shape[:-1], latent_pages.shape[-1] if up_value is None else up_value.shape[1]))


@_fake
def decode_codes(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
    batch, heads, _, _ = query.shape
    return query.new_empty((batch, 1, heads, value.shape[-1]))


@_fake
def ragged_page(query: Tensor, key_pages: Tensor, value_pages: Tensor, *call: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value_pages.shape[-1]))


@_fake
def attention_step(x: Tensor, *given: Any) -> Tensor:
    return _like(x)


@_fake
def attention_step_pages(x: Tensor, *given: Any) -> Tensor:
    return _like(x)


@_fake
def feed_forward_step(x: Tensor, *given: Any) -> Tensor:
    return _like(x)


@_fake
def decoder_layers(x: Tensor, *given: Any) -> Tensor:
    return _like(x)


@_fake
def decoder_layers_pages(x: Tensor, *given: Any) -> Tensor:
    return _like(x)


@_fake
def experts_step(x: Tensor, *given: Any) -> Tensor:
    return _like(x)


@_fake
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor, initial: Tensor, documents: Tensor, silu: bool, level: int
) -> tuple[Tensor, Tensor]:
    batch, _, channels = x.shape
    return _like(x), _states(x, batch, channels, weight.shape[1] - 1)


@_fake
def causal_conv1d_backward(
    grad: Tensor, final_grad: Tensor, x: Tensor, weight: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    batch, _, channels = x.shape
    of_bias = x.new_empty(channels, dtype=torch.float32)
    return _like(x), _like(weight, torch.float32), of_bias, _states(x, batch, channels, weight.shape[1] - 1)


@_fake
def ssm1(x: Tensor, dt: Tensor, A: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    batch, _, channels = x.shape
    return _like(x), _states(x, batch, channels, A.shape[1])


@_fake
def ssm1_backward(
    grad: Tensor, final_grad: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    batch, _, channels = x.shape
    wide = (_like(one, torch.float32) for one in (x, dt, A, B, C))
    return *wide, _states(x, batch, channels, A.shape[1])


@_fake
def ssm2(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = x.shape
    return _like(x), _states(x, batch, heads, width, B.shape[3])


@_fake
def ssm2_training(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, heads, width = x.shape
    return _like(x), _states(x, batch, heads, width, B.shape[3]), _like(z, torch.float32)


@_fake
def ssm2_backward(
    grad: Tensor, final_grad: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor,
    *given: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, _, heads, width = x.shape
    wide = (_like(dt, torch.float32), _like(A, torch.float32))
    of_z = _like(z) if z.dim() == 4 else _like(z, torch.float32)
    return (
        _like(x),
        *wide,
        _like(B),
        _like(C),
        _like(D, torch.float32),
        of_z,
        _states(x, batch, heads, width, B.shape[3]),
    )


@_fake
def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial: Tensor, *given: Any
) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = value.shape
    return _like(value), _states(value, batch, heads, query.shape[3], width)


@_fake
def gated_delta_rule_backward(
    grad: Tensor, final_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    batch, _, heads, width = value.shape
    wide = (_like(x, torch.float32) for x in (query, key, value, g, beta))
    return *wide, _states(value, batch, heads, query.shape[3], width)
