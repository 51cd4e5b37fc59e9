"""Tiny models of every kind of head, which tests share and none may change."""

from __future__ import annotations

import copy
import functools

import torch
from transformers import BertConfig, LlamaConfig, MixtralConfig, T5Config, ViTConfig

import easytorch

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
MODELS = {
    "llama": ("CausalLM", LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mixtral": ("CausalLM", MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)),
    "bert": ("MaskedLM", BertConfig(**SIZES)),
    "answers": ("QuestionAnswering", BertConfig(**SIZES)),
    "classes": ("SequenceClassification", BertConfig(**SIZES, num_labels=3)),
    "vit": ("ImageClassification", ViTConfig(**VIT, num_attention_heads=4, num_labels=3)),
    "t5": ("Seq2SeqLM", T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=97)),
}
IDS = torch.tensor([[5, 9, 33, 71], [4, 4, 90, 12]])
ONE = torch.tensor([1, 2])


@functools.cache
def shared(name: str):
    """Nothing may change it."""
    head, config = MODELS[name]
    torch.manual_seed(0)
    return getattr(easytorch, f"AutoModelFor{head}").from_config(copy.deepcopy(config)).eval()
