"""BERT, and what RoBERTa shares with it: an encoder with learned positions and a norm after each half of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from easytorch.bridge.outline import Head, Outline, Settings
from easytorch.bridge.outlines.fields import (
    LABELS,
    Field,
    activation,
    flag,
    number,
    only,
    padded,
    share,
    size,
    text,
    token,
)
from easytorch.bridge.outlines.weights import Weight, bare, embedding, layer_norm, linear

FIELDS: Mapping[str, Field] = {
    "vocab_size": size(),
    "hidden_size": size(),
    "intermediate_size": size(),
    "num_hidden_layers": size(),
    "num_attention_heads": size(),
    "max_position_embeddings": size(),
    "type_vocab_size": size(),
    "hidden_act": activation("gelu"),
    "layer_norm_eps": number(),
    "hidden_dropout_prob": share(0.1),
    "attention_probs_dropout_prob": share(0.1),
    "classifier_dropout": share(None),
    "tie_word_embeddings": flag(True),
    "is_decoder": only(False),
    "add_cross_attention": only(False),
    "gradient_checkpointing": only(False),
    "position_embedding_type": Field(None, lambda value: value == "absolute"),
}
Weights = Callable[[Settings, str], Iterator[Weight]]


def encoder(settings: Settings, start: str, *, positions_last: bool = False) -> Iterator[Weight]:
    """The base model without its pooler. positions_last: the order of the embeddings' weights."""
    hidden, middle = settings["hidden_size"], settings["intermediate_size"]
    tables = (
        embedding(f"{start}embeddings.word_embeddings", settings["vocab_size"], hidden),
        embedding(f"{start}embeddings.position_embeddings", settings["max_position_embeddings"], hidden),
        embedding(f"{start}embeddings.token_type_embeddings", settings["type_vocab_size"], hidden),
        layer_norm(f"{start}embeddings.LayerNorm", hidden),
    )
    for place in (0, 2, 3, 1) if positions_last else (0, 1, 2, 3):
        yield from tables[place]
    for number_ in range(settings["num_hidden_layers"]):
        layer = f"{start}encoder.layer.{number_}"
        for projection in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{projection}", hidden, hidden)
        yield from linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from layer_norm(f"{layer}.attention.output.LayerNorm", hidden)
        yield from linear(f"{layer}.intermediate.dense", middle, hidden)
        yield from linear(f"{layer}.output.dense", hidden, middle)
        yield from layer_norm(f"{layer}.output.LayerNorm", hidden)


def with_pooler(base: Weights) -> Weights:
    """The base model with its pooler."""

    def weights(settings: Settings, start: str) -> Iterator[Weight]:
        yield from base(settings, start)
        yield from linear(f"{start}pooler.dense", settings["hidden_size"], settings["hidden_size"])

    return weights


def classifier(base: Weights, name: str = "classifier", outputs: int | None = None) -> Weights:
    """A linear layer on top, as wide as there are labels unless `outputs` says how wide."""

    def weights(settings: Settings, start: str) -> Iterator[Weight]:
        yield from base(settings, start)
        yield from linear(name, settings[LABELS] if outputs is None else outputs, settings["hidden_size"])

    return weights


def _words(base: Weights, *, sentence: bool = False) -> Weights:
    def weights(settings: Settings, start: str) -> Iterator[Weight]:
        hidden, vocabulary = settings["hidden_size"], settings["vocab_size"]
        yield from base(settings, start)
        yield bare("cls.predictions.bias", vocabulary)
        yield from linear("cls.predictions.transform.dense", hidden, hidden)
        yield from layer_norm("cls.predictions.transform.LayerNorm", hidden)
        yield from linear("cls.predictions.decoder", vocabulary, hidden)
        if sentence:
            yield from linear("cls.seq_relationship", 2, hidden)

    return weights


def fits(settings: Settings) -> bool:
    """Whether the sizes go together."""
    return settings["hidden_size"] % settings["num_attention_heads"] == 0 and padded(settings, "vocab_size")


_pooled = with_pooler(encoder)
_TIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_HEADS = {
    "BertModel": Head(_pooled),
    "BertForPreTraining": Head(_words(_pooled, sentence=True), "bert", _TIES),
    "BertForMaskedLM": Head(_words(encoder), "bert", _TIES),
    "BertLMHeadModel": Head(_words(encoder), "bert", _TIES),
    "BertForNextSentencePrediction": Head(classifier(_pooled, "cls.seq_relationship", 2), "bert"),
    "BertForSequenceClassification": Head(classifier(_pooled), "bert"),
    "BertForMultipleChoice": Head(classifier(_pooled, outputs=1), "bert"),
    "BertForTokenClassification": Head(classifier(encoder), "bert"),
    "BertForQuestionAnswering": Head(classifier(encoder, "qa_outputs"), "bert"),
}
OUTLINE = Outline("bert", {**FIELDS, "pad_token_id": token(0), "pooler_type": text()}, _HEADS, fits)
