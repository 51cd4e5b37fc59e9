"""GPT-2: a decoder with learned positions, whose matrices torch holds as Conv1D."""

from __future__ import annotations

from collections.abc import Iterator

from easytorch.bridge.outline import Head, Outline, Settings
from easytorch.bridge.outlines.fields import LABELS, activation, flag, number, only, padded, share, size, text, token
from easytorch.bridge.outlines.weights import Weight, conv1d, embedding, layer_norm, linear

_FIELDS = {
    "vocab_size": size(),
    "n_positions": size(),
    "n_ctx": size(None),
    "n_embd": size(),
    "n_layer": size(),
    "n_head": size(),
    "n_inner": size(None),
    "activation_function": activation("gelu_new"),
    "layer_norm_epsilon": number(),
    "attn_pdrop": share(0.1),
    "embd_pdrop": share(0.1),
    "resid_pdrop": share(0.1),
    "reorder_and_upcast_attn": flag(False),
    "scale_attn_by_inverse_layer_idx": flag(False),
    "scale_attn_weights": flag(True),
    "summary_activation": only(None),
    "summary_first_dropout": share(0.1),
    "summary_proj_to_labels": flag(True),
    "summary_type": text("cls_index"),
    "summary_use_proj": flag(True),
    "add_cross_attention": only(False),
    "pad_token_id": token(),
    "tie_word_embeddings": flag(True),
}


def _decoder(settings: Settings, start: str) -> Iterator[Weight]:
    hidden = settings["n_embd"]
    middle = settings["n_inner"] or 4 * hidden
    yield from embedding(f"{start}wte", settings["vocab_size"], hidden)
    yield from embedding(f"{start}wpe", settings["n_positions"], hidden)
    for number_ in range(settings["n_layer"]):
        layer = f"{start}h.{number_}"
        yield from layer_norm(f"{layer}.ln_1", hidden)
        yield from conv1d(f"{layer}.attn.c_attn", hidden, 3 * hidden)
        yield from conv1d(f"{layer}.attn.c_proj", hidden, hidden)
        yield from layer_norm(f"{layer}.ln_2", hidden)
        yield from conv1d(f"{layer}.mlp.c_fc", hidden, middle)
        yield from conv1d(f"{layer}.mlp.c_proj", middle, hidden)
    yield from layer_norm(f"{start}ln_f", hidden)


def _causal(settings: Settings, start: str) -> Iterator[Weight]:
    yield from _decoder(settings, start)
    yield from linear("lm_head", settings["vocab_size"], settings["n_embd"], bias=False)


def _sequences(settings: Settings, start: str) -> Iterator[Weight]:
    yield from _decoder(settings, start)
    yield from linear("score", settings[LABELS], settings["n_embd"], bias=False)


def _tokens(settings: Settings, start: str) -> Iterator[Weight]:
    yield from _decoder(settings, start)
    yield from linear("classifier", settings[LABELS], settings["n_embd"])


def _fits(settings: Settings) -> bool:
    return settings["n_embd"] % settings["n_head"] == 0 and padded(settings, "vocab_size")


_HEADS = {
    "GPT2Model": Head(_decoder),
    "GPT2LMHeadModel": Head(_causal, "transformer", {"lm_head.weight": "transformer.wte.weight"}),
    "GPT2ForSequenceClassification": Head(_sequences, "transformer"),
    "GPT2ForTokenClassification": Head(_tokens, "transformer"),
}
OUTLINE = Outline("transformer", _FIELDS, _HEADS, _fits)
