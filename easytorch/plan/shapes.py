"""Configs of well-known models by their hub ids, so that a plan of them needs no download.

Sizes as in the models' config.json.
"""

from __future__ import annotations

from typing import Any

from easytorch.auto.failures import FAILURES, first_line
from easytorch.bridge.errors import nearest

_LLAMA3: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": {
        **_LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "meta-llama/Meta-Llama-3-70B": {
        **_LLAMA3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "Qwen/Qwen3-235B-A22B": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
}  # fmt: skip
SHORT = {
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "qwen3-235b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}


def config_of(model: str | dict[str, Any]) -> Any:
    """transformers' config of a model: a known name, a folder, a name on the Hub, or the settings of a config.json.

    `ValueError` for an architecture that is unknown or no causal language model, `OSError` for a name that is nowhere.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    import easytorch

    if isinstance(model, str):
        model = SHAPES.get(SHORT.get(model.lower(), model), model)
    if isinstance(model, str):
        try:
            config = AutoConfig.from_pretrained(model)
        except OSError as error:
            raise OSError(
                f"{model!r} is no folder or name on the Hub, and none of {', '.join(SHORT)}: {error}"
            ) from error
    else:
        kind = str(model.get("model_type"))
        if kind not in CONFIG_MAPPING:
            raise ValueError(f"unknown model_type {kind!r}{nearest(kind, CONFIG_MAPPING)}")
        try:
            config = AutoConfig.for_model(**model)
        except FAILURES as error:
            raise ValueError(f"transformers cannot build {kind!r} from these settings: {first_line(error)}") from error
    if type(config) not in easytorch.AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{config.model_type!r} has no causal language model, of which a plan is")
    return config
