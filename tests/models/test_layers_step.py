"""All layers of a token by one call: what was found in the modules is kept, and noticed when it changes."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, StaticCache

from easytorch.kernels.cpu import library
from easytorch.kernels.decoder_step import cpu
from easytorch.layers import layers_step
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import RMSNorm
from easytorch.protocol import quantization
from tests.models.test_decoder_step import IDS, LAYERS, MASK, by_modules, counted, generated, model, of_any_size

pytestmark = [
    pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}"),
    pytest.mark.skipif(not cpu.TAKES_LISTS, reason="torch hands no lists to operators of its stable interface"),
]
assert of_any_size  # a fixture that this file takes too
NEW = 6
UP = "model.layers.0.mlp.up_proj.weight"
HANDLES: list[RemovableHandle] = []


@pytest.fixture(autouse=True)
def no_global_hooks() -> Iterator[None]:
    yield
    while HANDLES:
        HANDLES.pop().remove()


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of layers of each call of the operator."""
    calls: list[int] = []
    step = cpu.decoder_layers

    def counting(x: torch.Tensor, layers: Any, memory: Any) -> torch.Tensor:
        calls.append(len(memory))
        return step(x, layers, memory)

    monkeypatch.setattr(cpu, "decoder_layers", counting)
    yield calls


def made_lists(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    init = layers_step._Layers.__init__

    def counting(self: Any, *given: Any) -> None:
        made.append(1)
        init(self, *given)

    monkeypatch.setattr(layers_step._Layers, "__init__", counting)
    return made


def test_a_token_is_one_call_and_the_modules_are_looked_at_once(
    whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_lists(monkeypatch)
    one = model()
    for rows, settings in ((3, {}), (1, {"do_sample": True}), (3, {"cache_implementation": "static"})):
        generated(one, IDS[:rows], MASK[:rows], NEW, **settings)
    assert whole == [LAYERS] * 3 * (NEW - 1)
    assert len(made) == 1
    one(IDS), one.train(), one.eval()  # with gradients, by its modules
    generated(one, IDS, MASK, NEW)
    assert len(made) == 1


def layer_of(one: Any, index: int = 1) -> Any:
    return one.model.layers[index]


class Halved(nn.Module):
    """A norm that is not ours."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states / 2


def other_weight(one: Any) -> None:
    layer_of(one).mlp.up_proj.weight = nn.Parameter(torch.randn(256, 128), requires_grad=False)


def other_data(one: Any) -> None:
    layer_of(one).mlp.down_proj.weight.data = torch.randn(128, 256)


def transposed(one: Any) -> None:
    weight = layer_of(one).self_attn.o_proj.weight
    weight.data = weight.data.t()


def in_place(one: Any) -> None:
    with torch.no_grad():
        layer_of(one).self_attn.k_proj.weight.mul_(-1)


def bias_of_one_number(one: Any) -> None:
    layer_of(one).self_attn.v_proj.bias.data = torch.full((1,), 0.7)


def no_bias(one: Any) -> None:
    layer_of(one).self_attn.q_proj.bias = None


def hook(one: Any) -> None:
    layer_of(one).register_forward_hook(lambda module, given, output: output * 1.5)


def hook_of_all(one: Any) -> None:
    one.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, given, output: output + 1)


def patched_instance(one: Any) -> None:
    layer = layer_of(one)
    layer.forward = types.MethodType(lambda self, hidden_states, **kwargs: hidden_states, layer)


def patched_projection(one: Any) -> None:
    layer = layer_of(one).self_attn.v_proj
    layer.forward = types.MethodType(lambda self, given: -nn.Linear.forward(self, given), layer)


def hook_by_hand(one: Any) -> None:
    layer_of(one).mlp.down_proj._forward_hooks[0] = lambda module, given, output: -output


def global_hook(one: Any) -> None:
    norm = layer_of(one).input_layernorm
    handle = register_module_forward_hook(lambda module, given, output: -output if module is norm else None)
    HANDLES.append(handle)


def fewer_layers(one: Any) -> None:
    one.config.num_hidden_layers = 1


def swapped_layers(one: Any) -> None:
    layers = one.model.layers
    first, second = layers[0], layers[1]
    layers[0].mlp, layers[1].mlp = second.mlp, first.mlp


def to_double(one: Any) -> None:
    one.to(torch.float64)


def to_bfloat16_by_data(one: Any) -> None:
    for parameter in one.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for buffer in one.buffers():
        buffer.data = buffer.data.to(torch.bfloat16)


def parameters_in_another_dict(one: Any) -> None:
    layer = layer_of(one).mlp.up_proj
    layer._parameters = {"weight": nn.Parameter(-layer.weight.detach()), "bias": layer.bias}


def hooks_cleared_and_a_new_one(one: Any) -> None:
    for module in one.modules():
        module._forward_hooks = OrderedDict()
    layer_of(one).mlp.up_proj.register_forward_hook(lambda module, given, output: -output)


def compiled_layer(one: Any) -> None:
    one.model.layers[1] = torch.compile(layer_of(one), backend="eager")


def attributes_in_place_of_modules(one: Any) -> None:
    """Which come before them, where their names are looked up."""
    layer = layer_of(one)
    norm, mlp = layer.input_layernorm, layer.mlp
    vars(layer).update(input_layernorm=lambda x: -norm(x), mlp=lambda x: -mlp(x))


def functions_in_place_of_modules(one: Any) -> None:
    """Which have no `__dict__`."""
    layer = layer_of(one)
    del layer.mlp, layer.input_layernorm
    layer.mlp, layer.input_layernorm = torch.neg, torch.tanh


def own_method(name: str, part: str = "self_attn") -> Callable[[Any], None]:
    """A method of one module alone, whose last or only tensor is negated."""

    def change(one: Any) -> None:
        module = getattr(layer_of(one), part)
        theirs = getattr(module, name)

        def negated(*given: Any) -> Any:
            output = theirs(*given)
            return -output if isinstance(output, torch.Tensor) else (*output[:-1], -output[-1])

        setattr(module, name, negated)

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a compiled layer": compiled_layer,
    "attributes in place of modules": attributes_in_place_of_modules,
    "functions in place of modules": functions_in_place_of_modules,
    "parameters in another dict": parameters_in_another_dict,
    "hooks cleared and a new one": hooks_cleared_and_a_new_one,
    "its own rotate": own_method("rotate"),
    "its own project": own_method("project"),
    "its own projections": own_method("projections"),
    "its own project_output": own_method("project_output"),
    "a network's own projections": own_method("projections", "mlp"),
    "its own features": lambda one: setattr(layer_of(one).self_attn, "features", lambda: {"softcap": 0.5}),
    "another weight": other_weight,
    "other data": other_data,
    "a transposed weight": transposed,
    "a weight in place": in_place,
    "no bias": no_bias,
    "a bias of one number": bias_of_one_number,
    "a hook of a layer": hook,
    "a hook of an activation": hook_of_all,
    "a forward of its own": patched_instance,
    "a projection's own forward": patched_projection,
    "a hook put there by hand": hook_by_hand,
    "a hook of all modules": global_hook,
    "fewer layers": fewer_layers,
    "networks swapped": swapped_layers,
    "float64": to_double,
    "bfloat16": to_bfloat16_by_data,
    "eps of a norm": lambda one: setattr(layer_of(one).input_layernorm, "variance_epsilon", 0.5),
    "another norm": lambda one: setattr(layer_of(one), "input_layernorm", Halved(layer_of(one).input_layernorm)),
    "the scale": lambda one: setattr(layer_of(one).self_attn, "scaling", 0.9),
    "the activation": lambda one: setattr(layer_of(one).mlp, "act_fn", nn.SiLU()),
    "an activation unknown": lambda one: setattr(layer_of(one).mlp, "act_fn", nn.ReLU()),
    "no positions": lambda one: setattr(layer_of(one).self_attn, "use_rope", False),
    "a softcap": lambda one: layer_of(one).self_attn._features.update(softcap=0.5),
    "the place in the cache": lambda one: [
        setattr(layer_of(one, at).self_attn, "layer_idx", 1 - at) for at in range(LAYERS)
    ],
    "another attention": lambda one: one.set_attn_implementation("sdpa"),
    "a copied layer": lambda one: one.model.layers.__setitem__(0, copy.deepcopy(one.model.layers[0])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(change: str) -> None:
    """Between two calls, and between two tokens of one."""
    one, untouched = model(), model()
    tokens = generated(one, IDS, MASK, NEW)
    ids, mask = tokens, (tokens != 0).long().index_fill(1, torch.arange(9, 9 + NEW), 1)
    cache = DynamicCache(config=one.config)
    with torch.no_grad():
        one(ids[:, :-2], attention_mask=mask[:, :-2], past_key_values=cache)
        one(ids[:, -2:-1], attention_mask=mask[:, :-1], past_key_values=cache)
    CHANGES[change](one)
    CHANGES[change](untouched)
    untouched.load_state_dict(one.state_dict())  # weights that were drawn differ
    # what is put there by hand is seen by the next generation
    if change not in ("float64", "bfloat16", "fewer layers", "a hook put there by hand"):
        kept = copy.deepcopy(cache)
        with torch.no_grad():
            got = one(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits
            with by_modules():
                expected = untouched(ids[:, -1:], attention_mask=mask, past_key_values=kept).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with by_modules():
        wanted = generated(untouched, IDS, MASK, NEW)
    found = generated(one, IDS, MASK, NEW)
    if change != "bfloat16":  # whose roundings differ
        assert torch.equal(found, wanted)


def test_a_class_that_is_patched_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = model()
    generated(one, IDS, MASK, NEW)
    for kind, name, other in (
        (type(one.model.layers[0]), "forward", lambda self, hidden_states, **kwargs: hidden_states),
        (type(one.model.layers[0].self_attn), "rotate", lambda self, query, key, *rest: (query, key)),
        (GatedMLP, "forward", lambda self, hidden_states: -hidden_states),
        (RMSNorm, "forward", lambda self, hidden_states: hidden_states),
        (GatedMLP, "_network", lambda self, x: -x),
        (GatedMLP, "__call__", lambda self, x: -x),
        (type(one.model.layers[0]), "__call__", lambda self, x, **kwargs: -x),
        (type(one.model.layers[0].self_attn), "fused", ("q_proj", "v_proj", "k_proj")),
        (type(one.model.layers[0].self_attn), "interleaved", True),
        (type(one.model.layers[0].self_attn), "score_scale", property(lambda self: 2.0)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, other)
            with by_modules():
                expected = generated(one, IDS, MASK, NEW)
            assert torch.equal(generated(one, IDS, MASK, NEW), expected)
    with counted() as calls:
        generated(one, IDS, MASK, NEW)
    assert calls["attention_step"] == LAYERS * (NEW - 1)


def test_a_subclass_states_what_its_forward_does() -> None:
    """By the names of its modules, whatever their order, and by the class that it was made of, as it was then."""

    def replaced(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return -hidden_states

    one = model()
    layer, kind = layer_of(one), type(layer_of(one))
    with torch.no_grad():
        layer.input_layernorm.weight.mul_(3)
    layer.__class__ = type("Reversed", (kind,), {"norms": kind.norms[::-1]})
    with by_modules():
        expected = logits_of(one)
    torch.testing.assert_close(logits_of(one), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", replaced)
        layer.__class__ = type("Later", (kind,), {})
    with by_modules():
        assert not torch.allclose(logits_of(one), expected)
        expected = logits_of(one)
    torch.testing.assert_close(logits_of(one), expected)


def test_what_an_attention_gives_in_another_dtype_is_the_modules_to_compute() -> None:
    """As one of float64, whose sum with float32 is of float64: no operator takes it."""
    one = model()
    layer = layer_of(one)
    attention, layer.mlp = layer.self_attn, layer.mlp.double()
    layer.post_attention_layernorm = RMSNorm(128, eps=1e-6).double()

    def wider(module: Any, given: Any, output: Any) -> Any:
        return output[0].double(), output[1]

    attention.register_forward_hook(wider)
    one.model.norm, one.lm_head = one.model.norm.double(), one.lm_head.double()
    with by_modules():
        expected = logits_of(one)
    # layers before it round in float32
    torch.testing.assert_close(logits_of(one), expected, rtol=1e-5, atol=1e-5)


def test_what_properties_and_features_of_a_class_return_is_asked_at_each_token() -> None:
    found = {"scaling": 0.2, "variance_epsilon": 1e-6, "softcap": 0.5}

    def features(self: Any) -> dict[str, Any]:
        return {"softcap": found["softcap"]}

    def of(name: str) -> property:
        return property(lambda self: found[name])

    for part, name, member in (
        ("self_attn", "scaling", of("scaling")),
        ("input_layernorm", "variance_epsilon", of("variance_epsilon")),
        ("self_attn", "softcap", features),
    ):
        one = model()
        module = getattr(layer_of(one), part)
        vars(module).pop(name, None)
        module.__class__ = type("Own", (type(module),), {"features" if name == "softcap" else name: member})
        for value in (found[name], 3.0):
            found[name] = value
            with by_modules():
                expected = logits_of(one)
            torch.testing.assert_close(logits_of(one), expected)


def logits_of(one: Any) -> torch.Tensor:
    """Of the third and the fourth token after the prompt."""
    cache = StaticCache(one.config, max_cache_len=32)
    with torch.no_grad():
        one(IDS[2:], past_key_values=cache)
        return torch.stack([one(IDS[2:, at : at + 1], past_key_values=cache).logits for at in range(4)][2:])


def step_of(one: Any, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = one(IDS[2:, :1], past_key_values=cache).logits
    return logits


def test_layers_of_one_place_in_the_cache_are_called_one_after_another(whole: list[int]) -> None:
    one = model()
    layer_of(one).self_attn.layer_idx = 0
    with by_modules():
        expected = logits_of(one)
    torch.testing.assert_close(logits_of(one), expected)
    assert not whole


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_what_is_asked_for_once_is_recorded_then_alone(asked: str, whole: list[int]) -> None:
    """transformers' hooks stay on the modules, and do nothing until they are asked again."""
    one, other = model(), model()
    caches = DynamicCache(config=one.config), DynamicCache(config=one.config)
    token, name = IDS[:, :1], asked.removeprefix("output_")
    with torch.no_grad():
        one(IDS, past_key_values=caches[0])
        with by_modules():
            other(IDS, past_key_values=caches[1])
        for asking in (False, True, False, False, True):
            whole.clear()
            got = one(token, past_key_values=caches[0], **{asked: asking})
            assert whole == ([] if asking else [LAYERS])
            with by_modules():
                expected = other(token, past_key_values=caches[1], **{asked: asking})
            torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
            assert (name in got) == asking
            if asking:
                torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)
    assert torch.equal(generated(one, IDS, MASK, NEW), generated(model(), IDS, MASK, NEW))
    assert whole == [LAYERS] * 2 * (NEW - 1)


@pytest.mark.parametrize(
    "part", ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.k_proj.bias", "mlp.down_proj.bias"]
)
def test_a_vector_whose_memory_was_freed_is_no_absent_one(part: str) -> None:
    """As ZeRO leaves a parameter between its layers' calls."""
    one = model()
    generated(one, IDS, MASK, NEW)
    cache = DynamicCache(config=one.config)
    with torch.no_grad():
        one(IDS, past_key_values=cache)
        one.model.layers[1].get_parameter(part).data = torch.empty(0)
        with pytest.raises((ValueError, RuntimeError)):
            one(IDS[:, :1], past_key_values=cache)


def test_no_layers() -> None:
    """As a draft of the first none of them."""
    one = model()
    one.config.num_hidden_layers = 0
    with by_modules():
        expected = logits_of(one)
    assert torch.equal(logits_of(one), expected)


@pytest.mark.parametrize("number", ["scale", "softcap"])
def test_numbers_that_attention_refuses_are_refused(number: str) -> None:
    one = model()
    cache = DynamicCache(config=one.config)
    step_of(one, cache), step_of(one, cache)
    attention = layer_of(one).self_attn
    for value in (float("inf"), float("nan"), *((0.0, -1.0) if number == "softcap" else ())):
        if number == "scale":
            attention.scaling = value
        else:
            attention._features["softcap"] = value
        with pytest.raises(ValueError, match="attention: soft"):
            step_of(one, cache)


class Slots:
    """A cache that is not transformers', of which nothing keeps a weak reference."""

    __slots__ = ("cache",)

    def __init__(self, config: Any) -> None:
        self.cache = DynamicCache(config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def test_a_cache_of_another_kind() -> None:
    one = model()
    cache: Any = Slots(one.config)
    other = DynamicCache(config=one.config)
    for _ in range(3):
        got = step_of(one, cache)
        with by_modules():
            expected = step_of(one, other)
        torch.testing.assert_close(got, expected)


def test_copies_and_pickles_are_of_the_model_alone() -> None:
    one = model()
    generated(one, IDS, MASK, NEW)
    size = len(pickle.dumps(model()))
    assert len(pickle.dumps(one)) <= size + 1000
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        with torch.no_grad():
            for weight in other.model.parameters():
                weight.mul_(-1.5)
        with by_modules():
            expected = generated(other, IDS, MASK, NEW)
        assert torch.equal(generated(other, IDS, MASK, NEW), expected)
    assert not torch.equal(generated(one, IDS, MASK, NEW), expected)
    assert list(one.state_dict()) == list(model().state_dict())


@pytest.mark.parametrize(
    "replace",
    [
        lambda one: quantization.quantize(one, "int8"),
        lambda one: one.load_state_dict(one.state_dict() | {UP: torch.ones(256, 128)}, assign=True),
        lambda one: one.to("meta"),
    ],
    ids=["quantized", "loaded", "meta"],
)
def test_weights_that_were_replaced_are_freed(replace: Callable[[Any], Any]) -> None:
    one = model()
    generated(one, IDS, MASK, NEW)
    weight = weakref.ref(one.get_parameter(UP))
    replace(one)
    gc.collect()
    assert weight() is None


def test_a_model_is_freed_with_its_last_name() -> None:
    one = model()
    generated(one, IDS, MASK, NEW)
    weight = weakref.ref(one.model.layers[0].mlp.up_proj.weight)
    del one
    gc.collect()
    assert weight() is None


def test_layers_that_are_not_all_in_cpp_are_called(whole: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One hook among them: the others' halves are in C++ one by one, and the layer that refused is asked first."""
    one = model()
    looked: list[Any] = []
    halves = layers_step._halves
    monkeypatch.setattr(layers_step, "_halves", lambda layer, x: looked.append(layer) or halves(layer, x))
    handle = layer_of(one).mlp.register_forward_hook(lambda *given: None)
    with counted() as calls:
        generated(one, IDS, MASK, NEW)
    assert calls == {"attention_step": LAYERS * (NEW - 1), "feed_forward_step": (LAYERS - 1) * (NEW - 1)}
    assert not whole and len(looked) == LAYERS + 1 + NEW - 2
    handle.remove()
    generated(one, IDS, MASK, NEW)
    assert len(whole) == NEW - 1
