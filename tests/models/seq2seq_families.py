"""The rows of native encoder-decoder families: see families.py, which has those of decoders."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.family import Family

_HEADS = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering")
_T5 = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 37,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 7,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_BART = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def _seq2seq(
    name: str,
    *heads: str,
    sizes: dict[str, Any],
    variants: tuple[dict[str, Any], ...] = (),
    dropouts: tuple[str, ...] = (),
) -> Family:
    """A row whose classes transformers calls <name>Config, <name>Model, <name>ForConditionalGeneration and so on."""
    classes = tuple(f"{name}{head}" for head in (*_HEADS, *heads))
    return Family(getattr(transformers, f"{name}Config"), classes, sizes, variants=variants, dropouts=dropouts)


SEQ2SEQ_FAMILIES = {
    "t5": _seq2seq(
        "T5",
        "EncoderModel",
        "ForTokenClassification",
        sizes=_T5,
        dropouts=("dropout_rate",),
        variants=(
            {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
            {"feed_forward_proj": "gated-silu", "d_kv": 8, "num_decoder_layers": None},
            {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 0.1},
        ),
    ),
    "bart": _seq2seq(
        "Bart",
        "ForCausalLM",
        sizes=_BART,
        dropouts=("dropout", "activation_dropout"),
        variants=({"scale_embedding": True, "activation_function": "relu", "decoder_layers": 3},),
    ),
    "mbart": _seq2seq(
        "MBart",
        "ForCausalLM",
        sizes=_BART,
        dropouts=("dropout", "activation_dropout"),
        variants=({"scale_embedding": True, "decoder_attention_heads": 8, "tie_word_embeddings": False},),
    ),
    "mt5": _seq2seq(
        "MT5",
        "EncoderModel",
        "ForTokenClassification",
        sizes=_T5,
        dropouts=("dropout_rate",),
        variants=({"feed_forward_proj": "relu", "num_decoder_layers": 1},),
    ),
}
