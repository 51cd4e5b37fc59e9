"""The rows of native encoder families: see families.py, which has those of decoders."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.family import Family

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
_HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def _encoder(
    name: str,
    *heads: str,
    sizes: dict[str, Any] | None = None,
    base: dict[str, Any] = _SIZES,
    variants: tuple[dict[str, Any], ...] = (),
    dropouts: tuple[str, ...] = _DROPOUTS,
    reference: str = "sdpa",
) -> Family:
    """A row whose classes transformers calls <name>Config, <name>Model, <name>ForMaskedLM and so on."""
    classes = tuple(f"{name}{head}" for head in (*_HEADS, *heads))
    config_class = getattr(transformers, f"{name}Config")
    return Family(config_class, classes, base | (sizes or {}), reference, variants, dropouts)


_ROBERTA = {"sizes": {"pad_token_id": 0}, "variants": ({"hidden_act": "relu", "layer_norm_eps": 0.1},)}

ENCODER_FAMILIES = {
    "bert": _encoder(
        "Bert",
        "ForPreTraining",
        "LMHeadModel",
        "ForNextSentencePrediction",
        variants=({"hidden_act": "gelu_new", "chunk_size_feed_forward": 1},),
    ),
    "roberta": _encoder("Roberta", "ForCausalLM", **_ROBERTA),
    "xlm_roberta": _encoder("XLMRoberta", "ForCausalLM", **_ROBERTA),
    "camembert": _encoder("Camembert", "ForCausalLM", **_ROBERTA),
    "electra": _encoder(
        "Electra",
        "ForCausalLM",
        "ForPreTraining",
        sizes={"embedding_size": 24, "summary_last_dropout": 0.0},
        variants=({"embedding_size": 32, "hidden_act": "relu"},),
    ),
    "distilbert": _encoder(
        "DistilBert",
        base={
            "vocab_size": 97,
            "dim": 32,
            "hidden_dim": 37,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 40,
        },
        dropouts=("dropout", "attention_dropout"),
        variants=({"sinusoidal_pos_embds": True, "activation": "relu"},),
    ),
    "modernbert": _encoder(
        "ModernBert",
        sizes={"intermediate_size": 48, "local_attention": 6}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        dropouts=("embedding_dropout", "attention_dropout", "mlp_dropout"),
        variants=(
            {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "decoder_bias": False},
            {"layer_types": ["sliding_attention"] * 2, "hidden_activation": "relu", "classifier_bias": True},
        ),
    ),
    "mpnet": _encoder("MPNet", variants=({"hidden_act": "relu"},), reference="eager"),
    "deberta_v2": _encoder(
        "DebertaV2",
        sizes={"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2}
        | {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
        variants=(
            {"position_buckets": -1, "max_relative_positions": 6, "pos_att_type": "c2p", "conv_kernel_size": 0},
            {"position_buckets": 24, "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0},
            {"relative_attention": False, "norm_rel_ebd": "none", "embedding_size": 24, "hidden_act": "relu"},
            {"legacy": False, "pos_att_type": ["p2c"], "attention_head_size": 8, "conv_act": "gelu"},
            {"pos_att_type": None, "max_relative_positions": 12, "conv_groups": 2},
        ),
        reference="eager",
    ),
}
