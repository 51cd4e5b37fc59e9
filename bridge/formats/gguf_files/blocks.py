"""Elements as GGUF stores them, a few rows at a time: plain numbers, or quantized with a scale for every block.

The packed types are those of the gguf package (`gguf.quants`), which unpacks what llama.cpp packs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from easytorch.bridge.core.casting import CastOverflow, cast
from easytorch.bridge.core.interruptions import interruption_of
from easytorch.bridge.dtypes import numpy_dtype

# ggml's types that are one number per element, and what they are called here.
PLAIN = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
# What packed elements become.
UNPACKED = "float32"
# The largest scale of a block and the most steps of it, which are float16's and int8's.
_MOST_SCALE, _MOST_STEPS = 65504.0, 127
# Elements: unpacking takes several times its result in passing, which stays in a processor's cache so.
_AT_ONCE = 1 << 18


def can_unpack(kind: str) -> bool:
    """Whether the gguf package here unpacks ggml's type `kind`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    number = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), np.uint8), number)
    except NotImplementedError:
        return False
    return True


def unpack(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 elements, of `shape`, that stand packed in the bytes `raw`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    number = GGMLQuantizationType[kind]
    block, width = GGML_QUANT_SIZES[number]
    blocks = raw.reshape(-1, width)
    made = np.empty((len(blocks), block), numpy_dtype(UNPACKED))
    step = max(1, _AT_ONCE // block)
    for start in range(0, len(blocks), step):
        # A scale may be infinite or NaN in the file: the elements then are too.
        with np.errstate(invalid="ignore", over="ignore"):
            some = blocks[start : start + step]
            if kind == "Q8_0":
                _unpack_q8_0(some, made[start : start + step])
            else:
                made[start : start + step] = dequantize(some, number)
    return made.reshape(shape)


def _unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """The same values as `gguf.dequantize`, in one pass; a block is a float16 scale and 32 int8."""
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    np.multiply(blocks[:, 2:].view(np.int8), scales, out=out, dtype=np.float32)


def packed(array: np.ndarray, kind: str) -> Iterator[np.ndarray]:
    """The bytes of `array` (any floating type, perhaps strided) as elements of ggml's type `kind`, in pieces."""
    if kind in PLAIN:
        for piece in _pieces(array):
            yield _bytes(cast(piece, numpy_dtype(PLAIN[kind])))
        return
    from gguf import GGMLQuantizationType, quantize

    for piece in _pieces(array):
        rows = cast(piece, numpy_dtype(UNPACKED)).reshape(-1, array.shape[-1])
        largest = np.abs(rows, where=np.isfinite(rows), out=np.zeros_like(rows)).max(initial=0.0)
        if largest > _MOST_SCALE * _MOST_STEPS:
            raise CastOverflow(
                f"holds {largest:.4g}, and the largest {kind} is {_MOST_SCALE * _MOST_STEPS:.4g}; give another dtype, "
                "as bf16 or f32"
            )
        yield _bytes(quantize(np.ascontiguousarray(rows), GGMLQuantizationType[kind]))


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """`array` rounded to ggml's type `kind`: as it reads back after it was stored."""
    if kind in PLAIN:
        return cast(array, numpy_dtype(PLAIN[kind]))
    return unpack(np.concatenate(list(packed(array, kind))), kind, array.shape)


def stored_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """The bytes a tensor takes; its rows must be whole blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = 1
    for size in shape:
        count *= size
    return count // block * width


def block_length(kind: str) -> int:
    """How many elements of a row are packed together."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """`array` by its first dimension, a few rows at a time."""
    if array.ndim == 0 or array.size <= _AT_ONCE:
        yield array
    elif array.size // array.shape[0] > _AT_ONCE and array.ndim > 1:
        for row in array:
            yield from _pieces(row)
    else:
        step = max(1, _AT_ONCE * array.shape[0] // array.size)
        for start in range(0, array.shape[0], step):
            yield array[start : start + step]


def require_gguf() -> None:
    """An ImportError that says what to install, where the gguf package is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        if (interruption := interruption_of(error)) is not None:
            raise interruption from None
        raise ImportError("GGUF files need the gguf package: pip install gguf") from error
