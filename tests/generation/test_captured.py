"""Decoding by captured steps: the tokens of the ordinary loop, and nothing in a step that a graph cannot hold.

The graphs are those of tests/generation/recorded_graph.py; CUDA's are in test_cuda_graphs.py.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import transformers
from transformers.masking_utils import flash_attention_mask

import easytorch
from easytorch.cache import Chunk, DecodeStep, RaggedPagesCache, RaggedPagesMetadata, RaggedStep, StateSlots
from easytorch.cache_names import cache_argument
from easytorch.generation import generate_tokens
from easytorch.generation.decoders import StaticDecoder
from easytorch.generation.engine import Engine, SamplingParams
from easytorch.generation.engine.decode_graphs import padded_pages, padded_rows
from easytorch.generation.engine.supported import cached_layers, empty_masks
from easytorch.generation.sampling import Sampler, SamplingConfig
from easytorch.kernels.interop.triton_call import Call
from easytorch.layers.captured_step import HostReads
from easytorch.operations.dispatch import platform
from tests.generation.engine.traffic import arrivals, difference, model_of, run, small_engine
from tests.generation.recorded_graph import recorded_graphs
from tests.models.families import FAMILIES

# Grouped queries, windows, sinks and experts, latents, states beside attention, chunks, states alone.
BLOCKS = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4_text", "mamba2")
IDS = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :5], MASK[2, :1] = 0, 0
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}

model_of_family = functools.cache(model_of)


@pytest.fixture
def graphs(monkeypatch):
    with recorded_graphs(monkeypatch) as counts:
        yield counts


def tokens(model, cache, **settings):
    steps = generate_tokens(model, IDS, MASK, cache=cache, max_new_tokens=9, **{"eos_token_id": []} | settings)
    return torch.stack(list(steps), 1)


@pytest.mark.parametrize("family", BLOCKS)
def test_generate_tokens(family, monkeypatch):
    model = model_of_family(family)
    want = tokens(model, "dynamic")
    sampled_until = SAMPLED | {"eos_token_id": [int(want[0, 4]), int(want[1, 6])]}
    sampled = tokens(model, "dynamic", **sampled_until)
    with recorded_graphs(monkeypatch) as counts:
        assert torch.equal(tokens(model, None), want)
        assert counts == {"warm": 1, "captured": 1, "replayed": 7}  # 9 tokens, the prompt's among them
        assert torch.equal(tokens(model, None, **sampled_until), sampled)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_model_generate(family, monkeypatch):
    """With transformers' loop around it: processors, criteria, a streamer, and its random numbers."""
    model = model_of_family(family)
    model.generation_config.eos_token_id = None

    class Kept(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens.append(value.clone().reshape(-1))

        def end(self):
            self.ended = True

    def generate(**settings):
        torch.manual_seed(5)
        return model.generate(IDS, attention_mask=MASK, max_new_tokens=9, pad_token_id=0, **settings)

    calls = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 10, "temperature": 0.7, "repetition_penalty": 1.3, "num_return_sequences": 2},
        {"do_sample": False, "stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= 16] * len(ids))]},
        {"do_sample": False, "cache_implementation": "static"},
    ]
    if family == "gemma2":  # a window of transformers' static cache rolls by a count in Python: it is compiled
        calls.pop()
    want = [generate(**settings) for settings in calls]
    one = Kept()
    with recorded_graphs(monkeypatch) as counts:
        for settings, expected in zip(calls, want, strict=True):
            assert torch.equal(generate(**settings), expected), settings
        assert counts["captured"] == len(calls)
        model.generate(IDS[1:2], max_new_tokens=9, do_sample=False, streamer=one, pad_token_id=0)
        assert counts["replayed"] > 20
    assert one.ended and torch.equal(torch.cat(one.tokens), want[0][1])


def test_generate_leaves_to_transformers_what_it_does_not_capture(graphs):
    """Beams, outputs beside the tokens, a cache of the caller's, and where torch.compile is switched off."""
    model = model_of_family("llama")
    for settings in (
        {"num_beams": 2},
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {"past_key_values": transformers.DynamicCache(config=model.config)},
        {"disable_compile": True},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
    ):
        ids = IDS[1:2]
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, **settings)
        assert graphs["warm"] == 0, settings


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next", "llama4_text"])
def test_engine(family, graphs):
    """scripts/check_engine.py --captured runs every family."""
    model = model_of_family(family)
    requests = arrivals(7, 3)
    engine = small_engine(model, requests, at_once=6, max_batch_tokens=24)
    run(engine, requests)
    stats = engine.stats()
    assert stats.captured_steps == graphs["replayed"] > 10 and engine.eager_reason is None
    assert [found for one in requests if (found := difference(model, one)) is not None] == []


def test_sizes_of_steps():
    assert [padded_rows(count) for count in (1, 2, 3, 5, 8, 9, 17, 33, 256)] == [1, 2, 4, 8, 8, 16, 32, 48, 256]
    assert [padded_pages(count, 100) for count in (1, 16, 17, 64, 65, 100)] == [16, 16, 32, 64, 100, 100]
    assert padded_pages(1, 4) == 4


def test_a_changed_model_is_captured_anew(graphs):
    model = model_of("llama")
    prompt = [5, 9, 33]

    def of_engine(engine):
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), "one")
        found = None
        while engine.has_unfinished_requests:
            found = engine.step()[0].outputs[0].token_ids
        return found

    engine = Engine(model, max_memory=1 << 20, prefix_reuse=False)
    before = of_engine(engine)
    assert graphs["captured"] == 1 and of_engine(engine) == before and graphs["captured"] == 1
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight.mul_(-3)  # in place: the graph sees it
    changed = of_engine(engine)
    assert changed != before and graphs["captured"] == 1
    weight.data = -weight.data / 3
    assert of_engine(engine) == before and graphs["captured"] == 2
    handle = model.model.layers[1].register_forward_hook(lambda module, given, output: output * 0)
    hooked = of_engine(engine)
    assert hooked != before and "model.layers.1 has hooks" in engine.eager_reason and graphs["captured"] == 2
    handle.remove()
    assert of_engine(engine) == before and engine.eager_reason is None and graphs["captured"] == 3
    eager = Engine(model, max_memory=1 << 20, enforce_eager=True)
    assert of_engine(eager) == before and eager.eager_reason == "enforce_eager=True"
    assert graphs["captured"] == 3


def test_the_model_changes_between_two_tokens(graphs):
    model = model_of("llama")
    run = generate_tokens(model, IDS, MASK, max_new_tokens=8, eos_token_id=[])
    for _ in range(4):
        next(run)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * -2
    rest = torch.stack(list(run), 1)
    assert graphs["captured"] == 2
    model = model_of("llama")
    run = generate_tokens(model, IDS, MASK, max_new_tokens=8, eos_token_id=[], cache="dynamic")
    for _ in range(4):
        next(run)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * -2
    assert torch.equal(torch.stack(list(run), 1), rest)


def test_a_step_that_reads_a_value_runs_eagerly(graphs, monkeypatch, caplog):
    model = model_of("llama")
    want = tokens(model, "dynamic")
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward

    def reads(self, x):
        return forward(self, x) if float(x.sum()) < 1e9 else x

    monkeypatch.setattr(kind, "forward", reads)
    engine = Engine(model, max_memory=1 << 20)
    engine.add_request([5, 9, 33], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    assert "aten.item.default waits for the device" in engine.eager_reason
    assert torch.equal(tokens(model, None), want)
    assert graphs["captured"] == 0 and "decoding runs without a CUDA graph" in caplog.text


def _cut_by_its_mask(module, query, key, value, mask, scaling=None, **_):
    """As flash-attn's: keys of padding are cut out, and the last query sees the last key."""
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
    seen = torch.ones(key.shape[0], key.shape[2]) if mask is None else mask[:, : key.shape[2]]
    seen = torch.nn.functional.pad(seen, (0, key.shape[2] - seen.shape[1])).bool()
    ends = int(seen.sum(-1).max()) if mask is None else mask.shape[1]
    places = torch.arange(ends - query.shape[2], ends)[:, None] >= torch.arange(key.shape[2])
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~(places & seen[:, None, None]), -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.mark.parametrize("mask", [flash_attention_mask, None])
def test_an_attention_that_does_not_know_the_slots_of_a_static_cache(mask, monkeypatch):
    """Its masks are those of padding, or none: there is no static cache that it was not asked to take."""
    model = model_of("llama")
    ids = IDS if mask is not None else IDS[1:2]  # without a mask there is no padding

    def generated():
        rows = MASK[: len(ids)] if mask is not None else None
        loop = generate_tokens(model, ids, rows, max_new_tokens=6, eos_token_id=[])
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return torch.stack(list(loop), 1), model.generate(ids, attention_mask=rows, **settings)[:, ids.shape[1] :]

    want, name = generated()[0], "cuts_by_padding" if mask else "cuts_nothing"
    transformers.AttentionInterface.register(name, _cut_by_its_mask)
    if mask is not None:
        transformers.AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    with recorded_graphs(monkeypatch) as counts:
        assert all(torch.equal(one, want) for one in generated()) and counts["warm"] == 0
    with pytest.raises(ValueError, match=r"cannot use a static cache: .*; use cache='dynamic'"):
        generate_tokens(model, ids, cache="static")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tensors of the meta device run what CUDA's would, but no kernel; reading a value of them is an error."""
    monkeypatch.setitem(platform._PLATFORM_OF_DEVICE, "meta", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(Call, "launch", lambda self: None)
    return torch.device("meta")


@pytest.mark.parametrize("family", BLOCKS)
def test_no_operator_of_a_step_waits_for_the_device(family, as_on_a_gpu):
    with as_on_a_gpu, torch.no_grad():
        model = easytorch.AutoModelForCausalLM.from_config(FAMILIES[family].config()).eval()
    ids, mask = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.bool)
    with torch.no_grad():
        decoder = StaticDecoder(model, ids, mask, 12, as_on_a_gpu)
        config = SamplingConfig(temperature=1.0, top_k=5, top_p=0.9, repetition_penalty=1.3, seed=1)
        sampler = Sampler(config, ids, mask, [1], 0, as_on_a_gpu)
        token = decoder.next(None, sampler)
        with HostReads() as reads:
            assert decoder.next(token, sampler).shape == (2,)
    assert reads.found == []
    with torch.inference_mode(), HostReads() as reads:
        step = pages_step(model, as_on_a_gpu)
        assert step().logits.shape[:2] == (1, 2)
    assert reads.found == []


def pages_step(model, device):
    """A decode step of the engine over pages, after a prompt that makes the states."""
    layers = cached_layers(model)
    sizes = {
        "num_kv_heads": 0,
        "k_headdim": 0,
        "v_headdim": 0,
        "page_size": 24,
        "num_pages": 64,
        "max_model_length": 96,
    }
    metadata = RaggedPagesMetadata(layers=(), dtype=model.dtype, hbm_utilization=1.0, **sizes)
    if layers.attentions:
        of_model = RaggedPagesMetadata.of(
            model.config, model.dtype, torch.device("cpu"), hbm_utilization=1.0, page_size=2, max_model_length=1,
            layers=layers.attentions, latents=layers.has_latents,
        )  # fmt: skip
        metadata = dataclasses.replace(of_model, num_pages=64, max_model_length=96)
    cache, states = RaggedPagesCache(metadata, device), StateSlots(5) if layers.has_states else None
    masks, name = empty_masks(model), cache_argument(model.forward)
    prompt = RaggedStep(cache, [Chunk(range(8), 0, 6, 0), Chunk(range(8, 16), 0, 5, 1)], states)
    given = {"attention_mask": masks, "use_cache": True}
    ids = torch.ones(1, 11, dtype=torch.int64, device=device)
    model(input_ids=ids, position_ids=prompt.positions, **given, **{name: prompt})
    rows = torch.zeros(2, 1 + 3 + 16, dtype=torch.int64, device=device)

    def run():
        step = DecodeStep(cache, rows[:, 1:], states)
        return model(input_ids=rows[:, 0][None], position_ids=step.positions, **given, **{name: step})

    return run
