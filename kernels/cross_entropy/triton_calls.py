"""The launches of softmax cross entropy. Imports Triton: import it inside the function that needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from easytorch.kernels.cross_entropy.triton_kernels import cross_entropy_backward, cross_entropy_forward
from easytorch.kernels.interop.triton_call import Call, block_of, rows_of


def forward_call(
    logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, lse: torch.Tensor, ignore_index: int,
    label_smoothing: float, softcap: float | None, z_loss: float,
) -> Call:  # fmt: skip
    """Fills losses, of the shape of the labels, and lse (2, *that shape), float32."""
    rows = rows_of(logits)
    block = block_of(rows.shape[1], elements=8192, widest=8192)
    arguments = {
        "logits": rows, "labels": labels.contiguous(), "losses": losses, "lse": lse, "logits_stride": rows.stride(0),
        **_settings(rows, ignore_index, label_smoothing, softcap, z_loss), "BLOCK": block.columns,
    }  # fmt: skip
    return Call(cross_entropy_forward, rows.shape[0], arguments, _warps(block.columns))


def backward_call(
    losses_grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, logits_grad: torch.Tensor,
    ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float,
) -> Call:  # fmt: skip
    """Fills logits_grad (..., V), contiguous; it may be the logits themselves, where those are contiguous."""
    rows = rows_of(logits)
    # a gradient that was expanded from one number has a stride of zero, and is not copied
    upstream = losses_grad if losses_grad.dim() == 1 else losses_grad.reshape(-1)
    block = block_of(rows.shape[1], elements=2048, widest=2048)
    arguments = {
        "losses_grad": upstream, "logits": rows, "labels": labels.contiguous(), "lse": lse, "logits_grad": logits_grad,
        "losses_grad_stride": upstream.stride(0), "logits_stride": rows.stride(0),
        **_settings(rows, ignore_index, label_smoothing, softcap, z_loss), "BLOCK": block.columns,
    }  # fmt: skip
    programs = rows.shape[0] * -(-rows.shape[1] // block.columns)
    return Call(cross_entropy_backward, programs, arguments, _warps(block.columns))


def typical_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """A training step over the vocabulary of Llama 3, plain and with everything."""
    logits = torch.empty(4096, 128256, dtype=dtype, device="meta")
    labels = torch.empty(4096, dtype=torch.int64, device="meta")
    row, parts = (torch.empty(*shape, 4096, dtype=torch.float32, device="meta") for shape in ((), (2,)))
    for name, settings in (("plain", (-100, 0.0, None, 0.0)), ("everything", (-100, 0.1, 30.0, 1e-4))):
        yield name, forward_call(logits, labels, row, parts, *settings)
        yield f"{name}_backward", backward_call(row, logits, labels, parts, logits, *settings)


def _settings(
    rows: torch.Tensor, ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float
) -> dict[str, Any]:
    return {
        "N": rows.shape[0], "V": rows.shape[1], "ignore_index": ignore_index, "smoothing": label_smoothing or None,
        "softcap": softcap, "z_loss": z_loss,
    }  # fmt: skip


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))
