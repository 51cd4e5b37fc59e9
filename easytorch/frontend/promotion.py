"""ATen's type promotion (aten/src/ATen/native/TypeProperties.cpp), which a builder does not do."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's name for an element type."""
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def result_type(*values: Any) -> DType:
    """The dtype to which torch promotes `values`: ops, 0-d ones among them, and Python numbers.

    Ops with axes decide; those without, and then numbers, count only where they are of a higher category
    (bool < integer < float < complex).
    """
    arrays: torch.dtype | None = None
    scalars: torch.dtype | None = None
    numbers: torch.dtype | None = None
    for value in values:
        if isinstance(value, Op):
            kind = torch_dtype(value.shape.dtype)
            if value.shape.rank:
                arrays = kind if arrays is None else torch.promote_types(arrays, kind)
            else:
                scalars = kind if scalars is None else torch.promote_types(scalars, kind)
        else:
            kind = _of_number(value)
            numbers = kind if numbers is None else torch.promote_types(numbers, kind)
    found = _combine(arrays, _combine(scalars, numbers))
    if found is None:
        raise TypeError("result_type: no values were given")
    return dtype_of(found)


def _of_number(value: Any) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    default = torch.get_default_dtype()
    if isinstance(value, float):
        return default
    if isinstance(value, complex):
        return default.to_complex()
    raise TypeError(f"result_type: {value!r} is neither an op nor a number")


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher
