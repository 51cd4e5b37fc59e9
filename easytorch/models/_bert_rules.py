"""BERT's weight table. Separate from the modules, so that converting a checkpoint does not import torch."""

from __future__ import annotations

# Torch name <-> Flax path, in the order Flax's modules hold their parameters (the language: bridge/rules/table.py).
RULES = (
    (
        "[bert.]embeddings.{table:word_embeddings|position_embeddings|token_type_embeddings}.weight",
        "[bert/]embeddings/{table}/embedding",
        "identity",
    ),
    ("[bert.]embeddings.LayerNorm.weight", "[bert/]embeddings/LayerNorm/scale", "identity"),
    ("[bert.]embeddings.LayerNorm.bias", "[bert/]embeddings/LayerNorm/bias", "identity"),
    ("[bert.]embeddings.{buffer:position_ids|token_type_ids}", None, "buffer"),
    (
        "[bert.]encoder.layer.{i}.{block:attention|crossattention}.self.{projection:query|key|value}.weight",
        "[bert/]encoder/layer/{i}/{block}/self/{projection}/kernel",
        "linear",
    ),
    (
        "[bert.]encoder.layer.{i}.{block:attention|crossattention}.self.{projection:query|key|value}.bias",
        "[bert/]encoder/layer/{i}/{block}/self/{projection}/bias",
        "identity",
    ),
    (
        "[bert.]encoder.layer.{i}.{block:attention|crossattention}.output.dense.weight",
        "[bert/]encoder/layer/{i}/{block}/output/dense/kernel",
        "linear",
    ),
    (
        "[bert.]encoder.layer.{i}.{block:attention|crossattention}.output.dense.bias",
        "[bert/]encoder/layer/{i}/{block}/output/dense/bias",
        "identity",
    ),
    (
        "[bert.]encoder.layer.{i}.{block:attention|crossattention}.output.LayerNorm.weight",
        "[bert/]encoder/layer/{i}/{block}/output/LayerNorm/scale",
        "identity",
    ),
    (
        "[bert.]encoder.layer.{i}.{block:attention|crossattention}.output.LayerNorm.bias",
        "[bert/]encoder/layer/{i}/{block}/output/LayerNorm/bias",
        "identity",
    ),
    (
        "[bert.]encoder.layer.{i}.{half:intermediate|output}.dense.weight",
        "[bert/]encoder/layer/{i}/{half}/dense/kernel",
        "linear",
    ),
    (
        "[bert.]encoder.layer.{i}.{half:intermediate|output}.dense.bias",
        "[bert/]encoder/layer/{i}/{half}/dense/bias",
        "identity",
    ),
    ("[bert.]encoder.layer.{i}.output.LayerNorm.weight", "[bert/]encoder/layer/{i}/output/LayerNorm/scale", "identity"),
    ("[bert.]encoder.layer.{i}.output.LayerNorm.bias", "[bert/]encoder/layer/{i}/output/LayerNorm/bias", "identity"),
    ("[bert.]pooler.dense.weight", "[bert/]pooler/dense/kernel", "linear"),
    ("[bert.]pooler.dense.bias", "[bert/]pooler/dense/bias", "identity"),
    # Masked language model, causal language model and pre-training; both sides share the decoder with the embedding.
    ("cls.predictions.bias", "cls/predictions/bias", "identity"),
    ("cls.predictions.transform.dense.weight", "cls/predictions/transform/dense/kernel", "linear"),
    ("cls.predictions.transform.dense.bias", "cls/predictions/transform/dense/bias", "identity"),
    ("cls.predictions.transform.LayerNorm.weight", "cls/predictions/transform/LayerNorm/scale", "identity"),
    ("cls.predictions.transform.LayerNorm.bias", "cls/predictions/transform/LayerNorm/bias", "identity"),
    ("cls.predictions.decoder.weight", "cls/predictions/decoder/kernel", "linear"),
    ("cls.predictions.decoder.weight", "bert/embeddings/word_embeddings/embedding", "tied"),
    ("cls.predictions.decoder.bias", "cls/predictions/bias", "tied"),
    # Next sentence prediction and pre-training.
    ("cls.seq_relationship.weight", "cls/seq_relationship/kernel", "linear"),
    ("cls.seq_relationship.bias", "cls/seq_relationship/bias", "identity"),
    # `classifier`: sequence and token classification, multiple choice. `qa_outputs`: question answering.
    ("{head:classifier|qa_outputs}.weight", "{head}/kernel", "linear"),
    ("{head:classifier|qa_outputs}.bias", "{head}/bias", "identity"),
)
