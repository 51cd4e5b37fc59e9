"""scripts/check_configs.py: wrong entries of a config are refused by name; all families take it some minutes."""

from __future__ import annotations

import pytest

from scripts import check_configs

# One family of each block, and entries that were once taken, or failed without a name.
CASES = (
    ("bert", "num_attention_heads"),
    ("bert", "type_vocab_size"),
    ("gemma2", "query_pre_attn_scalar"),
    ("gemma4_text", "vocab_size_per_layer_input"),
    ("smollm3", "no_rope_layers"),
    ("ministral3", "original_max_position_embeddings"),
    ("starcoder2", "hidden_act"),
    ("gpt_oss", "hidden_act"),
    ("deepseek_v2", "kv_lora_rank"),
    ("deepseek_v2", "topk_method"),
    ("mamba", "time_step_rank"),
    ("mamba2", "n_groups"),
    ("mamba2", "hidden_act"),
    ("mamba2", "time_step_limit"),
    ("kimi_linear", "linear_head_dim"),
    ("falcon_h1", "ssm_multipliers"),
    ("qwen3_next", "layer_types"),
    ("dinov3_vit", "num_attention_heads"),
    ("t5", "feed_forward_proj"),
    ("mistral3", "hidden_size"),
)


@pytest.mark.parametrize("family, entry", CASES)
def test_no_wrong_entry_is_taken(family: str, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = check_configs.check(family, entry, every=False)
    assert not any(counts[kind] for kind in check_configs.FINDINGS), capsys.readouterr().out
    assert counts.total() > 1
