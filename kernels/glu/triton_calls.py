"""The launches of the gated linear units. Imports Triton: import it inside the function that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.glu.triton_kernels import glu_backward, glu_forward
from easytorch.kernels.interop.triton_call import Call, block_of, rows_of


def forward_call(gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor, activation: str) -> Call:
    """Fills output (..., N)."""
    gates, ups = rows_of(gate), rows_of(up)
    tensors = {"gate": gates, "up": ups, "output": output}
    return _call(glu_forward, tensors, {"gate_stride": gates.stride(0), "up_stride": ups.stride(0)}, gates, activation)


def backward_call(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gate_grad: torch.Tensor, up_grad: torch.Tensor,
    activation: str,
) -> Call:  # fmt: skip
    """Fills gate_grad and up_grad (..., N)."""
    grads, gates, ups = rows_of(grad), rows_of(gate), rows_of(up)
    tensors = {"grad": grads, "gate": gates, "up": ups, "gate_grad": gate_grad, "up_grad": up_grad}
    strides = {"grad_stride": grads.stride(0), "gate_stride": gates.stride(0), "up_stride": ups.stride(0)}
    return _call(glu_backward, tensors, strides, gates, activation)


def typical_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """The MLP of an 8B model."""
    x = torch.empty(4096, 14336, dtype=dtype, device="meta")
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield activation, forward_call(x, x, x, activation)
        yield f"{activation}_backward", backward_call(x, x, x, x, x, activation)


def _call(
    kernel: object, tensors: dict[str, torch.Tensor], strides: dict[str, int], rows: torch.Tensor, activation: str
) -> Call:
    count, width = rows.shape
    block = block_of(width, elements=2048, widest=2048)
    arguments = {
        **tensors, **strides, "ROWS": count, "N": width, "ACTIVATION": activation, "BLOCK_M": block.rows,
        "BLOCK_N": block.columns,
    }  # fmt: skip
    programs = -(-count // block.rows) * -(-width // block.columns)
    return Call(kernel, programs, arguments, block.num_warps)
