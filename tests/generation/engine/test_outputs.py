"""What the outputs of a request hold: all tokens, the new ones, or nothing before the end; and what they cost."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace

import pytest
import torch
import transformers

import easytorch
from easytorch.generation.engine import LLM, CompletionOutput, Engine, RequestOutputKind, SamplingParams
from easytorch.generation.engine.request import Request
from easytorch.generation.engine.stop import StoppedText

PROMPT = [5, 9, 33]


class Letters:
    """A tokenizer: token i is the letter number i of `abc`; others are no text."""

    eos_token_id = None

    def decode(self, ids, **settings):
        return "".join("abc"[token % 4] if token % 4 < 3 else "" for token in ids)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.5, eos_token_id=None,
    )  # fmt: skip
    return easytorch.AutoModelForCausalLM.from_config(config).eval()


def outputs_of(engine, **settings):
    return list(engine.stream(PROMPT, SamplingParams(temperature=1, seed=3, max_tokens=24, logprobs=2, **settings)))


@pytest.mark.parametrize("stop", [None, ["cab", "bb"]])
def test_what_outputs_of_each_kind_hold(llama, stop):
    engine = Engine(llama, Letters(), max_memory=1 << 20)
    settings = {"stop": stop, "prompt_logprobs": 1}
    (final,) = outputs_of(engine, output_kind=RequestOutputKind.FINAL_ONLY, **settings)
    so_far = outputs_of(engine, **settings)
    new = outputs_of(engine, output_kind=RequestOutputKind.DELTA, **settings)
    whole = final.outputs[0]
    assert final.finished and (stop is None) == (len(whole.token_ids) == 24) and whole.text
    assert replace(so_far[-1], request_id=final.request_id) == final
    assert len(so_far) == len(new) == len(whole.token_ids) > 3
    for place, (output, step) in enumerate(zip(so_far, new, strict=True), 1):
        assert output.outputs[0].token_ids == whole.token_ids[:place]
        assert output.outputs[0].logprobs == whole.logprobs[:place]
        assert output.outputs[0].text == "".join(one.outputs[0].text for one in new[:place])
        assert step.outputs[0].token_ids == whole.token_ids[place - 1 : place]
        assert step.outputs[0].logprobs == whole.logprobs[place - 1 : place]
        assert output.finished == step.finished == (place == len(so_far))
        assert output.prompt_token_ids == PROMPT and output.prompt_logprobs == final.prompt_logprobs
        assert step.prompt_logprobs == (final.prompt_logprobs if place == 1 else [])
    assert "".join(one.outputs[0].text for one in new) == whole.text


def test_outputs_that_nobody_reads_are_not_copied(llama, monkeypatch):
    engine, copies, between = Engine(llama, Letters(), max_memory=1 << 20), [], Request._between

    def counting(self, before, after):
        copies.append(after[0] - before[0])
        return between(self, before, after)

    monkeypatch.setattr(Request, "_between", counting)
    found = outputs_of(engine)
    assert copies == [24]  # of the last one
    assert found[7].outputs[0].token_ids == found[-1].outputs[0].token_ids[:8] and copies == [24, 8]
    assert found[7].outputs[0].text is found[7].outputs[0].text and copies == [24, 8]
    outputs_of(engine, output_kind=RequestOutputKind.DELTA)
    assert copies[2:] == [1] * 24


def test_an_output_of_all_tokens_is_an_ordinary_object(llama):
    engine = Engine(llama, Letters(), max_memory=1 << 20)
    stream = engine.stream(PROMPT, SamplingParams(temperature=0, max_tokens=6))
    first, second = next(stream), next(stream)
    plain = CompletionOutput(0, first.outputs[0].text, first.outputs[0].token_ids, None, None, None)
    assert first.outputs[0] == plain and repr(first.outputs[0]) == repr(plain)
    for copied in (copy.copy(second), copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert copied == second and len(copied.outputs[0].token_ids) == 2
    with pytest.raises(AttributeError, match="has no attribute 'tokens'"):
        _ = first.outputs[0].tokens
    stream.close()


def test_llm_returns_final_outputs_whatever_the_kind(llama):
    llm = LLM(llama, Letters(), max_memory=1 << 20)
    for kind in RequestOutputKind:
        found = llm.generate([PROMPT, PROMPT[:1]], SamplingParams(max_tokens=5, seed=1, n=2, output_kind=kind))
        assert [[len(one.token_ids) for one in output.outputs] for output in found] == [[5, 5], [5, 5]]
    with pytest.raises(ValueError, match=r"output_kind='delta' must be one of RequestOutputKind\.CUMULATIVE"):
        SamplingParams(output_kind="delta")


def visible_text(pieces, stop, include):
    """By definition: what may be shown after each piece, until a stop string has come."""
    text, shown, held = "", [], 0 if include or not stop else max(map(len, stop)) - 1
    for piece in pieces:
        text += piece
        places = [(text.find(one), -len(one), one) for one in stop if one in text]
        if places:
            place, _, one = min(places)
            return [*shown, text[: place + (len(one) if include else 0)]], one
        shown.append(text[: max(0, len(text) - held)])
    return [*shown, text], None


@pytest.mark.parametrize("include", [False, True])
def test_text_up_to_a_stop_string_against_its_definition(include):
    draw = random.Random(0)
    matches = 0
    for _ in range(300):
        tokens = [draw.randrange(4) for _ in range(draw.randrange(1, 30))]
        stop = ["".join(draw.choices("abc", k=draw.randrange(1, 7))) for _ in range(draw.randrange(4))]
        expected, match = visible_text(["abc"[one : one + 1] for one in tokens], stop, include)
        text = StoppedText(Letters(), stop, include_stop=include, skip_special_tokens=True)
        found, before, parts, counts = None, 0, [], []
        for token in tokens:
            found = text.push(token, search=True)
            parts.append(text.part(before, text.shown))
            before = text.shown
            counts.append(before)
            if found is not None:
                break
        else:
            assert text.finish(search=True) is None
            parts.append(text.part(before, text.shown))
            counts.append(text.shown)
        assert found == match
        assert [text.part(0, count) for count in counts] == expected
        assert "".join(parts) == expected[-1]
        matches += match is not None
    assert 50 < matches < 250


def test_prompts_are_truncated_from_the_left(llama):
    engine = Engine(llama, max_memory=1 << 20, max_model_length=16)
    prompt = list(range(1, 31))
    for most, max_tokens, kept in ((4, 2, 4), (-1, 6, 10), (-1, None, 15)):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        *_, cut = engine.stream(prompt, replace(params, truncate_prompt_tokens=most))
        *_, short = engine.stream(prompt[-kept:], params)
        assert cut.prompt_token_ids == prompt[-kept:] and cut.outputs == short.outputs
    for wrong in (0, -2, 1.5, -1.0, True):
        with pytest.raises(ValueError, match=r"truncate_prompt_tokens=.* at least 1, or -1"):
            SamplingParams(truncate_prompt_tokens=wrong)


def test_tokens_without_text(llama):
    engine = Engine(llama, Letters(), max_memory=1 << 20)
    text, none = outputs_of(engine)[-1].outputs[0], outputs_of(engine, detokenize=False)[-1].outputs[0]
    assert text.text and none.text == "" and none.token_ids == text.token_ids
    with pytest.raises(ValueError, match="leave detokenize=False or stop out"):
        SamplingParams(detokenize=False, stop="a")


def test_a_request_may_leave_the_prefix_cache_unread(llama):
    engine = Engine(llama, max_memory=1 << 20, page_size=4)
    prompt, params = list(range(1, 14)), SamplingParams(temperature=0, max_tokens=3)
    found = [
        list(engine.stream(prompt, replace(params, skip_reading_prefix_cache=skip)))[-1] for skip in (True, True, False)
    ]
    assert [one.num_cached_tokens for one in found] == [0, 0, 12]
    assert found[0].outputs == found[1].outputs == found[2].outputs
