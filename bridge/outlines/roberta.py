"""RoBERTa: BERT's encoder, and heads of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from easytorch.bridge.outline import Head, Outline, Settings
from easytorch.bridge.outlines.bert import FIELDS, classifier, encoder, fits, with_pooler
from easytorch.bridge.outlines.fields import LABELS, padded, token
from easytorch.bridge.outlines.weights import Weight, bare, layer_norm, linear

_encoder = partial(encoder, positions_last=True)
_pooled = with_pooler(_encoder)


def _words(settings: Settings, start: str) -> Iterator[Weight]:
    hidden, vocabulary = settings["hidden_size"], settings["vocab_size"]
    yield from _encoder(settings, start)
    yield bare("lm_head.bias", vocabulary)
    yield from linear("lm_head.dense", hidden, hidden)
    yield from layer_norm("lm_head.layer_norm", hidden)
    yield from linear("lm_head.decoder", vocabulary, hidden)


def _sequences(settings: Settings, start: str) -> Iterator[Weight]:
    hidden = settings["hidden_size"]
    yield from _encoder(settings, start)
    yield from linear("classifier.dense", hidden, hidden)
    yield from linear("classifier.out_proj", settings[LABELS], hidden)


def _fits(settings: Settings) -> bool:
    # Positions are counted from the padding token on.
    return fits(settings) and padded(settings, "max_position_embeddings")


_TIES = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
_HEADS = {
    "RobertaModel": Head(_pooled),
    "RobertaForMaskedLM": Head(_words, "roberta", _TIES),
    "RobertaForCausalLM": Head(_words, "roberta", _TIES),
    "RobertaForSequenceClassification": Head(_sequences, "roberta"),
    "RobertaForMultipleChoice": Head(classifier(_pooled, outputs=1), "roberta"),
    "RobertaForTokenClassification": Head(classifier(_encoder), "roberta"),
    "RobertaForQuestionAnswering": Head(classifier(_encoder, "qa_outputs"), "roberta"),
}
OUTLINE = Outline("roberta", {**FIELDS, "pad_token_id": token(1)}, _HEADS, _fits)
