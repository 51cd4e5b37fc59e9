"""Codes of 16 rows side by side, as the C++ products read them: the layout, its definition and its inverse.

Of 16 rows, for every two blocks: of each row the float16 scale of the first, then of the second (q8_0, q4_0, q6_k; the
others have none), then four bytes of each row, the next four, and so on, q6_k's in the order in which they are used. A
vector then holds a row in each lane, so a product sums no lanes and reads a scale as a vector. The bytes are the same,
in another order: (N, bytes of a row) becomes (N / 16, 16 times as many), by which the layout is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.quantized_matmul.formats import storage

ROWS = 16
# The bytes of a block of columns, and where two of them are a float16 scale that stands before the codes.
_LAYOUTS = {
    "int8": (32, None), "int4": (16, None), "fp4_e2m1": (16, None), "q8_0": (34, 0), "q4_0": (18, 0),
    "q4_k": (144, None), "q6_k": (210, 208),
}  # fmt: skip
# q6_k's scales, then for every 16 bytes of lower bits four bytes of them, of those 32 later and of upper bits.
_ORDER_OF_Q6_K = [
    *(48, 49, 50, 51),
    *(
        place
        for half in range(2)
        for line in range(8)
        for place in (16 * half + line, 16 * half + 8 + line, 32 + 8 * half + line)
    ),
]


def interleaves(format: str, rows: int, columns: int) -> bool:
    """Whether a weight (rows, columns) of that format has the layout."""
    return format in _LAYOUTS and rows > 0 and rows % ROWS == 0 and columns > 0 and columns % 32 == 0


def rows_of(data: Tensor, format: str, columns: int) -> int:
    """The rows of a weight stored as `data`, interleaved or not."""
    return data.shape[0] * (ROWS if is_interleaved(data, format, columns) else 1)


def is_interleaved(data: Tensor, format: str, columns: int) -> bool:
    """Whether stored rows of a weight of `columns` are interleaved."""
    width, _ = storage(format, columns)
    return data.shape[1] != width and data.shape[1] == ROWS * width


def interleave(data: Tensor, format: str) -> Tensor:
    """(N, bytes of a row) -> (N / 16, 16 times as many)."""
    block, scale = _LAYOUTS[format]
    blocks = data.view(torch.uint8).reshape(data.shape[0] // ROWS, ROWS, -1, block)
    codes = blocks if scale is None else torch.cat([blocks[..., :scale], blocks[..., scale + 2 :]], -1)
    lines = codes.unflatten(-1, (-1, 4)).permute(0, 2, 3, 1, 4)
    if format == "q6_k":
        lines = lines[:, :, _ORDER_OF_Q6_K]
    made = []
    for first in range(0, blocks.shape[2], 2):
        if scale is not None:
            made.append(blocks[:, :, first : first + 2, scale : scale + 2].transpose(1, 2).flatten(1))
        made.append(lines[:, first : first + 2].flatten(1))
    return torch.cat(made, 1).view(data.dtype)


def separate(data: Tensor, format: str) -> Tensor:
    """The inverse of `interleave`."""
    count = data.shape[1] // ROWS
    # where each byte stood, interleaved like the bytes: a byte of the places at a time
    places = torch.arange(ROWS * count, device=data.device).reshape(ROWS, count)
    parts = [interleave((places >> bits & 255).to(torch.uint8), format).long() << bits for bits in (0, 8, 16, 24)]
    order = torch.stack(parts).sum(0).flatten().argsort()
    return data.view(torch.uint8)[:, order].reshape(-1, count).view(data.dtype)
