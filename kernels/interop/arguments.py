"""Argument checks of every operation: which are tensors, on which device, which are numbers.

Cheap, since each call asks: nothing waits for a device. The numbers in a tensor are looked at only where they are at
hand, on the CPU and in no graph; kernels elsewhere must not read outside their tensors whatever those hold.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import eager

# What is computed in; float8 is a format of weights (quantized_matmul).
FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
LARGEST = torch.finfo(torch.float32).max  # a factor beyond it makes NaN of a zero

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_REAL = (float, int, torch.SymFloat, torch.SymInt)


def together(a: Any, b: Any) -> bool:
    """True for two tensors on one device."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return (a.is_cpu and b.is_cpu) or a.device == b.device  # a device is an object made at each asking, a flag is not


def floating(tensor: Tensor) -> bool:
    """True for a dtype that operations compute in."""
    return tensor.dtype in FLOATS


def check_tensors(operation: str, **tensors: Any) -> None:
    """`TypeError` for what is neither a tensor nor None, `ValueError` for a tensor not on the device of the first."""
    first = device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name} must be a torch.Tensor, got {described(tensor)}")
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"{operation}: {name} is on {tensor.device} and {first} on {device}; move them to one device"
            )


def check_dense(operation: str, **tensors: Tensor | None) -> None:
    """`ValueError` for a sparse tensor."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.layout in _SPARSE:
            raise ValueError(f"{operation}: {name} must be dense, got {tensor.layout}; give {name}.to_dense()")


def check_number(operation: str, name: str, value: Any, *, least: float | None = None) -> Any:
    """The number as Python's float, or `TypeError` for what is none, `ValueError` for NaN, for one below `least` and
    for an integer that no float holds. None is a number absent, and those of a graph are returned as they are."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, _REAL):
        value = _unwrapped(operation, name, value)
    # a number of a graph is compared when the graph runs, if at all
    if isinstance(value, float | int) and (value != value or (least is not None and value < least)):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{operation}: {name} must be a number{bound}, got {value}")
    if isinstance(value, int) and not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{operation}: {name} must be a number that a float holds, got an integer beyond 1e308")
    return float(value) if isinstance(value, float | int) else value


def check_scale(operation: str, name: str, scale: float | None) -> float | None:
    """A factor as Python's float, or an error where it is not a finite number; None is the default one."""
    scale = check_number(operation, name, scale)
    if scale is not None and not -LARGEST <= scale <= LARGEST:
        raise ValueError(f"{operation}: {name} must be finite in float32, got {scale}")
    return scale


def check_eps(operation: str, eps: float) -> None:
    """An error unless eps is a finite number of at least 0."""
    if type(eps) is float and 0.0 <= eps < math.inf:  # as it always is
        return
    check_number(operation, "eps", eps, least=0.0)
    if eps is None or eps == math.inf:
        raise ValueError(f"{operation}: eps must be a finite number of at least 0, got {eps}")


def _unwrapped(operation: str, name: str, value: Any) -> Any:
    """The number in one of NumPy's, which are not all Python's."""
    if isinstance(value, Tensor) and value.dim() == 0 and torch.jit.is_tracing():
        return value  # what torch.jit.trace makes of a size, and of what is computed from it
    number = hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0 and "bool" not in str(value.dtype)
    if isinstance(value, bool | Tensor) or not number:
        raise TypeError(f"{operation}: {name} must be a number, got {described(value)}")
    return value.item()


def is_integer(value: Any) -> TypeGuard[int]:
    """True for int, NumPy's integers and those of a graph; not for bool."""
    return not isinstance(value, bool) and (isinstance(value, int | torch.SymInt) or _is_numpy_integer(value))


def _is_numpy_integer(value: Any) -> bool:
    if isinstance(value, bool | Tensor) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) != 0:
        return False
    return str(getattr(value, "dtype", "int")).startswith(("int", "uint"))  # arrays of floats have an __index__ too


def python_integer(value: int) -> int:
    """A value that `is_integer` accepts as a Python int or a SymInt: NumPy's integers would wrap around."""
    return value if isinstance(value, int | torch.SymInt) else operator.index(value)


def check_integer(operation: str, name: str, value: Any) -> None:
    """`TypeError` for what is neither an integer nor None."""
    if value is not None and not is_integer(value):
        raise TypeError(f"{operation}: {name} must be an integer, got {described(value)}")


def check_int64(operation: str, name: str, value: Any) -> None:
    """`check_integer`, and `ValueError` for one that no element of a tensor can be."""
    check_integer(operation, name, value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{operation}: {name} must be an integer of 64 bits, got one of {value.bit_length()}")


def check_flag(operation: str, name: str, value: Any) -> None:
    """`TypeError` for what is not a bool: any string, even "no", would count as True. None is False."""
    if value is None or isinstance(value, bool | torch.SymBool) or (is_integer(value) and value in (0, 1)):
        return
    # NumPy's bool, and a tensor that a trace has made of one
    if str(getattr(value, "dtype", "")).endswith("bool") and math.prod(value.shape) == 1:
        return
    raise TypeError(f"{operation}: {name} must be True or False, got {described(value)}")


def bounds(tensor: Tensor) -> tuple[int, int] | None:
    """The least and the greatest of some integers; None where they are not at hand, or there are none."""
    if not tensor.is_cpu or tensor.numel() == 0 or not eager() or torch.jit.is_tracing():
        return None
    if tensor.numel() <= 16:  # ATen takes 3 us more
        numbers = tensor.reshape(-1).tolist()
        return min(numbers), max(numbers)
    least, greatest = tensor.aminmax()
    return int(least), int(greatest)


def described(value: Any) -> str:
    """A wrong value in a message: a number or a string as it is, of anything else its type."""
    plain = isinstance(value, bool | int | float | complex | str | tuple) and len(repr(value)) <= 60
    return repr(value) if plain or value is None else type(value).__name__
