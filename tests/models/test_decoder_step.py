"""A layer's step in C++ is what its modules compute: tokens, caches, and whatever looks between the modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import easytorch
import easytorch.protocol.quantization
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.decoder_step import cpu
from easytorch.layers import attention
from easytorch.layers.cache_slots import slot_of
from easytorch.training.tokenizer import train_tokenizer
from tests.models.families import FAMILIES

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")

WIDE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = 2
# family -> further sizes, and which halves of a layer are in C++ with a dynamic cache
TAKEN: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "llama": ({"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}, True, True),
    "mistral": ({"sliding_window": 7}, True, True),
    "qwen2": ({}, True, True),
    "qwen3": ({"head_dim": 128}, True, True),
    "smollm3": ({"no_rope_layers": [1, 0]}, True, True),
    "mixtral": ({"num_local_experts": 2, "num_experts_per_tok": 1}, True, False),
    "ministral3": ({}, False, True),  # scales by position stand in its `rotate`
    "gemma": ({}, False, False),  # norms of another kind
}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SMALLEST_FLOAT32", 2**12)
    monkeypatch.setattr(processor, "AVX2", True)


def model(family: str = "llama", dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    torch.manual_seed(0)
    one = FAMILIES[family]
    given = one.sizes | WIDE | TAKEN[family][0] | sizes
    config = one.config_class(**given)
    made = easytorch.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for weight in made.parameters():  # larger than a new model's, so that tokens depend on the prompt
            if weight.dim() > 1:
                weight.mul_(2)
    return made


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each half was in C++."""
    calls = {"attention_step": 0, "feed_forward_step": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    def of_all(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, layers: Any, memory: Any) -> Any:
            for name in calls:
                calls[name] += len(memory)
            return function(x, layers, memory)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(cpu, name, counting(name, getattr(cpu, name)))
        patch.setattr(cpu, "decoder_layers", of_all(cpu.decoder_layers))
        yield calls


@contextmanager
def by_modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "takes", lambda x: False)
        yield


IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 6], [0, 0, 0, 71, 8, 12, 3, 44, 9], [2, 3, 4, 5, 6, 7, 8, 9, 10]])
MASK = (IDS != 0).long()


def generated(one: Any, ids: torch.Tensor, mask: torch.Tensor, new: int, **settings: Any) -> torch.Tensor:
    torch.manual_seed(7)
    tokens: torch.Tensor = one.generate(ids, attention_mask=mask, max_new_tokens=new, **settings)
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "num_beams": 2},
    ],
    ids=["greedy", "sampling", "static", "beams"],
)
@pytest.mark.parametrize("family", TAKEN)
def test_generation_gives_the_tokens_of_the_modules(family: str, settings: dict[str, Any]) -> None:
    """With a row of padding and without, past the end of a sliding window."""
    one, new = model(family), 12
    _, attends, feeds = TAKEN[family]
    for ids, mask in ((IDS, MASK), (IDS[:1], MASK[:1])):
        with by_modules():
            expected = generated(one, ids, mask, new, **settings)
        with counted() as calls:
            assert torch.equal(generated(one, ids, mask, new, **settings), expected)
        attending = LAYERS
        if "cache_implementation" in settings:  # a static window rolls its keys, which its own `update` does
            attending = one.model.layer_types.count("full_attention")
        assert calls["attention_step"] == attending * (new - 1) * attends
        assert calls["feed_forward_step"] == LAYERS * (new - 1) * feeds


@pytest.mark.parametrize("format", ["int8", "nf4", "affine"])
def test_quantized_layers_are_in_the_step(format: str) -> None:
    one = easytorch.protocol.quantization.quantize(model(), format)
    with by_modules():
        expected = logits_of(one, DynamicCache(config=one.config))
    with counted() as calls:
        got = logits_of(one, DynamicCache(config=one.config))
    assert calls == {"attention_step": 6 * LAYERS, "feed_forward_step": 6 * LAYERS}
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_codes_laid_out_for_the_step_are_saved_as_they_were() -> None:
    """By the state dict and as the protocol's state, after which the step gives the same numbers."""
    one = easytorch.protocol.quantization.quantize(model(), "affine")
    before = {name: tensor.clone() for name, tensor in one.named_buffers()}
    name = next(name for name in before if name.endswith("gate_proj.weight_codes"))
    expected = logits_of(one, DynamicCache(config=one.config))
    for read in (lambda: one.state_dict(), lambda: easytorch.protocol.graphother(one)):
        assert one.get_buffer(name).shape != before[name].shape, "the step lays codes out"
        state = read()
        assert all(torch.equal(state[key], tensor) for key, tensor in before.items() if key in state)
        assert torch.equal(logits_of(one, DynamicCache(config=one.config)), expected)
    graphdef, *state = easytorch.protocol.split_module(one)
    again = easytorch.protocol.merge_module(graphdef, *state)
    assert torch.equal(logits_of(again, DynamicCache(config=one.config)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_in_sixteen_bits_are_those_of_the_modules(dtype: torch.dtype) -> None:
    one = model("qwen3", dtype)
    with by_modules():
        expected = logits_of(one, DynamicCache(config=one.config))
    with counted() as calls:
        got = logits_of(one, DynamicCache(config=one.config))
    assert calls == {"attention_step": 6 * LAYERS, "feed_forward_step": 6 * LAYERS}
    assert (got - expected).norm() <= 2e-2 * expected.norm()


def logits_of(one: Any, cache: Any, tokens: torch.Tensor = IDS[:, :6]) -> torch.Tensor:
    """Of each of the tokens, fed one by one after the prompt `IDS`, or after what the cache holds."""
    found = []
    with torch.no_grad():
        if not cache.get_seq_length():
            one(IDS, past_key_values=cache)
        for token in tokens.split(1, 1):
            found.append(one(token, past_key_values=cache).logits)
    return torch.cat(found, 1).float()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a shallow copy": lambda cache: _shallow(cache),
    "a deep copy": copy.deepcopy,
    "cropped": lambda cache: cache.crop(-2) or cache,
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 1])) or cache,
    "rows repeated": lambda cache: cache.batch_repeat_interleave(2) or cache,
    "rows selected": lambda cache: cache.batch_select_indices(torch.tensor([1, 2])) or cache,
    "reset": lambda cache: cache.reset() or cache,
    "other keys": lambda cache: _scaled(cache, "keys"),
    "other values": lambda cache: _scaled(cache, "values"),
}


def _shallow(cache: Any) -> Any:
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def _scaled(cache: Any, name: str) -> Any:
    for layer in cache.layers:
        setattr(layer, name, getattr(layer, name) * 1.5)
    return cache


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_that_is_changed_or_copied_between_tokens(family: str, change: str) -> None:
    """Its memory is written past the tokens there are: another cache's must never be, nor what was cropped be seen."""
    one = model(family, sliding_window=100)

    def run() -> list[torch.Tensor]:
        cache = DynamicCache(config=one.config)
        first = logits_of(one, cache)
        other = CHANGES[change](cache)
        rows = other.layers[0].keys.shape[0] if other.get_seq_length() else 3
        tokens = torch.arange(2, 2 + 4 * rows).view(rows, 4)
        after = [logits_of(one, other, tokens)]
        if other is not cache:  # both go on, with tokens of their own
            after += [logits_of(one, cache, tokens.flip(1)), logits_of(one, other, tokens)]
        return [first, *after, *(tensor for layer in other.layers for tensor in (layer.keys, layer.values))]

    with by_modules():
        expected = run()
    for got, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_cache_grows_past_its_memory_and_by_a_share() -> None:
    one = model(max_position_embeddings=400)
    with by_modules():
        expected = generated(one, IDS[:1], MASK[:1], 150)
    cache = DynamicCache(config=one.config)
    assert torch.equal(generated(one, IDS[:1], MASK[:1], 150, past_key_values=cache), expected)
    keys = cache.layers[0].keys
    assert keys.shape[2] == cache.get_seq_length() == 9 + 149
    assert keys.untyped_storage().nbytes() <= 2 * keys.numel() * keys.element_size()


def test_a_layer_that_moves_between_devices_is_filled_by_its_cache() -> None:
    one = model()
    cache = DynamicCache(config=one.config)
    logits_of(one, cache)
    assert slot_of(cache, 0, 3, torch.float32) is not None
    cache.offloading = True
    assert slot_of(cache, 0, 3, torch.float32) is None


def test_caches_with_limits_refuse_as_before() -> None:
    one = model()
    for kind in ("static", "dynamic"):
        cache = one.init_cache(1, 11, kind=kind)
        with torch.no_grad(), counted() as calls:
            one(IDS[:1], past_key_values=cache)
            logits = [one(IDS[:1, :1], past_key_values=cache).logits for _ in range(2)]
            assert calls["attention_step"] == 2 * LAYERS and all(one.isfinite().all() for one in logits)
            with pytest.raises(ValueError, match="is for 11 tokens"):
                one(IDS[:1, :1], past_key_values=cache)


def test_a_static_cache_in_a_graph_of_gradients_is_its_own_updates() -> None:
    """A key written behind autograd's back would change a gradient without a word."""
    one = model()
    cache = StaticCache(config=one.config, max_cache_len=16)
    one(IDS, past_key_values=cache)
    with counted() as calls, torch.no_grad():
        one(IDS[:, :1], past_key_values=cache, attention_mask=torch.ones(3, 10))
    assert calls["attention_step"] == 0 and calls["feed_forward_step"] == LAYERS


ATTENTION = (
    "input_layernorm",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
)
FEED_FORWARD = ("post_attention_layernorm", "mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn")


@pytest.mark.parametrize("name", [*ATTENTION, *FEED_FORWARD])
def test_a_hook_on_any_module_is_called_at_each_token(name: str) -> None:
    one = model()
    seen: list[nn.Module] = []
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        hooked = one.model.layers[0].get_submodule(name)
        handle = getattr(hooked, register)(lambda module, *rest: seen.append(module))
        with counted() as calls:
            logits_of(one, DynamicCache(config=one.config))
        handle.remove()
        half = "attention_step" if name in ATTENTION else "feed_forward_step"
        other = "feed_forward_step" if name in ATTENTION else "attention_step"
        assert len(seen) == 7 and calls == {half: 6 * (LAYERS - 1), other: 6 * LAYERS}
        seen.clear()


class Doubled(nn.Linear):
    """A layer of another class, as adapters and quantization put in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("name", [one for one in (*ATTENTION, *FEED_FORWARD) if one.endswith("_proj")])
def test_a_layer_that_was_replaced_or_changed_is_run(name: str) -> None:
    one, parent = model(), name.partition(".")[0]
    plain = logits_of(one, DynamicCache(config=one.config))
    layer = one.model.layers[0]
    holder, leaf = layer.get_submodule(parent), name.partition(".")[2]
    linear = getattr(holder, leaf)
    other = Doubled(linear.in_features, linear.out_features, bias=linear.bias is not None)
    other.load_state_dict(linear.state_dict())
    setattr(holder, leaf, other)
    changed = logits_of(one, DynamicCache(config=one.config))
    setattr(holder, leaf, linear)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.mul_(2)
    expected = logits_of(one, DynamicCache(config=one.config))
    torch.testing.assert_close(changed, expected, rtol=1e-4, atol=1e-5)
    assert (plain - expected).norm() > 1e-3 * plain.norm()


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("shape", [(1, 5), (2, 4), (8, 1), (3, 3)], ids=str)
def test_a_few_tokens_of_any_rows_are_one_step_of_the_feed_forward(shape: tuple[int, int], format: str | None) -> None:
    """As those of several requests are, or the tokens that a draft proposes."""
    one = model() if format is None else easytorch.protocol.quantization.quantize(model(), format)
    ids = IDS.flatten()[: shape[0] * shape[1]].reshape(shape)
    with torch.no_grad():
        with by_modules():
            expected = one(ids).logits
        with counted() as calls:
            got = one(ids).logits
    rows = shape[0] * shape[1]
    assert calls == {"attention_step": 0, "feed_forward_step": LAYERS if rows <= 8 else 0}
    assert got.shape == expected.shape
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_generate_with_stop_strings_is_in_the_step(caplog: pytest.LogCaptureFixture) -> None:
    """generate hands the tokenizer of stop strings on to the model, which has no use for it."""
    one, tokenizer = model(), train_tokenizer(["the class statement binds a name"] * 5, 280)
    settings: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    expected = one.generate(IDS, **settings)
    attention._warn_unknown.cache_clear()
    with counted() as calls:
        found = one.generate(IDS, **settings, stop_strings="never said", tokenizer=tokenizer)
    assert torch.equal(found, expected)
    assert calls == {"attention_step": 6 * LAYERS, "feed_forward_step": 6 * LAYERS}
    assert not [record for record in caplog.records if "'tokenizer'" in record.message]


def test_what_asks_for_more_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    one = model()

    def steps(**arguments: Any) -> int:
        cache = DynamicCache(config=one.config)
        one(IDS, past_key_values=cache)
        with counted() as calls:
            one(IDS[:, :1], past_key_values=cache, **arguments)
        return calls["attention_step"] + calls["feed_forward_step"]

    assert steps() == 0, "gradients"
    with torch.no_grad():
        assert steps() == 2 * LAYERS
        with torch.autocast("cpu", torch.bfloat16):
            assert steps() == 0
        with torch.autograd.forward_ad.dual_level():
            assert steps() == 0
        for name, setting in (("EASYTORCH_OPS", "rms_norm=native"), ("EASYTORCH_CHECK", "1")):
            with monkeypatch.context() as patch:
                patch.setenv(name, setting)
                assert steps() == 0
        seen: list[nn.Module] = []
        with monkeypatch.context() as patch:
            patch.setattr(attention, "OBSERVERS", [seen.append])
            assert steps() == 2 * LAYERS and len(seen) == 2 * LAYERS, "the step says which layers call ours"
        one.set_attn_implementation("sdpa")
        assert steps() == LAYERS, "an attention that was asked for by name"
        one.set_attn_implementation("easytorch")
        assert steps() == 2 * LAYERS
        assert steps(output_attentions=True) == LAYERS, "attention weights"
