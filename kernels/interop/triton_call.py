"""One launch of a Triton kernel as plain data: launched on a GPU, or compiled ahead of time for one that is not here.

BlockShape sizes that depend on nothing but the width of a row are chosen here too. Imports no Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """`kernel[(programs,)](**arguments, **options)`, on the device of the first tensor among the arguments."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        # Triton 3.10 turns the fusion of multiply and add off by default; error bounds here are those with it
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def launch(self) -> None:
        if self.programs == 0:
            return
        first = next(value for value in self.arguments.values() if isinstance(value, torch.Tensor))
        with torch.cuda.device_of(first):
            self.kernel[(self.programs,)](**self.arguments, **self.options)


class BlockShape(NamedTuple):
    """Rows by columns of a tile, both powers of two, and the warps that hold it."""

    rows: int
    columns: int
    num_warps: int


def block_of(width: int, *, elements: int, widest: int) -> BlockShape:
    """A tile of about `elements` for rows of `width`: several short rows, one long one, or `widest` columns of it.

    16 elements per thread of 32: a load of 16 bytes per thread for 16 bits, twice over, and room for what is computed.
    """
    columns = min(widest, power_of_two(width))
    rows = max(1, elements // columns)
    return BlockShape(rows, columns, min(16, max(1, rows * columns // 512)))


def power_of_two(size: int) -> int:
    """The least power of two, at least 16, that is not below `size`."""
    return max(16, 1 << max(size - 1, 0).bit_length())


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """(..., N) -> (rows, N) with adjacent columns; a copy only where the strides ask for one."""
    width = tensor.shape[-1]
    rows = tensor.reshape(tensor.numel() // width if width else 0, width)
    return rows if rows.stride(1) == 1 or width <= 1 else rows.contiguous()


def adjacent(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A vector, where there is one, as kernels read it that take no stride of it."""
    return None if vector is None else vector.contiguous()
