"""The experts of few tokens by the operator in C++ (cpu*.cpp here): one call, of one parallel region, that reads the
weights of each chosen expert once. Inference only.

Processor time of the layer divided by that of grouped_matmul and the operations around it, and of transformers' best
experts function, one thread of a loaded Intel Xeon (Emerald Rapids, AVX-512 without dot products of bfloat16):

    tokens     D 1024, I 512, 4 of 16 experts          D 2048, I 768, 8 of 32
               bfloat16         float32                bfloat16         float32
    1          0.52, 0.64       0.71, 0.87             0.70, 0.75       1.12, 1.20
    4          0.52, 0.56       0.91, 1.05             0.64, 0.64
    16         0.39, 0.40       0.77, 0.81             0.38, 0.39
"""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import inference, library, processor
from easytorch.kernels.cpu.inference import ABSENT
from easytorch.kernels.decoder_step.cpu import flat
from easytorch.kernels.decoder_step.native import AnyProjection, QuantizedProjection
from easytorch.kernels.experts_step.native import SILU, UNITS, Unit, experts_of
from easytorch.kernels.quantized_matmul import cpu as quantized

# Tokens up to which the products are the operator's.
MOST_TOKENS = 16
# Numbers of an expert's projection up to which float32 is the operator's on CPUs where MKL multiplies one row as fast.
MOST_IN_FLOAT32 = float("inf") if processor.VENDOR == "AuthenticAMD" else 2**21
_CODES = {name: code for code, name in enumerate(UNITS)}


def takes(x: Tensor, *stacks: AnyProjection) -> bool:
    """True where `experts_step` takes hidden states x (N, D) and the stacks. It may build the library."""
    return (
        x.dtype in ABSENT
        and x.dim() == 2
        and 0 < x.shape[0] <= MOST_TOKENS
        and x.is_cpu
        and x.is_contiguous()
        and processor.AVX512  # where it was measured
        and not torch.is_grad_enabled()
        and all(_takes_stack(one, x.dtype) for one in stacks)
        and inference.refusal((x, *(tensor for one in stacks for tensor in one if isinstance(tensor, Tensor)))) is None
    )


def _takes_stack(stack: AnyProjection, dtype: torch.dtype) -> bool:
    bias = stack.bias
    if bias is not None and (bias.dtype is not dtype or not bias.is_cpu or bias.stride(-1) != 1):
        return False
    if experts_of(stack) == 0:
        return False
    if isinstance(stack, QuantizedProjection):
        zero = None if stack.zero is None else stack.zero[0]
        return quantized.takes_codes(stack.codes[0], stack.scale_bits[0], zero, stack.group_size)
    weight = stack.weight
    if dtype is torch.float32 and weight[0].numel() > MOST_IN_FLOAT32:
        return False
    return (
        weight.dim() == 3 and weight.dtype is dtype and weight.is_cpu and weight.numel() > 0 and weight.stride(2) == 1
    )


def experts_step(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: AnyProjection, down: AnyProjection, unit: Unit = SILU,
    *, level: int = library.BEST,
) -> Tensor:  # fmt: skip
    """The definition's (native.py), for what `takes` accepts; level: see library.LEVELS."""
    return torch.ops.easytorch_cpu.experts_step.default(
        x,
        indices.to(torch.int64).contiguous(),
        weights.to(torch.float32).contiguous(),
        *flat(ABSENT[x.dtype], gate_up, down),
        _CODES[unit.name],
        unit.alpha,
        unit.limit,
        torch.get_num_threads(),
        level,
    )
