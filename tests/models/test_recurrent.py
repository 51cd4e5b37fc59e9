"""What families with recurrent layers share: their states in transformers' caches, packed rows, and continuing."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import transformers

import easytorch
from easytorch.cache_names import CACHE, STATES, cache_of
from easytorch.generation import generate_tokens
from easytorch.layers.recurrent import convolve
from tests.models.families import CAUSAL, FAMILIES, RECURRENT

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])


@pytest.fixture(params=RECURRENT)
def family(request):
    return request.param


def models(make_pair, family, **changes):
    row = FAMILIES[family]
    return make_pair(CAUSAL[family], row.config(**changes), row.reference)


def states(cache) -> list[torch.Tensor]:
    """The convolutions' and the scans' states of each layer that has them."""
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return [state for layer in layers for state in (layer.conv_states[0], layer.recurrent_states[0])]


def test_states_are_those_of_transformers(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    name = FAMILIES[family].cache
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0  # three tokens are less than a convolution reads
    with torch.no_grad():
        caches = [model(IDS, attention_mask=mask)[name] for model in (ours, theirs)]
        for given, expected in zip(*map(states, caches), strict=True):
            assert given.dtype == expected.dtype
            torch.testing.assert_close(given, expected, **TOLERANCE)
        # either class goes on with the states of the other
        logits = [model(IDS[:, :1], **{name: caches[at]}).logits for model, at in ((ours, 1), (theirs, 0))]
    torch.testing.assert_close(*logits, **TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
def test_several_tokens_after_others(padded, family, make_pair) -> None:
    """transformers' Mamba 1 begins anew there."""
    ours, theirs = models(make_pair, family)
    name, mask = FAMILIES[family].cache, torch.ones_like(IDS)
    if padded:
        mask[0, :3] = 0
    with torch.no_grad():
        expected = theirs(IDS, attention_mask=mask).logits
        cache, steps = None, []
        for start, end in ((0, 2), (2, 7), (7, 10)):  # at first less than a convolution reads
            output = ours(IDS[:, start:end], attention_mask=mask[:, :end], use_cache=True, **{name: cache})
            cache = output[name]
            steps.append(output.logits)
    given = torch.cat(steps, 1)
    torch.testing.assert_close(given[mask == 1], expected[mask == 1], **TOLERANCE)


def test_packed_sequences_by_seq_idx_do_not_see_each_other(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    row = torch.cat([IDS[0, :2], IDS[1], IDS[0]])[None]
    with torch.no_grad():
        expected = torch.cat([theirs(part).logits for part in (IDS[:1, :2], IDS[1:], IDS[:1])], 1)
        seq_idx = torch.tensor([0] * 2 + [1] * 10 + [2] * 10)[None]
        positions = {}
        if FAMILIES[family].attentions:
            positions["position_ids"] = torch.tensor([*range(2), *range(10), *range(10)])[None]
        given = ours(row, seq_idx=seq_idx, use_cache=False, **positions).logits
    torch.testing.assert_close(given, expected, **TOLERANCE)


def test_gradients_through_tokens_after_others(family, make_pair) -> None:
    """The cache is written in place: what a gradient needs of it is kept."""
    ours, _ = models(make_pair, family)
    name = FAMILIES[family].cache
    ours(IDS).logits[:, 8:].square().mean().backward()
    expected = {key: weight.grad.clone() for key, weight in ours.named_parameters()}
    ours.zero_grad()
    cache = ours(IDS[:, :8], use_cache=True)[name]
    one = ours(IDS[:, 8:9], **{name: cache}).logits
    two = ours(IDS[:, 9:], **{name: cache}).logits
    torch.cat([one, two], 1).square().mean().backward()
    for key, weight in ours.named_parameters():
        torch.testing.assert_close(
            weight.grad, expected[key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_a_cache_that_is_reset_begins_anew(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    name = FAMILIES[family].cache
    with torch.no_grad():
        first = ours(IDS)
        expected = first.logits.clone()
        first[name].reset()
        torch.testing.assert_close(ours(IDS, **{name: first[name]}).logits, expected)


def test_our_loop_hands_transformers_own_class_its_cache(family) -> None:
    config = FAMILIES[family].config()
    torch.manual_seed(2)
    model = getattr(transformers, CAUSAL[family])(copy.deepcopy(config)).eval()
    with torch.no_grad():  # the tokens of weights as they are drawn hardly depend on the state
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    wanted = model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=-1)
    for cache in ("dynamic", "static"):
        given = torch.stack(list(generate_tokens(model, IDS, max_new_tokens=6, eos_token_id=-1, cache=cache)), dim=1)
        assert torch.equal(given, wanted[:, -6:])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_of_any_width(width) -> None:
    torch.manual_seed(4)
    conv = torch.nn.Conv1d(6, 6, width, groups=6, padding=width - 1)
    x = torch.randn(2, 7, 6)
    expected = torch.relu(conv(x.mT)[..., :7].mT)
    torch.testing.assert_close(convolve(conv, x, "relu", None, 0), expected)
    config = FAMILIES["mamba"].config(conv_kernel=width)
    cache = transformers.DynamicCache(config=config)
    steps = [convolve(conv, part, "relu", cache, 0) for part in x.split([1, 3, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected)


def test_initial_weights_follow_the_config() -> None:
    for family, changes in (("mamba", {"time_step_init_scheme": "constant"}), ("mamba2", {})):
        torch.manual_seed(3)
        config = FAMILIES[family].config(num_hidden_layers=64, rescale_prenorm_residual=True, **changes)
        made = importlib.import_module(f"easytorch.models.{family}")
        model = getattr(made, CAUSAL[family])(config)
        mixer = model.backbone.layers[0].mixer
        plain = getattr(made, CAUSAL[family])(FAMILIES[family].config(**changes)).backbone.layers[0].mixer
        ratio = mixer.out_proj.weight.std() / plain.out_proj.weight.std()
        assert ratio.item() == pytest.approx(1 / 8, rel=0.1)
        bias = mixer.dt_bias if family == "mamba2" else mixer.dt_proj.bias
        steps = torch.nn.functional.softplus(bias)
        assert config.time_step_min * 0.99 <= steps.min() and steps.max() <= config.time_step_max * 1.01


@pytest.mark.parametrize("family, changes, message", [
    ("mamba", {"time_step_init_scheme": "even"}, r"config\.time_step_init_scheme='even'; it is 'constant' or 'random'"),
    ("mamba2", {"n_groups": 3}, "8 heads in 3 groups"),
    ("qwen3_next", {"linear_num_value_heads": 5}, r"config\.linear_num_value_heads=5 must be a multiple of"),
    ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention"]}, "names sliding_attention; this family"),
])  # fmt: skip
def test_configs_that_a_family_does_not_carry(family, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        easytorch.AutoModelForCausalLM.from_config(FAMILIES[family].config(**changes))


@pytest.mark.parametrize("count", [3, 4])
def test_positions_in_three_dimensions(count, make_pair) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    ours, theirs = models(make_pair, "qwen3_5_text", rope_parameters=rope)
    torch.manual_seed(5)
    positions = torch.randint(0, 9, (count, 2, 10))
    positions[0] = torch.tensor([*range(6), *range(4)])  # of the text, packed, where there are four
    with torch.no_grad():
        given, expected = (model(IDS, position_ids=positions, use_cache=False).logits for model in (ours, theirs))
    torch.testing.assert_close(given, expected, **TOLERANCE)


def test_packed_sequences_by_cu_seq_lens(make_pair) -> None:
    ours, theirs = models(make_pair, "qwen3_5_text")
    starts = torch.tensor([0, 6, 10], dtype=torch.int32)
    positions = torch.tensor([[*range(6), *range(4)]])
    with torch.no_grad():
        given = ours(IDS[:1], position_ids=positions, cu_seq_lens_q=starts, cu_seq_lens_k=starts, use_cache=False)
        expected = torch.cat([theirs(IDS[:1, :6]).logits, theirs(IDS[:1, 6:]).logits], 1)
    torch.testing.assert_close(given.logits, expected, **TOLERANCE)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@pytest.mark.parametrize("wide", [False, True])
def test_residuals_have_the_dtype_that_the_config_says(family, wide, make_pair) -> None:
    """Of a model in bfloat16: float32 where residual_in_fp32, as in transformers."""
    found = []
    for model in models(make_pair, family, residual_in_fp32=wide):
        with torch.no_grad():
            states = model.bfloat16()(IDS, output_hidden_states=True).hidden_states
        found.append([one.dtype for one in states])
    assert found[0] == found[1]
    assert (torch.float32 in found[0]) == wide


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "granitemoehybrid", "kimi_linear"])
def test_a_hybrid_without_attention_continues_from_its_cache(name) -> None:
    """Which has no count of tokens: transformers' Qwen3-Next raises there."""
    config = FAMILIES[name].config()
    config.layer_types = ["linear_attention"] * len(config.layer_types)
    torch.manual_seed(0)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(IDS, attention_mask=mask, use_cache=False).logits[:, -4:]
        outputs = model(IDS[:, :7], attention_mask=mask[:, :7], use_cache=True)
        found = [outputs.logits[:, -1:]]
        for place in range(7, 10):
            given = {CACHE: cache_of(outputs), "attention_mask": mask[:, : place + 1]}
            outputs = model(IDS[:, place : place + 1], **given)
            found.append(outputs.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, **TOLERANCE)


@pytest.mark.skipif(STATES != CACHE, reason="transformers 5.23 keeps no state of the second context of such models")
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_guidance_is_that_of_two_forwards(name, make_pair) -> None:
    """transformers' Mamba 1 multiplies its second context's token by the mask of all tokens."""
    model, _ = models(make_pair, name)
    scale, tokens, other = 3.0, IDS[:1], IDS[1:, :3]
    with torch.no_grad():
        for _ in range(6):
            given, against = (model(one, use_cache=False).logits[:, -1].log_softmax(-1) for one in (tokens, other))
            chosen = (against + scale * (given - against)).argmax(-1, keepdim=True)
            tokens, other = torch.cat([tokens, chosen], 1), torch.cat([other, chosen], 1)
    settings = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(IDS[:1], guidance_scale=scale, negative_prompt_ids=IDS[1:, :3], **settings)
    assert torch.equal(found, tokens)


def test_nemotron_h_bounds_the_step_of_one_token_as_of_a_prompt() -> None:
    """transformers' does so in prompts alone, so that its decoding differs from its own forward."""
    config = FAMILIES["nemotron_h"].config(time_step_min=0.5)
    torch.manual_seed(0)
    model = easytorch.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits[:, -1]
        cache = cache_of(model(IDS[:, :-1], use_cache=True))
        found = model(IDS[:, -1:], **{CACHE: cache}).logits[:, -1]
    torch.testing.assert_close(found, expected, **TOLERANCE)
