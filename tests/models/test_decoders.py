"""What decoder families share: caches, generate, files, Flax, precision, and what is refused."""

from __future__ import annotations

import copy
import importlib
import re

import pytest
import torch
import transformers
from transformers import LlamaConfig

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.distributed.declared import expanded_plan
from easytorch.generation import generate_tokens
from easytorch.layers.masks import MASKS_OF
from easytorch.protocol.conversion import to_flax
from tests.models.families import CAUSAL, DECODERS, EXPERTS, FAMILIES, MAMBA, RECURRENT

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
        held = {FAMILIES[family].cache: held}
        steps = [ours(IDS[:, :6], **held).logits]
        steps += [ours(IDS[:, at : at + 1], **held).logits for at in range(6, IDS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), expected, **TOLERANCE)


def test_a_layer_has_the_attention_that_its_class_names(family) -> None:
    """A family that states its difference as another `attention_class` gets it, whatever else its layers hold."""
    config = FAMILIES[family].config()
    module = importlib.import_module(f"easytorch.models.{family}")
    # a model's, or its decoder's
    found = [kind.layer_class for kind in vars(module).values() if hasattr(kind, "layer_class")]
    layer_class = found[-1] if found else None
    if layer_class is None:
        assert family in MAMBA, "a decoder without a layer class"
        return
    other = type("Other", (layer_class.attention_class,), {})
    changed = type("Changed", (layer_class,), {"attention_class": other})
    layers = [changed(config, index) for index in range(config.num_hidden_layers)]
    assert any(isinstance(part, other) for layer in layers for part in layer.modules())


def test_a_backbone_has_the_layers_and_a_layer_the_network_that_its_class_names(family) -> None:
    config, module = FAMILIES[family].config(), importlib.import_module(f"easytorch.models.{family}")
    of_family = (kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__)
    backbone = next((kind for kind in of_family if hasattr(kind, "layer_class")), None)
    if backbone is None:
        assert family in MAMBA, "a decoder without a layer class"
        return
    changes = {}
    if (network := getattr(backbone.layer_class, "mlp_class", None)) is not None:
        changes["mlp_class"] = type("Network", (network,), {})
    layer = type("Layer", (backbone.layer_class,), changes)
    parts = [type(part) for part in type("Changed", (backbone,), {"layer_class": layer})(config).modules()]
    assert parts.count(layer) == config.num_hidden_layers
    assert not changes or changes["mlp_class"] in parts


def test_embeddings_for_tokens_and_the_logits_that_are_kept(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    embeds = theirs.get_input_embeddings()(IDS).detach()
    with torch.no_grad():
        assert torch.equal(ours.get_input_embeddings()(IDS), embeds)  # what PEFT's prompt tuning asks for
        every = theirs(IDS).logits
        given = [model(inputs_embeds=embeds).logits for model in (ours, theirs)]  # which Falcon-H1 does not scale
        torch.testing.assert_close(*given, **TOLERANCE)
        for keep, kept in ((2, every[:, -2:]), (torch.tensor([1, 4]), every[:, [1, 4]])):
            torch.testing.assert_close(ours(IDS, logits_to_keep=keep).logits, kept, **TOLERANCE)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "gpt_oss", "deepseek_v3", "gemma4_text", "cohere2"])
def test_a_draft_model_changes_no_token(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    tokens = [model.generate(IDS[:1], assistant_model=copy.deepcopy(theirs), **settings) for model in (ours, theirs)]
    assert torch.equal(*tokens) and torch.equal(tokens[0], theirs.generate(IDS[:1], **settings))


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
        loaded = loader.from_pretrained(tmp_path / loader.__module__)
        weights = loaded.state_dict()
        assert weights.keys() == saved.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved.state_dict().items())
    with torch.no_grad():  # what is in no file (tables of angles) is made anew on the meta device
        assert torch.equal(loaded(IDS).logits, ours(IDS).logits)


def test_a_language_model_loads_under_every_head(family, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family)
    theirs.save_pretrained(tmp_path)
    backbone = getattr(ours, "backbone_name", None) or theirs.base_model_prefix
    module, expected = importlib.import_module(f"easytorch.models.{family}"), getattr(theirs, backbone).state_dict()
    for head in FAMILIES[family].heads:
        prefix = getattr(module, head).base_model_prefix
        if prefix == "transformer" != theirs.base_model_prefix:  # transformers finds no weight there
            with pytest.raises(CheckpointError, match=r"'transformer\.embed_tokens\.weight': is missing"):
                getattr(module, head).from_pretrained(tmp_path)
            continue
        weights = getattr(module, head).from_pretrained(tmp_path).base_model.state_dict()
        assert weights.keys() == expected.keys(), head
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items()), head


def test_the_auto_class_gives_the_native_one(family) -> None:
    model = easytorch.AutoModelForCausalLM.from_config(FAMILIES[family].config())
    assert type(model).__module__ == f"easytorch.models.{family}"


# Settings of initial weights that are not the defaults.
INITIAL = {
    "mamba": {"rescale_prenorm_residual": True, "time_step_scale": 3.0},
    "mamba2": {"rescale_prenorm_residual": True},
    "nemotron_h": {"rescale_prenorm_residual": True},
}


@pytest.mark.parametrize("family, changes", [*((one, {}) for one in DECODERS), *INITIAL.items()])
def test_initial_weights_are_those_of_transformers(family, changes, memory_of_nan) -> None:
    config, made = FAMILIES[family].config(**changes), []
    for library in (transformers, easytorch):
        torch.manual_seed(3)
        made.append(library.AutoModelForCausalLM.from_config(copy.deepcopy(config)).state_dict())
    assert list(made[0]) == list(made[1])  # optimizer states are numbered in this order
    for name, weight in made[0].items():  # each starts at a constant, or is drawn from one distribution
        assert (weight.std() == 0) == (made[1][name].std() == 0), name
        spread = 0.01 + 4 * weight.std().item() / weight.numel() ** 0.5
        assert weight.mean().item() == pytest.approx(made[1][name].mean().item(), abs=spread), name
        if weight.numel() > 1:
            assert weight.std().item() == pytest.approx(made[1][name].std().item(), rel=4 / weight.numel() ** 0.5), name


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
    if family in EXPERTS:
        theirs.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        exact = theirs.double()(IDS).logits
        errors = [(model.bfloat16()(IDS).logits - exact).square().mean(-1) for model in (ours, theirs)]
    # a rounding may send a token to another expert: of those the middle one tells
    found = [error.median().sqrt() if family in EXPERTS else error.mean().sqrt() for error in errors]
    assert found[0] <= 1.3 * found[1]


@pytest.mark.parametrize("family", [family for family in DECODERS if FAMILIES[family].attentions])
def test_masks_by_layer_type_may_be_ready_made(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    length = IDS.shape[1]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    window = causal & causal.triu(1 - (getattr(ours.config, "sliding_window", None) or length))
    chunk = torch.arange(length) // (getattr(ours.config, "attention_chunk_size", None) or length)
    given = {"full_attention": causal, "sliding_attention": window, "linear_attention": None}
    given["chunked_attention"] = causal & (chunk == chunk[:, None])
    given["indexed_attention"] = causal
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS, attention_mask=given).logits, ours(IDS).logits, **TOLERANCE)
    with pytest.raises(ValueError, match=r"has masks for other.* layers; .* has \w+_attention"):
        ours(IDS, attention_mask={"other": causal})


def test_generate_makes_the_cache_anew_where_longrope_turns_long(make_pair) -> None:
    """Phi 3 beyond its trained length: the keys in the cache were turned by the other factors."""
    longrope = next(one for one in FAMILIES["phi3"].variants if one.get("original_max_position_embeddings") == 32)
    changes = longrope | {"original_max_position_embeddings": 14, "sliding_window": None}
    ours, theirs = make_pair("Phi3ForCausalLM", FAMILIES["phi3"].config(**changes))
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(*(model.generate(IDS, **settings) for model in (ours, theirs)))
    with torch.no_grad():  # the two lengths differ, so that a cache that is kept would show
        model = ours.generate(IDS, **settings, use_cache=False)
    assert torch.equal(model, ours.generate(IDS, **settings))


@pytest.mark.parametrize("family", [family for family in DECODERS if FAMILIES[family].attentions])
def test_packed_sequences(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    packs = FAMILIES[family].packs
    # transformers keeps the states of linear attention apart by `seq_idx` alone, and so do ours
    numbers = {"seq_idx": (positions == 0).cumsum(-1)} if family in RECURRENT and not packs else {}
    with torch.no_grad():
        given = ours(IDS[:1], position_ids=positions, use_cache=False, **numbers).logits
        if packs:
            expected = theirs(IDS[:1], position_ids=positions, use_cache=False).logits
        else:
            expected = torch.cat([theirs(IDS[:1, :6]).logits, theirs(IDS[:1, 6:]).logits], 1)
    torch.testing.assert_close(given, expected, **TOLERANCE)


def test_plans_of_parallelism_are_transformers(family) -> None:
    for head in FAMILIES[family].heads:
        with torch.device("meta"):
            made = [
                getattr(module, head)(FAMILIES[family].config())
                for module in (importlib.import_module(f"easytorch.models.{family}"), transformers)
            ]
        if getattr(made[0], "backbone_name", None):  # transformers, which looks elsewhere, has plans twice
            for plan in ("_tp_plan", "_fsdp_plan"):
                twice = {name for name in getattr(made[1], plan) if f"model.{name}" in getattr(made[1], plan)}
                setattr(made[1], plan, {name: how for name, how in getattr(made[1], plan).items() if name not in twice})
        for plan in ("_tp_plan", "_pp_plan", "_fsdp_plan", "_no_split_modules", "all_tied_weights_keys"):
            assert getattr(made[0], plan) == getattr(made[1], plan), (head, plan)
        assert made[0].base_model_prefix == made[1].base_model_prefix, head
        for plan in ("tp_plan", "ep_plan"):  # of modules and parameters that there are
            declared, expected = (expanded_plan(model, plan) for model in made)
            assert declared or not getattr(made[0].config, f"base_model_{plan}"), (head, plan)
            # transformers' experts of Llama 4 take no routing, and have no plan
            assert declared == expected or (family, plan) == ("llama4_text", "ep_plan"), (head, plan)


def test_every_head_that_transformers_has_is_native(family) -> None:
    row = FAMILIES[family]
    module = importlib.import_module(getattr(transformers, row.heads[0]).__module__)
    theirs = {
        name
        for name, one in vars(module).items()
        if isinstance(one, type)
        and issubclass(one, transformers.PreTrainedModel)
        and one.config_class is row.config_class
        and one.forward is not transformers.PreTrainedModel.forward
        and hasattr(transformers, name)
    }
    assert theirs == set(row.heads)


@pytest.mark.parametrize(
    "family, rate", [(family, rate) for family in DECODERS for rate in FAMILIES[family].dropouts], ids=str
)
def test_dropout_draws_what_transformers_draws(family, rate, make_pair) -> None:
    row = FAMILIES[family]
    outputs = []
    for model in make_pair(CAUSAL[family], row.config(**{rate: 0.5}), row.reference):
        torch.manual_seed(5)
        outputs.append(model.train()(IDS).logits)
        torch.manual_seed(5)
        assert not torch.allclose(outputs[-1], model.eval()(IDS).logits)
    torch.testing.assert_close(*outputs, **TOLERANCE)


def test_a_config_that_cannot_be_carried_is_refused_by_name(family) -> None:
    def refused(words: str, **changes: object) -> None:
        config = FAMILIES[family].config()
        for name, value in changes.items():
            setattr(config, name, value)
        with pytest.raises(ValueError, match=words):
            easytorch.AutoModelForCausalLM.from_config(config)

    config = FAMILIES[family].config()
    acts = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "mamba_hidden_act")
    if named := {name: "nosuch" for name in acts if name in vars(config)}:  # BLOOM's has none
        refused("no activation is called 'nosuch'; known: .*gelu", **named)
    rope = copy.deepcopy(getattr(config, "rope_parameters", None))
    if rope is not None:
        for one in rope.values() if "rope_type" not in rope else (rope,):
            one["rope_type"] = "nosuch"
        refused("no rope type is called 'nosuch'; known: .*yarn", rope_parameters=rope)


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


WRONG = (
    ("num_attention_heads", 0, "config.num_attention_heads=0 must be an integer of 1 or more"),
    ("num_attention_heads", -1, "config.num_attention_heads=-1 must be"),
    ("num_key_value_heads", 0, "config.num_key_value_heads=0 must be"),
    ("num_key_value_heads", 3, "config.num_attention_heads=4 must be a multiple of config.num_key_value_heads=3"),
    ("head_dim", 0, "config.head_dim=0 must be"),
    ("head_dim", -4, "config.head_dim=-4 must be"),
    ("hidden_size", 0, "config.hidden_size=0 must be"),
    ("intermediate_size", -1, "config.intermediate_size=-1 must be an integer of 0 or more"),
    ("vocab_size", -1, "config.vocab_size=-1 must be"),
    ("pad_token_id", 97, "config.pad_token_id=97 is not among the config.vocab_size=97 tokens"),
    ("sliding_window", 0, "config.sliding_window=0 must be 1 or more"),
)


def test_counts_that_do_not_fit_are_refused_by_name(family) -> None:
    base_class = getattr(importlib.import_module(f"easytorch.models.{family}"), FAMILIES[family].heads[0])
    windows = "sliding_window" in FAMILIES[family].sizes and family != "nemotron_h"  # which passes over it
    without_padding = family in ("gpt2", "gpt_neox", "mamba", "mamba2", "nemotron_h")  # their embedding has no such row
    for name, value, words in WRONG:
        config = FAMILIES[family].config()
        unused = (name == "sliding_window" and not windows) or (name == "pad_token_id" and without_padding)
        if unused or name not in {*vars(config), *config.attribute_map}:
            continue
        setattr(config, name, value)
        with pytest.raises(ValueError, match=re.escape(f"{config.model_type}: {words}")):
            base_class(config)


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_angles_need_no_head_dim_in_the_config(rope_type) -> None:
    """A config may leave it to the hidden size, where transformers' own functions of these types want a number."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    given, named = (LlamaConfig(**FAMILIES["llama"].sizes, rope_parameters=rope, head_dim=dim) for dim in (None, 8))
    given.head_dim = None
    expected = easytorch.AutoModelForCausalLM.from_config(named).model.rotary_emb.inv_freq
    assert torch.equal(easytorch.AutoModelForCausalLM.from_config(given).model.rotary_emb.inv_freq, expected)
