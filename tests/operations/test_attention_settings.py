"""What a call and the metadata settle beside the tensors, in every implementation of attention: obeyed or refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.attention import native
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.impl import OperationImpl

# operation -> the backends that run on a CPU; None is the free choice
BACKENDS: dict[str, tuple[str | None, ...]] = {
    "attention": (None,),
    "vanilla": (None,),
    "sdpa": (None, "native"),
    "flash": ("aten", "native", "xla"),
    "blocksparse": ("aten", "native"),
    "ring": ("aten", "native"),
    "decode": ("aten", "native"),
}
IMPLEMENTATIONS = [(name, backend) for name, backends in BACKENDS.items() for backend in backends]
EVERY = pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=pytest.mark.jax_cpu if backend == "xla" else (), id=f"{name}:{backend}")
        for name, backend in IMPLEMENTATIONS
    ],
)


def create(name: str, backend: str | None, **settings: Any) -> OperationImpl:
    if backend == "xla":
        pytest.importorskip("jax")
    return OperationRegistry.create(name, OperationMetadata(backend=backend, **settings))


def inputs(name: str, dtype: torch.dtype = torch.float32, keys: int = 20, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if name == "decode" else keys
    shapes = ((2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def compare(operation: OperationImpl, tensors: list[Tensor], features: dict[str, Any], tolerance: float) -> None:
    """Output and gradients against the definition in float64 on the same numbers."""

    def run(attend: Any, given: list[Tensor], features: dict[str, Any]) -> list[Tensor]:
        leaves = [*given, *(x for x in features.values() if isinstance(x, Tensor) and x.requires_grad)]
        output = attend(*given, **features)
        return [output, *torch.autograd.grad(output.double().square().sum(), leaves)]

    def wide(x: Any) -> Any:
        return x.detach().double().requires_grad_() if isinstance(x, Tensor) else x

    got = run(lambda *x, **kw: operation(*x, **kw).attention_outputs, tensors, features)
    wanted = run(
        lambda *x, **kw: native.attention(*x, **kw)[0], [wide(x) for x in tensors],
        {name: wide(x) for name, x in features.items()},
    )  # fmt: skip
    for a, b in zip(got, wanted, strict=True):
        assert relative_rms_error(a, b) <= tolerance


@EVERY
def test_an_explicit_dropout_of_zero_drops_nothing(name: str, backend: str | None) -> None:
    tensors = inputs(name)
    compare(create(name, backend, dropout_prob=0.5), tensors, {"dropout_prob": 0.0}, 1e-5)


@pytest.mark.parametrize("name", ["attention", "vanilla", "flash", "blocksparse", "decode", "ring"])
def test_the_dropout_of_the_metadata_is_that_of_a_call_without_one(name: str) -> None:
    tensors = inputs(name)
    dropped = create(name, None, dropout_prob=0.5)(*tensors, seed=3).attention_outputs
    expected = create(name, None)(*tensors, dropout_prob=0.5, seed=3).attention_outputs
    assert torch.equal(dropped, expected)
    assert relative_rms_error(dropped, native.attention(*tensors)[0]) > 0.1


def test_over_pages_an_explicit_dropout_of_zero_is_carried() -> None:
    """Pages have no dropout: one in the metadata is refused, unless the call says that nothing is dropped."""
    query, pages = torch.randn(5, 4, 16), torch.randn(4, 8, 2, 16)
    tables = torch.tensor([5]), torch.tensor([[0]]), torch.tensor([0, 5])
    operation = create("ragged_page_attention", None, dropout_prob=0.5)
    with pytest.raises(UnsupportedOperationError, match="dropout_prob"):
        operation(query, pages, pages, *tables)
    output = operation(query, pages, pages, *tables, dropout_prob=0.0).attention_outputs
    assert torch.equal(output, create("ragged_page_attention", None)(query, pages, pages, *tables).attention_outputs)


# With a scale of 0 or below, ATen's own causal kernel multiplies what it has hidden by it: NaN.
@pytest.mark.parametrize("features", [{"causal": True}, {"causal": True, "sliding_window": 9}, {}], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.5])
@EVERY
def test_a_scale_that_is_not_positive(name: str, backend: str | None, scale: float, features: dict[str, Any]) -> None:
    if backend == "xla" and (scale == 0.0 or features.keys() != {"causal"}):
        pytest.skip("one program of XLA's is enough")
    for keys in (20,) if backend == "xla" else (20, 300):
        if name != "sdpa" or backend is None or keys == 20:
            compare(create(name, backend), inputs(name, keys=keys), {"softmax_scale": scale, **features}, 2e-5)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# Any floating dtype, in every implementation: it is added to the scores, in their dtype.
@pytest.mark.parametrize("feature", ["bias", "sinks"])
@EVERY
def test_a_bias_or_sinks_of_another_dtype(name: str, backend: str | None, feature: str) -> None:
    operation = create(name, backend)
    for dtype, own in itertools.product(DTYPES, DTYPES):
        if backend == "xla" and (dtype, own) != (torch.float32, torch.float64):
            continue  # a program for each pair takes its seconds
        tensors = inputs(name, dtype)
        shape = (tensors[0].shape[1], 20) if feature == "bias" else (4,)
        extra = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(own).requires_grad_()
        try:
            operation.choose(*tensors, **{feature: extra})
        except UnsupportedOperationError:
            assert (name, backend, feature) in {("sdpa", None, "sinks"), ("ring", "aten", "bias")}
            continue
        # in half precision a gradient passes two roundings
        compare(operation, tensors, {feature: extra}, max(1e-5, *(2 * TOLERANCE[x] for x in (dtype, own))))


@EVERY
def test_the_softmax_dtype_is_obeyed_or_refused(name: str, backend: str | None) -> None:
    """An honest bfloat16 softmax is far from one in float32, and so is one in float64 from float32."""
    for dtype, softmax in itertools.product((torch.float32, torch.float64, torch.bfloat16), DTYPES):
        operation = create(name, backend, runtime_softmax_dtype=softmax)
        tensors = [x.detach() for x in inputs(name, dtype)]
        own = torch.float64 if dtype == torch.float64 else torch.float32
        try:
            output = operation(*tensors, causal=True).attention_outputs
        except UnsupportedOperationError as refusal:
            assert softmax != own or backend == "xla", refusal
            assert f"not computed in {softmax}" in str(refusal) or "not float64" in str(refusal)
            continue
        expected = native.attention(*tensors, causal=True, softmax_dtype=softmax)[0]
        rounding = TOLERANCE[torch.bfloat16] if dtype == torch.bfloat16 else 1e-6
        if softmax in (torch.bfloat16, torch.float16):  # the rows of a block are summed in another order
            assert relative_rms_error(output, expected) <= max(rounding, TOLERANCE[softmax] / 2)
            other = native.attention(*tensors, causal=True)[0]
            if dtype != torch.bfloat16:
                assert relative_rms_error(output, other) > TOLERANCE[softmax] / 10
        else:
            assert relative_rms_error(output, expected) <= (1e-12 if dtype == torch.float64 == softmax else rounding)


def test_a_ring_of_one_refuses_a_softmax_it_does_not_compute() -> None:
    with pytest.raises(UnsupportedOperationError, match=r"ring.*not computed in torch\.bfloat16"):
        create("ring", None, runtime_softmax_dtype=torch.bfloat16)(*inputs("ring"))
