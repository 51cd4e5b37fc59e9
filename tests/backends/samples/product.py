"""Products: dot, convolution, Fourier transforms, and the composite operations."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from backend_samples.make import FLOATS, NUMBERS, Sample, normal

from easytorch.backends.dtypes import COMPLEX, DType
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType


def _exact(dtype: DType) -> bool:
    return dtype.is_integer


def _dots() -> list[Sample]:
    found = []
    for dtype in NUMBERS:
        for left, right in (((3,), (3,)), ((2, 3), (3,)), ((2, 3), (3, 4))):
            found.append(
                Sample(
                    OpType.DOT,
                    f"{dtype}{list(left)}{list(right)}",
                    (normal(dtype, *left), normal(dtype, *right, seed=1)),
                    lambda b, x, y: b.dot(x, y),
                    lambda x, y: x @ y,
                    exact=_exact(dtype),
                    scaled=True,
                )
            )
    return found


_DOTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "batched": ((2, 3, 4), (2, 4, 5), ((2,), (0,), (1,), (0,))),
    "batch axes inside": ((3, 2, 4), (4, 5, 2), ((2,), (1,), (0,), (2,))),
    "two contracted": ((3, 4, 5), (5, 2, 3), ((0, 2), (), (2, 0), ())),
    "two batches": ((2, 3, 4), (3, 4, 2), ((2,), (0, 1), (1,), (2, 0))),
    "outer": ((2, 3), (4,), ((), (), (), ())),
    "nothing contracted but batched": ((2, 3), (2, 4), ((), (0,), (), (0,))),
    "empty contraction": ((2, 0), (0, 3), ((1,), (), (0,), ())),
    "empty": ((0, 2), (2, 3), ((1,), (), (0,), ())),
    "scalars": ((), (), ((), (), (), ())),
}


def _dot_generals() -> list[Sample]:
    found = []
    for name, (left, right, (lc, lb, rc, rb)) in _DOTS.items():
        for dtype in NUMBERS if name == "batch axes inside" else (DType.FLOAT32, DType.INT8, DType.BFLOAT16):

            def in_jax(x: Any, y: Any, numbers: Any = ((lc, rc), (lb, rb))) -> Any:
                from jax import lax

                return lax.dot_general(x, y, numbers)

            found.append(
                Sample(
                    OpType.DOT_GENERAL,
                    f"{name} {dtype}",
                    (normal(dtype, *left), normal(dtype, *right, seed=1)),
                    lambda b, x, y, axes=(lc, lb, rc, rb): b.dot_general(x, *axes[:2], y, *axes[2:]),
                    in_jax,
                    exact=_exact(dtype),
                    scaled=True,
                )
            )
    # Sixteen bits would stop growing at 256 (bfloat16) and 2048 (float16): sums are made in float32.
    for dtype in (DType.BFLOAT16, DType.FLOAT16):
        ones = np.ones((3000,), dtype.numpy)
        found.append(Sample(OpType.DOT, f"long {dtype}", (ones, ones), lambda b, x, y: b.dot(x, y), lambda x, y: x @ y))
    return found


def _channels_last(spatial: int) -> ConvolveAxesConfig:
    inner = tuple(range(1, spatial + 1))
    last = spatial + 1
    return ConvolveAxesConfig(0, last, inner, spatial, last, tuple(range(spatial)), 0, last, inner)


def _channels_first(spatial: int) -> ConvolveAxesConfig:
    inner = tuple(range(2, spatial + 2))
    return ConvolveAxesConfig(0, 1, inner, 1, 0, inner, 0, 1, inner)


_ODD = ConvolveAxesConfig(2, 0, (3, 1), 3, 1, (0, 2), 1, 3, (2, 0))
# operand, filter, axes, settings
_CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], ConvolveAxesConfig, dict[str, Any]]] = {
    "plain": ((2, 3, 5, 6), (4, 3, 2, 3), _channels_first(2), {}),
    "last": ((2, 5, 3), (2, 3, 4), _channels_last(1), {"strides": (2,)}),
    "odd axes": ((3, 5, 2, 4), (2, 4, 3, 3), _ODD, {"strides": (1, 2), "paddings": ((1, 0), (2, 1))}),
    "all": (
        (2, 4, 5, 6),
        (6, 2, 2, 3),
        _channels_first(2),
        {
            "strides": (2, 1),
            "paddings": ((1, 2), (0, 3)),
            "input_dilation": (2, 1),
            "filter_dilation": (1, 2),
            "filter_group_count": 2,
        },
    ),
    "depthwise": ((1, 3, 7), (6, 1, 3), _channels_first(1), {"filter_group_count": 3}),
    "batch groups": ((4, 3, 5), (6, 3, 2), _channels_first(1), {"batch_group_count": 2}),
    "cropped": ((1, 2, 6), (3, 2, 2), _channels_first(1), {"paddings": ((-1, -2),)}),
    "dilated and cropped": ((1, 2, 4), (3, 2, 2), _channels_first(1), {"paddings": ((-2, 1),), "input_dilation": (3,)}),
    "three axes": ((1, 2, 3, 4, 3), (2, 2, 2, 2, 2), _channels_first(3), {}),
    "no axes": ((3, 2), (4, 2), _channels_first(0), {}),
    "no place": ((1, 2, 2), (3, 2, 3), _channels_first(1), {}),
    "empty batch": ((0, 2, 4), (3, 2, 3), _channels_first(1), {}),
}


# Integers for what is laid out otherwise; everything once.
_CONVOLVED = {"all": NUMBERS, "batch groups": (DType.FLOAT32, DType.INT8), "cropped": (DType.INT8, DType.BFLOAT16)}


def _convolved(x: Any, kernel: Any, axes: ConvolveAxesConfig, setting: dict[str, Any]) -> Any:
    from jax import lax

    if x.dtype.kind in "iu":
        # Modulo 2**64 and so modulo any fewer bits: jax compiles it once.
        x, kernel = x.astype("int64"), kernel.astype("int64")
    count = len(axes.input_spatial)
    numbers = lax.ConvDimensionNumbers(
        (axes.input_batch, axes.input_channel, *axes.input_spatial),
        (axes.kernel_output_channel, axes.kernel_input_channel, *axes.kernel_spatial),
        (axes.output_batch, axes.output_channel, *axes.output_spatial),
    )
    return lax.conv_general_dilated(
        x,
        kernel,
        setting.get("strides", (1,) * count),
        setting.get("paddings", ((0, 0),) * count),
        setting.get("input_dilation"),
        setting.get("filter_dilation"),
        numbers,
        setting.get("filter_group_count", 1),
        setting.get("batch_group_count", 1),
    )


def _convolutions() -> list[Sample]:
    found = []
    for name, (left, right, axes, setting) in _CONVOLUTIONS.items():
        for dtype in _CONVOLVED.get(name, (DType.FLOAT32, DType.BFLOAT16)):
            found.append(
                Sample(
                    OpType.CONV_GENERAL_DILATED,
                    f"{name} {dtype}",
                    (normal(dtype, *left), normal(dtype, *right, seed=1)),
                    lambda b, x, y, a=axes, s=setting: b.conv_general_dilated(x, y, a, **s),
                    lambda x, y, a=axes, s=setting: _convolved(x, y, a, s),
                    exact=_exact(dtype),
                    scaled=True,
                )
            )
    return found


def _transforms() -> list[Sample]:
    def sample(kind: FFTType, dtype: DType, dims: tuple[int, ...], lengths: tuple[int, ...]) -> Sample:
        axes = tuple(range(-len(lengths), 0))
        name = {
            FFTType.FORWARD: "fftn",
            FFTType.INVERSE: "ifftn",
            FFTType.FORWARD_REAL: "rfftn",
            FFTType.INVERSE_REAL: "irfftn",
        }[kind]

        def in_jax(x: Any) -> Any:
            import jax.numpy as jnp

            return getattr(jnp.fft, name)(x, lengths, axes)

        return Sample(
            OpType.FFT,
            f"{kind} {dtype}{list(dims)} {lengths}",
            (normal(dtype, *dims),),
            lambda b, x: b.fft(x, kind, lengths),
            in_jax,
            scaled=True,
        )

    found = []
    for real, complex_ in ((DType.FLOAT32, DType.COMPLEX64), (DType.FLOAT64, DType.COMPLEX128)):
        for lengths in ((8,), (7,), (1,), (4, 5), (3, 4, 2)):
            half = (*lengths[:-1], lengths[-1] // 2 + 1)
            found.append(sample(FFTType.FORWARD, complex_, (2, *lengths), lengths))
            found.append(sample(FFTType.INVERSE, complex_, (2, *lengths), lengths))
            found.append(sample(FFTType.FORWARD_REAL, real, (2, *lengths), lengths))
            found.append(sample(FFTType.INVERSE_REAL, complex_, (2, *half), lengths))
    return found


def _softmax(x: Any, axis: int) -> Any:
    import jax

    return jax.nn.softmax(x, axis)


def _layer_norm(x: Any, scale: Any, offset: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    import jax.numpy as jnp

    sizes = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
    centered = x - jnp.mean(x, axes, keepdims=True)
    deviation = jnp.sqrt(jnp.var(x, axes, keepdims=True) + epsilon)
    return centered / deviation * scale.reshape(sizes) + offset.reshape(sizes)


def _attended(q: Any, k: Any, v: Any, mask: Any = None, *, is_causal: bool, scale: float | None) -> Any:
    import jax.numpy as jnp

    repeat = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, repeat, 1), jnp.repeat(v, repeat, 1)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    allowed = jnp.ones(scores.shape, bool)
    if is_causal:
        allowed &= jnp.arange(q.shape[2])[:, None] >= jnp.arange(k.shape[2])
    if mask is not None:
        allowed, scores = (allowed & mask, scores) if mask.dtype == bool else (allowed, scores + mask)
    powers = jnp.where(allowed, jnp.exp(scores), 0)
    total = powers.sum(3, keepdims=True)
    return jnp.einsum("bhts,bhsd->bhtd", powers / jnp.where(total == 0, 1, total), v)


def _composites() -> list[Sample]:
    found = []
    for dtype in FLOATS:
        for dims, axis in (((3, 4), 1), ((3, 4), 0), ((2, 3, 2), 1)):
            found.append(
                Sample(
                    OpType.SOFTMAX,
                    f"{dtype}{list(dims)} along {axis}",
                    (normal(dtype, *dims) * np.array(4, dtype.numpy),),
                    lambda b, x, axis=axis: b.softmax(x, axis),
                    lambda x, axis=axis: _softmax(x, axis),
                    scaled=True,
                )
            )
        for axes in ((1,), (0,), (1, 2)):
            sizes = [(3, 4, 5)[axis] for axis in axes]
            found.append(
                Sample(
                    OpType.LAYER_NORM,
                    f"{dtype} over {axes}",
                    (normal(dtype, 3, 4, 5), normal(dtype, *sizes, seed=1), normal(dtype, *sizes, seed=2)),
                    lambda b, *x, axes=axes: b.layer_norm(*x, axes, 1e-2),
                    lambda *x, axes=axes: _layer_norm(*x, axes, 1e-2),
                    scaled=True,
                )
            )
    large = np.array([[1000, 1001, 999], [-1000, 0, 1000]], np.float32)
    found.append(
        Sample(OpType.SOFTMAX, "large", (large,), lambda b, x: b.softmax(x, 1), lambda x: _softmax(x, 1), scaled=True)
    )
    return found


def _attentions() -> list[Sample]:
    found = []
    masks: dict[str, np.ndarray | None] = {
        "": None,
        " bool mask": normal(DType.BOOL, 3, 4),
        " wide mask": normal(DType.BOOL, 2, 1, 3, 4),
        " row of nothing": np.array([[True] * 4, [False] * 4, [True, False] * 2]),
        " added": normal(DType.FLOAT32, 1, 4, 3, 4),
    }
    for dtype, (name, mask), causal in itertools.product(FLOATS, masks.items(), (False, True)):
        if dtype is not DType.FLOAT32 and name not in ("", " added"):
            continue
        scale = 0.25 if causal else None
        inputs = (normal(dtype, 2, 4, 3, 5), normal(dtype, 2, 2, 4, 5, seed=1), normal(dtype, 2, 2, 4, 6, seed=2))
        more = () if mask is None else (mask if mask.dtype == bool else mask.astype(dtype.numpy),)
        found.append(
            Sample(
                OpType.SCALED_DOT_PRODUCT_ATTENTION,
                f"{dtype}{name}{' causal' * causal}",
                (*inputs, *more),
                lambda b, *x, c=causal, s=scale: b.scaled_dot_product_attention(*x, is_causal=c, scale=s),
                lambda *x, c=causal, s=scale: _attended(*x, is_causal=c, scale=s),
                scaled=True,
            )
        )
    return found


def _triangular() -> list[Sample]:
    found = []
    flags = list(itertools.product((False, True), repeat=4))
    for dtype in (*FLOATS, *COMPLEX):
        for left, lower, unit, adjoint in flags if dtype in (DType.FLOAT32, DType.COMPLEX128) else flags[:3]:
            # Far from singular, with what is not to be read set to NaN.
            a = np.array(normal(dtype, 2, 4, 4).astype(np.complex128 if dtype.is_complex else np.float64)) / 4
            a[:, range(4), range(4)] = np.nan if unit else a[:, range(4), range(4)] + 2
            rows, columns = np.indices((4, 4))
            a[:, rows < columns if lower else rows > columns] = np.nan
            found.append(
                Sample(
                    OpType.TRIANGULAR_SOLVE,
                    f"{dtype}{' left' * left}{' lower' * lower}{' unit' * unit}{' adjoint' * adjoint}",
                    (a.astype(dtype.numpy), normal(dtype, 2, *((4, 3) if left else (3, 4)), seed=1)),
                    lambda b, x, y, f=(left, lower, unit, adjoint): b.triangular_solve(x, y, *f),
                    host=lambda x, y, f=(left, lower, unit, adjoint): _solved(x, y, *f),
                    scaled=True,
                )
            )
    return found


def _solved(a: np.ndarray, b: np.ndarray, left: bool, lower: bool, unit: bool, adjoint: bool) -> np.ndarray:
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    matrix = (np.tril if lower else np.triu)(np.where(np.isnan(a), 0, a.astype(wide)))
    if unit:
        matrix[:, range(4), range(4)] = 1
    if adjoint:
        matrix = matrix.conj().swapaxes(1, 2)
    inverse, given = np.linalg.inv(matrix), b.astype(wide)
    return (inverse @ given if left else given @ inverse).astype(b.dtype)


def samples() -> list[Sample]:
    """All of this file."""
    return [
        *_dots(),
        *_dot_generals(),
        *_convolutions(),
        *_transforms(),
        *_composites(),
        *_attentions(),
        *_triangular(),
    ]
