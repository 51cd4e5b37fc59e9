"""ALiBi's slopes, and its bias by key, which is that by distance."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, StaticCache
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import easytorch
from easytorch.cache_names import cache_keyword, cache_of
from easytorch.layers.alibi import alibi_bias, alibi_slopes, places_of_keys
from easytorch.operations import OperationRegistry

IDS = torch.tensor([[5, 9, 33, 71, 8, 2, 17, 60], [7, 31, 90, 12, 60, 3, 12, 61]])
LEFT = torch.tensor([[1] * 8, [0] * 3 + [1] * 5])
SIZES = {"vocab_size": 97, "hidden_size": 30, "n_layer": 2, "n_head": 5, "initializer_range": 0.3}


def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and transformers', with the same weights."""
    torch.manual_seed(0)
    theirs = transformers.BloomForCausalLM(transformers.BloomConfig(**SIZES)).eval()
    ours = easytorch.AutoModelForCausalLM.from_config(transformers.BloomConfig(**SIZES)).eval()
    ours.load_state_dict(theirs.state_dict())
    assert type(ours) is importlib.import_module("easytorch.models.bloom").BloomForCausalLM
    return ours, theirs


@pytest.mark.parametrize("mask", [torch.ones_like(LEFT), LEFT, LEFT.flip(1), torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0]])])
@pytest.mark.parametrize("heads", [*range(1, 18), 24, 112])
def test_the_bias_of_transformers(heads: int, mask: torch.Tensor) -> None:
    expected = build_alibi_tensor(mask, heads, torch.float32).view(len(mask), heads, 1, -1)
    assert torch.equal(alibi_bias(alibi_slopes(heads), places_of_keys(mask, 8), torch.float32), expected)


def test_slopes_of_no_head_are_refused() -> None:
    with pytest.raises(ValueError, match="slopes of 0 heads"):
        alibi_slopes(0)


def test_the_bias_by_key_is_that_by_distance() -> None:
    """In float64, the softmax of which is another number only by its rounding."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 9, 6, 16, dtype=torch.float64).unbind(0)
    slopes = alibi_slopes(6).double()
    at = torch.arange(9)
    distance = (slopes[:, None, None] * (at[None] - at[:, None]))[None]
    attention = OperationRegistry.create("attention")
    by_key = attention(query, key, value, causal=True, bias=alibi_bias(slopes, at[None], torch.float64))
    by_distance = attention(query, key, value, causal=True, bias=distance)
    torch.testing.assert_close(by_key.attention_outputs, by_distance.attention_outputs, rtol=0, atol=1e-14)


def test_slots_behind_the_mask_have_no_place() -> None:
    assert places_of_keys(LEFT, 10)[1].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 0, 0]
    assert places_of_keys(LEFT, 6)[1].tolist() == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("mask", [None, LEFT])
@pytest.mark.parametrize("static", [False, True])
def test_parts_of_a_prompt_by_a_cache(static: bool, mask: torch.Tensor | None) -> None:
    ours, theirs = pair()
    compare_in_parts(ours, theirs, static, mask)


def compare_in_parts(ours: Any, theirs: Any, static: bool, mask: torch.Tensor | None) -> None:
    with torch.no_grad():
        expected = theirs(IDS, attention_mask=mask).logits
        cache = StaticCache(config=ours.config, max_cache_len=12) if static else None
        seen, found = 0, []
        for length in (3, 1, 4):  # prefill, decode, further tokens
            part = None if mask is None else mask[:, : seen + length]
            given = {"attention_mask": part, "use_cache": True, **cache_keyword(cache)}
            output = ours(IDS[:, seen : seen + length], **given)
            cache, seen = cache_of(output), seen + length
            found.append(output.logits)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], rtol=1e-5, atol=1e-5)


def test_the_bias_is_made_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    module = importlib.import_module("easytorch.layers.alibi")
    monkeypatch.setattr(module, "alibi_bias", lambda *args: made.append(1) or alibi_bias(*args))
    pair()[0](IDS)
    assert len(made) == 1


@pytest.mark.parametrize("mask", [None, LEFT])
@pytest.mark.parametrize("static", [False, True])
def test_an_attention_of_the_user_gets_the_bias_in_its_mask(static: bool, mask: torch.Tensor | None) -> None:
    """transformers makes none for a name that it knows no mask of: not of the past, of padding or of empty slots."""
    given = []

    def own(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        given.append(kwargs.get("position_bias"))
        weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    AttentionInterface.register("own_alibi", own)
    ours, theirs = pair()
    with torch.no_grad():
        expected = theirs(IDS).logits
        ours.set_attn_implementation("own_alibi")
        first = ours(IDS[:, :7], use_cache=True)
        last = ours(IDS[:, 7:], **cache_keyword(cache_of(first)))
    assert set(given) == {None}
    torch.testing.assert_close(torch.cat([first.logits, last.logits], 1), expected, rtol=1e-5, atol=1e-5)
    compare_in_parts(ours, theirs, static, mask)


def test_what_takes_no_bias_is_refused() -> None:
    ours, _ = pair()
    with pytest.raises(ValueError, match="flex"):
        ours.set_attn_implementation("flex_attention")
    config = transformers.BloomConfig(**SIZES, slow_but_exact=True, pretraining_tp=2)
    with pytest.raises(ValueError, match=r"slow_but_exact with config.pretraining_tp=2"):
        easytorch.AutoModelForCausalLM.from_config(config)


def test_what_only_transformers_computes_loads_as_its_class(tmp_path: Path) -> None:
    config = transformers.BloomConfig(**SIZES, slow_but_exact=True, pretraining_tp=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    found = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found) is transformers.BloomForCausalLM
    assert "slow_but_exact" in found.easytorch_report.reason
