"""Operations that lay out elements anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from backend_samples.make import FEW, Sample, normal, over

from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import make_shape
from easytorch.backends.types import OpType, PadAxis

Build = Callable[..., Any]


def _all(op_type: OpType, name: str, dims: tuple[int, ...], build: Build, host: Build) -> list[Sample]:
    """One use for every type, the others for a few."""
    dtypes = tuple(DType) if name == "plain" else (DType.INT4, DType.BFLOAT16)
    return over(
        op_type,
        dtypes,
        lambda dtype: Sample(op_type, f"{name} {dtype}", (normal(dtype, *dims),), build, host=host, exact=True),
    )


def _pads(x: np.ndarray, fill: np.ndarray, pads: tuple[PadAxis, ...]) -> np.ndarray:
    """Element by element."""
    pads = (*pads, *(PadAxis() for _ in range(x.ndim - len(pads))))
    sizes = [n + max(n - 1, 0) * p.interior + p.start + p.end for n, p in zip(x.shape, pads, strict=True)]
    result = np.full(sizes, fill, x.dtype)
    for index in np.ndindex(*x.shape):
        place = tuple(p.start + i * (p.interior + 1) for i, p in zip(index, pads, strict=True))
        if all(0 <= i < n for i, n in zip(place, sizes, strict=True)):
            result[place] = x[index]
    return result


def _pad() -> list[Sample]:
    settings = {
        "plain": ((2, 3), (PadAxis(1, 2, 1), PadAxis(0, 1, 2))),
        "no settings": ((2, 3), ()),
        "one axis of two": ((2, 3), (PadAxis(1, 0),)),
        "cropped": ((4, 5), (PadAxis(-1, -2), PadAxis(-2, 3))),
        "cropped between": ((4, 3), (PadAxis(-2, 1, 1), PadAxis(-1, -3, 2))),
        "cropped to nothing": ((3, 2), (PadAxis(-2, -1), PadAxis())),
        "empty": ((0, 2), (PadAxis(1, 2, 3), PadAxis())),
        "scalar": ((), ()),
    }
    found = []
    for name, (dims, pads) in settings.items():
        for dtype in DType if name == "plain" else (DType.INT4, DType.BFLOAT16):
            found.append(
                Sample(
                    OpType.PAD,
                    f"{name} {dtype}",
                    (normal(dtype, *dims), normal(dtype, seed=1)),
                    lambda b, x, fill, pads=pads: b.pad(x, fill, *pads),
                    host=lambda x, fill, pads=pads: _pads(x, fill, pads),
                    exact=True,
                )
            )
    return found


def _iota() -> list[Sample]:
    found = []
    for dtype, (dims, axis) in itertools.product(DType, (((3, 4), 0), ((3, 4), 1), ((7,), 0), ((2, 0), 1))):
        if dtype is DType.BOOL:
            continue
        count = np.arange(dims[axis]).astype(np.int8).astype(dtype.numpy)
        wanted = np.broadcast_to(count.reshape([-1 if a == axis else 1 for a in range(len(dims))]), dims)
        found.append(
            Sample(
                OpType.IOTA,
                f"{dtype}{list(dims)} along {axis}",
                (),
                lambda b, dtype=dtype, dims=dims, axis=axis: b.iota(make_shape(dtype, dims), axis),
                host=lambda wanted=wanted: wanted,
                exact=True,
            )
        )
    return found


def _concatenate() -> list[Sample]:
    def sample(dtype: DType, axis: int, *dims: tuple[int, ...]) -> Sample:
        return Sample(
            OpType.CONCATENATE,
            f"{dtype} {len(dims)} along {axis}",
            tuple(normal(dtype, *sizes, seed=seed) for seed, sizes in enumerate(dims)),
            lambda b, *x: b.concatenate(axis, *x),
            host=lambda *x: np.concatenate(x, axis),
            exact=True,
        )

    found = over(OpType.CONCATENATE, tuple(DType), lambda dtype: sample(dtype, 1, (2, 3), (2, 1)))
    return [*found, sample(DType.INT4, 0, (2, 3)), sample(DType.FLOAT32, 0, (0, 3), (2, 3), (0, 3), (4, 3))]


def _dynamic() -> list[Sample]:
    """Starts inside, before the beginning and beyond the end, of several integer types."""
    found = []
    starts = [(1, 2), (-5, 0), (9, 9), (0, -1)]
    for dtype, index_type in itertools.product(FEW, (DType.INT32,)):
        for start in starts:
            found += _dynamic_pair(dtype, index_type, start)
    for index_type in (DType.INT8, DType.INT64, DType.UINT8, DType.UINT32, DType.UINT64):
        found += _dynamic_pair(DType.FLOAT32, index_type, (1, 9))
    found += _dynamic_pair(DType.FLOAT32, DType.UINT64, (2**64 - 1, 2**63))
    found += _dynamic_pair(DType.FLOAT32, DType.INT64, (-(2**63), 2**63 - 1))
    return found


def _clamped(x: np.ndarray, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    firsts = [min(max(int(s), 0), full - n) for s, full, n in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(first, first + n) for first, n in zip(firsts, sizes, strict=True))


def _written(x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    result = x.copy()
    result[_clamped(x, starts, update.shape)] = update
    return result


def _dynamic_pair(dtype: DType, index_type: DType, start: tuple[int, int]) -> list[Sample]:
    x, update = normal(dtype, 4, 5), normal(dtype, 2, 3, seed=1)
    starts = tuple(np.array(one, index_type.numpy) for one in start)
    name = f"{dtype} at {index_type}{list(start)}"
    return [
        Sample(
            OpType.DYNAMIC_SLICE,
            name,
            (x, *starts),
            lambda b, x, *s: b.dynamic_slice(x, s, (2, 3)),
            host=lambda x, *s: x[_clamped(x, s, (2, 3))],
            exact=True,
        ),
        Sample(
            OpType.DYNAMIC_UPDATE_SLICE,
            name,
            (x, update, *starts),
            lambda b, x, update, *s: b.dynamic_update_slice(x, update, s),
            host=_written,
            exact=True,
        ),
    ]


def _constants() -> list[Sample]:
    found = []
    for dtype, dims in itertools.product(DType, ((), (2, 3), (0, 2))):
        value = normal(dtype, *dims)
        found.append(
            Sample(
                OpType.CONSTANT,
                f"{dtype}{list(dims)}",
                (),
                lambda b, value=value: b.constant(value),
                host=lambda value=value: value,
                exact=True,
            )
        )
    return found


def samples() -> list[Sample]:
    """All of this file."""
    shape = OpType.BROADCAST_IN_DIM
    return [
        *_all(OpType.RESHAPE, "plain", (2, 3), lambda b, x: b.reshape(x, 3, 2), lambda x: x.reshape(3, 2)),
        *_all(OpType.RESHAPE, "to a scalar", (1, 1), lambda b, x: b.reshape(x), lambda x: x.reshape(())),
        *_all(OpType.RESHAPE, "of nothing", (0, 3), lambda b, x: b.reshape(x, (5, 0)), lambda x: x.reshape(5, 0)),
        *_all(OpType.TRANSPOSE, "plain", (2, 3), lambda b, x: b.transpose(x, 1, 0), lambda x: x.T),
        *_all(
            OpType.TRANSPOSE,
            "four axes",
            (2, 3, 1, 4),
            lambda b, x: b.transpose(x, (3, 0, 2, 1)),
            lambda x: np.transpose(x, (3, 0, 2, 1)),
        ),
        *_all(OpType.TRANSPOSE, "scalar", (), lambda b, x: b.transpose(x), lambda x: x),
        *_all(OpType.BROADCAST, "plain", (3,), lambda b, x: b.broadcast(x, 2, 4), lambda x: np.tile(x, (2, 4, 1))),
        *_all(OpType.BROADCAST, "by nothing", (3,), lambda b, x: b.broadcast(x), lambda x: x),
        *_all(OpType.BROADCAST, "empty", (), lambda b, x: b.broadcast(x, 0, 2), lambda x: np.zeros((0, 2), x.dtype)),
        *_all(
            shape,
            "plain",
            (3, 1),
            lambda b, x: b.broadcast_in_dim(x, make_shape(b.op_shape(x).dtype, 3, 2, 4), (0, 2)),
            lambda x: np.repeat(np.repeat(x.reshape(3, 1, 1), 2, 1), 4, 2),
        ),
        *_all(
            shape,
            "scalar",
            (),
            lambda b, x: b.broadcast_in_dim(x, make_shape(b.op_shape(x).dtype, 2, 2), ()),
            lambda x: np.full((2, 2), x),
        ),
        *_all(OpType.SLICE, "plain", (4, 5), lambda b, x: b.slice(x, (1, 0), (3, 5), (1, 2)), lambda x: x[1:3, 0:5:2]),
        *_all(OpType.SLICE, "of nothing", (4,), lambda b, x: b.slice(x, (2,), (2,)), lambda x: x[2:2]),
        *_all(OpType.SLICE, "scalar", (), lambda b, x: b.slice(x, (), ()), lambda x: x),
        *_all(OpType.REVERSE, "plain", (3, 2), lambda b, x: b.reverse(x, 0, 1), lambda x: x[::-1, ::-1]),
        *_all(OpType.REVERSE, "one axis", (3, 2), lambda b, x: b.reverse(x, 1), lambda x: x[:, ::-1]),
        *_all(OpType.REVERSE, "no axis", (3, 2), lambda b, x: b.reverse(x), lambda x: x),
        *_all(OpType.PARAMETER, "plain", (2, 3), lambda b, x: x, lambda x: x),
        *_constants(),
        *_pad(),
        *_iota(),
        *_concatenate(),
        *_dynamic(),
    ]
