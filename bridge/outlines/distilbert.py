"""DistilBERT: BERT's encoder under other names, without token types and pooler."""

from __future__ import annotations

from collections.abc import Iterator

from easytorch.bridge.outline import Head, Outline, Settings
from easytorch.bridge.outlines.fields import LABELS, activation, flag, only, padded, share, size, token
from easytorch.bridge.outlines.weights import Weight, embedding, layer_norm, linear

_FIELDS = {
    "vocab_size": size(),
    "dim": size(),
    "hidden_dim": size(),
    "n_layers": size(),
    "n_heads": size(),
    "max_position_embeddings": size(),
    # Flax computes sinusoidal ones, and torch holds them.
    "sinusoidal_pos_embds": only(False),
    "activation": activation("gelu"),
    "dropout": share(0.1),
    "attention_dropout": share(0.1),
    "qa_dropout": share(0.1),
    "seq_classif_dropout": share(0.2),
    "pad_token_id": token(0),
    "tie_word_embeddings": flag(True),
}


def _encoder(settings: Settings, start: str) -> Iterator[Weight]:
    width, middle = settings["dim"], settings["hidden_dim"]
    yield from embedding(f"{start}embeddings.word_embeddings", settings["vocab_size"], width)
    yield from embedding(f"{start}embeddings.position_embeddings", settings["max_position_embeddings"], width)
    yield from layer_norm(f"{start}embeddings.LayerNorm", width)
    for number in range(settings["n_layers"]):
        layer = f"{start}transformer.layer.{number}"
        for projection in ("q_lin", "k_lin", "v_lin", "out_lin"):
            yield from linear(f"{layer}.attention.{projection}", width, width)
        yield from layer_norm(f"{layer}.sa_layer_norm", width)
        yield from linear(f"{layer}.ffn.lin1", middle, width)
        yield from linear(f"{layer}.ffn.lin2", width, middle)
        yield from layer_norm(f"{layer}.output_layer_norm", width)


def _words(settings: Settings, start: str) -> Iterator[Weight]:
    yield from _encoder(settings, start)
    yield from linear("vocab_transform", settings["dim"], settings["dim"])
    yield from layer_norm("vocab_layer_norm", settings["dim"])
    yield from linear("vocab_projector", settings["vocab_size"], settings["dim"])


def _sequences(settings: Settings, start: str) -> Iterator[Weight]:
    yield from _encoder(settings, start)
    yield from linear("pre_classifier", settings["dim"], settings["dim"])
    yield from linear("classifier", settings[LABELS], settings["dim"])


def _tokens(settings: Settings, start: str) -> Iterator[Weight]:
    yield from _encoder(settings, start)
    yield from linear("classifier", settings[LABELS], settings["dim"])


def _fits(settings: Settings) -> bool:
    return settings["dim"] % settings["n_heads"] == 0 and padded(settings, "vocab_size")


_TIES = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
_HEADS = {
    "DistilBertModel": Head(_encoder),
    "DistilBertForMaskedLM": Head(_words, "distilbert", _TIES),
    "DistilBertForSequenceClassification": Head(_sequences, "distilbert"),
    "DistilBertForTokenClassification": Head(_tokens, "distilbert"),
}
OUTLINE = Outline("distilbert", _FIELDS, _HEADS, _fits)
