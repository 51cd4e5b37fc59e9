"""What decoder families share: caches, generate, files, Flax, precision, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import easytorch
from easytorch.generation import generate_tokens
from easytorch.layers.masks import MASKS_OF
from easytorch.protocol.conversion import to_flax
from tests.models.families import CAUSAL, DECODERS, FAMILIES

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])


@pytest.fixture(params=DECODERS)
def family(request):
    return request.param


def models(make_pair, family, **kwargs):
    row = FAMILIES[family]
    return make_pair(CAUSAL[family], row.config(), row.reference, **kwargs)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_steps_through_a_cache_equal_one_pass(cache, family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    held = transformers.DynamicCache(config=ours.config)
    if cache == "static":
        held = transformers.StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        expected = theirs(IDS).logits
        steps = [ours(IDS[:, :6], past_key_values=held).logits]
        steps += [ours(IDS[:, at : at + 1], past_key_values=held).logits for at in range(6, IDS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), expected, **TOLERANCE)


@pytest.mark.parametrize("settings", [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "top_k": 20},
    {"do_sample": False, "cache_implementation": "static"},
], ids=str)  # fmt: skip
def test_generate_gives_transformers_tokens(settings, family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    tokens = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        tokens.append(model.generate(IDS, attention_mask=mask, max_new_tokens=12, eos_token_id=-1, **settings))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_our_loop_gives_the_same_tokens(cache, family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    wanted = ours.generate(IDS, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=-1)
    settings = {"max_new_tokens": 8, "eos_token_id": -1, "cache": cache}
    given = torch.stack(list(generate_tokens(ours, IDS, mask, **settings)), dim=1)
    assert torch.equal(given, wanted[:, -8:])


def test_files_go_both_ways(family, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family)
    for saved, loader in ((ours, transformers.AutoModelForCausalLM), (theirs, easytorch.AutoModelForCausalLM)):
        saved.save_pretrained(tmp_path / loader.__module__)
        loaded = loader.from_pretrained(tmp_path / loader.__module__).state_dict()
        assert loaded.keys() == saved.state_dict().keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.state_dict().items())


def test_the_auto_class_gives_the_native_one(family) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES[family].config())
    assert type(model).__module__ == f"easytorch.models.{family}"


def test_initial_weights_are_those_of_transformers(family, make_pair) -> None:
    config, made = FAMILIES[family].config(), []
    for library in (transformers, easytorch):
        torch.manual_seed(3)
        made.append(library.AutoModelForCausalLM.from_config(copy.deepcopy(config)).state_dict())
    assert made[0].keys() == made[1].keys()
    for name, weight in made[0].items():  # each starts at a constant, or is drawn from one distribution
        assert (weight.std() == 0) == (made[1][name].std() == 0), name
        assert weight.mean().item() == pytest.approx(made[1][name].mean().item(), abs=0.01), name


def test_flax_and_back(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    tree = ours.to_flax()
    back = type(ours).from_flax(ours.config, tree).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.state_dict().items())
    stock = to_flax(theirs)
    paths = [_paths(one) for one in (tree, stock)]
    assert paths[0] == paths[1]


def _paths(tree, prefix=()) -> dict[tuple[str, ...], tuple[int, ...]]:
    found = {}
    for name, value in tree.items():
        found |= _paths(value, (*prefix, name)) if hasattr(value, "items") else {(*prefix, name): tuple(value.shape)}
    return found


def test_bfloat16_is_as_exact_as_transformers(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    with torch.no_grad():
        exact = theirs.double()(IDS).logits
        errors = [(model.bfloat16()(IDS).logits - exact).square().mean().sqrt() for model in (ours, theirs)]
    assert errors[0] <= 1.3 * errors[1]


def test_masks_by_layer_type_may_be_ready_made(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    length = IDS.shape[1]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    window = causal & causal.triu(1 - (getattr(ours.config, "sliding_window", None) or length))
    given = {"full_attention": causal, "sliding_attention": window}
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS, attention_mask=given).logits, ours(IDS).logits, **TOLERANCE)
    with pytest.raises(ValueError, match=r"has masks for other layers; .* has full_attention"):
        ours(IDS, attention_mask={"other": causal})


def test_layer_types_that_a_family_does_not_have() -> None:
    for types, message in (
        (["full_attention", "linear_attention"], "names linear_attention"),
        (["full_attention"], "1 entries for num_hidden_layers=2"),
    ):
        config = FAMILIES["qwen3"].config()
        config.layer_types = types
        with pytest.raises(ValueError, match=message):
            easytorch.AutoModelForCausalLM.from_config(config)
    config = FAMILIES["gemma2"].config()
    config.sliding_window = None
    with pytest.raises(ValueError, match=r"config\.sliding_window is None"):
        easytorch.AutoModelForCausalLM.from_config(config)
    assert set(MASKS_OF) == {"full_attention", "sliding_attention", "chunked_attention"}
