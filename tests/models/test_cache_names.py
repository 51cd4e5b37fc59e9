"""The cache under the installed transformers' name, and under the other, in every native class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import easytorch.layers
import easytorch.models
from easytorch.cache_names import CACHE, NAMES, STATES, cache_of
from easytorch.models.llama import LlamaForCausalLM
from easytorch.models.mamba import MambaForCausalLM

IDS = torch.tensor([[5, 9, 33, 71, 8]])


def classes() -> Iterator[type[nn.Module]]:
    for room in (easytorch.layers, easytorch.models):
        for found in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            module = importlib.import_module(found.name)
            for one in vars(module).values():
                if inspect.isclass(one) and one.__module__ == found.name and hasattr(one, "forward"):
                    yield one


def test_signatures_have_the_installed_name() -> None:
    seen = set()
    for kind in classes():
        named = set(NAMES) & inspect.signature(kind.forward).parameters.keys()
        assert named <= {CACHE, STATES}, kind
        seen |= named
    assert seen == {CACHE, STATES}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes", "name", "old"),
    [
        (LlamaForCausalLM, {"num_attention_heads": 2}, CACHE, "past_key_values"),
        (MambaForCausalLM, {}, STATES, "cache_params"),
    ],
)
def test_both_names_are_one_argument(kind, sizes, name, old, older) -> None:
    config = kind.config_class(vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=2, **sizes)
    model: PreTrainedModel = kind(config).eval()
    theirs = getattr(transformers, kind.__name__)(config).eval()
    theirs.load_state_dict(model.state_dict())
    renamed = name == "cache"
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        cache = DynamicCache(config=config)
        first = model(IDS[:, :3], **{old if older else "cache": cache}, use_cache=True)
        assert name in first and first[name] is cache is cache_of(first)
        assert (name in theirs(IDS, use_cache=True)) and not (renamed and older and not told)
        rest = model(IDS[:, 3:], **{old if older else "cache": cache}, use_cache=True).logits
    assert (renamed and older) == any(old in str(one.message) for one in told)
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), model(IDS).logits, rtol=1e-5, atol=1e-5)
    given = {old if older else "cache": DynamicCache(config=config), "max_new_tokens": 3, "do_sample": False}
    expected = theirs.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(IDS, **given), expected)


def test_layers_are_given_the_installed_name_without_a_warning() -> None:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model, seen = LlamaForCausalLM(config).eval(), []
    for path in ("model", "model.layers.0", "model.layers.0.self_attn"):
        model.get_submodule(path).register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(set(kwargs) & set(NAMES)), with_kwargs=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert seen == [{CACHE}] * len(seen) and len(seen) == 6
