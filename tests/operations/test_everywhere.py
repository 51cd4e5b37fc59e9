"""Every registered operation inside everything that torch wraps around a call, and each of its custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from easytorch.operations import AttentionOutput, OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, OperationMismatchError, relative_rms_error


class Sample(NamedTuple):
    """`operation(**leaves, **settings)`; gradients flow to the leaves. batched: the leaves with a batch dimension of
    their own, by which vmap can add another; none where the call has data-dependent indices."""

    operation: str
    leaves: dict[str, Tensor]
    settings: dict[str, Any]
    batched: tuple[str, ...] = ()
    device: str = "cpu"

    def inputs(self) -> list[Tensor]:
        return [x.clone().to(self.device) for x in self.leaves.values()]


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(6))


def _attention(length: int = 33, keys: int = 33) -> dict[str, Tensor]:
    return {
        "query": _randn(2, length, 4, 16), "key": _randn(2, keys, 2, 16, seed=1),
        "value": _randn(2, keys, 2, 16, seed=2),
    }  # fmt: skip


def _pages() -> dict[str, Any]:
    """Two sequences of 5 new tokens after 11, and 1 after 8, in pages of 8."""
    return {
        "context_lens": torch.tensor([16, 9]), "block_tables": torch.tensor([[2, 0], [1, 3]]),
        "query_start_loc": torch.tensor([0, 5, 6]),
    }  # fmt: skip


def _latent() -> dict[str, Tensor]:
    return {"up_key": _randn(3, 16, 24, seed=4) / 5, "up_value": _randn(3, 20, 24, seed=5) / 5}


def _quantized(kind: str) -> Any:
    from easytorch.kernels.quantized_matmul.weight import quantize

    return quantize(_randn(24, 64, seed=1), kind)


def samples() -> dict[str, Sample]:
    qkv = ("query", "key", "value")
    angles = _randn(33, 8, seed=3)
    decay = {"dt": _rand(2, 19, 6), "A": -_rand(6, 4) - 0.1}
    return {
        "attention": Sample("attention", _attention(), {"causal": True}, qkv),
        "vanilla": Sample("vanilla", _attention(), {"causal": True, "softcap": 3.0}, qkv),
        "sdpa": Sample("sdpa", _attention(), {"causal": True, "sliding_window": 9}, qkv),
        "flash": Sample("flash", _attention(), {"causal": True, "softcap": 3.0}, qkv),
        "flash, dropout": Sample("flash", _attention(), {"dropout_prob": 0.2, "seed": 3}),
        "blocksparse": Sample("blocksparse", _attention(), {"causal": True, "sliding_window": 9}, qkv),
        "ring": Sample("ring", _attention(), {"causal": True}, qkv),
        "decode": Sample("decode", _attention(1), {"causal": True}, qkv),
        "ragged_page_attention": Sample(
            "ragged_page_attention",
            {"query": _randn(6, 4, 16), "key_pages": _randn(4, 8, 2, 16, seed=1), "value_pages": _randn(4, 8, 2, 16)},
            _pages(),
        ),
        "multi_latent_attention": Sample(
            "multi_latent_attention",
            {
                "query": _randn(2, 9, 3, 16), "query_rope": _randn(2, 9, 3, 8, seed=1),
                "latent": _randn(2, 9, 24, seed=2), "key_rope": _randn(2, 9, 8, seed=3), **_latent(),
            },
            {"causal": True},
            ("query", "query_rope", "latent", "key_rope"),
        ),
        "ragged_page_multi_latent_attention": Sample(
            "ragged_page_multi_latent_attention",
            {
                "query": _randn(6, 3, 16), "query_rope": _randn(6, 3, 8, seed=1),
                "latent_pages": _randn(4, 8, 32, seed=2), **_latent(),
            },
            _pages(),
        ),
        "rms_norm": Sample("rms_norm", {"x": _randn(3, 5, 16), "weight": _randn(16)}, {}, ("x",)),
        "layer_norm": Sample(
            "layer_norm", {"x": _randn(3, 5, 16), "weight": _randn(16), "bias": _randn(16, seed=1)}, {}, ("x",)
        ),
        "swiglu": Sample("swiglu", {"gate": _randn(3, 16), "up": _randn(3, 16, seed=1)}, {}, ("gate", "up")),
        "geglu": Sample("geglu", {"gate": _randn(3, 16), "up": _randn(3, 16, seed=1)}, {}, ("gate", "up")),
        "rotary": Sample(
            "rotary", {"query": _randn(2, 33, 4, 16), "key": _randn(2, 33, 2, 16, seed=1)},
            {"cos": angles.cos().repeat(2, 1, 2), "sin": angles.sin().repeat(2, 1, 2)}, ("query", "key"),
        ),
        "cross_entropy": Sample("cross_entropy", {"logits": _randn(5, 16)}, {"labels": torch.arange(5)}, ("logits",)),
        "fused_linear_cross_entropy": Sample(
            "fused_linear_cross_entropy", {"hidden": _randn(5, 8), "weight": _randn(16, 8, seed=1)},
            {"labels": torch.arange(5)}, ("hidden",),
        ),
        "linear": Sample(
            "linear", {"x": _randn(3, 65, 32), "weight": _randn(24, 32, seed=1), "bias": _randn(24)}, {}, ("x",)
        ),
        "grouped_matmul": Sample(
            "grouped_matmul", {"x": _randn(11, 8), "weight": _randn(3, 8, 12, seed=1)},
            {"group_sizes": torch.tensor([4, 0, 6])},
        ),
        **{
            f"quantized_matmul, {kind}": Sample(
                "quantized_matmul", {"x": _randn(3, 64)}, {"weight": _quantized(kind)}, ("x",)
            )
            for kind in ("int8", "int4", "nf4", "fp8_e4m3fn")
        },
        "causal_conv1d": Sample(
            "causal_conv1d", {"x": _randn(2, 19, 6), "weight": _randn(6, 4, seed=1), "bias": _randn(6)},
            {"activation": "silu"}, ("x",),
        ),
        "ssm1": Sample(
            "ssm1", {"x": _randn(2, 19, 6), **decay, "B": _randn(2, 19, 4, seed=1), "C": _randn(2, 19, 4, seed=2)},
            {"dt_softplus": True}, ("x", "dt", "B", "C"),
        ),
        "ssm2": Sample(
            "ssm2",
            {
                "x": _randn(2, 19, 6, 5), "dt": decay["dt"], "A": -_rand(6) - 0.1,
                "B": _randn(2, 19, 2, 4, seed=1), "C": _randn(2, 19, 2, 4, seed=2),
            },
            {"dt_softplus": True}, ("x", "dt", "B", "C"),
        ),
        "gated_delta_rule": Sample(
            "gated_delta_rule",
            {
                "query": _randn(2, 19, 2, 8), "key": _randn(2, 19, 2, 8, seed=1), "value": _randn(2, 19, 4, 6, seed=2),
                "g": -_rand(2, 19, 4), "beta": _rand(2, 19, 4),
            },
            {"use_qk_l2norm": True}, ("query", "key", "value", "g", "beta"),
        ),
    }  # fmt: skip


SAMPLES = samples()
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def everywhere(found: dict[str, Sample]) -> Any:
    """The samples as `sample`, on the CPU and on a GPU."""
    rows = [pytest.param(sample, id=name) for name, sample in found.items()]
    # moved by the test: there may be no device to move to while the tests are collected
    rows += [
        pytest.param(sample._replace(device="cuda"), id=f"{name}, cuda", marks=GPU) for name, sample in found.items()
    ]
    return pytest.mark.parametrize("sample", rows)


EVERY = everywhere(SAMPLES)


class Call(torch.nn.Module):
    """A sample's operation as a function of its leaves, in their order; the tensors of its result."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.operation = OperationRegistry.create(sample.operation)
        self.names = list(sample.leaves)
        self.settings = tree_map_only(Tensor, lambda x: x.to(sample.device), sample.settings)

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        result = self.operation(**dict(zip(self.names, leaves, strict=True)), **self.settings)
        if isinstance(result, AttentionOutput):
            return [result.attention_outputs]  # which path returns the weights too is its own affair
        fields = vars(result).values() if hasattr(result, "to_dict") else [result]
        return [x for x in tree_leaves(list(fields)) if isinstance(x, Tensor)]


def scalar(tensors: list[Tensor]) -> Tensor:
    return sum(x.float().square().mean() for x in tensors if x.is_floating_point())  # type: ignore[return-value]


def run(function: Callable[..., Any], sample: Sample) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    leaves = [x.requires_grad_() for x in sample.inputs()]
    outputs = function(*leaves)
    return [x.detach() for x in outputs], torch.autograd.grad(scalar(outputs), leaves)


def assert_equal(got: tuple[list[Tensor], tuple[Tensor, ...]], expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_rms_error(a, b) <= tolerance


def test_every_operation_has_a_sample() -> None:
    primary = {OperationRegistry.get(name).primary_name() for name in OperationRegistry.names()}
    assert {sample.operation for sample in SAMPLES.values()} == primary


@EVERY
def test_compile_fullgraph(sample: Sample) -> None:
    torch._dynamo.reset()
    # aot_eager traces forward and backward as inductor does, without the time of compiling C++
    compiled = torch.compile(Call(sample), fullgraph=True, backend="aot_eager")
    assert_equal(run(compiled, sample), run(Call(sample), sample))


@EVERY
def test_export(sample: Sample) -> None:
    module, leaves = Call(sample), tuple(sample.inputs())
    exported = torch.export.export(module, leaves).module()
    assert_equal((exported(*leaves), ()), (module(*leaves), ()))


@EVERY
def test_activation_checkpointing(sample: Sample) -> None:
    def checkpointed(*leaves: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(Call(sample), *leaves, use_reentrant=False)

    assert_equal(run(checkpointed, sample), run(Call(sample), sample), tolerance=0.0)


@EVERY
def test_autocast(sample: Sample) -> None:
    def mixed(*leaves: Tensor) -> Any:
        with torch.autocast(sample.device, dtype=torch.bfloat16):
            return Call(sample)(*leaves)

    (outputs, gradients), (expected, wanted) = run(mixed, sample), run(Call(sample), sample)
    for got, want in zip((*outputs, *gradients), (*expected, *wanted), strict=True):
        assert relative_rms_error(got.float(), want) < 5 * TOLERANCE[torch.bfloat16]


@EVERY
def test_bfloat16_and_float64(sample: Sample) -> None:
    expected = run(Call(sample), sample)
    for dtype in (torch.bfloat16, torch.float64):
        narrow = sample._replace(leaves={name: x.to(dtype) for name, x in sample.leaves.items()})
        outputs, gradients = run(Call(narrow), narrow)
        assert outputs[0].dtype == dtype or outputs[0].dim() == 0  # a loss is at least float32
        for got, want in zip((*outputs, *gradients), (*expected[0], *expected[1]), strict=True):
            allowed = 1e-5 if dtype == torch.float64 else 5 * TOLERANCE[dtype]
            assert relative_rms_error(got.float(), want) < allowed


@EVERY
def test_check_mode(sample: Sample, compared: list[str]) -> None:
    """What is right passes, and what is wrong by a hundredth does not."""
    call = Call(sample)
    call(*sample.inputs())
    named = dict(zip(call.names, sample.inputs(), strict=True))
    choice = call.operation.choose(**named, **call.settings)
    assert f"{choice.implementation}:{choice.backend}" in compared
    run = getattr(choice.operation, choice.method)
    expected = run(**named, **call.settings)

    def wrong(*_: Any, **__: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x * 1.01, run(**named, **call.settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice.operation, choice.runs, wrong)
        patch.setattr(call.operation, "definition", lambda *_, **__: expected)
        with pytest.raises(OperationMismatchError, match=f"{choice.implementation}.*differs from its definition"):
            call(*sample.inputs())


@EVERY
def test_func_grad(sample: Sample) -> None:
    leaves = tuple(sample.inputs())
    gradients = torch.func.grad(lambda *x: scalar(Call(sample)(*x)), argnums=tuple(range(len(leaves))))(*leaves)
    assert_equal(([], gradients), ([], run(Call(sample), sample)[1]))


@EVERY
@pytest.mark.parametrize("recorded", [False, True])
def test_forward_mode(sample: Sample, recorded: bool) -> None:
    """A custom operator drops tangents, without a word where nothing else is recorded."""
    forward_ad, call, leaves = torch.autograd.forward_ad, Call(sample), sample.inputs()
    directions = [x.flip(0) for x in leaves]
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, v) for x, v in zip(leaves, directions, strict=True)]
        got = forward_ad.unpack_dual(scalar(call(*duals))).tangent
    _, gradients = run(call, sample)
    expected = sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_functionalize() -> None:
    for name, sample in SAMPLES.items():
        leaves = sample.inputs()
        got = torch.func.functionalize(Call(sample))(*leaves)
        for a, b in zip(got, Call(sample)(*leaves), strict=True):
            assert relative_rms_error(a, b) <= 1e-5, name


@everywhere({name: sample for name, sample in SAMPLES.items() if sample.batched})
def test_vmap(sample: Sample) -> None:
    """Over the leaves that have a batch, the others shared; and the gradient of each element by itself."""
    mapped = tuple(0 if name in sample.batched else None for name in sample.leaves)
    first = sample.inputs()
    second = [x.flip(0) * 0.5 if axis == 0 else x for x, axis in zip(first, mapped, strict=True)]
    both = [torch.stack([a, b]) if axis == 0 else a for a, b, axis in zip(first, second, mapped, strict=True)]
    call = Call(sample)
    for index, got in enumerate(torch.func.vmap(call, in_dims=mapped)(*both)):
        assert relative_rms_error(got, torch.stack([call(*first)[index], call(*second)[index]])) <= 1e-5
    gradient = torch.func.grad(lambda *x: scalar(call(*x)))
    got = torch.func.vmap(gradient, in_dims=mapped)(*both)
    assert relative_rms_error(got, torch.stack([gradient(*first), gradient(*second)])) <= 1e-5


class Recorder(TorchDispatchMode):
    """The calls of our own operators, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "easytorch":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@EVERY
def test_opcheck(sample: Sample) -> None:
    with Recorder() as recorder:
        run(Call(sample), sample)
    for operator, args, kwargs in recorder.calls:
        copies = [
            x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in args
        ]
        differentiable = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Autograd")
        if "backward" in operator.name() or not differentiable:
            copies = [x.detach() if isinstance(x, Tensor) else x for x in copies]
        torch.library.opcheck(operator, tuple(copies), kwargs)
