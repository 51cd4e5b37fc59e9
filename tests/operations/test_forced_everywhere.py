"""Every implementation that can be forced on a CPU: compiled, exported, saved and loaded, traced, differentiated twice.

And `attention` at sizes that choose each of its implementations.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.cpu import processor
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import relative_rms_error

_spec = importlib.util.spec_from_file_location("samples_everywhere", Path(__file__).parent / "test_everywhere.py")
assert _spec is not None and _spec.loader is not None
everywhere = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = everywhere
_spec.loader.exec_module(everywhere)

SAMPLES = everywhere.SAMPLES
NOT_HERE = ("triton", "pallas")  # of GPUs and TPUs
# refuse graphs; and gradients, but for these
WITH_GRADIENTS = (
    "causal_conv1d", "cross_entropy", "flash", "gated_delta_rule", "geglu", "layer_norm", "rms_norm", "rotary", "ssm1",
    "ssm2", "swiglu",
)  # fmt: skip
EAGER_INFERENCE = [
    (name, "cpu") for name in (
        "decode", "multi_latent_attention", "ragged_page_attention", "ragged_page_multi_latent_attention",
        *WITH_GRADIENTS,
    )
]  # fmt: skip
FORCED = [
    pytest.param(name, backend, id=f"{name}:{backend}", marks=pytest.mark.jax_cpu if backend == "xla" else ())
    for name, sample in SAMPLES.items()
    for backend in OperationRegistry.create(sample.operation).backends()
    if backend not in NOT_HERE and (sample.operation, backend) not in EAGER_INFERENCE
]

# They read bytes as another dtype: torch.jit.trace (2.13) ends any `tensor.view(dtype)` with an assertion of its own.
UNTRACEABLE = [(f"quantized_matmul, {kind}", "aten") for kind in ("int4", "nf4", "fp8_e4m3fn")]


# Their definitions are a loop over tokens, which a graph holds one after another.
RECURRENT, FEW_TOKENS = ("ssm1", "ssm2", "gated_delta_rule"), 5


def forced(name: str, backend: str | None, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Tensor]]:
    """The call of a sample by one implementation, and its leaves; skipped where that refuses it."""
    if backend == "xla":
        pytest.importorskip("jax")
    sample = SAMPLES[name]
    call = everywhere.Call(sample)
    call.operation = OperationRegistry.create(sample.operation, OperationMetadata(backend=backend))
    leaves = [x.to(dtype) for x in sample.inputs()]
    try:
        call.operation.choose(**dict(zip(call.names, leaves, strict=True)), **call.settings)
    except UnsupportedOperationError as refusal:
        pytest.skip(str(refusal))
    return call, leaves


def close(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_rms_error(a, b) <= 1e-5


def gradients(function: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(everywhere.scalar(function(*leaves)), leaves)


def check_compiled(call: Any, leaves: list[Tensor], *, dynamic: bool, gradient: bool, wholly: bool = True) -> None:
    """dynamic: every size is a symbol; not wholly: those of batch and length are.

    A definition is many operations of plain torch: with every size a symbol, torch takes 5 to 20 times as long.
    """
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic if wholly else None, backend="aot_eager")
    leaves = [x.clone().requires_grad_(gradient) for x in leaves]
    if dynamic and not wholly:
        for leaf in leaves:
            for dim in range(min(2, leaf.dim() - 1)):
                torch._dynamo.maybe_mark_dynamic(leaf, dim)
    if gradient:
        found, expected = (torch.autograd.grad(everywhere.scalar(run(*leaves)), leaves) for run in (compiled, call))
        close(found, expected)
        return
    with torch.no_grad():
        close(compiled(*leaves), call(*leaves))


def check_exported(call: Any, leaves: list[Tensor]) -> None:
    """What was saved is loaded and run, with gradients that nobody asked for while it was exported."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(call, tuple(leaves)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    close(program(*leaves), call(*leaves))
    close(gradients(program, leaves), gradients(call, leaves))


def check_traced(call: Any, leaves: list[Tensor]) -> None:
    close(torch.jit.trace(call, tuple(leaves), check_trace=False)(*leaves), call(*leaves))


@pytest.mark.parametrize(("name", "backend"), FORCED)
def test_compiled_exported_and_traced(name: str, backend: str) -> None:
    call, leaves = forced(name, backend)
    if backend == "native" and SAMPLES[name].operation in RECURRENT:
        leaves = [x[:, :FEW_TOKENS] if x.dim() > 2 else x for x in leaves]
    check_compiled(call, leaves, dynamic=True, gradient=False, wholly=_few_operations(name, backend))
    if backend == "onednn":
        for keep in (check_exported, check_traced):
            with pytest.raises(UnsupportedOperationError, match="program should need nothing but ATen where it runs"):
                keep(call, leaves)
        return
    check_exported(call, leaves)
    if (name, backend) not in UNTRACEABLE:
        check_traced(call, leaves)


@pytest.mark.parametrize(("name", "backend"), EAGER_INFERENCE)
def test_what_is_for_eager_inference_refuses_the_rest(name: str, backend: str) -> None:
    call, leaves = forced(name, backend)
    close(call(*leaves), everywhere.Call(SAMPLES[name])(*leaves))
    for run, reason in (
        (lambda: torch.jit.trace(call, tuple(leaves)), "graphs or"),
        (lambda: torch.func.vmap(call)(*(x[None] for x in leaves)), "graphs or"),
        (lambda: torch.export.export(call, tuple(leaves)), "graphs or"),
        (lambda: gradients(call, leaves), "no gradient"),
    ):
        if reason == "no gradient" and name in WITH_GRADIENTS:
            run()
            continue
        with pytest.raises(UnsupportedOperationError, match=reason):
            run()


@pytest.mark.parametrize(("name", "backend"), [x for x in FORCED if x.values[0] in ("flash", "sdpa", "blocksparse")])
def test_compiled_with_gradients(name: str, backend: str) -> None:
    call, leaves = forced(name, backend)
    check_compiled(call, leaves, dynamic=True, gradient=True, wholly=_few_operations(name, backend))


def _few_operations(name: str, backend: str) -> bool:
    return backend != "native" and SAMPLES[name].operation not in (*RECURRENT, "multi_latent_attention")


# those that are operators of their own, or choose one
@pytest.mark.parametrize(
    "name", ["flash, dropout", "blocksparse", "ring", "grouped_matmul", "quantized_matmul, int8", "ssm1"]
)
def test_torch_func_in_a_compiled_function(name: str) -> None:
    sample = SAMPLES[name]
    call, leaves = everywhere.Call(sample), sample.inputs()
    wanted = tuple(range(len(leaves)))
    torch._dynamo.reset()
    of_all = torch.func.grad(lambda *x: everywhere.scalar(call(*x)), argnums=wanted)
    close(torch.compile(of_all, fullgraph=True, backend="aot_eager")(*leaves), gradients(call, leaves))


def _heads(length: int, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = (1, length if length > 1 else 40)
    shapes = ((1, length, heads, 8), (*rows, kv_heads, 8), (*rows, kv_heads, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


# implementation -> query rows, features: what `attention` chooses it for in inference
# (operations/attention/cpu_order.py)
CHOSEN: dict[str, tuple[int, dict[str, Any]]] = {
    "sdpa": (40, {"causal": True}),
    "vanilla": (40, {"causal": True, "softcap": 3.0}),
    "flash": (1024, {"causal": True, "sliding_window": 100}),
    "blocksparse": (1024, {"causal": True, "softcap": 3.0}),
    "decode": (1, {"causal": True}),
}


class Attend(torch.nn.Module):
    def __init__(self, features: dict[str, Any]) -> None:
        super().__init__()
        self.operation, self.features = OperationRegistry.create("attention"), features

    def forward(self, *heads: Tensor) -> list[Tensor]:
        return [self.operation(*heads, **self.features).attention_outputs]


@pytest.mark.parametrize("chosen", CHOSEN)
def test_attention_at_the_size_that_chooses_each(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", False)  # whatever CPU this is; in graphs it is ATen anyway
    rows, features = CHOSEN[chosen]
    call, leaves = Attend(features), _heads(rows)
    assert call.operation.choose(*leaves, **features).implementation == chosen
    for dynamic in (False, True):
        check_compiled(call, leaves, dynamic=dynamic, gradient=False, wholly=chosen != "vanilla")
    check_compiled(call, leaves, dynamic=False, gradient=True)
    check_exported(call, leaves)
    with torch.no_grad():
        check_traced(call, leaves)


def second_order(call: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a function of the first gradients. The leaves themselves are in it too: a first gradient that has
    lost its graph is then no error of autograd's own, only missing from the sum."""
    leaves = [x.requires_grad_() for x in leaves]
    generator = torch.Generator().manual_seed(3)
    outputs = [x for x in call(*leaves) if x.is_floating_point()]
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in outputs)
    loss = loss + sum(x.double().square().sum() for x in outputs)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    again = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in first)
    return list(torch.autograd.grad(again + sum(x.square().sum() for x in leaves), leaves))


@pytest.mark.parametrize(("name", "backend"), FORCED)
def test_second_order_gradients_are_right_or_an_error(name: str, backend: str) -> None:
    dtype = torch.float32 if backend == "xla" else torch.float64
    call, leaves = forced(name, backend, dtype)
    definition, given = forced(name, "native", torch.float64)
    try:
        found = second_order(call, leaves)
    except (RuntimeError, NotImplementedError) as error:
        assert any(words in str(error) for words in ("no autograd formula", "is not implemented", "force")), error
        return
    for a, b in zip(found, second_order(definition, given), strict=True):
        assert relative_rms_error(a, b) <= (1e-4 if dtype == torch.float32 else 1e-9)


def test_flash_has_gradients_of_every_order_and_inside_torch_func() -> None:
    sample = {"causal": True, "softcap": 2.0, "dropout_prob": 0.2, "seed": 3}
    generator = torch.Generator().manual_seed(1)
    heads = [x.double() for x in _heads(9)]
    bias = torch.randn(4, 9, 9, generator=generator, dtype=torch.float64)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)

    def run(backend: str) -> list[Tensor]:
        operation = OperationRegistry.create("flash", OperationMetadata(backend=backend))

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
            return operation(query, key, value, bias=bias, sinks=sinks, **sample).attention_outputs.pow(3).sum()

        leaves = [x.clone().requires_grad_() for x in (*heads, bias, sinks)]
        found, value = [], attend(*leaves)
        for _ in range(3):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            found += grads
            value = sum(x.square().sum() for x in grads)  # type: ignore[assignment]

        def of_query(query: Tensor) -> Tensor:
            return torch.func.grad(attend)(query, *heads[1:], bias, sinks).square().sum()

        both = torch.stack([heads[0], 2 * heads[0]])
        return [*found, torch.func.vmap(torch.func.grad(of_query))(both)]

    for got, expected in zip(run("aten"), run("native"), strict=True):
        assert relative_rms_error(got, expected) <= 1e-10


def test_ssm1_raises_inside_torch_func_too() -> None:
    call, leaves = forced("ssm1", "aten")

    def first(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: everywhere.scalar(call(x, *leaves[1:])))(x).square().sum()

    with pytest.raises(RuntimeError, match=r"ssm1.*force the definition"):
        torch.func.grad(first)(leaves[0])
