"""Every overload that torch tags as core ATen has a lowering, whose values are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from easytorch import frontend
from easytorch.frontend.routing import backend_of
from scripts.frontend_opinfo import core_overloads, run_functional

aten = torch.ops.aten
nan, inf = float("nan"), float("inf")
# Each draws a tensor from the generator that its case is given.
Draw = Callable[[torch.Generator], torch.Tensor]


def f(*sizes: int, dtype: torch.dtype = torch.float32) -> Draw:
    return lambda g: torch.randn(sizes, generator=g).to(dtype)


def positive(*sizes: int) -> Draw:
    return lambda g: torch.rand(sizes, generator=g) + 0.5


def unit(*sizes: int) -> Draw:
    return lambda g: torch.rand(sizes, generator=g) * 1.8 - 0.9


def i(*sizes: int, low: int = -9, high: int = 9, dtype: torch.dtype = torch.int64) -> Draw:
    return lambda g: torch.randint(low, high, sizes, generator=g).to(dtype)


def mask(*sizes: int) -> Draw:
    return lambda g: torch.rand(sizes, generator=g) > 0.5


def given(*values: float, dtype: torch.dtype | None = None) -> Draw:
    return lambda g: torch.tensor(values, dtype=dtype)


X, Y = f(3, 4), f(3, 4)
IMAGE, VOLUME = f(2, 3, 7, 6), f(1, 2, 5, 6, 4)
SPECIAL = given(nan, inf, -inf, 0.0, -0.0, 1.5, -2.5)
EMBEDDING = f(10, 4)

# (arguments, keywords) for each, and more than one where a variant matters.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "_adaptive_avg_pool2d.default": [(IMAGE, [3, 4])],
    "_adaptive_avg_pool2d_backward.default": [(f(2, 3, 3, 4), IMAGE)],
    "_adaptive_avg_pool3d.default": [(VOLUME, [2, 3, 4])],
    "_cdist_forward.default": [(f(2, 3, 5), f(4, 5), p, None) for p in (0.0, 1.0, 2.0, 3.0, inf)],
    "_embedding_bag.default": [
        *((EMBEDDING, i(6, low=0), given(0, 2, 2), False, mode) for mode in (0, 1, 2)),
        (EMBEDDING, i(4, low=0), given(0, 2, 4), False, 0, False, f(4), True, 3),
    ],
    "_fft_c2r.default": [(f(3, 4, dtype=torch.complex64), [0, 1], 2, 6)],
    "_fft_r2c.default": [(X, [0, 1], 0, True), (X, [1], 1, False)],
    "_log_softmax.default": [(X, 1, False)],
    "_native_batch_norm_legit.default": [(IMAGE, f(3), f(3), f(3), positive(3), True, 0.1, 1e-5)],
    "_native_batch_norm_legit.no_stats": [(IMAGE, f(3), None, True, 0.1, 1e-5)],
    "_native_batch_norm_legit_no_training.default": [(IMAGE, f(3), f(3), f(3), positive(3), 0.1, 1e-5)],
    "_pdist_forward.default": [(f(4, 3), 2.0), (f(4, 3), 0.0)],
    "_softmax.default": [(X, 0, False)],
    "_to_copy.default": [(f(3), {"dtype": torch.float64}), (given(1.7, -1.7), {"dtype": torch.int64})],
    "adaptive_avg_pool1d.default": [(f(2, 3, 7), [3])],
    "add.Tensor": [(X, f(4)), (i(3), f(3), {"alpha": 2}), (mask(4), mask(4))],
    "add.Scalar": [(X, 2), (i(3), 1.5, 2)],
    "addmm.default": [(f(5), f(3, 4), f(4, 5)), (f(3, 5), f(3, 4), f(4, 5), {"beta": 0.5, "alpha": 2})],
    "amax.default": [(X, [1]), (X, [], True), (given(1.0, nan), [0])],
    "amin.default": [(X, [0, 1]), (i(3, 4), [1], True)],
    "any.default": [(mask(3, 4),), (given(0.0, nan),)],
    "any.dim": [(X, 1, True), (i(3, 4, dtype=torch.uint8, low=0, high=2), 0)],
    "any.dims": [(mask(2, 3, 4), [0, 2])],
    "arange.start_step": [(1, 10, 3), (0.5, 2, 0.25)],
    "argmax.default": [(X,), (X, 1, True), (given(1.0, nan, 3.0),)],
    "argmin.default": [(i(3, 4, high=-5), 1), (X, None, True)],
    "as_strided.default": [(X, [2, 2], [1, 2], 1)],
    "atan2.default": [(X, Y), (i(3), i(3))],
    "atan2.out": [(X, Y, {"out": f(3, 4)})],
    "avg_pool1d.default": [(f(2, 3, 7), [3], [2], [1], True, False)],
    "avg_pool2d.default": [(IMAGE, [3, 2], [2, 2], [1, 1], True, False), (IMAGE, [2, 2], [], [0, 0], False, True, 3)],
    "avg_pool2d_backward.default": [(f(2, 3, 4, 4), IMAGE, [3, 2], [2, 2], [1, 1], True, True, None)],
    "avg_pool3d.default": [(VOLUME, [2, 3, 2], [2, 2, 1], [1, 1, 0])],
    "bitwise_not.default": [(i(4),), (mask(4),)],
    "cat.default": [([f(2, 3), f(1, 3), f(0)],), ([f(2, 1), i(2, 2)], -1)],
    "clamp.default": [(SPECIAL, -1, 2), (i(4), None, 1.5)],
    "clamp.Tensor": [(X, f(4), None), (X, f(4), f(3, 1))],
    "col2im.default": [(f(2, 12, 12), [5, 6], [2, 2], [1, 2], [0, 1], [2, 1])],
    "constant_pad_nd.default": [(X, [1, -1, 2, 0], 3.5)],
    "convolution.default": [
        (IMAGE, f(4, 3, 3, 2), f(4), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
        (f(2, 4, 9), f(6, 2, 3), None, [1], [1], [2], False, [0], 2),
        (f(2, 4, 5, 4), f(4, 3, 3, 2), f(6), [2, 1], [1, 1], [1, 2], True, [1, 0], 2),
        (VOLUME, f(3, 2, 2, 3, 2), None, [1, 1, 1], [0, 1, 0], [1, 1, 1], False, [0, 0, 0], 1),
    ],
    "convolution_backward.default": [
        (f(2, 4, 4, 5), IMAGE, f(4, 3, 3, 2), [4], [2, 1], [1, 0], [1, 1], False, [0, 0], 1, [True, True, True]),
        (f(2, 6, 7), f(2, 4, 9), f(6, 2, 3), [6], [1], [1], [2], False, [0], 2, [True, True, False]),
        (f(2, 6, 10), f(2, 4, 5), f(4, 3, 3), [6], [2], [1], [1], True, [1], 2, [True, True, True]),
    ],
    "copy.default": [(X, f(4, dtype=torch.float64))],
    "cumsum.default": [(X, 1), (i(3, 5), 0, {"dtype": torch.float32}), (mask(7), 0)],
    "diagonal.default": [(f(2, 3, 4), 1, -2, -1), (X, -1)],
    "div.Scalar": [(i(4), 2)],
    "div.Scalar_mode": [(i(9), 4, {"rounding_mode": mode}) for mode in ("floor", "trunc", None)],
    "div.Tensor": [(X, Y), (i(4), given(1, 2, 3, 0))],
    "div.Tensor_mode": [(SPECIAL, given(2.0, 3.0, 2.0, 1.0, 3.0, -1.0, 2.0), {"rounding_mode": "floor"})],
    "elu.default": [(X, 1.5, 1.1, 0.5)],
    "embedding.default": [(EMBEDDING, i(2, 3, low=0))],
    "embedding_dense_backward.default": [
        (f(2, 3, 4), i(2, 3, low=0), 10, 2, True),
        (f(5, 4), i(5, low=0), 10, -1, False),
    ],
    "empty.memory_format": [([2, 3],)],
    "empty_strided.default": [([2, 3], [1, 2])],
    "expand.default": [(f(3, 1), [2, -1, 4])],
    "fill.Scalar": [(i(3), 2.7)],
    "flip.default": [(f(2, 3, 4), [0, -1])],
    "fmod.Scalar": [(i(9), 4), (SPECIAL, 0.0)],
    "fmod.Tensor": [(f(9), f(9))],
    "full.default": [([2, 3], 7), ([], True)],
    "full_like.default": [(X, 2), (X, 2, {"dtype": torch.int64})],
    "gather.default": [(X, 1, i(2, 3, low=0, high=4))],
    "gelu.default": [(X,), (X, {"approximate": "tanh"})],
    "grid_sampler_2d.default": [
        (IMAGE, lambda g: torch.rand((2, 4, 5, 2), generator=g) * 2.6 - 1.3, kind, edge, corners)
        for kind in range(3)
        for edge in range(3)
        for corners in (False, True)
    ],
    "hardtanh.default": [(X, -0.5, 0.5)],
    "index.Tensor": [
        (X, [None, i(5, low=-4, high=4)]),
        (f(3, 4, 5), [i(2, 1, low=0, high=3), None, i(3, low=0, high=5)]),
        (f(3, 4, 5), [None, i(2, low=0, high=4), i(2, low=0, high=5)]),
    ],
    "index_put.default": [
        (X, [i(5, low=-3, high=3)], f(5, 4), True),
        (X, [given(2, 0), given(1, -1)], f(2)),
        (f(3, 4, 5), [None, given(3, 1)], f(3, 1, 5)),
        (X, [mask(3, 4)], given(9.0)),
        (X, [mask(3)], f(1)),
    ],
    "index_select.default": [(X, 1, i(6, low=0, high=4)), (f(), 0, given(0))],
    "isinf.default": [(SPECIAL,), (i(3),)],
    "isnan.default": [(SPECIAL,), (i(3),)],
    "leaky_relu.default": [(X, 0.3)],
    "logical_not.default": [(SPECIAL,), (i(4, low=0, high=2),)],
    "masked_scatter.default": [(X, mask(3, 4), f(12))],
    "max.dim": [(X, 1), (given(1.0, nan, 2.0), 0, True)],
    "max_pool2d_with_indices.default": [
        (IMAGE, [3, 2], [2, 2], [1, 1], [1, 2], True),
        (lambda g: torch.full((1, 1, 3, 3), -inf), [2, 2]),
    ],
    "max_pool2d_with_indices_backward.default": [
        (
            f(1, 1, 2, 2),
            f(1, 1, 4, 4),
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            lambda g: torch.tensor([[[[0, 2], [4, 2]]]]),
        )
    ],
    "max_pool3d_with_indices.default": [(VOLUME, [2, 3, 2], [1, 2, 2], [1, 1, 0])],
    "mean.default": [(X,), (i(3), {"dtype": torch.float32})],
    "mean.dim": [(X, [1], True), (f(3, 0), [1])],
    "min.dim": [(i(3, 4), 0)],
    "mm.default": [(f(3, 4), f(4, 5)), (i(3, 4), i(4, 5))],
    "bmm.default": [(f(2, 3, 4), f(2, 4, 5))],
    "native_dropout.default": [(X, 0.0, True), (X, 0.5, False), (X, 1.0, True)],
    "native_group_norm.default": [(IMAGE, f(3), f(3), 2, 3, 42, 3, 1e-5), (f(2, 4, 5), None, None, 2, 4, 5, 2, 1e-5)],
    "native_group_norm_backward.default": [
        (f(2, 4, 5), f(2, 4, 5), f(2, 2), positive(2, 2), f(4), 2, 4, 5, 2, [True, True, True])
    ],
    "native_layer_norm.default": [(f(2, 3, 4), [3, 4], f(3, 4), f(3, 4), 1e-5), (X, [4], None, None, 1e-5)],
    "native_layer_norm_backward.default": [
        (f(2, 3, 4), f(2, 3, 4), [4], f(2, 3, 1), positive(2, 3, 1), f(4), f(4), [True, True, True])
    ],
    "permute.default": [(f(2, 3, 4), [2, 0, -2])],
    "pow.Scalar": [(2, f(4)), (2, i(4, low=0))],
    "pow.Tensor_Scalar": [*((positive(4), power) for power in (2, 3, 0.5, -1, -2, 1.7)), (i(4), 3)],
    "pow.Tensor_Tensor": [(positive(3, 4), f(4)), (i(4), i(4, low=0, high=4))],
    "prod.default": [(X,), (i(4),), (mask(3),)],
    "prod.dim_int": [(X, 1, True), (i(3, 4), 0, {"dtype": torch.float32})],
    "rand.default": [([200],)],
    "randn.default": [([200],)],
    "randperm.default": [(50,)],
    "reflection_pad1d.default": [(f(2, 5), [2, 3])],
    "reflection_pad2d.default": [(IMAGE, [1, 2, 3, 0])],
    "reflection_pad3d.default": [(VOLUME, [1, 2, 3, 0, 2, 1])],
    "remainder.Scalar": [(i(9), 4), (i(9), -4), (f(9), 0.7)],
    "remainder.Tensor": [(f(9), f(9)), (i(9), i(9, low=1))],
    "repeat.default": [(X, [2, 1, 3])],
    "replication_pad2d.default": [(IMAGE, [1, 2, 3, 0])],
    "replication_pad3d.default": [(VOLUME, [1, 2, 3, 0, 2, 1])],
    "resize_.default": [(X, [2, 3])],
    "round.default": [(given(0.5, 1.5, 2.5, -0.5, 1.2),), (i(3),)],
    "scalar_tensor.default": [(2.5,), (3, {"dtype": torch.int64})],
    "scatter.src": [(X, 1, lambda g: torch.tensor([[2, 0, 1], [3, 3, 0]])[:, [0, 2]], f(2, 4))],
    "scatter.value": [(X, 0, i(2, 3, low=0, high=3), 5.0)],
    "scatter_add.default": [(X, 1, i(2, 6, low=0, high=4), f(3, 6))],
    "scatter_reduce.two": [
        (X, 1, i(3, 6, low=0, high=4), f(3, 6), reduce, {"include_self": include})
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    ],
    "select.int": [(X, 1, -2)],
    "select_scatter.default": [(X, f(3), 1, 2)],
    "slice.Tensor": [(X, 1, 1, 9223372036854775807, 2), (X, 0, -2, -1)],
    "slice_scatter.default": [(X, f(3, 2), 1, 0, 4, 2)],
    "sort.default": [(i(3, 8), 1, True), (given(1.0, nan, -inf, 0.0, nan), 0), (X, 0)],
    "split_with_sizes.default": [(X, [1, 3], 1)],
    "squeeze.dim": [(f(1, 3, 1), 0), (f(3), 0)],
    "squeeze.dims": [(f(1, 3, 1), [0, 1, 2])],
    "sub.Scalar": [(i(3), 2, 3)],
    "sub.Tensor": [(X, Y, {"alpha": 3})],
    "sum.dim_IntList": [(X, [1]), (mask(3, 4), None), (i(3, 4, dtype=torch.int32), [0], True)],
    "sym_is_contiguous.default": [(X,)],
    "sym_numel.default": [(X,)],
    "sym_size.int": [(X, 1)],
    "sym_storage_offset.default": [(X,)],
    "sym_stride.int": [(X, 0)],
    "topk.default": [
        (X, 2),
        (lambda g: torch.randperm(27, generator=g).view(3, 9), 3, 1, False),
        (given(1.0, nan, 2.0), 2),
    ],
    "unsqueeze.default": [(X, -1)],
    "upsample_bilinear2d.vec": [
        (IMAGE, [10, 4], False, None),
        (IMAGE, [10, 4], True, None),
        (IMAGE, None, False, [1.7, 0.6]),
    ],
    "upsample_nearest2d.vec": [(IMAGE, [14, 4], None), (IMAGE, None, [1.7, 2.0])],
    "var.correction": [(X, [1], {"correction": 2}), (X, None, {"correction": 0, "keepdim": True})],
    "var.dim": [(X, [1], False)],
    "view.default": [(X, [2, -1])],
    "where.self": [(mask(3, 1), f(4), i(3, 4))],
    "reciprocal.default": [(SPECIAL,), (i(4, low=1),)],
    "rsqrt.default": [(positive(4),)],
    "sqrt.default": [(SPECIAL,), (i(4, low=0),)],
    "log.default": [(positive(4),), (given(0.0, -1.0, inf),)],
    "acosh.default": [(given(1.0, 1.5, 30.0, 0.5),)],
    "native_batch_norm": [],
}
ELEMENTS = [
    "acos",
    "asin",
    "atanh",
    "atan",
    "asinh",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "expm1",
    "floor",
    "log10",
    "log1p",
    "log2",
    "neg",
    "relu",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "tan",
    "tanh",
    "trunc",
    "abs",
    "alias",
    "clone",
]
PAIRS = ["eq", "ne", "lt", "le", "gt", "ge"]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor"]
CASES |= {f"{name}.default": [(unit(3, 4),), (SPECIAL,)] for name in ELEMENTS}
CASES |= {f"{name}.Tensor": [(X, f(4)), (i(20, high=-5), i(20, high=-5)), (SPECIAL, SPECIAL)] for name in PAIRS}
CASES |= {f"{name}.Scalar": [(X, 0), (i(20), 1.5)] for name in PAIRS}
CASES |= {f"{name}.Tensor": [(i(9), i(9)), (mask(9), mask(9))] for name in BITS}
CASES |= {f"{name}.Scalar": [(i(9), 5), (mask(9), True)] for name in BITS}
CASES |= {f"logical_{name}.default": [(SPECIAL, mask(7)), (mask(9), mask(9))] for name in ("and", "or", "xor")}
CASES |= {
    f"{name}imum.default": [(X, f(4)), (SPECIAL, given(1.0, nan, 0.0, -0.0, 0.0, 2.0, nan))] for name in ("max", "min")
}
CASES |= {"mul.Tensor": [(X, f(4)), (mask(4), mask(4)), (i(3), f())], "mul.Scalar": [(i(3), 2.5)]}
del CASES["native_batch_norm"]
# How many elements there are, or what number it is, depends on the data: a compiled program has its sizes fixed.
REFUSED = {"nonzero.default", "_local_scalar_dense.default"}
# Random numbers are not torch's own, and what is not initialized is anything.
SHAPE_ONLY = {"empty.memory_format", "empty_strided.default", "rand.default", "randn.default", "randperm.default"}


CORE = sorted(str(operation).removeprefix("aten.") for operation in core_overloads())


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, variant = name.partition(".")
    return getattr(getattr(aten, packet), variant)


def drawn(arguments: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    positional = arguments[: len(arguments) - bool(keywords)]
    return pytree.tree_map(lambda leaf: leaf(generator) if callable(leaf) else leaf, (list(positional), keywords))


def run(function: Callable[..., Any], tensors: list[torch.Tensor]) -> list[Any]:
    return run_functional(function, tensors, backend_of("numpy"))


def test_there_are_193() -> None:
    assert len(CORE) == 193


def test_every_overload_has_a_lowering() -> None:
    assert [name for name in CORE if overload(name) not in frontend.lowerings()] == []


def test_every_overload_has_a_case() -> None:
    assert sorted({*CASES, *REFUSED}) == CORE


@pytest.mark.parametrize("name", [name for name in CORE if name not in REFUSED])
def test_values(name: str) -> None:
    for arguments in CASES[name]:
        leaves, spec = pytree.tree_flatten(drawn(arguments))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors: torch.Tensor, leaves: list[Any] = leaves, spec: Any = spec, places: Any = places) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                # What is written in place is no input.
                filled[place] = tensor.clone() if overload(name)._schema.is_mutable else tensor
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return overload(name)(*args, **kwargs)

        tensors = [leaves[place] for place in places]
        expected = pytree.tree_leaves(call(*(tensor.clone() for tensor in tensors)))
        actual = run(call, tensors)
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert ours == theirs
                continue
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            if name not in SHAPE_ONLY:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_random_numbers_are_of_their_distribution() -> None:
    uniform, normal, order = run(lambda: (aten.rand([2000]), aten.randn([2000]), aten.randperm(50)), [])
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.03
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1
    assert order.sort().values.tolist() == list(range(50))


@pytest.mark.parametrize("call", [torch.nonzero, lambda x: aten._local_scalar_dense(x.sum())])
def test_what_depends_on_data_is_refused_with_the_reason(call: Callable[[torch.Tensor], Any]) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            found = call(x)
            return x * found if isinstance(found, torch.SymFloat) else found

    with pytest.raises(frontend.LoweringError, match=r"when the program is compiled|depends on"):
        frontend.compile(Module(), (torch.ones(3),), backend="numpy")
