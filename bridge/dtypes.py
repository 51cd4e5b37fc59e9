"""Element types under one name each, numpy's (or ml_dtypes'), and their names in the formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

# Canonical name (also torch's and Flax's) -> safetensors code, in the order safetensors' own writer stores them.
SAFETENSORS_CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
NAMES_OF_CODES = {code: name for name, code in SAFETENSORS_CODES.items()}
# Types that only Flax stores; numpy and Flax keep a 4-bit element in a byte.
_ONLY_FLAX = ("complex128", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "int4", "uint4")
_NUMPY = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*SAFETENSORS_CODES, *_ONLY_FLAX)}
FLOATING = frozenset(name for name in _NUMPY if "float" in name)
ALIASES = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def is_dtype(name: str) -> bool:
    """True for the canonical name of an element type that tensors may have here."""
    return name in _NUMPY


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name that `is_dtype` knows; `KeyError` for any other."""
    return _NUMPY[name]


def floating_dtype(name: str) -> str:
    """The canonical name of a floating element type given as the user writes it (`bf16`, `float32`, ...)."""
    canonical = ALIASES.get(name, name)
    if canonical not in FLOATING:
        accepted = ", ".join(sorted({*FLOATING, *ALIASES}))
        raise ValueError(f"dtype {name!r} is not a floating point type; accepted: {accepted}")
    return canonical


def _numpy_own(dtype: np.dtype) -> bool:
    return dtype.type.__module__ == "numpy"


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view of a CPU tensor (copied to the CPU otherwise) with every element type kept, bfloat16 and fp8 included."""
    import torch

    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _NUMPY:
        raise ValueError(f"torch dtype {tensor.dtype} has no numpy counterpart")
    if _numpy_own(_NUMPY[name]):
        return tensor.resolve_conj().resolve_neg().numpy()
    raw = {1: torch.uint8, 2: torch.int16}[tensor.itemsize]
    return tensor.view(raw).numpy().view(_NUMPY[name])


def torch_stores(name: str) -> bool:
    """Whether torch can store the element type; its 4-bit dtypes exist only as names."""
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype) and name not in ("int4", "uint4")


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor that shares memory where the array is C-contiguous, aligned and writable; a copy otherwise."""
    import torch

    array = np.require(array, requirements=("C", "A", "W"))
    name = array.dtype.name
    if not torch_stores(name):
        raise ValueError(f"torch has no element type {name!r}")
    if _numpy_own(array.dtype):
        return torch.from_numpy(array)
    raw = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
    return torch.from_numpy(array.view(raw)).view(getattr(torch, name))
