"""linear(layer, x): the result of layer(x); through the operation where it profits and nothing watches the layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from easytorch.kernels.cpu import processor
from easytorch.layers import linear as module
from easytorch.layers.linear import linear


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the inputs that went through the operation; the CPU is AMD's."""
    seen: list[torch.dtype] = []
    operation = module._OPERATION

    def record(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return operation(x, *rest)

    monkeypatch.setattr(processor, "VENDOR", "AuthenticAMD")
    monkeypatch.setattr(processor, "AVX2", False)
    record.few_rows = operation.few_rows
    monkeypatch.setattr(module, "_OPERATION", record)
    return seen


def large() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(1024, 1024), torch.randn(2, 64, 1024)


def test_large_float32_layers_take_the_operation(calls: list[torch.dtype]) -> None:
    layer, x = large()
    torch.testing.assert_close(linear(layer, x), layer(x))
    assert calls == [torch.float32]
    expected, got = (
        torch.autograd.grad(output.square().mean(), tuple(layer.parameters()))
        for output in (layer(x), linear(layer, x))
    )
    torch.testing.assert_close(got, expected)


def test_the_others_are_called(calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = large()
    linear(nn.Linear(64, 64), x[..., :64])
    linear(layer.bfloat16(), x.bfloat16())
    with torch.device("meta"):
        linear(nn.Linear(1024, 1024), torch.empty(3, 1024))
    monkeypatch.setattr(processor, "VENDOR", "GenuineIntel")
    linear(*large())
    assert not calls


def test_forced_and_checked(calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    small, x = nn.Linear(8, 4), torch.randn(3, 8)
    with monkeypatch.context() as patch:
        patch.setenv("EASYTORCH_OPS", "linear=native")
        linear(small, x)
    with monkeypatch.context() as patch:
        patch.setenv("EASYTORCH_CHECK", "1")
        linear(small, x)
    assert len(calls) == 2


def test_whatever_watches_or_replaces_a_layer_is_run(calls: list[torch.dtype]) -> None:
    layer, x = large()
    x.requires_grad_()
    seen: list[str] = []
    for register, name in (
        (layer.register_forward_hook, "after"),
        (layer.register_forward_pre_hook, "before"),
        (layer.register_full_backward_hook, "back"),
        (layer.register_full_backward_pre_hook, "before back"),
        (nn.modules.module.register_module_forward_hook, "everywhere"),
    ):
        handle = register(lambda *_, name=name: seen.append(name))
        linear(layer, x).sum().backward()
        handle.remove()
    assert seen == ["after", "before", "back", "before back", "everywhere"]
    assert not calls
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(1024, 1024))
    torch.testing.assert_close(linear(weighted, x), weighted(x))
    layer.forward = lambda x: -x  # type: ignore[method-assign]
    assert torch.equal(linear(layer, x), -x)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_layer_is_a_product_unless_something_listens(
    dtype: torch.dtype, calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Linear(8, 4, dtype=dtype), torch.ones(2, 3, 8, dtype=dtype)
    expected = layer(x)
    seen: list[str] = []
    forward = nn.Linear.forward
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(lambda *_, name=register.__name__: seen.append(name))
        linear(layer, x.clone().requires_grad_()).sum().backward()
        handle.remove()
        assert seen.pop() == register.__name__ and not seen
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + 1)
        assert torch.equal(linear(layer, x), expected + 1)
        patch.setattr(nn.Linear, "forward", forward)
        patch.setattr(nn.Module, "__call__", lambda self, x: x)
        assert linear(layer, x) is x
    assert torch.equal(linear(layer, x), expected)
    weight = layer.weight.detach()  # as FSDP and meta-learning have it
    del layer.weight
    layer.weight = weight * 2  # type: ignore[assignment]
    assert torch.equal(linear(layer, x), layer(x)) and not torch.equal(layer(x), expected)
    other = nn.Linear(8, 4, bias=False, dtype=dtype)
    product = other(x)
    with monkeypatch.context() as patch:  # and the module is not called for nothing
        patch.setattr(nn.Module, "_call_impl", None)
        assert torch.equal(linear(other, x), product)
    assert not calls


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.down, linear(self.up, x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_exported_traced(calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    model, (_, x) = Pair(), large()
    expected = model(x)
    assert len(calls) == 2
    monkeypatch.undo()
    monkeypatch.setattr(processor, "VENDOR", "AuthenticAMD")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    program = torch.export.export(model, (x,))
    assert {str(n.target) for n in program.graph.nodes if n.op == "call_function"} == {"aten.linear.default"}
    torch.testing.assert_close(program.module()(x), expected)
    traced = torch.jit.trace(model, x)
    assert "mkldnn" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), expected)


def test_autocast_substituted_and_tied_weights(calls: list[torch.dtype]) -> None:
    model, (_, x) = Pair(), large()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    zeros = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    assert not torch.func.functional_call(model, zeros, x).any()
    tied = nn.Linear(1024, 1024, bias=False)
    tied.weight = model.up.weight
    torch.testing.assert_close(linear(tied, x), model.up(x))
    twice = copy.deepcopy(model)
    torch.testing.assert_close(twice(x), model(x))


def test_the_layers_of_the_models_are_exactly_linear() -> None:
    """bitsandbytes, fp8, GGUF and quantize_dynamic replace `type(module) is nn.Linear` only."""
    from transformers import BertConfig, LlamaConfig

    from easytorch.models.bert import BertForMaskedLM
    from easytorch.models.llama import LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    for model in (
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)),
        BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2)),
    ):
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        assert len(layers) > 6
        assert {type(layer) for layer in layers} == {nn.Linear}
