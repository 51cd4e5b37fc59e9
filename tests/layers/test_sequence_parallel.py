"""`attn_implementation="ring"` in one process, and how sequences are divided (over ranks: tests/distributed)."""

from __future__ import annotations

import pytest
import torch

import easytorch
from easytorch.layers.sequence_parallel import layout_of
from tests.models.families import FAMILIES


def test_the_ring_of_one_process_is_its_attention() -> None:
    config = FAMILIES["llama"].config(vocab_size=96)
    torch.manual_seed(0)
    model = easytorch.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.arange(2 * 9).view(2, 9) * 7 % 96
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None].expand(2, -1)
    for given in ({}, {"attention_mask": padding}, {"position_ids": positions}):
        model.set_attn_implementation("easytorch")
        wanted = model(input_ids=ids, **given).logits
        model.set_attn_implementation("ring")
        found = model(input_ids=ids, **given).logits
        torch.testing.assert_close(found, wanted)
    tokens = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(ids, **tokens)
    model.set_attn_implementation("easytorch")
    assert torch.equal(generated, model.generate(ids, **tokens))


def test_a_sequence_is_divided_for_equal_work_where_it_can_be() -> None:
    assert [layout_of(length, 2) for length in (8, 6, 2)] == ["zigzag", "contiguous", "contiguous"]
    with pytest.raises(ValueError, match=r"a sequence of 9 tokens does not divide over the 4 ranks of sp: .* 8 or 16"):
        layout_of(9, 4)
    with pytest.raises(ValueError, match="a sequence of 0 tokens"):
        layout_of(0, 4)
