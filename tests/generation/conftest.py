"""Small causal models of different makes, with weights large enough that their tokens vary."""

from __future__ import annotations

import pytest
import torch

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDLESS = {
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def configs():
    import transformers

    rope = {**SMALL, **ENDLESS, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return {
        "llama": transformers.LlamaConfig(**rope),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, **ENDLESS
        ),
        # one layer sees a window shorter than the prompts
        "gemma3_text": transformers.Gemma3TextConfig(
            **rope, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
        ),
        "mistral": transformers.MistralConfig(**rope, sliding_window=6),
        "gemma2": transformers.Gemma2Config(**rope, head_dim=8, sliding_window=6),
        "cohere2": transformers.Cohere2Config(**rope, sliding_window=6),
        "llama4_text": transformers.Llama4TextConfig(
            **rope, head_dim=8, intermediate_size_mlp=64, attention_chunk_size=6, num_local_experts=2
        ),
        "bloom": transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **ENDLESS),
    }


@pytest.fixture(scope="session")
def make_model():
    """`make_model("llama")`: transformers' causal model of that type, "native_llama" ours; always the same weights.

    settings: further keys of the config.
    """
    import transformers

    import easytorch

    def make(name: str, settings=None, **kwargs):
        torch.manual_seed(0)
        auto = easytorch.AutoModelForCausalLM if name.startswith("native_") else transformers.AutoModelForCausalLM
        config = configs()[name.removeprefix("native_")]
        config.update(settings or {})
        return auto.from_config(config, **kwargs).eval()

    return make


@pytest.fixture(scope="session")
def llama(make_model):
    return make_model("llama")
