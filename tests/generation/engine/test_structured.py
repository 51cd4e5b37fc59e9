"""Structured outputs: every text is what its request asks for, whatever runs beside it."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import llguidance
import pytest
import torch
import transformers

import easytorch
from easytorch.generation.engine import Engine, SamplingParams, StructuredOutputsParams
from easytorch.generation.engine.request import token_sequences
from easytorch.training.tokenizer import train_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "c"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    tokenizer = train_tokenizer(['{"name": "ab", "size": 12} yes no 2026-11-27'] * 5, 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer) + 5, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.5, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    # 40 pages of 4 tokens: the requests of a test push one another out
    return Engine(model, tokenizer, max_memory=40 * 4 * 2 * 2 * 32 * 4, page_size=4)


def texts(engine, structure, count=4, **params):
    settings = {"temperature": 1.5, "max_tokens": 60} | params
    for seed in range(count):
        given = SamplingParams(seed=seed, structured_outputs=structure, **settings)
        engine.add_request([5, 9, 33], given)
    free = engine.add_request([5, 9, 33], SamplingParams(seed=0, max_tokens=20, ignore_eos=True))
    found, beside = [], None
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished and output.request_id == free:
                beside = output.outputs[0].token_ids
            elif output.finished:
                found.append(output.outputs[0])
    return found, beside


@pytest.mark.parametrize(
    "structure, matches",
    [
        (
            StructuredOutputsParams(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
            lambda text: re.fullmatch(r"\d{4}-\d\d-\d\d", text),
        ),
        (
            StructuredOutputsParams(choice=["yes", "no", 'the "third"']),
            lambda text: text in ("yes", "no", 'the "third"'),
        ),
        (
            StructuredOutputsParams(grammar='start: "(" start ")" | "x"'),
            lambda text: re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")"),
        ),
    ],
    ids=["regex", "choice", "grammar"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_texts_are_complete_and_match(engine, structure, matches, temperature):
    found, beside = texts(engine, structure, temperature=temperature)
    complete = [one for one in found if one.finish_reason == "stop"]
    assert len(complete) >= 1 and all(matches(one.text) for one in complete)
    assert all(one.finish_reason in ("stop", "length") for one in found)
    alone = engine.add_request([5, 9, 33], SamplingParams(seed=0, max_tokens=20, ignore_eos=True))
    while engine.has_unfinished_requests:
        (output,) = engine.step()
    assert output.request_id == alone and output.outputs[0].token_ids == beside


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["dict", "text"])
def test_json_schema(engine, schema):
    found, _ = texts(engine, StructuredOutputsParams(json=schema), count=8)
    complete = [json.loads(one.text) for one in found if one.finish_reason == "stop"]
    assert len(complete) >= 4
    for one in complete:
        assert one["name"] in ("ab", "c") and 0 <= one["size"] <= 99 and len(one) == 2


def test_a_preempted_text_goes_on_where_it_was(engine):
    before = engine.stats().preemptions
    found, _ = texts(engine, StructuredOutputsParams(regex="(ab|cd){20}"), count=8, max_tokens=80)
    assert engine.stats().preemptions > before, "memory for all of them: the test shows nothing"
    assert [re.fullmatch("(ab|cd){20}", one.text) is not None for one in found] == [True] * 8


def test_json_object_begins_as_one(engine):
    found, _ = texts(engine, StructuredOutputsParams(json_object=True), count=2, max_tokens=12)
    assert all(one.text.lstrip().startswith("{") for one in found)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "take one of json, json_object, regex, choice, grammar; given: none"),
        ({"regex": "a", "choice": ["b"]}, "given: regex, choice"),
        ({"regex": ""}, "regex='' must be a string that is not empty"),
        ({"choice": "yes"}, "choice='yes' must be a list of strings"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"json": "{"}, "the JSON schema is not valid JSON"),
        ({"json": "[]"}, "a JSON schema is an object, not list"),
        ({"json": {"a": {1, 2}}}, "cannot be written as JSON"),
    ],
)
def test_wrong_specifications_are_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"json": {"type": "nope"}}, "cannot be compiled: Invalid type: nope"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
        ({"regex": "(("}, "unclosed group"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"regex": r"[^\s\S]"}, "no text of this tokenizer's tokens can match it"),
        ({"grammar": "start: start"}, "no text of this tokenizer's tokens can match it"),
        ({"json": {"$ref": "#"}}, "no text of this tokenizer's tokens can match it"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_nothing_is_queued(engine, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.add_request([5], SamplingParams(structured_outputs=StructuredOutputsParams(**given)))
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("params", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_what_contradicts_a_structure_is_refused(params):
    with pytest.raises(ValueError, match="the structure determines where the text ends"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **params)


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(engine, monkeypatch):
    """As where it has too many states: the others go on."""
    from easytorch.generation.engine.structured import StructuredText

    monkeypatch.setattr(StructuredText, "error", property(lambda self: "too many states"))
    found, beside = texts(engine, StructuredOutputsParams(regex="a{30}"), count=1)
    assert (found[0].finish_reason, found[0].stop_reason) == ("abort", "too many states")
    assert len(beside) == 20


def test_more_optional_properties_than_a_row_holds_are_refused_before_they_start(engine):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    with pytest.raises(ValueError, match="cannot be compiled"):
        engine.add_request([5], SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert not engine.has_unfinished_requests


def test_equal_grammars_that_arrive_at_once_are_compiled_once(engine, monkeypatch):
    outputs, compiled, waiting = engine.structured_outputs, [], threading.Barrier(4)

    def slow(source):
        compiled.append(source)
        time.sleep(0.5)
        if "nope" in source:
            raise ValueError("nope")
        return llguidance.LLMatcher(outputs._automaton, source)

    def ask(regex):
        waiting.wait(timeout=60)
        try:
            return outputs.compile(StructuredOutputsParams(regex=regex)).allowed(300).sum().item()
        except ValueError as error:
            return str(error)

    monkeypatch.setattr(outputs, "_compiled", slow)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, ["[ab]c"] * 4)) == {2} and len(compiled) == 1
        assert set(pool.map(ask, ["nope"] * 4)) == {"nope"} and len(compiled) == 2
    assert not outputs._pending


def test_a_grammar_that_leads_nowhere_is_no_text_that_is_complete(engine):
    """After "q" nothing can come but an end token, which does not end what the grammar asks for."""
    found, _ = texts(engine, StructuredOutputsParams(grammar='start: "a" "q" x\nx: x "b"'), count=1)
    assert found[0].finish_reason == "abort" and "no text" in found[0].stop_reason


def test_many_choices_with_one_beginning(engine):
    choices = [f"no {number}" for number in range(3000)]
    found, _ = texts(engine, StructuredOutputsParams(choice=choices), count=2)
    assert [one.finish_reason for one in found] == ["stop"] * 2 and all(one.text in choices for one in found)


def test_the_first_mask_is_computed_when_a_grammar_is_compiled(engine, monkeypatch):
    """It takes seconds for some: not in a step, where all requests would wait for it; and its error is a refusal."""
    calls = []

    class Matcher:
        def __init__(self, *args, **more):
            calls.append("made")

        def compute_bitmask(self):
            calls.append("mask")

        def is_error(self):
            return "mask" in calls

        def get_error(self):
            return "too many\nstates<non-verbose/>"

    monkeypatch.setattr(llguidance, "LLMatcher", Matcher)
    with pytest.raises(ValueError, match=r"cannot be compiled: too many states$"):
        engine.structured_outputs._compile("start: A")
    assert calls == ["made", "mask"]


def test_bad_words_and_allowed_tokens(engine):
    """Of words the token that would complete them, after a space too; of tokens all others."""
    free = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    text = engine.tokenizer.encode(" yes no")

    def generated(**more):
        outputs = [
            list(engine.stream([5, 9, 33], replace(free, seed=seed, **more)))[-1].outputs[0] for seed in range(4)
        ]
        return [token for one in outputs for token in one.token_ids], "".join(one.text for one in outputs)

    only, joined = generated(allowed_token_ids=text)
    assert set(only) == set(text) and " yes" in joined and " no" in joined
    _, joined = generated(allowed_token_ids=text, bad_words=["no"])
    assert " no" not in joined and " yes" in joined
    several = engine.tokenizer.encode("ab", add_special_tokens=False) + engine.tokenizer.encode("c") * 2
    word = token_sequences(engine.tokenizer, ["cc"])[0]
    assert len(word) == 2
    _, joined = generated(allowed_token_ids=several, bad_words=["cc"])
    assert "cc" not in joined and "c" in joined
    with pytest.raises(ValueError, match="allowed_token_ids has token 99999"):
        engine.add_request([5], replace(free, allowed_token_ids=[99999]))


def test_a_tokenizer_is_needed():
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    engine = Engine(easytorch.AutoModelForCausalLM.from_config(config).eval(), max_memory=1 << 20, max_model_length=32)
    with pytest.raises(ValueError, match="need a fast tokenizer, and the engine has no tokenizer"):
        engine.add_request([5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
