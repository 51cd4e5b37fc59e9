"""Weights of llama.cpp's blocks with every code and bounded scales."""

from __future__ import annotations

import torch

from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight

# Where the float16 scales of a block stand.
SCALES = {
    "q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q6_k": (208,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2),
    "iq4_nl": (0,), "q2_k": (80, 82), "q3_k": (108,), "q5_k": (0, 2), "iq4_xs": (0,),
}  # fmt: skip


def random_blocks(format: str, rows: int, columns: int, seed: int) -> QuantizedWeight:
    generator, block = torch.Generator().manual_seed(seed), BLOCKS[format]
    data = torch.randint(256, (rows, columns // block.columns, block.nbytes), generator=generator, dtype=torch.uint8)
    for start in SCALES[format]:
        scales = torch.rand(*data.shape[:2], 1, generator=generator) * 0.1 - 0.05
        data[..., start : start + 2] = scales.half().view(torch.uint8)
    return QuantizedWeight.of_blocks(data.flatten(1), format)
