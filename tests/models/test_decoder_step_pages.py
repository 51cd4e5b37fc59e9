"""A layer's step in C++ over pages: the engine's tokens, and generation over a cache of pages, are the modules'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import easytorch.protocol.quantization
from easytorch.cache import RaggedPagesCache, RaggedPagesMetadata
from easytorch.generation.engine import Engine, SamplingParams
from easytorch.kernels.cpu import library
from easytorch.kernels.decoder_step import cpu
from easytorch.layers import attention
from easytorch.models.llama import LlamaAttention
from tests.models.test_decoder_step import IDS, LAYERS, TAKEN, by_modules, generated, model, of_any_size

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
assert of_any_size  # a fixture that this file takes too

PROMPTS = [[5, 9, 33], [71, 8, 12, 3, 44, 6, 7, 8, 9, 10, 11], [2], [5, 9, 33, 4, 4, 4, 4]]
NEW = 12


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the hidden states of each attention over pages in C++, be it one of many layers of a call."""
    seen: list[tuple[int, ...]] = []
    step, layers_step = cpu.attention_step_pages, cpu.decoder_layers_pages

    def of_all(x: torch.Tensor, layers: Any, memory: Any) -> torch.Tensor:
        seen.extend([tuple(x.shape)] * len(memory))
        return layers_step(x, layers, memory)

    def counting(x: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return step(x, *given, **more)

    monkeypatch.setattr(cpu, "attention_step_pages", counting)
    monkeypatch.setattr(cpu, "decoder_layers_pages", of_all)
    return seen


def of_engine(one: Any, **settings: Any) -> list[list[int]]:
    """Requests of different lengths, of which the first two share a page after some steps."""
    engine = Engine(one, max_memory=1 << 22, page_size=4, **settings)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NEW)
    names = [engine.add_request(prompt, params) for prompt in PROMPTS[:3]]
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        if engine.stats().steps == 3:
            names.append(engine.add_request(PROMPTS[3], params))
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    return [found[name] for name in names]


@pytest.mark.parametrize("family", TAKEN)
def test_the_engine_gives_the_tokens_of_the_modules(family: str, calls: list[tuple[int, ...]]) -> None:
    """Past the end of a sliding window; each step of at most eight tokens is one operator a layer."""
    one = model(family)
    with by_modules():
        expected = of_engine(one)
    assert not calls
    assert of_engine(one) == expected
    if TAKEN[family][1]:
        assert len(calls) >= LAYERS * (NEW - 1) and {shape[0] for shape in calls} >= {1, 3, 4}
    else:
        assert not calls


class WithSinks(LlamaAttention):
    """gpt-oss's attention; its own norms, in float32, are not those of a step."""

    def features(self) -> dict[str, Any]:
        return {**super().features(), "s_aux": self.sinks}


def test_sinks_are_in_the_step_over_pages(calls: list[tuple[int, ...]]) -> None:
    one = model()
    plain = of_engine(one)
    for layer in one.model.layers:
        layer.self_attn.__class__ = WithSinks
        layer.self_attn.sinks = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 4.0]))
    calls.clear()
    with by_modules():
        expected = of_engine(one)
    assert not calls and expected != plain
    assert of_engine(one) == expected and calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_sixteen_bits_they_are_those_of_one_request(dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    """A request's numbers do not depend on the others' of its step, nor on the pages."""
    one = model("qwen3", dtype)
    together = of_engine(one)
    assert calls
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NEW)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        engine = Engine(one, max_memory=1 << 22, page_size=8)
        engine.add_request(prompt, params)
        while engine.has_unfinished_requests:
            outputs = engine.step()
        alone = outputs[0].outputs[0].token_ids
        same = sum(a == b for a, b in zip(alone, tokens, strict=True))
        assert same >= NEW // 2, (alone, tokens)


def test_quantized_layers_are_in_the_step_over_pages(calls: list[tuple[int, ...]]) -> None:
    one = easytorch.protocol.quantization.quantize(model(), "int8")
    with by_modules():
        expected = of_engine(one)
    assert of_engine(one) == expected and calls


def cache_of(one: Any, dtype: torch.dtype = torch.float32) -> RaggedPagesCache:
    dim = one.model.layers[0].self_attn.head_dim
    return RaggedPagesCache(
        RaggedPagesMetadata(
            layers=tuple(range(LAYERS)), num_kv_heads=2, k_headdim=dim, v_headdim=dim, dtype=dtype, page_size=4,
            num_pages=64, max_model_length=60, hbm_utilization=0.5,
        )
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generation_over_a_cache_of_pages(settings: dict[str, Any], calls: list[tuple[int, ...]]) -> None:
    one = model("qwen3")
    rows = IDS[2:] if "prompt_lookup_num_tokens" in settings else IDS[[0, 2]]

    def run() -> torch.Tensor:
        cache = cache_of(one)
        return generated(one, rows, torch.ones_like(rows), NEW, past_key_values=cache, do_sample=False, **settings)

    with by_modules():
        expected = run()
    assert not calls
    assert torch.equal(run(), expected)
    assert calls


def test_the_slots_of_a_token_are_made_once_for_all_layers(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And anew for other pages, as beams take at each token."""
    made: list[Any] = []
    tokens = RaggedPagesCache.tokens

    def seen(*given: Any) -> Any:
        made.append(tokens(*given))
        return made[-1]

    monkeypatch.setattr(RaggedPagesCache, "tokens", seen)
    one = model("qwen3")
    generated(one, IDS[:1], torch.ones_like(IDS[:1]), NEW, past_key_values=cache_of(one), do_sample=False)
    assert calls and len(made) >= LAYERS * NEW and len({id(found) for found in made}) == NEW


def test_attention_over_pages_is_reported(calls: list[tuple[int, ...]]) -> None:
    one, reported = model(), []
    attention.OBSERVERS.append(reported.append)
    try:
        of_engine(one)
    finally:
        attention.OBSERVERS.remove(reported.append)
    layers = [layer.self_attn for layer in one.model.layers]
    assert calls and len(reported) % LAYERS == 0 and reported[-LAYERS:] == layers


def test_what_looks_between_the_modules_runs_them(calls: list[tuple[int, ...]]) -> None:
    one = model()
    expected, seen = of_engine(one), []
    assert calls
    calls.clear()
    for name in ("self_attn", "self_attn.k_proj", "input_layernorm"):
        handle = one.model.layers[0].get_submodule(name).register_forward_hook(lambda *given: seen.append(given))
        assert of_engine(one) == expected
        handle.remove()
        assert seen and calls
        seen.clear()
    count = len(calls)
    one.set_attn_implementation("sdpa")
    assert of_engine(one) == expected and len(calls) == count


def test_pages_of_another_dtype_are_the_modules(calls: list[tuple[int, ...]]) -> None:
    """Which say what does not fit."""
    one = model()
    cache = cache_of(one, torch.bfloat16)
    with torch.no_grad(), pytest.raises(ValueError, match="the pages are of"):
        one(IDS[:1, :2], past_key_values=cache)
    assert not calls
