"""Llama, and what other families share with it: a decoder of RMSNorm, grouped heads and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from easytorch.bridge.outline import Head, Outline, Settings
from easytorch.bridge.outlines.fields import (
    LABELS,
    Field,
    activation,
    flag,
    number,
    only,
    padded,
    rotary,
    share,
    size,
    token,
)
from easytorch.bridge.outlines.weights import Weight, embedding, linear, rms_norm

FIELDS: Mapping[str, Field] = {
    **rotary(),
    "vocab_size": size(),
    "hidden_size": size(),
    "intermediate_size": size(),
    "num_hidden_layers": size(),
    "num_attention_heads": size(),
    "num_key_value_heads": size(None),
    "head_dim": size(None),
    "hidden_act": activation("silu"),
    "max_position_embeddings": size(2048),
    "rms_norm_eps": number(),
    "pad_token_id": token(),
    "attention_dropout": share(0.0),
}


def fits(settings: Settings) -> bool:
    """Whether the sizes go together."""
    heads = settings["num_attention_heads"]
    return (
        settings["hidden_size"] % heads == 0
        and heads % (settings["num_key_value_heads"] or heads) == 0
        and padded(settings, "vocab_size")
    )


def decoder(settings: Settings, start: str) -> Iterator[Weight]:
    """The weights of the base model."""
    hidden, middle, heads = (settings[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    width = settings["head_dim"] or hidden // heads
    key_value = (settings["num_key_value_heads"] or heads) * width
    of_attention, of_mlp = (settings.get(key, False) for key in ("attention_bias", "mlp_bias"))
    of_inputs = of_attention or settings.get("qkv_bias", False)
    yield from embedding(f"{start}embed_tokens", settings["vocab_size"], hidden)
    for number_ in range(settings["num_hidden_layers"]):
        layer = f"{start}layers.{number_}"
        yield from linear(f"{layer}.self_attn.q_proj", heads * width, hidden, bias=of_inputs)
        yield from linear(f"{layer}.self_attn.k_proj", key_value, hidden, bias=of_inputs)
        yield from linear(f"{layer}.self_attn.v_proj", key_value, hidden, bias=of_inputs)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, heads * width, bias=of_attention)
        yield from linear(f"{layer}.mlp.gate_proj", middle, hidden, bias=of_mlp)
        yield from linear(f"{layer}.mlp.up_proj", middle, hidden, bias=of_mlp)
        yield from linear(f"{layer}.mlp.down_proj", hidden, middle, bias=of_mlp)
        yield from rms_norm(f"{layer}.input_layernorm", hidden)
        yield from rms_norm(f"{layer}.post_attention_layernorm", hidden)
    yield from rms_norm(f"{start}norm", hidden)


def causal(settings: Settings, start: str) -> Iterator[Weight]:
    """With the head of a language model."""
    yield from decoder(settings, start)
    yield from linear("lm_head", settings["vocab_size"], settings["hidden_size"], bias=False)


def sequence_classification(settings: Settings, start: str) -> Iterator[Weight]:
    """With one score for a text."""
    yield from decoder(settings, start)
    yield from linear("score", settings[LABELS], settings["hidden_size"], bias=False)


def token_classification(settings: Settings, start: str) -> Iterator[Weight]:
    """With a score for each token."""
    yield from decoder(settings, start)
    yield from linear("score", settings[LABELS], settings["hidden_size"])


def heads_of(family: str) -> dict[str, Head]:
    """The classes of a family whose names begin with `family`."""
    return {
        f"{family}Model": Head(decoder),
        f"{family}ForCausalLM": Head(causal, "model", {"lm_head.weight": "model.embed_tokens.weight"}),
        f"{family}ForSequenceClassification": Head(sequence_classification, "model"),
        f"{family}ForTokenClassification": Head(token_classification, "model"),
    }


_OWN: dict[str, Any] = {"attention_bias": flag(False), "mlp_bias": flag(False), "pretraining_tp": only(1)}
OUTLINE = Outline("model", {**FIELDS, **_OWN}, heads_of("Llama"), fits)
