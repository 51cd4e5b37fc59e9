"""The experts of few tokens by the operator in C++ (cpu*.cpp here): one call, of one parallel region, that reads the
weights of each chosen expert once. Inference only.

Processor time of the layer divided by that of the operations around products by expert, of transformers' grouped_mm,
and of a plain read of the chosen experts' weights, in bfloat16, one thread of a slightly loaded Intel Xeon
(Emerald Rapids, AVX-512 without dot products of bfloat16):

    tokens     D 1024, I 512, 4 of 16 experts     D 2048, I 768, 8 of 32
    1          0.79, 0.69, 0.95                   0.91, 0.79, 0.98
    4          0.89, 0.65, 1.01                   0.90, 0.64, 0.91
    16         0.93, 0.46, 0.98                   0.94, 0.45, 0.86

In float32 it takes 0.92 to 1.65 of grouped_mm there, which is MKL's.

Stored (E, K, N), of the operations, of transformers' fastest (grouped_mm, batched_mm, eager) and of the read; loaded:

    tokens     D 1024, I 512, 4 of 16: bfloat16    float16             D 2880, I 1440, 4 of 8: bfloat16
    1          0.37, 0.44, 0.69                    0.25, 0.09, 0.72    0.94, 1.00, 0.86
    4          0.51, 0.59, 0.93                    0.28, 0.06, 0.74
    16         0.34, 0.37, 0.81                    0.29, 0.03, 0.86
"""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import inference, library, processor
from easytorch.kernels.cpu.inference import ABSENT
from easytorch.kernels.decoder_step.cpu import flat
from easytorch.kernels.decoder_step.native import AnyProjection, QuantizedProjection
from easytorch.kernels.experts_step.native import SILU, UNITS, Unit, experts_of
from easytorch.kernels.linear import preference
from easytorch.kernels.quantized_matmul import cpu as quantized

# Tokens up to which the products are the operator's.
MOST_TOKENS = 16
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
    if dtype is torch.float32 and not preference.ONE_FLOAT32_ROW:
        return False
    if weight.dim() != 3 or weight.dtype is not dtype or not weight.is_cpu or weight.numel() == 0:
        return False
    return weight.stride(2) == 1 or weight.stride(1) == 1  # or stored as (E, K, N)


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
