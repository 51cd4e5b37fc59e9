"""What Gemma 4 alone has: a second embedding of each token, and layers that read the keys of earlier ones."""

from __future__ import annotations

import re

import pytest
import torch

from easytorch.models.gemma4_text import Gemma4ForCausalLM, Gemma4TextDecoderLayer
from tests.models.families import FAMILIES
from tests.models.test_decoders import IDS

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ROW = FAMILIES["gemma4_text"]
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16}


@pytest.fixture
def both(make_pair):
    return make_pair("Gemma4ForCausalLM", ROW.config())


@torch.no_grad()
def test_tokens_are_found_by_their_embeddings(both) -> None:
    ours, theirs = both
    embeds = ours.get_input_embeddings()(IDS)
    expected = theirs(inputs_embeds=theirs.get_input_embeddings()(IDS)).logits
    torch.testing.assert_close(ours(inputs_embeds=embeds).logits, expected, **TOLERANCE)
    parts = ours.model.get_per_layer_inputs(IDS)
    torch.testing.assert_close(ours(inputs_embeds=embeds, per_layer_inputs=parts).logits, expected, **TOLERANCE)
    with pytest.raises(ValueError, match=r"each of inputs_embeds must be the embedding of one token.*per_layer_inputs"):
        ours(inputs_embeds=embeds + 0.1)
    with pytest.raises(ValueError, match="per_layer_inputs if input_ids"):
        ours(IDS, per_layer_inputs=parts)


def rows_of_layers(model) -> list[int]:
    """How many positions each layer of the last call ran at; the handles are of one test's model."""
    seen: list[int] = []
    for layer in model.modules():
        if isinstance(layer, Gemma4TextDecoderLayer):
            layer.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["easytorch", "vanilla", "flash"])
def test_layers_without_keys_run_at_the_positions_whose_logits_are_wanted(padded, implementation, both) -> None:
    ours, _ = both
    ours.set_attn_implementation(implementation)
    mask = torch.ones_like(IDS)
    mask[0, : 3 * padded] = 0
    every = ours(IDS, attention_mask=mask).logits
    seen = rows_of_layers(ours)
    for keep, static in ((1, False), (3, False), (1, True), (torch.tensor([2, 5]), False)):
        cache = ours.init_cache(2, 16) if static else None
        given = ours(IDS, attention_mask=mask, logits_to_keep=keep, past_key_values=cache, use_cache=static).logits
        expected = every[:, -keep:] if isinstance(keep, int) else every[:, keep]
        torch.testing.assert_close(given, expected, **TOLERANCE)
    whole = [10, 10, 10, 10]
    few = [[10, 10, 1, 1], [10, 10, 3, 3] if padded else whole, [10, 10, 1, 1] if padded else whole, whole]
    assert seen == [rows for one in few for rows in one]


@torch.no_grad()
def test_what_is_recorded_is_of_every_position(both) -> None:
    ours, theirs = both
    for name in ("output_hidden_states", "output_attentions"):
        theirs.set_attn_implementation("eager")
        outputs = [model(IDS, logits_to_keep=1, **{name: True}) for model in (ours, theirs)]
        key = name.removeprefix("output_")
        assert [one.shape for one in outputs[0][key]] == [one.shape for one in outputs[1][key]]
    kept = ours(IDS, return_shared_kv_states=True).shared_kv_states
    expected = theirs(IDS, return_shared_kv_states=True).shared_kv_states
    assert kept.keys() == expected.keys() == {"sliding_attention", "full_attention"}
    for name, tensors in expected.items():
        for one, other in zip(kept[name], tensors, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def test_both_embeddings_grow(both) -> None:
    ours, theirs = both
    for model in both:
        model.resize_token_embeddings(101, mean_resizing=False)
        assert model.model.embed_tokens_per_layer.weight.shape == (101, 4 * 6)
        assert model.config.vocab_size_per_layer_input == model.config.vocab_size == 101
    assert ours(IDS % 3 + 98).logits.shape == theirs(IDS % 3 + 98).logits.shape


def test_a_reentrant_checkpoint_would_lose_gradients_of_shared_keys(both) -> None:
    with pytest.raises(ValueError, match="last 2 layers read keys of earlier ones"):
        both[0].gradient_checkpointing_enable({"use_reentrant": True})
    own = Gemma4ForCausalLM(ROW.config(num_kv_shared_layers=0)).train()
    own.gradient_checkpointing_enable({"use_reentrant": True})
    own(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weight in own.parameters())


@pytest.mark.parametrize("changes, words", [
    ({"num_kv_shared_layers": 3}, "leaves no full_attention layer with keys of its own among the first 1"),
    ({"num_kv_shared_layers": 5}, "config.num_kv_shared_layers=5 must be an integer from 0 to num_hidden_layers=4"),
    (EXPERTS | {"top_k_experts": 6}, "config.top_k_experts=6 must be 1 to num_experts=5"),
    (EXPERTS | {"num_experts": None}, "config.enable_moe_block needs the numbers num_experts"),
    ({"global_head_dim": 0}, "config.head_dim=0 must be"),
    ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "must be a multiple of config.num_key_value_heads=3"),
])  # fmt: skip
def test_configs_that_cannot_be_carried(changes, words) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Gemma4ForCausalLM(ROW.config(**changes))
