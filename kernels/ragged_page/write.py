"""Writing new keys and values into the pages of a cache, by slot: page * page_size + offset in the page."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.torch_func import as_given, recording
from easytorch.kernels.interop.triton_devices import interpreted, refusal
from easytorch.kernels.ragged_page.contract import INDEX_DTYPES


def write_pages(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row i of key (N, K, D) and value (N, K, Dv) into slot slot_mapping[i] (N,) of the pages, in place.

    key_pages (P, page_size, K, D) and value_pages (P, page_size, K, Dv) are changed and returned; a slot of -1 is
    skipped. Slots must differ. Raises `ValueError` for shapes and dtypes that do not fit and, on the CPU, for a slot
    out of range.
    """
    return write_page(key_pages, key, slot_mapping), write_page(value_pages, value, slot_mapping)


def write_page(pages: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """`write_pages` for one pool: rows (N, ...) into pages (P, page_size, ...)."""
    if pages.dim() < 2 or rows.shape[1:] != pages.shape[2:] or slot_mapping.shape != rows.shape[:1]:
        raise ValueError(
            f"write_pages: expected pages (P, page_size, ...), rows (N, ...) and slot_mapping (N,), got "
            f"{tuple(pages.shape)}, {tuple(rows.shape)}, {tuple(slot_mapping.shape)}"
        )
    if pages.dtype != rows.dtype:
        raise ValueError(f"write_pages: pages and rows must have one dtype, got {pages.dtype} and {rows.dtype}")
    if slot_mapping.dtype not in INDEX_DTYPES:
        raise ValueError(f"write_pages: slot_mapping must be int32 or int64, got {slot_mapping.dtype}")
    if pages.device.type == "xla":
        from easytorch.kernels.interop.xla_bridge import call_jax
        from easytorch.kernels.ragged_page import jax_write

        return pages.copy_(call_jax(jax_write.write_page, pages, rows, slot_mapping.to(torch.int32)))
    if pages.is_cpu and as_given(elementwise=True) and not interpreted() and not recording(pages, rows):
        _write_by_index(pages, rows, slot_mapping)  # as an operator of Python it takes four times as long
    else:
        _write(pages, rows, slot_mapping)
    return pages


@torch.library.custom_op("easytorch::write_page", mutates_args=("pages",))
def _write(pages: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if _by_triton(pages):
        from easytorch.kernels.ragged_page.triton_write_calls import write_call

        write_call(pages, rows, slot_mapping).launch()
        return
    _write_by_index(pages, rows, slot_mapping)


@_write.register_fake
def _(pages: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    return None


def _write_by_index(pages: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    page_count, page_size = pages.shape[:2]
    slots = slot_mapping.to(torch.int64)
    if slots.is_cpu and slots.numel():
        low, high = map(int, slots.aminmax())
        if not -1 <= low <= high < page_count * page_size:
            raise ValueError(
                f"write_pages: slots must be -1 or in 0..{page_count * page_size - 1}, got {low} to {high}"
            )
        if low >= 0 and pages.is_contiguous():
            pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, rows)
            return
    kept = slots >= 0
    slots = slots[kept]
    pages[slots // page_size, slots % page_size] = rows[kept]


def _by_triton(pages: torch.Tensor) -> bool:
    """For a GPU, where selecting the valid slots would synchronize with the device; the kernel takes contiguous
    rows."""
    interpreted_or_gpu = refusal(pages.device, pages.dtype) is None and pages.device.type != "meta"
    return interpreted_or_gpu and pages[:1, :1].is_contiguous()
