"""The scan of Mamba-2 in Triton, for CUDA and ROCm; native.py defines it.

The gradient recomputes the chunks by aten.py on the same device. Nothing here imports Triton until a kernel is
launched; with TRITON_INTERPRET=1 set before that it runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.interop.triton_devices import DTYPES, refusal
from easytorch.kernels.recurrence import documents, recompute
from easytorch.kernels.ssm1.native import finish
from easytorch.kernels.ssm2 import aten
from easytorch.kernels.ssm2.native import NO_LIMIT, ScanDims, check_arguments, first_state, per_head, time_step

WIDEST = 256


def supports(x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when the kernel takes x as `dtype` (None: its own), else the reason."""
    if B.shape[-1] > WIDEST:
        return f"a state must fit the registers, at most {WIDEST} wide, got {B.shape[-1]}"
    if B.dtype not in DTYPES or C.dtype not in DTYPES:
        return f"B and C are float32, float16 or bfloat16, got {B.dtype} and {C.dtype}"
    return refusal(x.device, dtype or x.dtype)


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
    """`native.ssm2` in Triton: the same shapes and dtypes; `ValueError` also for what `supports` refuses."""
    sizes = check_arguments(x, dt, A, B, C, D, z, dt_bias, dt_limit, initial_state, segment_ids)
    reason = supports(x, B, C)
    if reason is not None:
        raise ValueError(f"triton ssm2: {reason}")
    if sizes.length == 1:
        return aten.ssm2(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_state, segment_ids)
    step = time_step(dt, dt_bias, dt_softplus, dt_limit, torch.float32)
    number = None if segment_ids is None else documents.numbers(segment_ids).to(torch.int32)
    outputs, state = _forward(x, step, A.float(), B, C, first_state(x, sizes, initial_state), number)
    return finish(outputs, x, per_head(D), z), state


@torch.library.custom_op("easytorch::triton_ssm2", mutates_args=())
def _forward(
    x: torch.Tensor, step: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The outputs before D and z, float32, and the last state."""
    from easytorch.kernels.ssm2.triton_calls import forward_call

    output, last = _forward_fake(x, step, A, B, C, state, number)
    step, A, state = step.contiguous(), A.contiguous(), state.contiguous()
    forward_call(x, step, A, B, C, state, None if number is None else number.contiguous(), output, last).launch()
    return output, last


@_forward.register_fake
def _forward_fake(
    x: torch.Tensor, step: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return output, torch.empty(state.shape, dtype=torch.float32, device=x.device)


def _plain(
    x: torch.Tensor, step: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, length, heads, width = x.shape
    sizes = ScanDims(batch, length, heads, width, *B.shape[2:])
    return aten.chunks(x.float(), step, step * A, B.float(), C.float(), state, number, sizes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return tuple(recompute.gradients(_plain, ctx.saved_tensors, grads, ctx.needs_input_grad))


_forward.register_autograd(_autograd, setup_context=_setup_context)
