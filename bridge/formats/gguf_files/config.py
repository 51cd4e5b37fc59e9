"""A model's config as GGUF metadata and back: the keys llama.cpp reads, from transformers' config classes.

Source: `set_gguf_parameters` of llama.cpp's `convert_hf_to_gguf.py` (its `conversion` package, 2026) and the gguf
package's `Keys`. Metadata says less than config.json does, so the complete config is stored under a key of our own,
which others ignore; without it a config is inferred from the metadata and the shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from easytorch.bridge.core.config import Config, settings_of
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError, nearest

# model_type -> llama.cpp's name of the architecture that runs it.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "bloom": "bloom",
    "falcon": "falcon",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "bert": "bert",
    "t5": "t5",
    "mt5": "t5",
    "umt5": "t5",
}
OWN_CONFIG = "easytorch.config"
# Tensors that llama.cpp expects and torch computes from its config.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
DERIVED = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)

# Key after the architecture's name <-> attribute of transformers' config (its common name: their classes map it).
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_FRACTIONS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_T5_KEYS: dict[str, str | None] = {
    "context_length": "n_positions",
    "feed_forward_length": "d_ff",
    "attention.head_count_kv": None,
    "attention.key_length": "d_kv",
    "attention.value_length": "d_kv",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "decoder_block_count": "num_decoder_layers",
    "decoder_start_token_id": "decoder_start_token_id",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
}
# Where a family's attribute has another name; None: its config does not have it.
_OTHERWISE: dict[str, dict[str, str | None]] = {
    "bert": {"attention.head_count_kv": None},
    "gpt2": {
        "feed_forward_length": "n_inner",
        "attention.head_count_kv": None,
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "bloom": {
        "context_length": "seq_length",
        "feed_forward_length": None,
        "attention.head_count_kv": None,
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "falcon": {
        "feed_forward_length": "ffn_hidden_size",
        "attention.head_count_kv": "num_kv_heads",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "attention.key_length": None,
        "attention.value_length": None,
    },
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon"},
    "qwen2_moe": {"expert_count": "num_experts"},
    "qwen3_moe": {"expert_count": "num_experts"},
    "phi3": {"attention.key_length": None, "attention.value_length": None},
    "t5": _T5_KEYS,
    "mt5": _T5_KEYS,
    "umt5": _T5_KEYS,
}
# Integers are unsigned of 32 bits in the metadata, the others float32.
_INTEGERS = frozenset((*_NUMBERS, *_T5_KEYS)) - _FRACTIONS.keys()
_LARGEST_INTEGER, _LARGEST_FLOAT = 2**32 - 1, float(np.finfo(np.float32).max)
_SLIDING = ("gemma2", "gemma3_text")
_CAUSAL_HEADS = {"bert": "BertModel", **dict.fromkeys(("t5", "mt5", "umt5"), "ForConditionalGeneration")}
# What Llama 3.1 and 3.2 were trained with, and with which the file's factors are compared.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CONTEXT = 2048


def arch_of(config: Config) -> str:
    """llama.cpp's name of the config's architecture; `CheckpointError` for a family that has none here."""
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        raise CheckpointError(
            f"GGUF is not written or read here for {config.model_type!r}{nearest(config.model_type, ARCHITECTURES)}; "
            f"known: {', '.join(ARCHITECTURES)}",
            file=config.file,
        )
    return found


def _keys(family: str) -> Iterator[tuple[str, str, type]]:
    other = _OTHERWISE.get(family, {})
    for key, attribute in {**_NUMBERS, **{key: name for key, name in other.items() if key not in _FRACTIONS}}.items():
        if (name := other.get(key, attribute)) is not None:
            yield key, name, int
    for key, attribute in _FRACTIONS.items():
        if (name := other.get(key, attribute)) is not None:
            yield key, name, float


def fields_of(config: Config) -> dict[str, int | float | bool | str]:
    """The metadata of the model, without its tokenizer: floats are float32 there, integers unsigned of 32 bits."""
    arch, family, settings = arch_of(config), config.model_type, settings_of(config)
    fields: dict[str, int | float | bool | str] = {}
    for key, attribute, kind in _keys(family):
        value = getattr(settings, attribute, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            fields[key] = kind(value) if math.isfinite(value) else value
    _refuse_unstorable(fields, config)
    fields |= _special(family, settings, fields)
    fields |= _rope(family, settings, int(fields.get("attention.key_length", 0)))
    _refuse_unstorable(fields, config)
    named = {f"{arch}.{key}": value for key, value in fields.items()}
    name = str(config.content.get("_name_or_path") or config.file.parent.name)
    return {"general.name": name, **named, OWN_CONFIG: json.dumps(config.content)}


def _refuse_unstorable(fields: Mapping[str, int | float | bool | str], config: Config) -> None:
    """Refuses numbers that the types of GGUF's metadata do not hold, which its writer cannot pack."""
    for key, value in fields.items():
        integer = isinstance(value, int) or key in _INTEGERS
        if isinstance(value, str) or (0 <= value <= _LARGEST_INTEGER if integer else abs(value) <= _LARGEST_FLOAT):
            continue
        range_ = f"a number from 0 to {_LARGEST_INTEGER}" if integer else "a float32"
        name = _NUMBERS.get(key) or _FRACTIONS.get(key) or key
        raise CheckpointError(
            f"{name} is {value!r}, and GGUF's `{key}` is {range_}; correct it",
            file=config.file,
        )


def _special(family: str, settings: Any, fields: Mapping[str, Any]) -> dict[str, int | float | bool | str]:
    hidden, heads = fields["embedding_length"], fields["attention.head_count"]
    made: dict[str, int | float | bool | str] = {"context_length": fields.get("context_length", _CONTEXT)}
    made["feed_forward_length"] = fields.get("feed_forward_length", 4 * hidden)
    made["attention.head_count_kv"] = fields.get("attention.head_count_kv", heads)
    if family == "falcon":
        grouped = settings.new_decoder_architecture or not settings.multi_query
        made |= {"tensor_data_layout": "jploski", "attention.head_count_kv": settings.num_kv_heads if grouped else 1}
    elif family == "stablelm":
        made["use_parallel_residual"] = bool(settings.use_parallel_residual)
    elif family == "bert":
        made["attention.causal"] = False
    if family in _SLIDING and settings.sliding_window:
        made["attention.sliding_window"] = settings.sliding_window
    elif family == "phi3":
        # llama.cpp tells Phi-4 from Phi-3 by a window of 0.
        made["attention.sliding_window"] = settings.sliding_window or 0
    return made


def _rope(family: str, settings: Any, head: int) -> dict[str, int | float | bool | str]:
    given = getattr(settings, "rope_parameters", None) or {}
    rope = given.get("full_attention", given)
    if not rope or family in ("gpt2", "bloom", "bert", "t5", "mt5", "umt5"):
        return {}
    head = head or settings.hidden_size // settings.num_attention_heads
    made: dict[str, int | float | bool | str] = {"rope.freq_base": float(rope.get("rope_theta", 10000.0))}
    made["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    local = given.get("sliding_attention", {}).get("rope_theta")
    if local is not None:
        made["rope.freq_base_swa"] = float(local)
    kind = rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings")
    original = int(original or getattr(settings, "original_max_position_embeddings", None) or 0)
    if kind in ("linear", "yarn"):
        made |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    elif kind == "longrope" and original:
        made["rope.scaling.type"] = kind
        made["rope.scaling.attn_factor"] = _long_attention(settings.max_position_embeddings, original)
    if kind in ("yarn", "longrope") or (family == "phi3" and original):
        made["rope.scaling.original_context_length"] = original
    for key, name in {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}.items():
        if kind == "yarn" and rope.get(name) is not None:
            made[f"rope.scaling.{key}"] = float(rope[name])
    return made


def _long_attention(context: int, original: int) -> float:
    scale = context / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def derived_tensors(config: Config) -> dict[str, np.ndarray]:
    """The tensors of `DERIVED` that the model has: the divisors of its rotary frequencies, float32."""
    settings = settings_of(config)
    given = getattr(settings, "rope_parameters", None) or {}
    rope = given.get("full_attention", given)
    kind = rope.get("rope_type")
    if kind == "longrope":
        pairs = {LONG_FACTORS: rope["long_factor"], SHORT_FACTORS: rope["short_factor"]}
        return {name: np.asarray(factors, np.float32) for name, factors in pairs.items()}
    if kind != "llama3":
        return {}
    head = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    return {ROPE_FACTORS: llama3_factors(head, rope)}


def llama3_factors(head: int, rope: Mapping[str, Any]) -> np.ndarray:
    """(head/2,) float32: Llama 3.1's scaling, 1 for short waves and `factor` for long ones."""
    base = rope.get("rope_theta", 10000.0)
    waves = 2 * np.pi * np.power(base, np.arange(0, head, 2, dtype=np.float32) / head)
    old = rope.get("original_max_position_embeddings", 8192)
    low, high, factor = (rope.get(f"{name}factor", default) for name, default in _LLAMA3_DEFAULTS.items())
    smooth = (old / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < old / high, 1, np.where(waves > old / low, factor, between)).astype(np.float32)


_LLAMA3_DEFAULTS = {"low_freq_": 1.0, "high_freq_": 4.0, "": 8.0}


def config_from(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], derived: Mapping[str, np.ndarray]
) -> dict[str, Any] | None:
    """config.json's content: the stored one, else from metadata and shapes; None for an unknown architecture."""
    own = fields.get(OWN_CONFIG)
    if isinstance(own, str):
        try:
            content = json.loads(own)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict):
            return content
    plain = {key: value for key, value in fields.items() if _is_plain(value)}
    family = _family(plain)
    return None if family is None else _made(family, plain, tensors, derived)


def _is_plain(value: Any) -> bool:
    """Whether the value is a string or a finite number, as in a config."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _family(fields: Mapping[str, Any]) -> str | None:
    arch = fields.get("general.architecture")
    if arch == "llama":
        if fields.get("llama.expert_count"):
            return "mixtral"
        return "mistral" if fields.get("general.name") == "mistral" else "llama"
    return next((family for family, name in ARCHITECTURES.items() if name == arch), None)


def _made(
    family: str, fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], derived: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    import transformers

    arch = ARCHITECTURES[family]
    config_class = transformers.CONFIG_MAPPING[family]
    content: dict[str, Any] = {"model_type": family}
    for key, attribute, kind in _keys(family):
        value = fields.get(f"{arch}.{key}")
        if isinstance(value, int | float):
            content[attribute] = kind(value)
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape:
        content["vocab_size"] = embedding.shape[0]
    for attribute in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if content.get(attribute, 0) < 1:
            raise CheckpointError(f"the metadata states no `{attribute}`; give the model's config.json by `config`")
    content["tie_word_embeddings"] = "output.weight" not in tensors
    content |= _from_shapes(family, tensors)
    window = fields.get(f"{arch}.attention.sliding_window")
    if isinstance(window, int) and window and family in (*_SLIDING, "phi3"):
        content["sliding_window"] = int(window)
    for name in ("bos", "eos", "padding"):
        if isinstance(number := fields.get(f"tokenizer.ggml.{name}_token_id"), int):
            content[f"{name.removesuffix('ding')}_token_id"] = number
    if (rope := _rope_from(arch, fields, content, derived)) is not None:
        content |= rope
    if family == "falcon":
        content |= _falcon(content, tensors)
    content["architectures"] = [_head(family, config_class)]
    return content


def _from_shapes(family: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in tensors
    if family == "llama":
        return {"attention_bias": biased, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if family == "qwen3":
        return {"attention_bias": biased}
    if family == "qwen3_moe":
        # llama.cpp always runs it so.
        return {"attention_bias": biased, "norm_topk_prob": True}
    if family == "stablelm":
        parallel = "blk.0.ffn_norm.weight" not in tensors
        normed = "blk.0.attn_q_norm.weight" in tensors
        return {"use_qkv_bias": biased, "use_parallel_residual": parallel, "qk_layernorm": normed}
    if family == "starcoder2":
        return {"use_bias": biased}
    if family in ("t5", "mt5", "umt5"):
        return {"feed_forward_proj": "gated-gelu" if "enc.blk.0.ffn_gate.weight" in tensors else "relu"}
    return {}


def _falcon(content: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    grouped = "blk.0.attn_norm_2.weight" in tensors
    alone = content.get("num_kv_heads") == 1
    return {
        "new_decoder_architecture": grouped,
        "multi_query": grouped or alone,
        "bias": "blk.0.attn_qkv.bias" in tensors,
        "alibi": False,
    }


def _rope_from(
    arch: str, fields: Mapping[str, Any], content: Mapping[str, Any], derived: Mapping[str, np.ndarray]
) -> dict[str, Any] | None:
    theta = fields.get(f"{arch}.rope.freq_base")
    if not isinstance(theta, int | float):
        return None
    rope: dict[str, Any] = {"rope_theta": float(theta), "rope_type": "default"}
    kind = fields.get(f"{arch}.rope.scaling.type")
    if kind in ("linear", "yarn"):
        factor = fields.get(f"{arch}.rope.scaling.factor", 1.0)
        rope |= {"rope_type": kind, "factor": float(factor) if isinstance(factor, int | float) else 1.0}
    if kind == "longrope" and LONG_FACTORS in derived and SHORT_FACTORS in derived:
        long, short = (derived[name].astype(float).tolist() for name in (LONG_FACTORS, SHORT_FACTORS))
        rope |= {"rope_type": kind, "long_factor": long, "short_factor": short}
    original = fields.get(f"{arch}.rope.scaling.original_context_length")
    if isinstance(original, int) and kind is not None:
        rope["original_max_position_embeddings"] = original
    if ROPE_FACTORS in derived:
        rope |= _llama3(derived[ROPE_FACTORS], rope)
    head = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
    rotated = fields.get(f"{arch}.rope.dimension_count", head)
    if isinstance(rotated, int) and head > 0 and rotated != head:
        rope["partial_rotary_factor"] = rotated / head
    local = fields.get(f"{arch}.rope.freq_base_swa")
    if content["model_type"] == "gemma3_text":
        near = {"rope_theta": float(local) if isinstance(local, int | float) else 10000.0, "rope_type": "default"}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": near}}
    return {"rope_parameters": rope}


def _llama3(factors: np.ndarray, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings that give these factors, if Meta's published ones do; the file has only the factors."""
    tried = {**rope, **_LLAMA3, "rope_type": "llama3", "factor": float(factors.max(initial=1.0))}
    if np.allclose(llama3_factors(2 * len(factors), tried), factors, rtol=1e-5):
        return tried
    raise CheckpointError(
        "the file's rotary factors are not those of Llama 3.1 or 3.2; give the model's config.json by `config`",
        tensor=ROPE_FACTORS,
    )


def _head(family: str, config_class: type) -> str:
    import transformers

    if family in _CAUSAL_HEADS:
        named = _CAUSAL_HEADS[family]
        return named if named.startswith("Bert") else config_class.__name__.removesuffix("Config") + named
    head: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return str(head.__name__)
