"""The native families: a tiny config of each, its heads, and transformers' attention it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import BertConfig, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen3Config


@dataclass(frozen=True)
class Family:
    """A row of the table. reference: the attention of transformers' class with which outputs are compared."""

    config_class: type[PreTrainedConfig]
    heads: tuple[str, ...]
    sizes: dict[str, Any]
    reference: str = "sdpa"
    variants: tuple[dict[str, Any], ...] = field(default=())

    def config(self, **changes: Any) -> PreTrainedConfig:
        return self.config_class(**self.sizes | changes)


_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_DECODER = _SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = {
    "bert": Family(
        BertConfig,
        (
            "BertModel",
            "BertForPreTraining",
            "BertLMHeadModel",
            "BertForMaskedLM",
            "BertForNextSentencePrediction",
            "BertForSequenceClassification",
            "BertForMultipleChoice",
            "BertForTokenClassification",
            "BertForQuestionAnswering",
        ),
        _SIZES | {"intermediate_size": 37, "max_position_embeddings": 40},
    ),
    "llama": Family(
        LlamaConfig,
        (
            "LlamaModel",
            "LlamaForCausalLM",
            "LlamaForSequenceClassification",
            "LlamaForTokenClassification",
            "LlamaForQuestionAnswering",
        ),
        _DECODER,
        variants=(
            {"attention_bias": True, "mlp_bias": True},
            {"head_dim": 12},
            {"num_key_value_heads": 1},
            {"num_key_value_heads": 4},
            {"tie_word_embeddings": True},
            {"pretraining_tp": 2},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
        ),
    ),
    "qwen3": Family(
        Qwen3Config,
        (
            "Qwen3Model",
            "Qwen3ForCausalLM",
            "Qwen3ForSequenceClassification",
            "Qwen3ForTokenClassification",
            "Qwen3ForQuestionAnswering",
        ),
        _DECODER | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        variants=(
            {"use_sliding_window": False},
            {"attention_bias": True, "head_dim": 8},
            {"tie_word_embeddings": True},
            {"layer_types": ["sliding_attention", "sliding_attention"]},
        ),
    ),
    "gemma2": Family(
        Gemma2Config,
        ("Gemma2Model", "Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2ForTokenClassification"),
        _DECODER | {"head_dim": 8, "query_pre_attn_scalar": 13, "sliding_window": 4},
        reference="eager",  # which alone carries its softcap
        variants=(
            {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7},
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"attention_bias": True, "num_key_value_heads": 1},
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2},
        ),
    ),
}
DECODERS = tuple(name for name in FAMILIES if name != "bert")
HEADS = tuple((family, head) for family, row in FAMILIES.items() for head in row.heads)
CAUSAL = {family: next(head for head in FAMILIES[family].heads if head.endswith("CausalLM")) for family in DECODERS}
