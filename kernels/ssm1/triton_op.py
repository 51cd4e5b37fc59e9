"""The selective scan in Triton, for CUDA and ROCm; native.py defines it.

The gradient is scan.py's, by ATen on the same device, from the states that the kernel saves. Nothing here imports
Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that it runs on the CPU.
"""

from __future__ import annotations

import torch

from easytorch.kernels.interop.triton_devices import refusal
from easytorch.kernels.recurrence import documents
from easytorch.kernels.ssm1 import aten, scan
from easytorch.kernels.ssm1.native import check_arguments, finish, first_state, time_step

WIDEST = 256


def supports(x: torch.Tensor, A: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when the kernel takes x as `dtype` (None: its own), else the reason."""
    if A.shape[-1] > WIDEST:
        return f"a state must fit the registers, at most {WIDEST} wide, got {A.shape[-1]}"
    return refusal(x.device, dtype or x.dtype)


def ssm1(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native.ssm1` in Triton: the same shapes and dtypes; `ValueError` also for what `supports` refuses.

    Not differentiable twice.
    """
    check_arguments(x, dt, A, B, C, D, z, dt_bias, initial_state, segment_ids)
    reason = supports(x, A)
    if reason is not None:
        raise ValueError(f"triton ssm1: {reason}")
    if x.shape[1] == 1:
        return aten.ssm1(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, segment_ids)
    step = time_step(dt, dt_bias, dt_softplus, torch.float32)
    first = None if segment_ids is None else documents.first_tokens(segment_ids)
    state = first_state(x, A, initial_state).transpose(1, 2)
    outputs, last, _ = _forward(step, x.float(), A.float().t().unsqueeze(0), B.float(), C.float(), state, first)
    return finish(outputs, x, D, z), last.transpose(1, 2)


@torch.library.custom_op("easytorch::triton_ssm1_scan", mutates_args=())
def _forward(
    step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`scan.scan`, for float32 and one A."""
    from easytorch.kernels.ssm1.triton_calls import forward_call

    output, last, kept = scan.outputs_like(x, A)
    tensors = [tensor.contiguous() for tensor in (step, x, A[0], B, C, state)]
    forget = None if first is None else first.contiguous().view(torch.uint8)
    step, x, A, B, C, state = tensors
    forward_call(step, x, A, B, C, state, forget, output, last, kept).launch()
    return output, last, kept


@_forward.register_fake
def _forward_fake(
    step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return scan.outputs_like(x, A)


_forward.register_autograd(scan.autograd, setup_context=scan.setup_context)
