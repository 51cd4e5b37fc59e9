"""Llama's weight table. Separate from the modules, so that converting a checkpoint does not import torch."""

from __future__ import annotations

# Torch name <-> Flax path, in the order Flax's modules hold their parameters (the language: bridge/rules/table.py).
# `transformer` is the base of LlamaForQuestionAnswering, `model` that of every other head.
RULES = (
    (
        "[{base:model|transformer}.]embed_tokens.weight",
        "[{base}/]embed_tokens/embedding",
        "identity",
    ),
    (
        "[{base:model|transformer}.]layers.{i}.input_layernorm.weight",
        "[{base}/]layers/{i}/input_layernorm/weight",
        "identity",
    ),
    (
        "[{base:model|transformer}.]layers.{i}.self_attn.{projection:q_proj|k_proj|v_proj|o_proj}.weight",
        "[{base}/]layers/{i}/self_attn/{projection}/kernel",
        "linear",
    ),
    (
        "[{base:model|transformer}.]layers.{i}.self_attn.{projection:q_proj|k_proj|v_proj|o_proj}.bias",
        "[{base}/]layers/{i}/self_attn/{projection}/bias",
        "identity",
    ),
    ("[{base:model|transformer}.]layers.{i}.self_attn.rotary_emb.inv_freq", None, "buffer"),
    (
        "[{base:model|transformer}.]layers.{i}.post_attention_layernorm.weight",
        "[{base}/]layers/{i}/post_attention_layernorm/weight",
        "identity",
    ),
    (
        "[{base:model|transformer}.]layers.{i}.mlp.{projection:up_proj|gate_proj|down_proj}.weight",
        "[{base}/]layers/{i}/mlp/{projection}/kernel",
        "linear",
    ),
    (
        "[{base:model|transformer}.]layers.{i}.mlp.{projection:up_proj|gate_proj|down_proj}.bias",
        "[{base}/]layers/{i}/mlp/{projection}/bias",
        "identity",
    ),
    ("[{base:model|transformer}.]norm.weight", "[{base}/]norm/weight", "identity"),
    ("[{base:model|transformer}.]rotary_emb.{buffer:inv_freq|original_inv_freq}", None, "buffer"),
    # Causal language model: Flax's head has a kernel of its own even where the torch model ties it to the embedding.
    ("lm_head.weight", "lm_head/kernel", "linear"),
    ("lm_head.weight", "model/embed_tokens/embedding", "tied_in_torch"),
    # `score`: sequence and token classification. `qa_outputs`: question answering.
    ("{head:score|qa_outputs}.weight", "{head}/kernel", "linear"),
    ("{head:score|qa_outputs}.bias", "{head}/bias", "identity"),
)
