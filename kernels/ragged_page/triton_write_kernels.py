"""Writing rows into pages on a GPU: one program per row and block of columns. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
