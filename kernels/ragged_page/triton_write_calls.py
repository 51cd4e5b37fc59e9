"""Writing into pages on a GPU: one program per block of columns of a row, which waits for nothing. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from easytorch.kernels.interop.triton_call import Call, power_of_two

_WIDEST = 2048


@triton.jit
def write_rows(
    pages, rows, slots, page_stride, slot_stride, row_stride, SIZE, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """rows (N, WIDTH) into the slots of pages (P, PAGE, WIDTH); a slot outside [0, SIZE) is skipped."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    inside = columns < tl.where((slot >= 0) & (slot < SIZE), WIDTH, 0)
    values = tl.load(rows + row * row_stride + columns, mask=inside)
    tl.store(pages + slot // PAGE * page_stride + slot % PAGE * slot_stride + columns, values, mask=inside)


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
