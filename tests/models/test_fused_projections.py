"""Projections of one input lie side by side and are one product in inference; what looks at them sees each alone."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import easytorch
from easytorch.layers import fused_linear
from easytorch.layers.fused_linear import FusedProjections, lay_side_by_side, runs
from easytorch.operations import OperationRegistry
from tests.models.families import FAMILIES

IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44]])
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALLEST_WEIGHT", 0)


def model(**changes):
    torch.manual_seed(0)
    return easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config(**changes)).eval()


def fused_into(one) -> list[list[str]]:
    """The names of the first layer's projections, those that are one product together."""
    found = []
    for module in (one.model.layers[0].self_attn, one.model.layers[0].mlp):
        weights = [module.get_submodule(name).weight for name in module.fused]
        found += [[module.fused[index] for index in run] for run in runs(weights)]
    return found


TOGETHER = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]


class Products(torch.overrides.TorchFunctionMode):
    """How many rows the weights of F.linear had."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            self.rows.append(args[1].shape[0])
        return function(*args, **(kwargs or {}))


def products(one) -> list[int]:
    with Products() as counted, torch.no_grad():
        counted.rows = []
        one(IDS)
    return counted.rows


SEPARATE, FUSED = [32, 16, 16, 32, 48, 48, 32], [64, 32, 96, 32]


def test_a_layer_runs_four_products_and_the_same_numbers() -> None:
    one = model(attention_bias=True)
    assert fused_into(one) == TOGETHER
    assert products(one) == FUSED * 2 + [97]
    with torch.no_grad():
        given = one(IDS).logits
    torch.testing.assert_close(given, one(IDS).logits, **TOLERANCE)  # with gradients each is a product of its own
    with Products() as counted:
        counted.rows = []
        one(IDS)
    assert counted.rows == SEPARATE * 2 + [97]


@pytest.mark.parametrize("change", [
    lambda one: one.bfloat16().float(),
    lambda one: one.double(),
    copy.deepcopy,
    lambda one: copy.deepcopy(copy.deepcopy(one)),
    lambda one: (one.load_state_dict(model(attention_bias=True).state_dict()), one)[1],
    lambda one: pickled(one),
    lambda one: one.to("meta").to_empty(device="cpu"),
], ids=["to", "double", "deepcopy", "deepcopy twice", "load_state_dict", "torch.save", "to_empty"])  # fmt: skip
def test_they_stay_side_by_side(change) -> None:
    one = model(attention_bias=True)
    names = list(one.state_dict())
    changed = change(one)
    assert fused_into(changed) == TOGETHER and products(changed) == FUSED * 2 + [97]
    assert list(changed.state_dict()) == names


def pickled(one):
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_copy_is_of_its_own() -> None:
    one = model()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.zero_()
        other.model.layers[0].mlp.up_proj.weight.zero_()
    assert one.model.layers[0].self_attn.q_proj.weight.any() and one.model.layers[0].mlp.up_proj.weight.any()


def test_files_have_each_weight_once(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    one = model()
    one.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == one.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in one.state_dict().items())
    save_file(one.state_dict(), tmp_path / "direct.safetensors")
    numbers = sum(tensor.numel() * 4 for tensor in one.state_dict().values())
    assert (tmp_path / "direct.safetensors").stat().st_size < numbers + 20_000
    loaded = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, one(IDS).logits, **TOLERANCE)


def test_in_place_changes_of_one_are_seen() -> None:
    one = model()
    with torch.no_grad():
        before = one(IDS).logits
        one.model.layers[1].self_attn.k_proj.weight.mul_(3.0)
        after = one(IDS).logits
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, one(IDS).logits, **TOLERANCE)


def test_training_steps_and_then_inference() -> None:
    one = model().train()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        one(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert fused_into(one) == TOGETHER
    one.eval()
    with torch.no_grad():
        given = one(IDS).logits
    torch.testing.assert_close(given, one(IDS).logits, **TOLERANCE)


def test_hooks_on_one_projection_run() -> None:
    one, seen = model(), []
    one.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *args: seen.append(args[2].shape))
    one.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: seen.append("act"))
    assert products(one) == [32, 16, 16, *FUSED[1:], *FUSED, 97]
    assert seen == [(1, 8, 16), "act"]


def test_what_stands_in_for_a_projection_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    one = model()
    attention, plain = one.model.layers[0].self_attn, products(one)
    doubled = Doubled(32, 16, bias=False)
    doubled.weight = attention.v_proj.weight
    with torch.no_grad():
        expected = one(IDS).logits
        attention.v_proj = doubled
        changed = one(IDS).logits
    assert not torch.allclose(changed, expected) and len(products(one)) == len(plain) + 2
    torch.testing.assert_close(changed, one(IDS).logits, **TOLERANCE)


def test_a_parameter_put_elsewhere_leaves_the_others_together() -> None:
    one = model()
    one.model.layers[0].self_attn.k_proj.weight = nn.Parameter(torch.randn(16, 32))
    with torch.no_grad():
        given = one(IDS).logits
    torch.testing.assert_close(given, one(IDS).logits, **TOLERANCE)


class ThreeOfOne(FusedProjections):
    fused = ("a", "b", "c")

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        for name, rows in zip(self.fused, (3, 5, 2), strict=True):
            setattr(self, name, nn.Linear(4, rows, bias=bias))
        self.lay_projections()


def test_weights_that_lie_in_another_order_and_seeming_neighbours() -> None:
    module, store, x = ThreeOfOne(), torch.randn(10 * 4), torch.randn(6, 4)
    layers = [module.a, module.b, module.c]

    def compare() -> None:
        with torch.no_grad():
            for given, layer in zip(module.projections(x), layers, strict=True):
                torch.testing.assert_close(given, layer(x), **TOLERANCE)

    compare()
    assert module._neighbours.runs == ((0, 1, 2),)
    for index, start in ((2, 0), (0, 2), (1, 5)):
        rows = layers[index].out_features
        layers[index].weight.data = store[start * 4 : (start + rows) * 4].view(rows, 4)
    compare()
    assert module._neighbours.runs == ((2, 0, 1),)
    layers[1].weight.data = store[20:].view(4, 5).t()  # where it was, and not contiguous
    compare()
    layers[1].weight.data = store[20:].view(5, 4)
    layers[0].bias = nn.Parameter(torch.randn(3))  # one of three
    compare()
    assert module._neighbours.runs == ((2,), (0,), (1,))


def test_neighbours_of_two_storages() -> None:
    """Two allocations may touch: the first one's storage does not hold the second."""
    module, x = ThreeOfOne(), torch.randn(6, 4)
    memory = np.zeros(40, np.float32)
    for layer, (start, stop) in zip((module.a, module.b, module.c), ((0, 12), (12, 32), (32, 40)), strict=True):
        layer.weight.data = torch.from_numpy(memory[start:stop]).view(-1, 4)
    with torch.no_grad():
        assert [one.shape for one in module.projections(x)] == [(6, 3), (6, 5), (6, 2)]
    assert module._neighbours.runs == ((0,), (1,), (2,))


def test_biases_are_side_by_side_too() -> None:
    module, x = ThreeOfOne(bias=True), torch.randn(6, 4)
    with torch.no_grad():
        for given, layer in zip(module.projections(x), (module.a, module.b, module.c), strict=True):
            torch.testing.assert_close(given, layer(x), **TOLERANCE)
    assert module._neighbours.runs == ((0, 1, 2),)


def test_layers_that_cannot_share_a_storage_are_left() -> None:
    mixed = [nn.Linear(4, 3), nn.Linear(4, 3).double()]
    addresses = [layer.weight.data_ptr() for layer in mixed]
    lay_side_by_side(mixed)
    assert [layer.weight.data_ptr() for layer in mixed] == addresses
    with torch.device("meta"):
        lay_side_by_side([nn.Linear(4, 3), nn.Linear(4, 3)])


def test_autocast_gives_the_dtype_that_it_promises() -> None:
    one = model()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert products(one) == SEPARATE * 2 + [97]


def test_gated_units_reach_the_operations(monkeypatch) -> None:
    for act, name in (
        ("silu", "swiglu"),
        ("gelu", "geglu"),
        ("gelu_pytorch_tanh", "geglu"),
        ("gelu_new", "geglu"),
        ("relu", None),
    ):
        one, called = model(hidden_act=act), []
        with torch.no_grad():
            expected = one(IDS).logits
        for operation in ("swiglu", "geglu"):
            kind = OperationRegistry.get(operation)
            plain = kind.forward_native

            def native(self, *args, operation=operation, plain=plain, called=called, **kwargs):
                called.append(operation)
                return plain(self, *args, **kwargs)

            monkeypatch.setattr(kind, "forward_native", native)
        monkeypatch.setenv("EASYTORCH_OPS", "swiglu=native,geglu=native")
        with torch.no_grad():
            torch.testing.assert_close(one(IDS).logits, expected, **TOLERANCE)
        assert called == ([name] * 2 if name else [])
        monkeypatch.undo()


def test_compiled_and_exported() -> None:
    one = model()
    with torch.no_grad():
        expected = one(IDS, use_cache=False).logits
        compiled = torch.compile(one, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected, **TOLERANCE)
        program = torch.export.export(one, (IDS,), {"use_cache": False}, strict=False).module()
        torch.testing.assert_close(program(IDS, use_cache=False).logits, expected, **TOLERANCE)


def test_parameters_without_an_address_are_left(monkeypatch) -> None:
    """As those of FSDP and torchao: of a subclass without a storage of its own, which is not asked for an address."""
    one = model()
    one.model.layers[0].self_attn.k_proj.weight = nn.Parameter(TwoTensor(torch.ones(16, 32), torch.ones(16, 32)))
    monkeypatch.setattr(TwoTensor, "data_ptr", lambda self: pytest.fail("asked for an address"), raising=False)
    one.double()
    with torch.no_grad():
        assert one(IDS).logits.shape == (1, 8, 97)
