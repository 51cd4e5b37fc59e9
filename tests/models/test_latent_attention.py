"""What families with latent attention share: which of its two forms runs, and what is in their caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV3Config, DynamicCache

import easytorch
from easytorch import AutoModelForCausalLM
from easytorch.cache_names import CACHE, cache_of
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.experts_step import cpu as experts_cpu
from easytorch.kernels.linear.preference import ONE_FLOAT32_ROW
from easytorch.kernels.multi_latent import cpu as latent_cpu
from easytorch.layers import latent_attention
from easytorch.models import deepseek_v32
from easytorch.operations.dispatch.check import relative_rms_error
from tests.models.families import CAUSAL, FAMILIES

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])
LATENT = ("deepseek_v3", "deepseek_v2")


@pytest.fixture(params=LATENT)
def family(request):
    return request.param


@pytest.fixture
def absorbed(monkeypatch) -> list[int]:
    """The numbers of queries of the calls that attended to latents."""
    lengths = []
    operation = latent_attention.multi_latent_attention

    def noted(query, *args, **kwargs):
        lengths.append(query.shape[1])
        return operation(query, *args, **kwargs)

    monkeypatch.setattr(latent_attention, "multi_latent_attention", noted)
    return lengths


def models(make_pair, family, **changes):
    return make_pair(CAUSAL[family], FAMILIES[family].config(**changes))


def test_one_token_attends_to_latents_and_a_prompt_to_the_keys_of_every_head(family, make_pair, absorbed) -> None:
    ours, theirs = models(make_pair, family)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for attention_mask in (None, mask):
        absorbed.clear()
        with torch.no_grad():
            past = ours(IDS[:, :9], attention_mask=None if attention_mask is None else mask[:, :9]).past_key_values
            assert absorbed == []
            given = ours(IDS[:, 9:], attention_mask=attention_mask, past_key_values=past).logits
            assert absorbed == [1, 1]
            expected = theirs(IDS, attention_mask=attention_mask).logits[:, 9:]
        torch.testing.assert_close(given, expected, **TOLERANCE)


@pytest.mark.parametrize("reason", ["sdpa", "vanilla", "weights", "forced", "adapter"])
def test_what_asks_for_the_keys_of_every_head_gets_them(reason, make_pair, absorbed, monkeypatch) -> None:
    ours, _ = models(make_pair, "deepseek_v3")
    kwargs = {"output_attentions": True} if reason == "weights" else {}
    with torch.no_grad():
        expected = ours(IDS).logits[:, 9:]
    if reason in ("sdpa", "vanilla"):
        ours.set_attn_implementation(reason)
    if reason == "forced":
        monkeypatch.setenv("EASYTORCH_OPS", "attention=vanilla")
    if reason == "adapter":  # a hook stands for whatever listens to the projection
        for layer in ours.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, output: 2.0 * output)
        with torch.no_grad():
            expected = ours(IDS).logits[:, 9:]
    with torch.no_grad():
        past = ours(IDS[:, :9]).past_key_values
        output = ours(IDS[:, 9:], past_key_values=past, **kwargs)
    assert absorbed == []
    torch.testing.assert_close(output.logits, expected, **TOLERANCE)
    assert (output.attentions is not None) == (reason == "weights")


def test_gradients_through_one_token_over_a_cache(make_pair, absorbed) -> None:
    gradients = []
    for model in models(make_pair, "deepseek_v3"):
        past = model(IDS[:, :9]).past_key_values
        model(IDS[:, 9:], past_key_values=past).logits.square().mean().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert absorbed == [1, 1]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


def test_a_cache_of_either_class_goes_on_in_the_other(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    with torch.no_grad():
        expected = theirs(IDS).logits[:, 6:]
        for first, second in ((ours, theirs), (theirs, ours)):
            past = first(IDS[:, :6]).past_key_values
            assert type(past) is transformers.DynamicCache
            torch.testing.assert_close(second(IDS[:, 6:], past_key_values=past).logits, expected, **TOLERANCE)


def test_autocast_joins_what_it_narrowed(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    outputs = []
    for model in (ours, theirs):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            past = model(IDS[:, :9]).past_key_values
            outputs.append(model(IDS[:, 9:], past_key_values=past).logits.float())
    with torch.no_grad():
        exact = theirs(IDS).logits[:, 9:]
    errors = [(output - exact).square().mean().sqrt() for output in outputs]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("family, changes, message", [
    ("deepseek_v3", {"n_group": None}, r"deepseek_v3: 8 experts in config\.n_group=None groups"),
    ("deepseek_v3", {"n_group": 3}, r"8 experts in config\.n_group=3 groups"),
    ("deepseek_v3", {"n_group": 8}, r"config\.n_group=8 groups.* of 2 or more experts"),
    ("deepseek_v3", {"topk_group": 5}, r"config\.topk_group=5 are taken"),
    ("deepseek_v2", {"n_group": None}, r"deepseek_v2: 8 experts in config\.n_group=None groups"),
    ("deepseek_v2", {"topk_group": 0}, r"config\.topk_group=0 are taken"),
    ("deepseek_v2", {"num_experts_per_tok": None}, r"config\.num_experts_per_tok=None of 8 experts"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, r"config\.topk_method='noaux_tc'; this family has greedy, group"),
])  # fmt: skip
def test_routing_that_a_family_does_not_have(family, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        easytorch.AutoModelForCausalLM.from_config(FAMILIES[family].config(**changes))


@torch.no_grad()
def test_one_token_reads_the_latents_that_the_indexer_chooses(make_pair, monkeypatch) -> None:
    ours, theirs = make_pair("DeepseekV32ForCausalLM", FAMILIES["deepseek_v32"].config(index_topk=3))
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    caches = [DynamicCache(config=model.config) for model in (ours, theirs)]
    for model, cache in zip((ours, theirs), caches, strict=True):
        model(ids[:, :11], attention_mask=mask[:, :11], past_key_values=cache)
    read = []
    attention = type(ours.model.layers[0].self_attn)
    absorbs = attention._absorbs

    def counting(self, query, latent, *rest):
        read.append(latent.shape[2])
        return absorbs(self, query, latent, *rest)

    monkeypatch.setattr(attention, "_absorbs", counting)
    given, expected = (
        model(ids[:, 11:], attention_mask=mask, past_key_values=cache).logits
        for model, cache in zip((ours, theirs), caches, strict=True)
    )
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    assert read == [3, 3]


@torch.no_grad()
@pytest.mark.parametrize("tied", ["all", "some"])
def test_keys_that_score_alike_are_chosen_as_transformers_does(make_pair, tied: str) -> None:
    """In a prompt, and token by token after it: neither defines an order of its own."""
    ours, theirs = make_pair("DeepseekV32ForCausalLM", FAMILIES["deepseek_v32"].config(index_topk=4))
    chosen: dict[int, list[torch.Tensor]] = {id(model): [] for model in (ours, theirs)}
    for model in (ours, theirs):
        for layer in model.model.layers:
            weight = layer.self_attn.indexer.weights_proj.weight
            weight.mul_(0) if tied == "all" else weight[1:].mul_(0)  # by one head alone many keys have relu(...) = 0
            seen = chosen[id(model)]
            layer.self_attn.indexer.register_forward_hook(lambda _, given, found, seen=seen: seen.append(found.long()))
    ids = torch.randint(3, 97, (2, 80), generator=torch.Generator().manual_seed(0))
    caches = [DynamicCache(config=model.config) for model in (ours, theirs)]
    for part in ids.split([70, *[1] * 10], 1):
        given, expected = (
            model(part, past_key_values=cache).logits for model, cache in zip((ours, theirs), caches, strict=True)
        )
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    pairs = list(zip(chosen[id(ours)], chosen[id(theirs)], strict=True))
    assert len(pairs) == 11 * 2 and all(torch.equal(a, b) for a, b in pairs)


def test_an_indexer_that_cannot_be_carried_is_refused_by_name() -> None:
    for changes, words in (
        ({"q_lora_rank": None}, "config.q_lora_rank must be a number"),
        ({"index_topk": 0}, "config.index_topk=0 must be an integer of 1 or more"),
        ({"index_head_dim": 4}, "config.qk_rope_head_dim=8 is more than config.index_head_dim=4"),
        ({"mlp_layer_types": ["dense", "thin"]}, "config.mlp_layer_types names 'thin'"),
        ({"mlp_layer_types": ["dense"]}, "config.mlp_layer_types has 1 entries"),
    ):
        config = FAMILIES["deepseek_v32"].config()
        for name, value in changes.items():
            object.__setattr__(config, name, value)
        with pytest.raises(ValueError, match=words):
            deepseek_v32.DeepseekV32Model(config)


@pytest.mark.skipif(
    library.missing() is not None or not processor.AVX512, reason="operators in C++ are chosen where they were measured"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config_class", [DeepseekV2Config, DeepseekV3Config])
def test_generate_decodes_by_the_operators_in_cpp(
    config_class: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents and experts of each token, with and without padding; the tokens are those of the operations."""
    calls = {"attention": 0, "experts": 0}

    def counted(name: str, module: Any, function: str) -> None:
        run = getattr(module, function)

        def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls[name] += 1
            result: torch.Tensor = run(*args, **kwargs)
            return result

        monkeypatch.setattr(module, function, counting)

    counted("attention", latent_cpu, "run")
    counted("experts", experts_cpu, "experts_step")
    config = config_class(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, n_shared_experts=1, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tokens, mask = torch.randint(0, 64, (2, 30)), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :3] = 0
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "output_logits": True}
    found = model.generate(tokens, return_dict_in_generate=True, **settings)
    chosen = dtype != torch.float32 or ONE_FLOAT32_ROW
    of_cpp = {"attention": 3 * 4, "experts": 2 * 4 if chosen else 0}  # layers times tokens after the first
    assert calls == of_cpp
    monkeypatch.setattr(latent_cpu, "prefers", lambda *args, **kwargs: False)
    monkeypatch.setattr(experts_cpu, "takes", lambda *args: False)
    expected = model.generate(tokens, return_dict_in_generate=True, **settings)
    assert calls == of_cpp
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    assert relative_rms_error(found.logits[1], expected.logits[1]) <= allowed


@pytest.mark.parametrize("implementation", ["eager", "easytorch"])
def test_attention_weights_of_one_token_have_a_column_for_every_key(implementation, make_pair) -> None:
    """Where an indexer chooses too: those of tokens that were not chosen are 0, as transformers'."""
    ours, theirs = make_pair(CAUSAL["deepseek_v32"], FAMILIES["deepseek_v32"].config())
    ours.set_attn_implementation(implementation)
    theirs.set_attn_implementation("eager")
    ids = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17]])
    outputs = []
    with torch.no_grad():
        for model in (ours, theirs):
            cache = cache_of(model(ids[:, :-1], use_cache=True))
            outputs.append(model(ids[:, -1:], output_attentions=True, **{CACHE: cache}))
    for found, expected in zip(outputs[0].attentions, outputs[1].attentions, strict=True):
        assert found.shape == expected.shape == (1, ours.config.num_attention_heads, 1, 10)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
