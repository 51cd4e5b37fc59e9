"""Arguments of wrong types, of every public method: a `BackendError`, or what they plainly mean."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends import BackendError, FFTType, PadAxis, ReduceOpType, make_shape
from easytorch.backends.shapeinference.rule import require_dtype
from easytorch.backends.types import OP_TYPES, ConvolveAxesConfig, OpType

NAMES = ("numpy", "torch", "xla")
SCALARS = [
    getattr(np, name)(1)
    for name in (
        *("int8", "int16", "int32", "int64", "longlong", "uint8", "uint16", "uint32", "uint64", "ulonglong"),
        *("float16", "float32", "float64", "longdouble", "complex64", "bool_"),
    )
]
WRONG: list[Any] = [
    *(None, "0", "", b"1", 1.0, 2.5, -1, 2**31, 2**62, 2**64, -(2**63), True, 1j, float("nan"), [], (), {}, set()),
    *([None], ["0"], [[1]], [1.5], [2**62, 2**62], (-1, 1), {"a": 1}, object(), int, np.float32, "float32", "no type"),
    *(np.zeros(2), np.zeros(()), np.zeros((2, 2), object), np.array(["a"]), range(2), (i for i in range(2))),
    *(FFTType.INVERSE, ReduceOpType.MAX, OpType.ADD, PadAxis(1, 1), make_shape("float32", 2), lambda *x: None),
    *SCALARS,
]
CLOSURES = (OpType.CALL, OpType.COND, OpType.WHILE_LOOP, OpType.SORT, OpType.SELECT_AND_SCATTER)


def right(b: backends.Builder) -> dict[str, Any]:
    """What a method's argument of each name may be; wrong ones take the place of one at a time."""
    x = b.parameter(f"x{len(b.graph.parameters)}", make_shape("float32", 2, 2))
    i = b.constant(np.int32(0))
    ints = dict.fromkeys(("axis", "iota_axis", "index_vector_axis", "split_axis", "concat_axis"), 0)
    lists = (
        "starts",
        "limits",
        "slice_dims",
        "broadcast_axes",
        "axes",
        "window_dimensions",
        "fft_length",
        "dimensions",
    )
    return {
        **ints,
        **dict.fromkeys(lists, (1, 1)),
        "output_shape": make_shape("float32", 2, 2),
        "shape": make_shape("float32", 2, 2),
        "start_indices": (i, i),
        "dtype": "int32",
        "target_dtype": "int32",
        "output_dtype": "int32",
        "fft_type": FFTType.FORWARD,
        "reduction_type": ReduceOpType.SUM,
        "epsilon": 0.1,
        "exponent_bits": 5,
        "mantissa_bits": 3,
        "operand": x,
        **dict.fromkeys(("x", "x0", "x1", "a", "b", "lhs", "rhs", "source", "update", "updates"), x),
    }


def attempt(call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except BackendError:
        pass
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("op_type", OP_TYPES, ids=str)
def test_of_operations(op_type: OpType) -> None:
    seed = 0
    source = random.Random(f"{seed} {op_type}")
    backend = backends.new("numpy")
    method = getattr(backends.Builder, op_type.method)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    for number in range(len(parameters) * len(WRONG)):
        place, wrong = divmod(number, len(WRONG))
        b = backend.builder("wrong")
        known = right(b)
        given: list[Any] = []
        for index, parameter in enumerate(parameters):
            value = known.get(parameter.name, source.choice(WRONG) if number % 3 == 0 else known["x"])
            given.append(WRONG[wrong] if index == place else value)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL and source.random() < 0.3:
                given.append(source.choice(WRONG))
        # A closure that raises raises its own.
        if any(isinstance(one, type) for one in given) and op_type in CLOSURES:
            continue
        attempt(lambda b=b, given=given: getattr(b, op_type.method)(*given), f"seed {seed}: {op_type}({given})")


@pytest.mark.parametrize("name", NAMES)
def test_of_backends(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    b = backend.builder("right")
    x = b.parameter("x", make_shape("float32", 2))
    executable = b.compile(b.add(x, x))
    buffer = backend.buffer_from_numpy(np.ones(2, np.float32))
    shape = make_shape("float32", 2)
    for wrong in WRONG:
        calls: dict[str, Callable[[], Any]] = {
            "execute": lambda w=wrong: executable.execute(w),
            "execute [x]": lambda w=wrong: executable.execute([w]),
            "donate": lambda w=wrong: executable.execute([buffer], w),
            "donate [x]": lambda w=wrong: executable.execute([backend.buffer_from_numpy(np.ones(2, "f4"))], [w]),
            "builder": lambda w=wrong: backend.builder(w),
            "num_devices": lambda w=wrong: backend.builder("b", w),
            "buffer_finalize": lambda w=wrong: backend.buffer_finalize(w),
            "buffer_shape": lambda w=wrong: backend.buffer_shape(w),
            "buffer_device_num": lambda w=wrong: backend.buffer_device_num(w),
            "buffer_to_flat_data": lambda w=wrong: backend.buffer_to_flat_data(w, np.ones(2, "f4")),
            "flat": lambda w=wrong: backend.buffer_to_flat_data(buffer, w),
            "buffer_from_flat_data": lambda w=wrong: backend.buffer_from_flat_data(0, w, shape),
            "its shape": lambda w=wrong: backend.buffer_from_flat_data(0, np.ones(2, "f4"), w),
            "its device": lambda w=wrong: backend.buffer_from_flat_data(w, np.ones(2, "f4"), shape),
            "new_shared_buffer": lambda w=wrong: backend.new_shared_buffer(0, w),
            "its device, shared": lambda w=wrong: backend.new_shared_buffer(w, shape),
            "buffer_data": lambda w=wrong: backend.buffer_data(w),
            "buffer_from_numpy": lambda w=wrong: backend.buffer_from_numpy(w),
            "device": lambda w=wrong: backend.buffer_from_numpy(np.ones(2), w),
            "buffer_to_numpy": lambda w=wrong: backend.buffer_to_numpy(w),
            "buffer_from_torch": lambda w=wrong: backend.buffer_from_torch(w),
            "buffer_to_torch": lambda w=wrong: backend.buffer_to_torch(w),
            "parameter": lambda w=wrong: backend.builder("b").parameter(w, shape),
            "parameter's shape": lambda w=wrong: backend.builder("b").parameter("p", w),
            "constant": lambda w=wrong: backend.builder("b").constant(w),
            "constant's dimensions": lambda w=wrong: backend.builder("b").constant(1.0, w),
            "compile": lambda w=wrong: backend.builder("b").compile(w),
            "op_shape": lambda w=wrong: backend.builder("b").op_shape(w),
            "make_shape": lambda w=wrong: make_shape(w, 2),
            "its dimensions": lambda w=wrong: make_shape("float32", w),
            "Shape": lambda w=wrong: backends.Shape(backends.DType.INT8, w),
            "new": lambda w=wrong: backends.new(f"{name}:{w}") if w is not None else None,
            "new_with_config": lambda w=wrong: backends.new_with_config(w),
            "register": lambda w=wrong: backends.register(name, w) if not callable(w) else None,
            "op_type_string": lambda w=wrong: backends.op_type_string(w),
            "PadAxis": lambda w=wrong: PadAxis(0, w),
            "ConvolveAxesConfig": lambda w=wrong: ConvolveAxesConfig(0, 1, w, 0, 1, (), 0, w, ()),
        }
        for what, call in calls.items():
            attempt(call, f"{name}: {what} {wrong!r}")


@pytest.mark.parametrize("name", NAMES)
def test_types_that_are_the_same(name: str, backend_of: Callable[[str], Any]) -> None:
    """numpy has two types of 64 bits that C calls otherwise, and arrays of the other byte order."""
    backend = backend_of(name)
    for dtype in ("longlong", "ulonglong", ">f4", ">i8"):
        array = np.arange(3).astype(dtype)
        buffer = backend.buffer_from_numpy(array)
        np.testing.assert_array_equal(backend.buffer_to_numpy(buffer), np.arange(3))
        assert backend.buffer_shape(buffer) == make_shape(np.dtype(dtype), 3)
        b = backend.builder("constant")
        (found,) = b.compile(b.neg(b.constant(array))).execute([])
        np.testing.assert_array_equal(backend.buffer_to_numpy(found), -array)
    assert make_shape(np.ulonglong, 1).dtype is backends.DType.UINT64


@pytest.mark.parametrize("given", [None, "", np.float32(1), np.zeros(2), "float128", object, 4, ["float32"]])
def test_what_is_no_element_type(given: Any) -> None:
    with pytest.raises(BackendError, match="no element type"):
        make_shape(given, 1)


def test_members_of_other_enumerations() -> None:
    b = backends.new("numpy").builder("enumerations")
    x = b.parameter("x", make_shape("float32", 2))
    with pytest.raises(BackendError, match=r"ReduceOpType\.SUM"):
        b.reduce_window(x, FFTType.INVERSE, (1,))
    with pytest.raises(BackendError, match=r"FFTType\.FORWARD"):
        b.fft(x, ReduceOpType.SUM, (2,))
    assert b.op_shape(b.reduce_window(x, 1, (2,))).dimensions == (1,)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="int8 is not accepted: bool"):
        require_dtype(make_shape("int8"), (backends.DType.BOOL,), "bool")
