"""The engine: tokens are those of each request by itself, whatever runs beside it."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import easytorch
from easytorch.generation import generate_tokens
from easytorch.generation.engine import LLM, Engine, SamplingParams
from easytorch.generation.engine.memory import cache_sizes
from easytorch.generation.engine.pages import PagePool
from easytorch.generation.engine.request import Request
from easytorch.generation.engine.supported import cached_layers, refusal
from tests.generation.engine.page_machine import PageMachine
from tests.generation.engine.traffic import (
    PAGE_SIZE,
    arrivals,
    difference,
    families,
    model_of,
    run,
    small_engine,
)

# One of each kind of block: learned positions, windows, both, softcaps, sinks, experts, partial rotation, ...
BLOCKS = (
    "llama", "gpt2", "mistral", "gemma2", "gpt_oss", "cohere2", "qwen3_moe", "opt", "deepseek_v3", "mamba2",
    "falcon_h1", "qwen3_next", "llama4_text", "gemma4_text", "deepseek_v32",
)  # fmt: skip
STATEFUL = {"mamba2", "falcon_h1", "qwen3_next"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return model_of("llama")


@pytest.mark.parametrize("family", BLOCKS)
def test_tokens_are_those_of_one_request(family):
    model = model_of(family)
    requests = arrivals(14, 3)
    engine = small_engine(model, requests, at_once=6, max_batch_tokens=24)
    run(engine, requests)
    assert [found for one in requests if (found := difference(model, one)) is not None] == []
    stats = engine.stats()
    assert stats.preemptions > 0 or not engine.page_bytes, stats
    assert (stats.cached_tokens > 0) == (family not in STATEFUL), stats


def test_states_take_memory_and_none_is_shared():
    """Of a hybrid the states take at most half; a model of states alone runs as many requests as there are states."""
    hybrid, alone = model_of("qwen3_next"), model_of("mamba")
    one = sizes_of(hybrid, 1 << 20, 1).slot_bytes
    sizes = sizes_of(hybrid, 7 * one, 100)
    assert sizes.num_slots == 3 and sizes.metadata.num_pages == 4 * one // sizes.metadata.page_bytes
    with pytest.raises(ValueError, match=f"the recurrent states of one request take {one}, for which half of it is"):
        Engine(hybrid, max_memory=one)
    engine = Engine(alone, max_memory=5 * sizes_of(alone, 1 << 20, 1).slot_bytes)
    assert engine.stats().num_pages == 5 and not engine.page_bytes
    ids = [engine.add_request([5, 9, 33], GREEDY) for _ in range(7)]
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (5, 2)
    done = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert len({tuple(done[one]) for one in ids}) == 1


def sizes_of(model, memory, requests):
    return cache_sizes(model, cached_layers(model), memory, 4, 64, requests)


def test_the_report_counts_attention_over_pages():
    for family in ("llama", "deepseek_v3"):
        model = model_of(family)
        next(iter(Engine(model, max_memory=1 << 20).stream([5, 6], GREEDY)))
        report = model.easytorch_report
        assert report.called == report.layers, family


def test_every_native_family_is_carried():
    for family in families():
        model = model_of(family)
        assert refusal(model) is None, family
        requests = arrivals(2, 1, aborts=False)
        run(Engine(model, max_memory=1 << 20, page_size=PAGE_SIZE, max_batch_tokens=24), requests)
        assert [found for one in requests if (found := difference(model, one)) is not None] == [], family


def test_what_pages_cannot_hold_is_refused():
    model = model_of("gemma4_text", use_bidirectional_attention="all", sliding_window=8)
    with pytest.raises(ValueError, match="does not support this model: Gemma4ForCausalLM attends to later tokens"):
        Engine(model)
    with pytest.raises(ValueError, match=r"page_size=16 must divide attention_chunk_size=4 of Llama4ForCausalLM"):
        Engine(model_of("llama4_text"))


def test_pages_are_as_wide_as_their_layers():
    """Gemma 4's layers differ in heads, and the last have none; DeepSeek V3.2 keeps an indexer's keys too."""
    wide = Engine(model_of("gemma4_text"), max_memory=1 << 20)._cache
    widths = [sum(pool.shape[2] * pool.shape[3] for pool in wide.pools(index)) for index in wide.metadata.layers]
    assert len(set(widths)) > 1 and len(widths) < wide.metadata.layers[-1] + 3
    assert wide.metadata.page_bytes == 16 * 4 * sum(widths)
    model = model_of("deepseek_v32")
    indexed = Engine(model, max_memory=1 << 20)._cache
    plain = Engine(model_of("deepseek_v3"), max_memory=1 << 20)._cache
    assert indexed.index_pages(0).shape[2] == model.config.index_head_dim and not plain.metadata.index_headdim


def test_pages():
    few = settings(
        max_examples=25, stateful_step_count=40, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(PageMachine, settings=few)


SAMPLED = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {5: 3.0, 7: -100.0}},
]


def test_samples_depend_on_their_seed_alone(llama):
    prompts = [one.prompt for one in arrivals(10, 5)]
    params = [SamplingParams(seed=i, max_tokens=10, ignore_eos=True, **SAMPLED[i % 5]) for i in range(10)]
    together = LLM(llama, max_memory=1 << 20, page_size=PAGE_SIZE, max_batch_tokens=16).generate(prompts, params)
    alone = LLM(llama, max_memory=1 << 20, page_size=PAGE_SIZE, prefix_reuse=False)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        found = output.outputs[0].token_ids
        assert found == alone.generate(prompt, one)[0].outputs[0].token_ids
        if not (one.min_p or one.logit_bias):  # what generate_tokens knows too
            names = ("temperature", "top_p", "repetition_penalty", "seed")
            known = {name: getattr(one, name) for name in names} | {"top_k": one.top_k or None}
            tokens = generate_tokens(llama, torch.tensor([prompt]), max_new_tokens=10, eos_token_id=[], **known)
            assert found == [int(token) for token in tokens]
    other = alone.generate(prompts[0], SamplingParams(seed=99, max_tokens=10, ignore_eos=True))
    assert other[0].outputs[0].token_ids != together[0].outputs[0].token_ids


def test_a_temperature_above_float32_leaves_forbidden_tokens_forbidden(llama):
    params = SamplingParams(temperature=1e300, seed=3, max_tokens=12, ignore_eos=True, allowed_token_ids=[40, 41, 60])
    output = LLM(llama, max_memory=1 << 20, page_size=PAGE_SIZE).generate([5, 6, 7], params)[0]
    assert set(output.outputs[0].token_ids) <= {40, 41, 60}


def test_continuations_of_one_prompt(llama):
    llm = LLM(llama, max_memory=1 << 20, page_size=PAGE_SIZE)
    prompt = list(range(10, 31))
    params = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True)
    output = llm.generate(prompt, params)[0]
    assert [one.index for one in output.outputs] == [0, 1, 2]
    for index, one in enumerate(output.outputs):
        own = llm.generate(prompt, SamplingParams(seed=7 + index, max_tokens=6, ignore_eos=True))[0]
        assert own.outputs[0].token_ids == one.token_ids
    assert llm.engine.stats().cached_tokens >= 2 * 20, "the prompt's full pages are computed once"


def test_log_probabilities_are_the_model_s(llama):
    prompt = [5, 9, 33, 71]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3, repetition_penalty=1.5)
    output = LLM(llama, max_memory=1 << 20).generate(prompt, params)[0].outputs[0]
    with torch.no_grad():
        rows = llama(torch.tensor([prompt + output.token_ids])).logits[0].double().log_softmax(-1)[len(prompt) - 1 :]
    assert len(output.logprobs) == 5
    for token, given, row in zip(output.token_ids, output.logprobs, rows, strict=False):
        best = row.topk(3).indices.tolist()
        assert set(given) == {token, *best}
        for one, logprob in given.items():
            assert math.isclose(logprob.logprob, float(row[one]), abs_tol=1e-4)
            assert logprob.rank == int((row > row[one]).sum()) + 1


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_log_probabilities_of_prompts_are_the_model_s(family):
    """Whatever the chunks, with a prefix that is cached already, after a preemption, and beside requests without."""
    model = model_of(family)
    torch.manual_seed(4)
    prompts = torch.randint(5, 90, (5, 21)).tolist()
    prompts[1] = prompts[0][:19]
    params = dataclasses.replace(GREEDY, prompt_logprobs=3)
    engine = Engine(model, page_size=4, max_memory=1 << 22, max_batch_tokens=8)
    engine._pool = engine._scheduler.pool = PagePool(20)
    list(engine.stream(prompts[0], GREEDY))
    outputs = {}
    asked = {engine.add_request(prompt, params): prompt for prompt in prompts}
    plain = {engine.add_request(prompt, GREEDY): prompt for prompt in prompts}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    for request_id, prompt in asked.items():
        with torch.no_grad():
            own = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        first, *found = outputs[request_id].prompt_logprobs
        assert first is None and len(found) == len(prompt) - 1
        for place, (token, given) in enumerate(zip(prompt[1:], found, strict=True)):
            values, best = own[place].topk(3)
            assert set(given) == {token, *best.tolist()}
            assert given[token].logprob == pytest.approx(float(own[place, token]), abs=1e-4)
            assert given[token].rank == int((own[place] > own[place, token]).sum()) + 1
            assert [given[one].logprob for one in best.tolist()] == pytest.approx(values.tolist(), abs=1e-4)
    for request_id, prompt in plain.items():
        assert outputs[request_id].prompt_logprobs is None
        same = next(one for one in asked if asked[one] == prompt)
        assert outputs[request_id].outputs[0].token_ids == outputs[same].outputs[0].token_ids
    assert family == "mamba2" or engine.stats().preemptions > 0


def test_prompts_are_scored_a_few_positions_at_a_step(llama, monkeypatch):
    """The logits of a long prompt would take gigabytes; one-token prompts have none to score."""
    monkeypatch.setattr("easytorch.generation.engine.scheduler.MOST_SCORED", 6)
    engine = Engine(llama, page_size=4, max_memory=1 << 20)
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    asked = {engine.add_request(list(range(5, 5 + length)), params): length for length in (1, 15, 2, 9)}
    most = []
    run_model = llama.forward
    monkeypatch.setattr(
        llama, "forward", lambda **given: most.append(len(given["logits_to_keep"])) or run_model(**given)
    )
    done = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step()}
    assert {one: len(done[one].prompt_logprobs) for one in asked} == asked
    assert max(most) <= 6 + len(asked) and len(most) >= 4


def test_penalties_and_biases_are_their_definitions(llama):
    prompt = [5, 9, 33, 71, 9]
    given = {"presence_penalty": 1.5, "frequency_penalty": 1.2, "logit_bias": {11: 2.5}, "repetition_penalty": 1.4}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, **given)
    found = LLM(llama, max_memory=1 << 20).generate(prompt, params)[0].outputs[0].token_ids
    expected: list[int] = []
    for _ in range(16):
        with torch.no_grad():
            logits = llama(torch.tensor([prompt + expected])).logits[0, -1].double()
        for token in {*prompt, *expected}:
            logits[token] *= 1.4 if logits[token] < 0 else 1 / 1.4
        for token in set(expected):
            logits[token] -= 1.2 * expected.count(token) + 1.5
        logits[11] += 2.5
        expected.append(int(logits.argmax()))
    assert found == expected
    assert found != LLM(llama, max_memory=1 << 20).generate(prompt, GREEDY)[0].outputs[0].token_ids


def test_ends(llama):
    llm = LLM(llama, max_memory=1 << 20)
    prompt = [5, 9, 33]
    free = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    token = free.token_ids[4]
    cut = free.token_ids.index(token) + 1
    output = llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    )
    assert output[0].outputs[0].token_ids == free.token_ids[:cut]
    assert (output[0].outputs[0].finish_reason, output[0].outputs[0].stop_reason) == ("stop", token)
    llama.generation_config.eos_token_id = [token]
    try:
        ended = LLM(llama, max_memory=1 << 20)
        output = ended.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0]
        assert output.token_ids == free.token_ids[:cut] and output.stop_reason is None
        later = ended.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12, min_tokens=9))[0].outputs[0]
        assert len(later.token_ids) >= 9 and token not in later.token_ids[:8]
        wanted = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=4, logit_bias={token: 100.0})
        assert len(ended.generate(prompt, wanted)[0].outputs[0].token_ids) == 5  # as soon as it may end, it does
    finally:
        llama.generation_config.eos_token_id = 2


def test_a_shared_prefix_is_computed_once_even_in_one_step(llama):
    prefix = list(range(3, 43))
    prompts = [[*prefix, 50 + i] for i in range(5)]
    engine = Engine(llama, max_memory=1 << 20, page_size=PAGE_SIZE)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    first = {output.request_id: output for output in engine.step()}
    assert [first[one].num_cached_tokens for one in ids] == [0, 40, 40, 40, 40]
    done = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step()}
    plain = LLM(llama, max_memory=1 << 20, prefix_reuse=False)
    for request_id, expected in zip(ids, plain.generate(prompts, GREEDY), strict=True):
        assert done[request_id].outputs == expected.outputs
    engine.reset_prefix_cache()
    assert list(engine.stream(prompts[0], GREEDY))[-1].num_cached_tokens == 0


def test_a_step_that_fails_changes_no_request(llama, monkeypatch):
    requests = arrivals(6, 2, aborts=False)
    engine = Engine(llama, max_memory=1 << 20, page_size=PAGE_SIZE, max_batch_tokens=16)
    inner, calls = engine._run, []

    def failing(*args):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        return inner(*args)

    def patient():
        try:
            return Engine.step(engine)
        except KeyboardInterrupt:
            return []

    monkeypatch.setattr(engine, "_run", failing)
    monkeypatch.setattr(engine, "step", patient)
    # one in three steps fails, and all begin anew: few at once, or they would not come to an end
    for one in requests:
        one.params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)
    run(engine, requests)
    assert [found for one in requests if (found := difference(llama, one)) is not None] == []


def test_a_step_interrupted_between_two_tokens_loses_none(llama, monkeypatch):
    """After the model has run, within the requests' own work: those with their token have it once, the others later."""
    engine = Engine(llama, max_memory=1 << 20, page_size=PAGE_SIZE)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most) for most in (1, 3, 3)]
    ids = [engine.add_request([5, 9, 33 + place], one) for place, one in enumerate(params)]
    append, calls = Request.append, []

    def failing(*args):
        calls.append(1)
        if len(calls) in (2, 5):
            raise KeyboardInterrupt
        append(*args)

    monkeypatch.setattr(Request, "append", failing)
    found, interrupted = {}, 0
    while engine.has_unfinished_requests:
        try:
            for output in engine.step():
                found.setdefault(output.request_id, []).append(output.outputs[0].token_ids)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 2
    for place, one in enumerate(ids):
        expected = list(generate_tokens(llama, torch.tensor([[5, 9, 33 + place]]), max_new_tokens=3, eos_token_id=[]))
        tokens = [int(token) for token in expected]
        assert found[one] == [tokens[:count] for count in range(1, len(found[one]) + 1)]
    assert [len(found[one]) for one in ids] == [1, 3, 3]


def test_a_stream_that_is_left_gives_its_pages_back(llama):
    engine = Engine(llama, max_memory=1 << 20)
    stream = engine.stream([5, 6, 7], GREEDY)
    assert len(next(stream).outputs[0].token_ids) == 1
    assert engine.stats().free_pages < engine.stats().num_pages
    stream.close()
    assert engine.stats().free_pages == engine.stats().num_pages and not engine.has_unfinished_requests
    assert not engine.abort("not there")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([5, 97], {}, "token 97; tokens are ints from 0 to 96"),
        ([5, -1], {}, "token -1"),
        ([5, True], {}, "token True"),
        ("text", {}, "no tokenizer"),
        ([5] * 64, {"max_tokens": None}, "the prompt has 64 tokens, and a request at most 64"),
        ([5] * 60, {"max_tokens": 5}, "60 tokens and max_tokens=5"),
        ([5], {"stop_token_ids": [97]}, "stop_token_ids has token 97"),
        ([5], {"logit_bias": {100: 1.0}}, "logit_bias has token 100"),
        ([5], {"stop": "end"}, "stop strings need a tokenizer"),
        ([5], {"temperature": -1.0}, "temperature=-1.0 must be finite and at least 0"),
        ([5], {"temperature": math.nan}, "temperature=nan must be a number"),
        ([5], {"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ([5], {"top_k": -2}, "top_k=-2 must be an int of at least -1"),
        ([5], {"min_p": 1.5}, "min_p=1.5 must be between 0 and 1"),
        ([5], {"presence_penalty": 3.0}, "presence_penalty=3.0 must be between -2 and 2"),
        ([5], {"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
        ([5], {"max_tokens": 0}, "max_tokens=0 must be an int of at least 1"),
        ([5], {"min_tokens": 9, "max_tokens": 3}, "min_tokens=9 is above max_tokens=3"),
        ([5], {"logprobs": 21}, "logprobs=21 must be at most 20"),
        ([5], {"n": 0}, "n=0"),
        ([5], {"stop": ["a", ""]}, "none of them empty"),
        ([5], {"seed": 1.5}, "seed=1.5 must be an int"),
        ([5], {"min_tokens": 2, "allowed_token_ids": [9], "stop_token_ids": [9, 8]}, "which min_tokens forbids"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompt, params, message, llama):
    llm = LLM(llama, max_memory=1 << 20)
    with pytest.raises(ValueError, match=message):
        llm.generate([[5, 6], prompt], [GREEDY, SamplingParams(**params)])
    assert not llm.engine.has_unfinished_requests, "the other prompt is not left behind"


def test_memory_that_cannot_hold_a_request_is_said_before_it_starts(llama):
    engine = Engine(llama, max_memory=1 << 20, page_size=4)
    with pytest.raises(ValueError, match=r"takes 16 pages of .* bytes, and max_memory=.* has 3"):
        Engine(llama, max_memory=3 * engine.page_bytes, page_size=4, max_model_length=64)
    small = Engine(llama, max_memory=3 * engine.page_bytes, page_size=4)
    assert small.max_model_length == 12
    with pytest.raises(ValueError, match="8 tokens and max_tokens=5 follow, which is more than the 12"):
        small.add_request([5] * 8, SamplingParams(max_tokens=5))
    with pytest.raises(ValueError, match="a page of 4 tokens takes"):
        Engine(llama, max_memory=10, page_size=4)
    with pytest.raises(ValueError, match=r"max_memory=1\d* is more than the \d+ bytes of cpu that are free"):
        Engine(llama, max_memory=10**18)
    with pytest.raises(ValueError, match="max_model_length=65 is above the 64 positions"):
        Engine(llama, max_memory=1 << 20, max_model_length=65)
    assert Engine(llama, page_size=5, max_requests=3).stats().num_pages == 3 * 13, "of 64 tokens each"
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="share of the free memory"):
            Engine(llama, max_memory=wrong)
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8': .* give 'auto' or 'float32'"):
        Engine(llama, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="max_batch_tokens=0"):
        Engine(llama, max_batch_tokens=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.train(), r"training mode.*model.eval\(\)"),
        (lambda model: model.set_attn_implementation("eager"), "attn_implementation='eager'"),
    ],
)
def test_a_model_that_attends_to_no_pages_is_refused(change, reason):
    model = model_of("llama")
    change(model)
    with pytest.raises(ValueError, match=reason):
        Engine(model)


def test_other_classes_are_refused_by_name():
    config = transformers.MptConfig(vocab_size=97, d_model=32, n_layers=2, n_heads=4)
    with pytest.raises(ValueError, match="MptForCausalLM is not a native decoder"):
        Engine(easytorch.AutoModelForCausalLM.from_config(config).eval())
    bloom = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match=r"BloomForCausalLM adds a bias of the distance \(ALiBi\).*use model.generate"):
        Engine(easytorch.AutoModelForCausalLM.from_config(bloom).eval())
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
        Engine(easytorch.AutoModelForSeq2SeqLM.from_config(transformers.T5Config(**sizes)).eval())


@pytest.mark.parametrize("more", [
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
], ids=lambda more: more["rope_type"])  # fmt: skip
def test_positions_that_depend_on_the_longest_row_end_where_they_begin_to(more):
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 32} | more
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    engine = Engine(model, max_memory=1 << 20)
    assert engine.max_model_length == 32
    with pytest.raises(
        ValueError, match=f"above the 32 positions: beyond them {rope['rope_type']} positions depend on"
    ):
        Engine(model, max_memory=1 << 20, max_model_length=33)


def test_the_page_s_samples_run():
    page = (Path(__file__).resolve().parents[3] / "docs" / "engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)
    assert len(blocks) >= 2 and not namespace["engine"].has_unfinished_requests
