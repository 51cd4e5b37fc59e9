"""Launches of triton_write_kernels.py. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.interop.triton_call import Call, power_of_two
from easytorch.kernels.ragged_page.triton_write_kernels import write_rows

_WIDEST = 2048


def write_call(pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> Call:
    """pages (P, page_size, ...), of which a row is contiguous, rows (N, ...), slots (N,)."""
    page_count, page_size = pages.shape[:2]
    count, width = rows.shape[0], rows[0].numel() if rows.shape[0] else 0
    flat = rows.reshape(count, width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    block = min(_WIDEST, power_of_two(width))
    arguments = {
        "pages": pages, "rows": flat, "slots": slots.contiguous(), "page_stride": pages.stride(0),
        "slot_stride": pages.stride(1), "row_stride": flat.stride(0), "SIZE": page_count * page_size,
        "PAGE": page_size, "WIDTH": width, "BLOCK": block,
    }  # fmt: skip
    return Call(write_rows, count * -(-width // block), arguments)


def typical_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Keys of a 8B model, the compressed cache of DeepSeek-V3."""
    slots = torch.empty(64, dtype=torch.int64, device="meta")
    for name, shape in (("keys", (8, 128)), ("latent", (576,))):
        pages, rows = (torch.empty(*lead, *shape, dtype=dtype, device="meta") for lead in ((4096, 16), (64,)))
        yield f"write_{name}", write_call(pages, rows, slots)
