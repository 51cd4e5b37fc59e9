"""The native families: a tiny config of each, its heads, and transformers' attention it is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from transformers import Gemma2Config, LlamaConfig, Qwen3Config

from easytorch.cache_names import STATES
from tests.models.encoder_families import ENCODER_FAMILIES
from tests.models.family import Family
from tests.models.image_text_families import IMAGE_TEXT_FAMILIES
from tests.models.seq2seq_families import SEQ2SEQ_FAMILIES
from tests.models.tower_families import TOWER_FAMILIES, TOWER_HEADS

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_ONE_HEAD_EACH = _SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _ONE_HEAD_EACH | {"num_key_value_heads": 2}

FAMILIES = (
    ENCODER_FAMILIES
    | SEQ2SEQ_FAMILIES
    | {
        "llama": Family(
            LlamaConfig,
            (
                "LlamaModel",
                "LlamaForCausalLM",
                "LlamaForSequenceClassification",
                "LlamaForTokenClassification",
                "LlamaForQuestionAnswering",
            ),
            _DECODER,
            variants=(
                {"attention_bias": True, "mlp_bias": True},
                {"head_dim": 12},
                {"num_key_value_heads": 1},
                {"num_key_value_heads": 4},
                {"tie_word_embeddings": True},
                {"pretraining_tp": 2},
                {"hidden_act": "gelu"},
                {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
            ),
        ),
        "qwen3": Family(
            Qwen3Config,
            (
                "Qwen3Model",
                "Qwen3ForCausalLM",
                "Qwen3ForSequenceClassification",
                "Qwen3ForTokenClassification",
                "Qwen3ForQuestionAnswering",
            ),
            _DECODER | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            variants=(
                {"use_sliding_window": False},
                {"attention_bias": True, "head_dim": 8},
                {"tie_word_embeddings": True},
                {"layer_types": ["sliding_attention", "sliding_attention"]},
            ),
        ),
        "gemma2": Family(
            Gemma2Config,
            ("Gemma2Model", "Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2ForTokenClassification"),
            _DECODER | {"head_dim": 8, "query_pre_attn_scalar": 13, "sliding_window": 4},
            reference="eager",  # which alone carries its softcap
            variants=(
                {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7},
                {"attn_logit_softcapping": None, "final_logit_softcapping": None},
                {"attention_bias": True, "num_key_value_heads": 1},
                {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2},
            ),
        ),
    }
)

_SEQUENCE, _TOKEN, _ANSWER = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def _decoder(
    name: str,
    *heads: str,
    sizes: dict[str, Any] | None = None,
    variants: tuple[dict[str, Any], ...] = (),
    dropouts: tuple[str, ...] = (),
    base: dict[str, Any] = _DECODER,
) -> Family:
    """A row whose classes transformers calls <name>Config, <name>Model, <name>ForCausalLM and so on."""
    classes = tuple(f"{name}{head}" for head in ("Model", "ForCausalLM", *heads))
    return Family(
        getattr(transformers, f"{name}Config"), classes, base | (sizes or {}), variants=variants, dropouts=dropouts
    )


_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 3.0],
    "partial_rotary_factor": 0.5,
}

_GEMMA4 = _DECODER | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "head_dim": 4,
    "global_head_dim": 8,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
    },
}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16}

FAMILIES |= {
    "mistral": _decoder(
        "Mistral",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes={"sliding_window": 4},
        variants=({"sliding_window": None}, {"head_dim": 12, "tie_word_embeddings": True}),
    ),
    "ministral": _decoder(
        "Ministral", _SEQUENCE, _TOKEN, _ANSWER, sizes=_WINDOWS | {"head_dim": 8}, variants=({"layer_types": None},)
    ),
    "ministral3": _decoder(
        "Ministral3",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes={
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        variants=({"sliding_window": 3},),
    ),
    "qwen2": _decoder(
        "Qwen2",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes={"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        variants=({"use_sliding_window": False}, {"tie_word_embeddings": True}),
    ),
    "phi3": _decoder(
        "Phi3",
        _SEQUENCE,
        _TOKEN,
        sizes={"sliding_window": 4},
        dropouts=("resid_pdrop",),
        variants=(
            {"sliding_window": None, "num_key_value_heads": None},
            _PARTIAL,
            {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
            {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 8},
        ),
    ),
    "olmo": _decoder(
        "Olmo", _SEQUENCE, sizes={"clip_qkv": 0.2}, variants=({"clip_qkv": None, "attention_bias": True},)
    ),
    "olmo2": _decoder("Olmo2", _SEQUENCE, variants=({"attention_bias": True, "num_key_value_heads": 1},)),
    "olmo3": _decoder(
        "Olmo3",
        _SEQUENCE,
        sizes=_WINDOWS,
        variants=(
            {"layer_types": None},
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "yarn",
                        "rope_theta": 5e5,
                        "factor": 4.0,
                        "original_max_position_embeddings": 16,
                    },
                }
            },
        ),
    ),
    "smollm3": _decoder(
        "SmolLM3",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes={"no_rope_layers": [1, 0]},
        variants=({"use_sliding_window": True, "sliding_window": 3, "attention_bias": True, "mlp_bias": True},),
    ),
    "granite": _decoder(
        "Granite",
        sizes={
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
        variants=({"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},),
    ),
    "gemma": _decoder("Gemma", _SEQUENCE, _TOKEN, sizes={"head_dim": 12}, variants=({"attention_bias": True},)),
    "gemma3_text": Family(
        transformers.Gemma3TextConfig,
        ("Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
        _DECODER | _WINDOWS | {"head_dim": 8, "query_pre_attn_scalar": 13},
        variants=(
            {"final_logit_softcapping": 0.7, "attention_bias": True},
            {"use_bidirectional_attention": True, "sliding_window": 8},
            {"layer_types": None, "num_key_value_heads": 1},
        ),
    ),
    "gemma4_text": Family(
        transformers.Gemma4TextConfig,
        ("Gemma4TextModel", "Gemma4ForCausalLM"),
        _GEMMA4,
        attentions=4,
        variants=(
            {"use_double_wide_mlp": True, "final_logit_softcapping": 0.7, "attention_bias": True},
            {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "per_layer_config": None},
            {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            {"num_kv_shared_layers": 0, "tie_word_embeddings": False} | _GEMMA4_EXPERTS,
            {"num_kv_shared_layers": 1, "layer_types": None, "num_hidden_layers": 7} | _GEMMA4_EXPERTS,
            {"use_bidirectional_attention": "all", "sliding_window": 8},
        ),
    ),
    "llama4_text": Family(
        transformers.Llama4TextConfig,
        ("Llama4TextModel", "Llama4ForCausalLM"),
        _DECODER
        | {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 4,
            "floor_scale": 3,
            "attn_scale": 0.4,
        },
        attentions=3,
        variants=(
            {"num_experts_per_tok": 1, "use_qk_norm": False, "attention_bias": True},
            {"no_rope_layers": None, "no_rope_layer_interval": 2, "attn_temperature_tuning": False},
            {"moe_layers": [], "hidden_act": "gelu", "tie_word_embeddings": True},
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        ),
    ),
    "cohere": _decoder(
        "Cohere", sizes={"use_qk_norm": True}, variants=({"use_qk_norm": False, "attention_bias": True},)
    ),
    "cohere2": _decoder("Cohere2", sizes=_WINDOWS, variants=({"layer_types": None}, {"logit_scale": 3.0})),
    "glm": _decoder("Glm", _SEQUENCE, _TOKEN, sizes={"head_dim": 8}, variants=({"attention_bias": False},)),
    "glm4": _decoder("Glm4", _SEQUENCE, _TOKEN, sizes={"head_dim": 8}, variants=({"attention_bias": False},)),
    "starcoder2": _decoder(
        "Starcoder2",
        _SEQUENCE,
        _TOKEN,
        sizes={"sliding_window": 4},
        dropouts=("residual_dropout", "embedding_dropout"),
        variants=({"use_bias": False}, {"sliding_window": None}),
    ),
    "stablelm": _decoder(
        "StableLm",
        _SEQUENCE,
        _TOKEN,
        sizes=_PARTIAL | {"qk_layernorm": True},
        dropouts=("hidden_dropout",),
        variants=({"use_parallel_residual": True}, {"qk_layernorm": False, "use_qkv_bias": True}),
    ),
    "phi": _decoder(
        "Phi",
        _SEQUENCE,
        _TOKEN,
        dropouts=("resid_pdrop", "embd_pdrop"),
        variants=({"qk_layernorm": True}, {"num_key_value_heads": None}),
    ),
    "nemotron": _decoder(
        "Nemotron", _SEQUENCE, _TOKEN, _ANSWER, variants=({"attention_bias": True, "mlp_bias": True, "head_dim": 12},)
    ),
    "gpt_neox": _decoder(
        "GPTNeoX",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        base=_ONE_HEAD_EACH,
        sizes={"rotary_pct": 0.5},
        dropouts=("hidden_dropout",),
        variants=({"use_parallel_residual": False, "attention_bias": False}, {"tie_word_embeddings": True}),
    ),
    "opt": _decoder(
        "OPT",
        _SEQUENCE,
        _ANSWER,
        base=_ONE_HEAD_EACH,
        sizes={"ffn_dim": 48, "dropout": 0.0},
        dropouts=("dropout",),
        variants=(
            {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
            {"enable_bias": False, "layer_norm_elementwise_affine": False},
            {"_remove_final_layer_norm": True, "tie_word_embeddings": False},
        ),
    ),
    "bloom": replace(
        _decoder(
            "Bloom",
            _SEQUENCE,
            _TOKEN,
            _ANSWER,
            base={
                "vocab_size": 97,
                "hidden_size": 30,
                "n_layer": 2,
                "n_head": 5,  # no power of two: the slopes of the fifth head are those of eight
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            dropouts=("hidden_dropout",),
            variants=(
                {"apply_residual_connection_post_layernorm": True, "n_head": 2},
                {"tie_word_embeddings": False, "hidden_size": 33, "n_head": 11},
                {"slow_but_exact": True},
            ),
        ),
        reference="eager",  # transformers' class has no other
        packs=False,
    ),
    "gpt2": Family(
        transformers.GPT2Config,
        (
            "GPT2Model",
            "GPT2LMHeadModel",
            "GPT2DoubleHeadsModel",
            "GPT2ForSequenceClassification",
            "GPT2ForTokenClassification",
            "GPT2ForQuestionAnswering",
        ),
        {
            "vocab_size": 97,
            "n_embd": 32,
            "n_inner": 48,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "summary_first_dropout": 0.0,
        },
        variants=(
            {"scale_attn_by_inverse_layer_idx": True, "n_inner": None},
            {"scale_attn_weights": False, "reorder_and_upcast_attn": True, "tie_word_embeddings": False},
        ),
        dropouts=("resid_pdrop", "embd_pdrop"),
    ),
    "arcee": _decoder("Arcee", _SEQUENCE, _TOKEN, _ANSWER, variants=({"mlp_bias": True, "attention_bias": True},)),
    "helium": _decoder("Helium", _SEQUENCE, _TOKEN, sizes={"head_dim": 8}, variants=({"attention_bias": True},)),
    "exaone4": _decoder(
        "Exaone4",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes=_WINDOWS,
        variants=({"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},),
    ),
    "hunyuan_v1_dense": _decoder(
        "HunYuanDenseV1",
        _SEQUENCE,
        sizes={"head_dim": 12},
        variants=(
            {"attention_bias": True},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
        ),
    ),
    "seed_oss": _decoder(
        "SeedOss",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes={"head_dim": 12, "attention_dropout": 0.0},
        dropouts=("residual_dropout",),
        variants=({"attention_out_bias": True},),
    ),
    "ernie4_5": _decoder("Ernie4_5", sizes={"head_dim": 12}, variants=({"use_bias": True},)),
}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.2}

FAMILIES |= {
    "mixtral": _decoder(
        "Mixtral",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes=_EXPERTS | {"num_local_experts": 4, "sliding_window": 4},
        dropouts=("router_jitter_noise",),
        variants=({"sliding_window": None, "head_dim": 12}, {"num_local_experts": 7, "num_experts_per_tok": 3}),
    ),
    "qwen3_moe": _decoder(
        "Qwen3Moe",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes=_EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": True},
        variants=(
            {"norm_topk_prob": False, "mlp_only_layers": [0], "attention_bias": True},
            {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 3},
        ),
    ),
    "olmoe": _decoder(
        "Olmoe",
        sizes=_EXPERTS | {"num_experts": 4, "clip_qkv": 0.7},
        variants=({"clip_qkv": None, "norm_topk_prob": True}, {"attention_bias": True}),
    ),
    "granitemoe": _decoder(
        "GraniteMoe",
        sizes=_EXPERTS
        | {
            "num_local_experts": 4,
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
        variants=({"attention_bias": True, "tie_word_embeddings": True},),
    ),
    "qwen2_moe": _decoder(
        "Qwen2Moe",
        _SEQUENCE,
        _TOKEN,
        _ANSWER,
        sizes=_EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        variants=(
            {"norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False},
            {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        ),
    ),
    "glm4_moe": _decoder(
        "Glm4Moe",
        sizes={
            "num_experts_per_tok": 2,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
        variants=(
            {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2},
            {"first_k_dense_replace": 0, "use_qk_norm": False, "attention_bias": True},
        ),
    ),
    "gpt_oss": replace(
        _decoder(
            "GptOss",
            _SEQUENCE,
            _TOKEN,
            sizes=_EXPERTS | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
            variants=({"swiglu_limit": 0.02, "swiglu_alpha": 3.0}, {"attention_bias": False, "sliding_window": 2}),
        ),
        reference="eager",  # which alone carries its sinks
        packs=False,
    ),
    "minimax_m2": _decoder(
        "MiniMaxM2",
        sizes=_EXPERTS | {"num_local_experts": 4, "head_dim": 12},
        dropouts=("router_jitter_noise",),
        variants=(_PARTIAL, {"num_local_experts": 7, "num_experts_per_tok": 3}),
    ),
}
_LATENT = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

FAMILIES |= {
    "deepseek_v3": _decoder(
        "DeepseekV3",
        _SEQUENCE,
        _TOKEN,
        base=_ONE_HEAD_EACH,
        sizes=_LATENT | {"num_key_value_heads": 4},
        variants=(
            {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
            {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_parameters": _YARN},
        ),
    ),
    "deepseek_v32": _decoder(
        "DeepseekV32",
        base=_ONE_HEAD_EACH,
        sizes=_LATENT
        | {"num_key_value_heads": 4, "index_topk": 4, "index_head_dim": 12, "index_n_heads": 5, "num_hidden_layers": 2},
        variants=(
            {"index_topk": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_parameters": _YARN},
            {"mlp_layer_types": ["sparse", "dense"], "attention_bias": True, "index_topk": 1},
        ),
    ),
    "deepseek_v2": _decoder(
        "DeepseekV2",
        _SEQUENCE,
        base=_ONE_HEAD_EACH,
        sizes=_LATENT | {"topk_method": "group_limited_greedy"},
        variants=(
            {"q_lora_rank": None, "topk_method": "greedy", "topk_group": 1, "attention_bias": True, "mlp_bias": True},
            {"first_k_dense_replace": 0, "topk_group": 1, "rope_parameters": _YARN},
        ),
    ),
}
_RECURRENT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _mamba(name: str, sizes: dict[str, Any], variants: tuple[dict[str, Any], ...]) -> Family:
    row = _decoder(name, base=_RECURRENT, sizes=sizes, variants=variants)
    return replace(row, reference="eager", cache=STATES, attentions=0, packs=False, wide=True)


FAMILIES |= {
    "mamba": _mamba(
        "Mamba",
        {"state_size": 6},
        (
            {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
            {"hidden_act": "gelu", "residual_in_fp32": False, "conv_kernel": 3, "time_step_init_scheme": "constant"},
        ),
    ),
    "mamba2": _mamba(
        "Mamba2",
        {"state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        (
            {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1},
            {
                "hidden_act": "gelu",
                "residual_in_fp32": False,
                "time_step_limit": (0.5, 0.7),
                "expand": 1,
                "head_dim": 4,
            },
        ),
    ),
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "partial_rotary_factor": 0.5,
}

FAMILIES |= {
    "qwen3_next": replace(
        _decoder(
            "Qwen3Next",
            _SEQUENCE,
            _TOKEN,
            _ANSWER,
            sizes=_DELTA
            | _EXPERTS
            | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
            variants=(
                {"norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True, "linear_conv_kernel_dim": 2},
                {"linear_num_key_heads": 4, "hidden_act": "gelu", "layer_types": _DELTA["layer_types"][::-1]},
            ),
        ),
        attentions=1,
    ),
    "qwen3_5_text": Family(
        transformers.Qwen3_5TextConfig,
        ("Qwen3_5TextModel", "Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification"),
        _DECODER | _DELTA,
        attentions=1,
        variants=(
            {"attention_bias": True, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
            {"linear_num_key_heads": 4, "hidden_act": "gelu", "layer_types": _DELTA["layer_types"][::-1]},
        ),
    ),
    "qwen3_5_moe_text": Family(
        transformers.Qwen3_5MoeTextConfig,
        ("Qwen3_5MoeTextModel", "Qwen3_5MoeForCausalLM"),
        {name: size for name, size in _DECODER.items() if name != "intermediate_size"}
        | _DELTA
        | _EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        attentions=1,
        variants=({"attention_bias": True, "tie_word_embeddings": True},),
    ),
}
_OF_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2}

FAMILIES |= {
    "granitemoehybrid": replace(
        _decoder(
            "GraniteMoeHybrid",
            sizes=_OF_MAMBA2
            | _EXPERTS
            | {
                "layer_types": _DELTA["layer_types"],
                "num_local_experts": 4,
                "shared_intermediate_size": 24,
                "embedding_multiplier": 3.0,
                "logits_scaling": 4.0,
                "residual_multiplier": 0.4,
                "attention_multiplier": 0.2,
            },
            variants=(
                {"position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True},
                {"num_local_experts": 0, "tie_word_embeddings": True, "mamba_conv_bias": False, "mamba_n_groups": 1},
            ),
        ),
        attentions=1,
        packs=False,
    ),
    "nemotron_h": replace(
        _decoder(
            "NemotronH",
            base={name: size for name, size in _DECODER.items() if name != "num_hidden_layers"},
            sizes={
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
                "head_dim": 8,
                "mamba_num_heads": 8,
                "mamba_head_dim": 4,
                "ssm_state_size": 6,
                "n_groups": 2,
                "n_routed_experts": 8,
                "n_group": 4,
                "topk_group": 2,
                "moe_intermediate_size": 24,
                "moe_shared_expert_intermediate_size": 40,
                "routed_scaling_factor": 1.5,
            },
            variants=(
                {"moe_latent_size": 16, "mlp_bias": True, "use_bias": True, "use_conv_bias": False},
                {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_logits_to_keep": 2},
                {"time_step_min": 0.5, "time_step_max": 2.0},
            ),
        ),
        attentions=1,
        wide=True,
    ),
}
FAMILIES |= {
    "falcon_h1": _decoder(
        "FalconH1",
        sizes=_OF_MAMBA2
        | {
            "mamba_d_ssm": 48,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.7,
            "mlp_multipliers": [0.6, 1.7],
            "key_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 0.9],
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.3,
        },
        variants=(
            {"mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True},
            {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None, "mlp_bias": True},
            {"mamba_conv_bias": False, "tie_word_embeddings": True, "head_dim": 12, "mamba_n_groups": 1},
        ),
    ),
}
FAMILIES |= {
    "kimi_linear": replace(
        _decoder(
            "KimiLinear",
            sizes=_EXPERTS
            | {
                "layer_types": _DELTA["layer_types"],
                "mlp_layer_types": ["sparse", "dense"],
                "num_key_value_heads": 4,
                "num_local_experts": 8,
                "n_group": 4,
                "topk_group": 2,
                "moe_intermediate_size": 24,
                "kv_lora_rank": 12,
                "qk_nope_head_dim": 6,
                "qk_rope_head_dim": 4,
                "v_head_dim": 8,
                "linear_head_dim": 6,
                "linear_num_heads": 3,
                "rms_norm_eps": 1e-6,
            },
            variants=(
                {"q_lora_rank": 10, "attention_bias": True, "linear_conv_kernel_dim": 2, "n_shared_experts": 2},
                {"hidden_act": "gelu", "layer_types": _DELTA["layer_types"][::-1], "norm_topk_prob": False},
            ),
        ),
        attentions=1,
    ),
}
ENCODERS, SEQ2SEQ = tuple(ENCODER_FAMILIES), tuple(SEQ2SEQ_FAMILIES)
DECODERS = tuple(name for name in FAMILIES if name not in (*ENCODERS, *SEQ2SEQ))
EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "qwen2_moe",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "deepseek_v3",
    "deepseek_v2",
    "qwen3_next",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "nemotron_h",
    "llama4_text",
    "deepseek_v32",
    "kimi_linear",
)
MAMBA = ("mamba", "mamba2", "nemotron_h", "falcon_h1")  # whose out_proj PEFT refuses
RECURRENT = (*MAMBA, "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "kimi_linear")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
CAUSAL = {family: next(head for head in FAMILIES[family].heads if head.endswith(_CAUSAL)) for family in DECODERS}
# The head whose logits stand for a family where one is enough.
LANGUAGE = CAUSAL | {
    family: next(head for head in FAMILIES[family].heads if head.endswith(("ForMaskedLM", "ForConditionalGeneration")))
    for family in (*ENCODERS, *SEQ2SEQ)
}
CAUSAL_ENCODERS = {family: head for family in ENCODERS for head in FAMILIES[family].heads if head.endswith(_CAUSAL)}
# Towers of images and texts, whose inputs tower_families.py has.
TOWERS = tuple(TOWER_FAMILIES)
FAMILIES |= TOWER_FAMILIES
LANGUAGE |= TOWER_HEADS
# A tower and a decoder each, whose inputs image_text_families.py has.
IMAGE_TEXT = tuple(IMAGE_TEXT_FAMILIES)
FAMILIES |= IMAGE_TEXT_FAMILIES
LANGUAGE |= {
    family: next(head for head in row.heads if head.endswith("ForConditionalGeneration"))
    for family, row in IMAGE_TEXT_FAMILIES.items()
}
HEADS = tuple((family, head) for family, row in FAMILIES.items() for head in row.heads)
