"""blocksparse: chunks, prefixes and everything else against the definition, on every backend the CPU has."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from easytorch.kernels.blocksparse import native
from easytorch.operations import AttentionOutput, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import relative_rms_error


class Shape(NamedTuple):
    batch: int = 2
    length: int = 63
    keys: int = 63
    heads: int = 6
    kv_heads: int = 2
    dim: int = 60
    value_dim: int = 60


def _documents(length: int, *ends: int) -> torch.Tensor:
    """(1, length): the document of each position, documents ending before `ends`."""
    return torch.bucketize(torch.arange(length), torch.tensor(ends), right=True)[None]


def _gaps(shape: Shape) -> torch.Tensor:
    """(T, S) that leaves out whole stretches of keys, not the same for all queries."""
    row, column = torch.arange(shape.length)[:, None], torch.arange(shape.keys)
    return ((column // 70 + row // 64) % 2 == 0) & (torch.rand(shape.length, shape.keys) > 0.2)


LONG = Shape(1, 300, 300, 4, 2, 32, 32)
CASES: dict[str, tuple[Shape, Any]] = {
    "chunks": (Shape(), lambda s: {"chunk_size": 10, "causal": True}),
    "chunks both ways": (Shape(keys=200), lambda s: {"chunk_size": 50}),
    "chunks before the first key": (Shape(length=200), lambda s: {"chunk_size": 50, "causal": True}),
    "one chunk": (Shape(), lambda s: {"chunk_size": 1000, "causal": True}),
    "prefix": (Shape(), lambda s: {"prefix_length": 17, "causal": True}),
    "prefix of each batch": (Shape(keys=200), lambda s: {"prefix_length": torch.tensor([3, 500]), "causal": True}),
    "prefix and window": (
        Shape(length=200),
        lambda s: {"prefix_length": torch.tensor([5, 40]), "causal": True, "sliding_window": (100, 30)},
    ),
    "prefix without causal": (Shape(), lambda s: {"prefix_length": 9}),
    "one query": (Shape(length=1, keys=150), lambda s: {"chunk_size": 64, "causal": True}),
    "documents": (
        LONG,
        lambda s: {
            "query_segment_ids": _documents(300, 90, 91, 250), "key_segment_ids": _documents(300, 90, 91, 250),
            "causal": True,
        },
    ),
    "documents of each batch": (
        LONG._replace(batch=2),
        lambda s: dict.fromkeys(
            ("query_segment_ids", "key_segment_ids"),
            torch.cat([_documents(300, 140, 280), _documents(300, 31)]),
        ),
    ),
    "segments in pieces": (
        LONG,
        lambda s: dict.fromkeys(("query_segment_ids", "key_segment_ids"), (torch.arange(300) // 70 % 2)[None]),
    ),
    "gaps": (LONG, lambda s: {"mask": _gaps(s), "sinks": torch.randn(s.heads)}),
    "gaps, bias": (LONG, lambda s: {"mask": _gaps(s), "bias": torch.randn(1, s.heads, 300, 300)}),
    "bias of the keys": (LONG, lambda s: {"bias": torch.randn(300), "chunk_size": 100, "softcap": 100.0}),
    "everything": (
        LONG._replace(batch=2, value_dim=36),
        lambda s: {
            "mask": _gaps(s), "bias": torch.randn(2, 1, 1, 300), "causal": True, "sliding_window": (90, 20),
            "query_segment_ids": _documents(300, 280).repeat(2, 1),
            "key_segment_ids": _documents(300, 280).repeat(2, 1),
            "softcap": 4.0, "sinks": torch.randn(s.heads), "softmax_scale": 0.2, "dropout_prob": 0.1, "seed": 5,
            "chunk_size": 130, "prefix_length": torch.tensor([10, 270]),
        },
    ),
}  # fmt: skip
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def blocksparse(backend: str | None = None, **metadata: Any) -> Any:
    return OperationRegistry.create("blocksparse", OperationMetadata(backend=backend, **metadata))


def tensors(shape: Shape) -> dict[str, torch.Tensor]:
    b, t, s, h, k, d, dv = shape
    return {"query": torch.randn(b, t, h, d), "key": torch.randn(b, s, k, d), "value": torch.randn(b, s, k, dv)}


def run(function: Any, given: dict[str, Any], rounded: torch.dtype, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of `function` in `dtype`, on inputs rounded to `rounded`."""
    leaves = {
        name: x.to(rounded).to(dtype).requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    output = function(**{**given, **leaves})
    output = output.attention_outputs if isinstance(output, AttentionOutput) else output[0]
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(rounded)
    grads = torch.autograd.grad(output, list(leaves.values()), upstream.to(dtype))
    return {"output": output, **{f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}}


@pytest.fixture(autouse=True)
def poisoned_empty() -> Any:
    """torch.empty gives NaN: what an implementation forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(sum(map(ord, case)))
    shape, features = CASES[case]
    given = {**tensors(shape), **features(shape)}
    expected = run(native.attention, given, dtype, torch.float64)
    for name, got in run(blocksparse("aten"), given, dtype, dtype).items():
        assert got.dtype == dtype
        allowed = TOLERANCE[dtype]
        if dtype.itemsize == 2 and name != "output":
            # a gradient passes two roundings, and that of a sink is a sum over rows in which much cancels
            allowed *= 4 if name == "gradient of sinks" else 2
        error = relative_rms_error(got, expected[name])
        assert error <= allowed, f"{name}: relative RMS error {error:.2e}, allowed {allowed:.0e}"


@pytest.mark.parametrize("length", [1, 40, 63])
def test_chunks_are_those_of_transformers(length: int) -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    keys, chunk = 63, 16
    function = masking.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    own = torch.arange(keys - length, keys)
    theirs = torch.stack([torch.stack([function(0, 0, p, j) for j in torch.arange(keys)]) for p in own])
    q, k, _ = tensors(Shape(1, length, keys, 2, 1, 8, 8)).values()
    identity = torch.eye(keys).reshape(1, keys, 1, keys)  # the output is the weights
    for backend in ("native", "aten"):
        weights = blocksparse(backend)(q, k, identity, chunk_size=chunk, causal=True).attention_outputs
        assert torch.equal(weights[0, :, 0] > 0, theirs)


def test_a_prefix_is_seen_by_all_and_sees_itself() -> None:
    q, k, _ = tensors(Shape(2, 10, 10, 2, 1, 8, 8)).values()
    identity = torch.eye(10).reshape(1, 10, 1, 10).repeat(2, 1, 1, 1)
    expected = torch.ones(2, 10, 10, dtype=torch.bool).tril()
    expected[0, :, :4] = expected[1, :, :7] = True
    for backend in ("native", "aten"):
        output = blocksparse(backend)(q, k, identity, prefix_length=torch.tensor([4, 7]), causal=True)
        assert torch.equal(output.attention_outputs[:, :, 1] > 0, expected)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 1), (300, 7), (129, 257)])
def test_any_length(sizes: tuple[int, int]) -> None:
    given = {**tensors(Shape(1, *sizes, 2, 1, 8, 8)), "causal": True, "sliding_window": 50, "sinks": torch.randn(2)}
    expected = run(native.attention, given, torch.float32, torch.float64)
    for name, got in run(blocksparse("aten"), given, torch.float32, torch.float32).items():
        assert relative_rms_error(got, expected[name]) <= 1e-5, name


@pytest.mark.parametrize("backend", ["native", "aten"])
def test_errors(backend: str) -> None:
    attention, given = blocksparse(backend), tensors(Shape())
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        attention(**given, chunk_size=0)
    with pytest.raises(ValueError, match="prefix_length must be at least 0"):
        attention(**given, prefix_length=-1)
    with pytest.raises(ValueError, match=r"prefix_length must be an int or integers \(2,\)"):
        attention(**given, prefix_length=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="key/value heads"):
        attention(given["query"], given["key"][:, :, :1], given["value"])
    for mask in (torch.ones(3, 3), torch.ones(7, 5, 3, 2, dtype=torch.bool), [True]):
        with pytest.raises((TypeError, ValueError), match=r"attention: mask|mask must"):
            attention(**given, chunk_size=4, mask=mask)


def test_the_names_and_a_forced_choice() -> None:
    assert OperationRegistry.get("splash") is OperationRegistry.get("blocksparse")
    given = tensors(Shape())
    for forced in ("blocksparse", "splash", "splash:aten"):
        attention = OperationRegistry.create("attention", OperationMetadata(backend=forced))
        choice = attention.choose(**given, sliding_window=4, causal=True)
        assert (choice.implementation, choice.backend) == ("blocksparse", "aten")
    with pytest.raises(UnsupportedOperationError, match="runs on cuda, rocm"):
        blocksparse("triton")(**given)


def test_the_chooser_takes_chunks_and_prefixes() -> None:
    given = tensors(Shape())
    attention = OperationRegistry.create("attention")
    for features in ({"chunk_size": 16}, {"prefix_length": 5}):
        assert attention.choose(**given, **features, causal=True).implementation == "blocksparse"
        got = attention(**given, **features, causal=True).attention_outputs
        torch.testing.assert_close(got, native.attention(**given, **features, causal=True)[0])


def test_the_differential_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    given = {**tensors(Shape()), "chunk_size": 16, "causal": True, "dropout_prob": 0.3}
    for name in ("blocksparse", "attention"):
        OperationRegistry.create(name)(**given)
    operation = blocksparse()
    wrong = functools.partial(operation.run, lambda query, *args, **kwargs: query)
    monkeypatch.setattr(operation, "forward_cpu", wrong)
    with pytest.raises(AssertionError, match="differs from its definition"):
        operation(**given)


FEATURES = {"chunk_size": 16, "causal": True, "softcap": 3.0, "dropout_prob": 0.2, "seed": 3}


def _step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return 2 * blocksparse("aten")(query, key, value, **FEATURES).attention_outputs


def _gradients(function: Any) -> tuple[torch.Tensor, ...]:
    leaves = [x.requires_grad_() for x in _given()]
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output.square().sum(), leaves)


def _given() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(tensors(Shape(1, 33, 33, 4, 2, 16, 16)).values())


def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_gradients(compiled), _gradients(_step))


def test_exports() -> None:
    class Module(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return _step(*given)

    given = tuple(_given())
    torch.testing.assert_close(torch.export.export(Module(), given).module()(*given), _step(*given))


def test_autocast_leaves_it_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _gradients(_step)
    torch.testing.assert_close(inside, _gradients(_step))


def test_checkpointing() -> None:
    recomputed = _gradients(lambda *given: checkpoint(_step, *given, use_reentrant=False))
    torch.testing.assert_close(recomputed, _gradients(_step))


def test_torch_func_transforms_the_definition() -> None:
    query, key, value = _given()

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return 2 * blocksparse()(q, k, value, **FEATURES).attention_outputs

    grad = torch.func.grad(lambda q: step(q, key).square().sum())(query)
    torch.testing.assert_close(grad, _gradients(_step)[1])
    batched = torch.func.vmap(step, in_dims=(0, 1))(torch.stack([query, -query]), torch.stack([key, -key], dim=1))
    torch.testing.assert_close(batched, step(query, key).repeat(2, 1, 1, 1, 1))
    with pytest.raises(UnsupportedOperationError, match=r"torch\.func"):
        torch.func.grad(lambda q: _step(q, key, value).sum())(query)


@pytest.mark.parametrize("extras", [False, True])
def test_opcheck(extras: bool) -> None:
    query, key, value = (x.requires_grad_() for x in _given())
    begin = torch.zeros(1, 33, dtype=torch.int32)
    end = torch.arange(1, 34, dtype=torch.int32)[None]
    optional: list[Any] = [None] * 6
    if extras:
        ids, mask = torch.zeros(1, 33, dtype=torch.int64), torch.rand(33, 33) > 0.2
        optional = [mask, torch.randn(4, 1, 33, requires_grad=True), ids, ids, torch.randn(4, requires_grad=True), None]
        optional[-1] = torch.tensor(3)
    static = (0.3, None, None, 2.0 if extras else None, 0.2 if extras else 0.0)
    given = (query, key, value, begin, end, *optional, *static)
    torch.library.opcheck(torch.ops.easytorch.blocksparse_forward.default, given)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    output, logsumexp = torch.ops.easytorch.blocksparse_forward(*plain)
    backward = (torch.randn_like(output), output, logsumexp, *plain, extras)
    torch.library.opcheck(torch.ops.easytorch.blocksparse_backward.default, backward)


def test_dropout_without_a_seed_follows_the_generator_of_torch() -> None:
    given = tensors(Shape())
    torch.manual_seed(1)
    first, second = (blocksparse("aten")(**given, dropout_prob=0.5).attention_outputs for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, blocksparse("aten")(**given, dropout_prob=0.5).attention_outputs)
    assert not torch.equal(first, second)
