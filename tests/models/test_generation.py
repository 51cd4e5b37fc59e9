"""generate() of native models: the same tokens as transformers', with every cache and on padded rows."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from tests.models.families import CAUSAL, FAMILIES

MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
}


def generate(model, batch, **kwargs) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(**batch, max_new_tokens=9, min_new_tokens=9, **kwargs)


@pytest.fixture
def left_padded(batch):
    ids = batch["input_ids"][:, :9].clone()
    mask = batch["attention_mask"][:, :9].clone()
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_llama_generates_what_transformers_does(mode, cache, left_padded, make_pair, llama_config) -> None:
    ours, theirs = make_pair("LlamaForCausalLM", llama_config())
    kwargs = MODES[mode] | ({"use_cache": False} if cache is None else {"cache_implementation": cache})
    if cache == "static":
        kwargs["disable_compile"] = True
    given, expected = generate(ours, left_padded, **kwargs), generate(theirs, left_padded, **kwargs)
    assert torch.equal(given, expected)
    assert given.shape == (2, 18)


@pytest.mark.parametrize("mode", MODES)
def test_a_bert_decoder_generates_what_transformers_does(mode, left_padded, make_pair, bert_config) -> None:
    ours, theirs = make_pair("BertLMHeadModel", bert_config(is_decoder=True, eos_token_id=2))
    assert torch.equal(generate(ours, left_padded, **MODES[mode]), generate(theirs, left_padded, **MODES[mode]))


def test_cached_steps_equal_one_pass(make_pair, llama_config) -> None:
    ours, _ = make_pair("LlamaForCausalLM", llama_config())
    torch.manual_seed(8)
    ids = torch.randint(3, 97, (2, 12))
    static = StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        whole = ours(ids, use_cache=False).logits
        for cache in (DynamicCache(config=ours.config), static):
            pieces = [ours(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 9), (9, 10), (10, 12))]
            torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_padding_on_the_left_does_not_change_the_text(make_pair, llama_config) -> None:
    ours, _ = make_pair("LlamaForCausalLM", llama_config())
    torch.manual_seed(9)
    ids = torch.randint(3, 97, (1, 6))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (padded != 0).long()
    alone = generate(ours, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, do_sample=False)
    beside = generate(ours, {"input_ids": padded, "attention_mask": mask}, do_sample=False)
    assert torch.equal(alone[:, 6:], beside[:, 10:])


@pytest.mark.parametrize("implementation", ["easytorch", "vanilla", "sdpa", "eager", "flash"])
def test_every_attention_generates_the_same(implementation, left_padded, make_pair, llama_config) -> None:
    ours, theirs = make_pair("LlamaForCausalLM", llama_config(), attn_implementation=implementation)
    assert ours.config._attn_implementation == implementation
    expected = generate(theirs, left_padded, do_sample=False)
    assert torch.equal(generate(ours, left_padded, do_sample=False), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "ministral", "gpt_oss"])
def test_drafting_with_the_first_layers(family, make_pair) -> None:
    """Also where the config lists the types of all layers."""
    ours, _ = make_pair(CAUSAL[family], FAMILIES[family].config(), FAMILIES[family].reference)
    torch.manual_seed(10)
    ids = torch.randint(3, 97, (1, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = generate(ours, inputs, do_sample=False)
    assert torch.equal(generate(ours, inputs, do_sample=False, assistant_early_exit=1), expected)
    assert ours.config.num_hidden_layers == 2


def test_embeddings_are_a_prompt_where_they_are_one_of_transformers() -> None:
    """generate() looks for them in the signature of what prepares a step."""
    compared = 0
    for family, head in CAUSAL.items():
        theirs = getattr(transformers, head)
        ours = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
        signatures = (inspect.signature(one.prepare_inputs_for_generation).parameters for one in (ours, theirs))
        taken, expected = ("inputs_embeds" in parameters for parameters in signatures)
        assert taken or not expected, family
        compared += expected
    assert compared > 40


@pytest.mark.parametrize("family", ["mamba", "mamba2", "phi3"])
def test_embeddings_generate_what_their_tokens_do(family, left_padded, make_pair) -> None:
    ours, _ = make_pair(CAUSAL[family], FAMILIES[family].config(), FAMILIES[family].reference)
    embeds = ours.get_input_embeddings()(left_padded["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": left_padded["attention_mask"]}
    assert torch.equal(generate(ours, given), generate(ours, left_padded)[:, 9:])
