"""The heads that transformers puts on the base models of this package: hidden states -> logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from easytorch.bridge.forwards.parts import ACTIVATIONS, Params, dense, layer_norm

# (the whole tree, the base model's subtree, its last hidden states, the config) -> logits; None without that head.
Head = Callable[[Params, Params, jax.Array, Mapping[str, Any]], jax.Array | None]


def logits_of(
    architecture: str, tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]
) -> jax.Array | None:
    """The logits of the class `architecture` from its base model's hidden states; None for a head that is not here."""
    head = _HEADS.get(architecture)
    return None if head is None else head(tree, base, states, config)


def _matrix(own: Params | None, table: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    """(in, vocabulary): the head's own kernel, else the embedding that it is tied to."""
    if own is not None and "kernel" in own:
        kernel: jax.Array = own["kernel"]
        return kernel
    return table.T if config.get("tie_word_embeddings") else None


def _times(states: jax.Array, matrix: jax.Array | None) -> jax.Array | None:
    return None if matrix is None else jnp.matmul(states, matrix, precision="highest")


def _causal(tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    table = (base["wte"] if "wte" in base else base["embed_tokens"])["embedding"]
    return _times(states, _matrix(tree.get("lm_head"), table, config))


def _t5(tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    states = states * config["d_model"] ** -0.5 if config.get("scale_decoder_outputs") else states
    return _times(states, _matrix(tree.get("lm_head"), tree["shared"]["embedding"], config))


def _bert(tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    head = tree.get("cls", {}).get("predictions")
    if head is None:
        return None
    x = ACTIVATIONS[config["hidden_act"]](dense(head["transform"]["dense"], states))
    x = layer_norm(head["transform"]["LayerNorm"], x, config["layer_norm_eps"])
    made = _times(x, _matrix(head.get("decoder"), base["embeddings"]["word_embeddings"]["embedding"], config))
    return None if made is None else made + head["bias"]


def _roberta(tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    head = tree.get("lm_head")
    if head is None:
        return None
    x = layer_norm(head["layer_norm"], ACTIVATIONS["gelu"](dense(head["dense"], states)), config["layer_norm_eps"])
    made = _times(x, _matrix(head.get("decoder"), base["embeddings"]["word_embeddings"]["embedding"], config))
    return None if made is None else made + head["bias"]


def _of_first(tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    """A classifier over the class token."""
    return dense(tree["classifier"], states[:, 0]) if "classifier" in tree else None


def _of_pooled(tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    """BERT's, over what its pooler makes of the first token."""
    if "classifier" not in tree or "pooler" not in base:
        return None
    return dense(tree["classifier"], jnp.tanh(dense(base["pooler"]["dense"], states[:, 0])))


def _of_each(tree: Params, base: Params, states: jax.Array, config: Mapping[str, Any]) -> jax.Array | None:
    """A classifier over every token."""
    return dense(tree["classifier"], states) if "classifier" in tree else None


_HEADS: dict[str, Head] = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "GemmaForCausalLM", "GPT2LMHeadModel"), _causal),
    "T5ForConditionalGeneration": _t5,
    **dict.fromkeys(("BertForMaskedLM", "BertLMHeadModel"), _bert),
    **dict.fromkeys(("RobertaForMaskedLM", "XLMRobertaForMaskedLM"), _roberta),
    "ViTForImageClassification": _of_first,
    "BertForSequenceClassification": _of_pooled,
    **{f"{name}ForTokenClassification": _of_each for name in ("Bert", "Roberta", "XLMRoberta")},
}
